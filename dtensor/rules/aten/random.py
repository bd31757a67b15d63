"""Random operations. What is drawn is cut like the operand it fills: without communication, in the current mode (see ``draw``).

Operations whose outcome depends on the *values* of an operand (``bernoulli`` of given probabilities, ``multinomial``, ``normal``
with a tensor of means) are in ``values_drawn``: exact in both modes.
"""

from __future__ import annotations

from typing import Any

import torch

from ...placement import REDUCE_OPS
from ...random.distributions import SAMPLERS, sampler_of
from ...random.draw import DRAWING, draw, draw_counted
from ..call import Call
from ..kernels import KernelContext
from ..registry import register
from ..rule import Factors, Rule
from ..verbs import broadcast_factors


def shape_alone(call: Call) -> Factors | None:
    """The result looks like operand 0, whose values do not matter; other operands are numbers."""
    return broadcast_factors(call) if call.plain == frozenset(range(1, len(call.operands))) else None


def any_operand(call: Call) -> tuple[str, ...]:
    return tuple(f"{op}{',R' * (len(call.operands) - 1)} -> R" for op in REDUCE_OPS)


def draw_like(at: KernelContext, like: Any, *args: Any, **kwargs: Any) -> Any:
    """A block of what the op draws for a whole tensor with the strides of the global operand."""
    func, layout, result = at.call.func, at.operands[0], at.results[0]
    assert result is not None
    sampler = sampler_of(func._schema.name.partition("::")[2])
    if DRAWING.mode == "counter" and sampler is not None:
        given = arguments_of(func, args, kwargs)
        return draw_counted(result, sampler, given, given.get("generator"))
    has_out = any(argument.is_out for argument in func._schema.arguments)

    def sample(device: torch.device) -> torch.Tensor:
        whole = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=device)
        into = {"out": torch.empty(result.shape, dtype=result.dtype, device=device)} if has_out else {}
        drawn: torch.Tensor = func(whole, *args, **kwargs, **into)
        return drawn

    return draw(result, sample)


def arguments_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments after the first by name, defaults filled in."""
    declared = func._schema.arguments[1:]
    given = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
    return given | dict(zip((argument.name for argument in declared), args, strict=False)) | kwargs


register(
    "rand_like randn_like randint_like bernoulli.p bernoulli_.float normal_ uniform uniform_ exponential exponential_ random "
    "random_ cauchy cauchy_ log_normal log_normal_ geometric geometric_",
    Rule(shape_alone, any_operand, run=draw_like, kind="random", source="... -> ..."),
)


def drop(at: KernelContext, x: Any, p: float, train: bool | None) -> Any:
    """Every element kept is scaled alike, so what dropout makes of ones is what it multiplies by."""
    layout, mask_layout = at.operands[0], at.results[1]
    assert mask_layout is not None

    def sample(device: torch.device) -> torch.Tensor:
        ones = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=device).fill_(1)
        return torch.native_dropout(ones, p, train)[1]

    counted = DRAWING.mode == "counter" and train is not False
    mask = draw_counted(mask_layout, SAMPLERS["bernoulli"], {"p": 1 - p}) if counted else draw(mask_layout, sample)
    scale = 1.0 if train is False or p == 1 else 1 / (1 - p)
    return at.map(lambda _, block, kept: block * kept * scale if train is not False else block.clone(), x, mask), mask


# linear in the operand, the mask being the same for all terms
register(
    "native_dropout", Rule(broadcast_factors, ("sum -> sum,R", "avg -> avg,R"), run=drop, kind="random", source="... -> ..., ...")
)
