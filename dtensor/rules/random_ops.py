"""Random operations as declarations: a block of what one global draw gives, whether or not the values of an operand decide it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..layout.layout import Layout
from ..random.distributions import Sampler, sampler_of
from ..random.draw import DRAWING, as_one_step, draw, draw_counted, from_one_state, own_block_of, place_in
from .call import Call
from .kernel_context import KernelContext
from .notation import parse
from .notation_rules import Notation
from .partial_rules import rows
from .registry import register
from .rule import Rule, Word


@dataclass(frozen=True, slots=True)
class DrawLike(Word):
    """A block of what the op draws for a whole tensor with the strides of the global operand, whose values do not matter."""

    def __call__(self, at: KernelContext, like: Any, *args: Any, **kwargs: Any) -> Any:
        result, func, (sampler, has_out) = at.results[0], at.call.func, at.once(_manner)
        assert result is not None

        def block(layouts: Sequence[Layout], args: Any, kwargs: Any) -> Any:
            drawn, whole = layouts
            if sampler is not None and DRAWING.mode == "counter":
                given = _arguments_of(func, args, kwargs)
                return draw_counted(drawn, sampler, given, given.get("generator"))
            return draw(drawn, lambda device: sample(drawn, whole, device, args, kwargs))

        def sample(drawn: Layout, layout: Layout, device: torch.device, args: Any, kwargs: Any) -> Tensor:
            whole = room_for(layout, device)
            into = {"out": room_for(drawn, device)} if has_out else {}
            made: Tensor = func(whole, *args, **kwargs, **into)
            return made

        return as_one_step((result, at.operands[0]), block, args, kwargs)


def room_for(layout: Layout, device: torch.device) -> Tensor:
    """Room for a whole result: what is drawn for an element follows from where in memory it lies."""
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=device)


def _manner(call: Call) -> tuple[Sampler | None, bool]:
    """How an operator draws by counting, and whether it is one that fills ``out=``."""
    schema = call.func._schema
    return sampler_of(schema.name.partition("::")[2]), any(argument.is_out for argument in schema.arguments)


def _arguments_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments after the first by name, defaults filled in."""
    declared = func._schema.arguments[1:]
    given = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
    return given | dict(zip((argument.name for argument in declared), args, strict=False)) | kwargs


@dataclass(frozen=True, slots=True)
class DrawAround(Word):
    """The op on whole tensors that hold one block each, and elsewhere ``other``, a value that the op takes.

    How many numbers are drawn does not depend on values, so each block is what one device gives, at the cost of the whole
    tensor's time and transient memory on each rank (see ``draw``).
    """

    other: float

    def __call__(self, at: KernelContext, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
        result, call = at.results[0], at.call
        assert result is not None
        op, mesh, (_, has_out) = call.func, call.mesh, at.once(_manner)  # by its packet, one element is a number
        places = [i for i, value in enumerate(args) if isinstance(value, Tensor)]
        given = [layout for layout, name in zip(at.operands, call.names, strict=True) if isinstance(call.arguments[name], Layout)]

        def one(layouts: Sequence[Layout], member: int | None, *values: Any) -> Tensor:
            whole = list(values)
            for layout, i in zip(layouts[1:], places, strict=True):
                whole[i] = around(values[i], layout, member, self.other)
            into = {"out": room_for(layouts[0], values[places[0]].device)} if has_out else {}
            return own_block_of(op(*whole, generator=generator, **into), layouts[0], member)

        def drawn(layouts: Sequence[Layout], *args: Any) -> Any:
            return from_one_state(mesh, generator, partial(one, layouts), *args)

        return as_one_step((result, *given), drawn, *args)


def around(block: Tensor, layout: Layout, member: int | None, other: float) -> Tensor:
    """A tensor of the global shape that holds one member's block (None: no block), and ``other`` elsewhere.

    It lies in memory as torch has a tensor like the global one, whose elements may share memory (it is expanded).
    """
    if member is not None and block.shape == layout.shape and block.stride() == layout.stride:
        return block
    stride = torch.empty_like(torch.empty_strided(layout.shape, layout.stride, device="meta")).stride()
    whole = torch.empty_strided(layout.shape, stride, dtype=block.dtype, device=block.device).fill_(other)
    if member is not None:
        place_in(whole, layout, layout.mesh.coordinates[member]).copy_(block)
    return whole


def drawn(
    names: str,
    pattern: str = "... -> ...",
    *,
    around: float | None = None,
    run: Any = None,
    partials: Any = (),
    factors: Any = None,
) -> Rule:
    """A rule for operators that draw. ``around``: what stands beside a rank's block where values decide what is drawn (a value
    that the operator takes); ``run``: another kernel."""
    kernel = run or (DrawLike() if around is None else DrawAround(around))
    return register(names, Rule(factors or Notation(parse(pattern)), rows(partials), run=kernel, kind="random"))
