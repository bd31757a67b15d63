"""Convolutions: samples, groups, and channels are factors; input channels are contracted; positions have halos.

With one group the inner channel dims lead; with several, ranks take whole groups. Transposed, input and output change places in
the weight, and positions are whole. Else blocks of positions read what lies beyond their edges from their neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...placement import Partial
from ..call import Call
from ..declare import by_pattern
from ..halo_exchange import Reach, added_around, read_around, span
from ..kernel_context import At, KernelContext
from ..notation_rules import by
from ..registry import register
from ..rule import Factors, Kernel, LocalView, Word

aten = torch.ops.aten

WEIGHT = {False: "(g o) i [s*]", True: "(g i) o [s*]"}
FORWARD = by("transposed", {t: f"input: n (g i) [s*], weight: {w}, bias: +(g o) -> n (g o) [s*]" for t, w in WEIGHT.items()})
BACKWARD = by(
    "transposed",
    {t: f"grad_output: n (g o) [s*], input: n (g i) [s*], weight: {w} -> n (g i) [s*], {w}, (g o)" for t, w in WEIGHT.items()},
)
SIZES = {"g": "groups"}
GROUPED: dict[str, Any] = {"nonempty": "g i o", "kind": "einsum"}


def groups_of(call: Call, x: Any, weight: Any, output: Any) -> int:
    """Groups in a block, from the shapes: dim 1 of the weight is the channels of one of them.

    The channels inside a group may be cut too, where each rank has a single group.
    """
    channels = output[1] if call["transposed"] else x[1]
    return channels // weight[1] if weight[1] else int(call["groups"])


def local_groups(call: Call, view: LocalView) -> dict[str, Any]:
    x, weight = view.operands[:2]
    return {"groups": groups_of(call, x, weight, view.results[0])}


def local_backward(call: Call, view: LocalView) -> dict[str, Any]:
    grad, x, weight = view.operands
    return {"groups": groups_of(call, x, weight, grad), "bias_sizes": call["bias_sizes"] and [grad[1]]}


def products(call: Call) -> int:
    """FLOPs of one convolution: every position of the outputs meets the weight of an output channel, transposed every input's."""
    x, weight = (call.shape(call.names.index(name)) for name in ("input", "weight"))
    made = call.results[0] if "grad_output" not in call.names else call.operands[call.names.index("grad_output")]
    met = x if call["transposed"] or made is None else made.shape
    return 2 * math.prod(met) * math.prod(weight[1:])


def products_of_gradients(call: Call) -> int:
    """As many for the gradient of the input, and as many for that of the weight."""
    return products(call) * sum(call["output_mask"][:2])


# --- positions --------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Sliding(Word):
    """The factors of a notation, and of each dim of positions one of inputs and outputs."""

    notation: Callable[[Call], Factors | None]
    kernel: Any

    def __call__(self, call: Call) -> Factors | None:
        found = self.notation(call)
        if found is None or call["transposed"] or len(call.shape(call.names.index("input"))) < 3:
            return found
        sizes, windows, kernels = dict(found.sizes), dict(found.windows), dict(found.kernels)
        operands, results = list(found.operands), list(found.results)
        inputs, outputs = (("operand", call.names.index("input")), ("result", 0))
        if "grad_output" in call.names:
            outputs = ("operand", call.names.index("grad_output"))
        for d, reach in enumerate(reaches(call)):
            name, split = f"p{d}", call.operands[inputs[1]].splits[2 + d]
            sizes[name], *places = reach.windows(None if split is None else split.sizes)
            of_inputs = [inputs, ("result", 0)] if "grad_output" in call.names and call["output_mask"][0] else [inputs]
            for (side, i), window in [*((at, places[0]) for at in of_inputs), (outputs, places[1])]:
                tensors = operands if side == "operand" else results
                tensors[i] = (*tensors[i][: 2 + d], (name,), *tensors[i][3 + d :])
                if window != range(sizes[name]):
                    windows[side, i, name] = window
            kernels[name] = Kernel(self.kernel(d), Partial("sum"), *_issued(call, d))
        return replace(found, operands=tuple(operands), results=tuple(results), sizes=sizes, kernels=kernels, windows=windows)

    def __str__(self) -> str:
        return str(self.notation)

    def own(self) -> tuple[Any, ...]:
        return (self.kernel(0),)


