"""Random operators: numbers are sharded as the operand that they fill, without communication, and do not depend on the layout.

If values of an operand decide what is generated, results are those of one device in both modes. ``rrelu`` generates numbers for
the elements that are not positive: the mask of these is gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...base.memory_order import contiguous_stride
from ...layout.layout import Layout
from ...random.distributions import SAMPLERS, Sampler, sampler_of
from ...random.draw import RANDOM_MODE, as_graph_op, draw, draw_counted, map_from_one_state, take_block, view_block
from ..call import Call
from ..declare import POINTWISE
from ..declared_factors import DeclaredFactors
from ..kernel_context import KernelContext
from ..notation import parse_notation
from ..partial_rules import combine_partials, forgets
from ..registry import register
from ..rule import Declaration, Factors, Rule


@dataclass(frozen=True, slots=True)
class DrawLike(Declaration):
    """A block of the random tensor that the operator generates for the global tensor. Values of the operand have no influence."""

    def __call__(self, at: KernelContext, like: Any, *args: Any, **kwargs: Any) -> Any:
        result, func, (sampler, has_out) = at.results[0], at.call.func, at.once(_sampler_and_out)
        assert result is not None

        def generate(layouts: Sequence[Layout], args: Any, kwargs: Any) -> Any:
            result_layout, operand_layout = layouts
            if sampler is not None and RANDOM_MODE.mode == "counter":
                named = _arguments_of(func, args, kwargs)
                return draw_counted(result_layout, sampler, named, named.get("generator"))
            return draw(result_layout, lambda device: run_operator(result_layout, operand_layout, device, args, kwargs))

        def run_operator(result_layout: Layout, operand_layout: Layout, device: torch.device, args: Any, kwargs: Any) -> Tensor:
            operand = allocate_global(operand_layout, device)
            into = {"out": allocate_global(result_layout, device)} if has_out else {}
            result_tensor: Tensor = func(operand, *args, **kwargs, **into)
            return result_tensor

        return as_graph_op((result, at.operands[0]), generate, args, kwargs)


def allocate_global(layout: Layout, device: torch.device) -> Tensor:
    """Return memory for a global result. The number generated for an element depends on its place in memory."""
    return torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype, device=device)


def _sampler_and_out(call: Call) -> tuple[Sampler | None, bool]:
    """Return the sampler with which the operator generates by counters, or None, and whether it fills ``out=``."""
    schema = call.func._schema
    return sampler_of(schema.name.partition("::")[2]), any(argument.is_out for argument in schema.arguments)


def _arguments_of(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments after the first by name, with defaults filled in."""
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
        result, call = at.results[0], at.call
        assert result is not None
        op, mesh = call.func, call.mesh  # not the packet, which takes one element as a number
        _, has_out = at.once(_sampler_and_out)
        places = [i for i, value in enumerate(args) if isinstance(value, Tensor)]
        layouts = [
            layout for layout, name in zip(at.operands, call.names, strict=True) if isinstance(call.arguments[name], Layout)
        ]

        def generate_block(layouts: Sequence[Layout], member: int | None, *values: Any) -> Tensor:
            embedded = list(values)
            for layout, i in zip(layouts[1:], places, strict=True):
                embedded[i] = embed_block(values[i], layout, member, self.other)
            into = {"out": allocate_global(layouts[0], values[places[0]].device)} if has_out else {}
            return take_block(op(*embedded, generator=generator, **into), layouts[0], member)

        def generate(layouts: Sequence[Layout], *args: Any) -> Any:
            return map_from_one_state(mesh, generator, partial(generate_block, layouts), *args)

        return as_graph_op((result, *layouts), generate, *args)


def embed_block(block: Tensor, layout: Layout, member: int | None, fill_value: float) -> Tensor:
    """Return a tensor of the global shape with one rank's block (None: no block) and ``fill_value`` elsewhere.

    Its memory order is that of a tensor like the global one, which may be expanded.
    """
    if member is not None and block.shape == layout.shape and block.stride() == layout.stride:
        return block
    stride = torch.empty_like(torch.empty_strided(layout.shape, layout.stride, device="meta")).stride()
    embedded = torch.empty_strided(layout.shape, stride, dtype=block.dtype, device=block.device).fill_(fill_value)
    if member is not None:
        view_block(embedded, layout, layout.mesh.coordinates[member]).copy_(block)
    return embedded


