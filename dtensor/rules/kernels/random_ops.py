"""Random ops as declarations: each rank generates its block of one global random tensor, also if values decide what."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...layout.layout import Layout
from ...random.distributions import Sampler, find_sampler
from ...random.draw import RANDOM_MODE, draw, draw_counted, map_from_one_state, run_as_graph_op, take_block, view_block
from ..call import Call
from ..declared_factors import DeclaredFactors
from ..kernel_context import KernelContext
from ..notation import parse_notation
from ..partial_rules import combine_partials
from ..registry import register
from ..rule import Declaration, Rule


@dataclass(frozen=True, slots=True)
class DrawLike(Declaration):
    """A block of the random tensor that the operator generates for the global tensor. Values of the operand have no influence."""

    def __call__(self, at: KernelContext, like: Any, *args: Any, **kwargs: Any) -> Any:
        """Return each rank's block of the random tensor that the operator generates for the global tensor."""
        result, func, (sampler, has_out) = at.results[0], at.call.func, at.compute_once(_sampler_and_out)
        assert result is not None

        def generate(layouts: Sequence[Layout], args: Any, kwargs: Any) -> Any:
            """Generate this rank's block of random numbers: by counters in counter mode if possible, else exactly."""
            result_layout, operand_layout = layouts
            if sampler is not None and RANDOM_MODE.mode == "counter":
                named = _arguments_of(func, args, kwargs)
                return draw_counted(result_layout, sampler, named, named.get("generator"))
            return draw(result_layout, lambda device: run_operator(result_layout, operand_layout, device, args, kwargs))

        def run_operator(result_layout: Layout, operand_layout: Layout, device: torch.device, args: Any, kwargs: Any) -> Tensor:
            """Run the random operator for the global shape, with uninitialized memory in place of its operand."""
            operand = allocate_global_memory(operand_layout, device)
            into = {"out": allocate_global_memory(result_layout, device)} if has_out else {}
            result_tensor: Tensor = func(operand, *args, **kwargs, **into)
            return result_tensor

        return run_as_graph_op((result, at.operands[0]), generate, args, kwargs)


def allocate_global_memory(layout: Layout, device: torch.device) -> Tensor:
    """Allocate memory in the global shape and strides: the number generated for an element depends on its place."""
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=device)


def _sampler_and_out(call: Call) -> tuple[Sampler | None, bool]:
    """Return the counter-based sampler of the operator, or None, and whether the overload has ``out=``."""
    schema = call.func._schema
    return find_sampler(schema.name.partition("::")[2]), any(argument.is_out for argument in schema.arguments)


def _arguments_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return a dict of the arguments after the operand by name, with defaults filled in."""
    declared = func._schema.arguments[1:]
    named = {argument.name: argument.default_value for argument in declared if argument.has_default_value()}
    return named | dict(zip((argument.name for argument in declared), args, strict=False)) | kwargs


@dataclass(frozen=True, slots=True)
class DrawAround(Declaration):
    """The operator on global tensors that contain one block each, and elsewhere ``other``, a value that the operator accepts.

    How many numbers are generated does not depend on values. So each block is what one device generates, at the cost of the
    global tensor's time and memory on each rank (see ``draw``).
    """

    other: float

    def __call__(self, at: KernelContext, *args: Any, generator: Any = None, **kwargs: Any) -> Any:
        """Return each rank's block of what the operator generates for a global tensor that contains the rank's values."""
        result, call = at.results[0], at.call
        assert result is not None
        op, mesh = call.func, call.mesh  # not the packet, which takes one element as a number
        _, has_out = at.compute_once(_sampler_and_out)
        places = [i for i, value in enumerate(args) if isinstance(value, Tensor)]
        layouts = [
            layout for layout, name in zip(at.operands, call.names, strict=True) if isinstance(call.arguments[name], Layout)
        ]

        def generate_block(layouts: Sequence[Layout], member: int | None, *values: Any) -> Tensor:
            """Run the operator on a global tensor that has one rank's block in its place, and return that block of the result."""
            embedded = list(values)
            for layout, i in zip(layouts[1:], places, strict=True):
                embedded[i] = embed_block(values[i], layout, member, self.other)
            into = {"out": allocate_global_memory(layouts[0], values[places[0]].device)} if has_out else {}
            return take_block(op(*embedded, generator=generator, **into), layouts[0], member)

        def generate(layouts: Sequence[Layout], *args: Any) -> Any:
            return map_from_one_state(mesh, generator, partial(generate_block, layouts), *args)

        return run_as_graph_op((result, *layouts), generate, *args)


def embed_block(block: Tensor, layout: Layout, member: int | None, fill_value: float) -> Tensor:
    """Return a tensor of the global shape with one rank's block in its place, and ``fill_value`` elsewhere.

    ``member`` None: no block.

    Its memory order is that of a tensor like the global one, which may be expanded.
    """
    if member is not None and block.shape == layout.shape and block.stride() == layout.stride:
        return block
    stride = torch.empty_like(torch.empty_strided(layout.shape, layout.stride, device="meta")).stride()
    embedded = torch.empty_strided(layout.shape, stride, dtype=block.dtype, device=block.device).fill_(fill_value)
    if member is not None:
        view_block(embedded, layout, layout.mesh.coordinates[member]).copy_(block)
    return embedded


def random_operator(
    names: str,
    pattern: str = "... -> ...",
    *,
    around: float | None = None,
    run: Any = None,
    partials: Any = (),
    factors: Any = None,
) -> Rule:
    """Declare random operators, for which each rank generates its block of one global random tensor.

    ``around``: the value beside a rank's block if values decide what is generated. ``run``: another kernel.
    """
    kernel = run or (DrawLike() if around is None else DrawAround(around))
    return register(
        names, Rule(factors or DeclaredFactors(parse_notation(pattern)), combine_partials(partials), run=kernel, kind="random")
    )