def reaches(call: Call) -> list[Reach]:
    """How outputs read inputs, by dim of positions."""
    x, weight = (call.shape(call.names.index(name)) for name in ("input", "weight"))
    if "grad_output" in call.names:
        outputs = call.shape(call.names.index("grad_output"))
    else:
        made = call.results[0]
        assert made is not None
        outputs = made.shape
    each = [_each(call[name], len(x) - 2) for name in ("stride", "padding", "dilation")]
    return [Reach(*sizes) for sizes in zip(x[2:], outputs[2:], weight[2:], *each, strict=True)]


def _each(value: Any, dims: int) -> list[int]:
    """One number for all dims of positions, or one for each."""
    return list(value) if len(value) == dims else [value[0]] * dims


def _issued(call: Call, d: int) -> tuple[int, Any]:
    """How many collectives a block of positions takes, and their bytes."""
    times = 1 + ("grad_output" in call.names and call["output_mask"][0])

    def nbytes(call: Call) -> int:
        layout, reach = call.operands[call.names.index("input")], reaches(call)[d]
        return times * reach.halo * (layout.numel // max(1, reach.inputs)) * layout.dtype.itemsize

    return times, nbytes


@dataclass(frozen=True, slots=True)
class Convolved(Word):
    """The outputs of a rank along dim ``d`` of positions."""

    d: int

    def __call__(self, at: KernelContext, x: Any, weight: Any, bias: Any, *sizes: Any) -> Any:
        dim, reach, result = self.d + 2, at.once(reaches)[self.d], at.results[0]
        assert result is not None
        outputs = span(result, dim)

        def one(here: At, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if not outputs(here.member):
                return x.new_empty(result.shape_of(here.member))
            return aten.convolution(x, weight, bias, *_of_block(sizes, self.d, x, weight))

        return at.map(one, read_around(at, x, dim, at.operands[0], reach, outputs), weight, bias)


@dataclass(frozen=True, slots=True)
class Gradients(Word):
    """Of a rank's outputs along dim ``d`` of positions: of the inputs that they read, and terms of that of weight and bias."""

    d: int

    def __call__(self, at: KernelContext, grad: Any, x: Any, weight: Any, bias: Any, *given: Any) -> Any:
        *sizes, mask = given
        dim, reach, outputs = self.d + 2, at.once(reaches)[self.d], span(at.operands[0], self.d + 2)

        def one(here: At, grad: Tensor, x: Tensor, weight: Tensor) -> Any:
            if not grad.numel():
                nothing = torch.zeros_like(x), torch.zeros_like(weight), grad.new_zeros(grad.shape[1])
                return tuple([value if asked else None for value, asked in zip(nothing, mask, strict=True)])
            sides = bias and [grad.shape[1]]
            return aten.convolution_backward(grad, x, weight, sides, *_of_block(sizes, self.d, x, weight), mask)

        of_read, *others = at.map(one, grad, read_around(at, x, dim, at.operands[1], reach, outputs), weight)
        return (added_around(at, of_read, dim, at.operands[1], reach, outputs) if mask[0] else None, *others)


def _of_block(sizes: Any, d: int, x: Tensor, weight: Tensor) -> tuple[Any, ...]:
    """Stride to groups for a block of what is read along dim ``d``, which is padded already."""
    stride, padding, dilation, transposed, beside, groups = sizes
    padding = [0 if k == d else n for k, n in enumerate(_each(padding, x.ndim - 2))]
    return stride, padding, dilation, transposed, beside, x.shape[1] // weight.shape[1] if weight.shape[1] else groups


FORWARD_RULE = by_pattern(
    FORWARD, sums={"i": "sum"}, sizes=SIZES, partials="R,R,avg -> avg", local_args=local_groups, flops=products, **GROUPED
)
register("convolution", replace(FORWARD_RULE, factors=Sliding(FORWARD_RULE.factors, Convolved)))
# the gradient of the bias knows no input channels
BACKWARD_RULE = by_pattern(
    BACKWARD, sums={"n o": "sum", "i": "R"}, sizes=SIZES, local_args=local_backward, flops=products_of_gradients, **GROUPED
)
register("convolution_backward", replace(BACKWARD_RULE, factors=Sliding(BACKWARD_RULE.factors, Gradients)))