def drawn(
    names: str,
    pattern: str = "... -> ...",
    *,
    around: float | None = None,
    run: Any = None,
    partials: Any = (),
    factors: Any = None,
) -> Rule:
    """Declare random operators.

    ``around``: the value beside a rank's block if values decide what is generated. ``run``: another kernel.
    """
    kernel = run or (DrawLike() if around is None else DrawAround(around))
    return register(
        names, Rule(factors or DeclaredFactors(parse_notation(pattern)), combine_partials(partials), run=kernel, kind="random")
    )


drawn(
    """
    rand_like
    randn_like
    randint_like
    bernoulli.p
    bernoulli_.float
    normal_
    uniform
    uniform_
    exponential
    exponential_
    random
    random_
    cauchy
    cauchy_
    log_normal
    log_normal_
    geometric
    geometric_
    """,
    partials=forgets,
)
drawn("bernoulli", around=0.5)
drawn("normal.Tensor_float normal.float_Tensor normal.Tensor_Tensor", "each: ... -> ...", around=1.0)
drawn("multinomial", "n* [] -> n* []", around=1.0)  # categories are unsharded


def dropout_of_blocks(at: KernelContext, x: Any, p: float, train: bool | None) -> Any:
    """Return the operand times the mask. All kept elements are scaled alike, so the mask follows from dropout of ones."""
    layout, mask_layout = at.operands[0], at.results[1]
    assert mask_layout is not None

    def generate_mask(layouts: Sequence[Layout]) -> Any:
        mask_layout, like = layouts

        def sample_mask(device: torch.device) -> Tensor:
            ones = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=device).fill_(1)
            return torch.native_dropout(ones, p, train)[1]

        counted = RANDOM_MODE.mode == "counter" and train is not False
        return draw_counted(mask_layout, SAMPLERS["bernoulli"], {"p": 1 - p}) if counted else draw(mask_layout, sample_mask)

    mask = as_graph_op((mask_layout, layout), generate_mask)
    scale = 1.0 if train is False or p == 1 else 1 / (1 - p)
    out = at.map(lambda _, block, kept: block * kept * scale if train is not False else block.clone(), x, mask)
    return out, mask


# linear in the operand, because all addends have the same mask
drawn("native_dropout", "... -> each: ...", run=dropout_of_blocks, partials=("sum -> sum,R", "avg -> avg,R"))


# --- rrelu ---
def rrelu_factors(call: Call) -> Factors | None:
    if call["training"]:  # row-major for any memory order, which the meta kernel does not know
        call.results = tuple(meta and replace(meta, stride=contiguous_stride(meta.shape)) for meta in call.results)
    return POINTWISE(call)


def rrelu_of_blocks(
    at: KernelContext, x: Any, noise: Any, lower: Any = 0.125, upper: Any = 1 / 3, training: bool = False, generator: Any = None
) -> Any:
    """Return the operand with random slopes where elements are not positive, one number for each, in row-major order."""
    if not training or not at.comm.held:  # a rank outside of the mesh does not know how many numbers are generated
        return at.map(lambda _, block, own: torch.ops.aten.rrelu_with_noise(block, own, lower, upper, False), x, noise)
    layout, mesh = at.operands[0], at.call.mesh
    sharded_mesh_dims = tuple(sorted({mesh_dim for split in layout.splits if split is not None for mesh_dim in split.mesh_dims}))
    coordinates = mesh.coordinates
    signs = at.map(lambda _, block: block <= 0, x)
    masks = (
        at.comm.all_gather(signs, sharded_mesh_dims, lambda member: layout.local_shape(coordinates[member])).wait()
        if sharded_mesh_dims
        else [signs]
    )

    def slopes_of_rank(layout: Layout, member: int, own: Tensor, parts: list[Tensor]) -> Tensor:
        signs_of_all = torch.empty(layout.shape, dtype=own.dtype, device=own.device)
        group = mesh.members_of(sharded_mesh_dims, member) if sharded_mesh_dims else (member,)
        for peer, negative in zip(group, parts, strict=True):
            view_block(signs_of_all, layout, coordinates[peer]).fill_(1).masked_fill_(negative, -1)
        noise_of_all = torch.empty_like(signs_of_all)
        torch.ops.aten.rrelu_with_noise(signs_of_all, noise_of_all, lower, upper, True, generator)
        return take_block(noise_of_all, layout, member)

    def generate_slopes(layouts: Sequence[Layout], *given: Any) -> Any:
        return map_from_one_state(mesh, generator, partial(slopes_of_rank, layouts[0]), *given)

    slopes = as_graph_op((layout,), generate_slopes, noise, masks)
    return at.map(lambda _, block, own, slope: block * own.copy_(slope), x, noise, slopes)


drawn("rrelu_with_noise", factors=rrelu_factors, run=rrelu_of_blocks)
