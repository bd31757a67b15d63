"""Cat, repeat, roll and others: operations that concatenate tensors, repeat or move elements along dims, or pad and mask them.

Concatenation along a sharded dim: each operand is a window of the result (``dim_windows.py``). Parts of a sharded tensor are
concatenated without communication. Another operand moves once, to the ranks that have its place in the result.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from ...placement import Partial
from ..call import Call
from ..declare import blockwise, kernel_rule, view
from ..kernel_context import At, KernelContext
from ..op_traits import declare_traits
from ..rule import ANY_PARTIAL, LINEAR_PARTIAL, Dims, Factors, Kernel, LocalView, Shapes, StrategyChoice, factors_of_first_operand
from .slices import ZERO_FILL_PARTIALS, PositionFactors


# --- concatenate ---
def cat_factors(call: Call) -> Factors:
    """Return the factors of ``cat``: each operand is a window of the concatenated dim. Operands of shape (0,) fit anything."""
    result = call.results[0]
    assert result is not None
    dims = tuple((f"d{k}",) for k in range(len(result.shape)))
    if result.shape == (0,):  # all operands are empty: torch ignores the dim
        return Factors(((dims),) * len(call.operands), (dims,), {"d0": 0}, unsharded=frozenset({"d0"}))
    d = call.dims("dim", len(result.shape))[0]
    operands: list[Dims] = []
    windows, start = {}, 0
    for i, layout in enumerate(call.operands):
        skipped = len(layout.shape) != len(dims)
        operands.append(((),) if skipped else dims)
        if not skipped:
            windows["operand", i, f"d{d}"] = range(start, start + layout.shape[d])
            start += layout.shape[d]
    sizes = {f"d{k}": size for k, size in enumerate(result.shape)}
    return Factors(tuple(operands), (dims,), sizes, windows=windows)


def cat_shapes(call: Call) -> Shapes | None:
    """Return the result shape of ``cat`` in a tuple, or None if the operand shapes do not fit."""
    shapes = [call.shape(i) for i in range(len(call.operands))]
    if not shapes[0]:
        return None
    d = call.dims("dim", len(shapes[0]))[0]
    rests = {shape[:d] + shape[d + 1 :] for shape in shapes}
    if len({len(shape) for shape in shapes}) > 1 or len(rests) > 1 or not 0 <= d < len(shapes[0]):
        return None
    return ((*shapes[0][:d], sum(shape[d] for shape in shapes), *shapes[0][d + 1 :]),)


def stack_shapes(call: Call) -> Shapes | None:
    """Return the result shape of ``stack`` in a tuple, or None if operands differ in shape or the dim is out of range."""
    shapes = {call.shape(i) for i in range(len(call.operands))}
    shape, d = next(iter(shapes)), call["dim"]
    d += len(shape) + 1 if d < 0 else 0
    return ((*shape[:d], len(call.operands), *shape[d:]),) if len(shapes) == 1 and 0 <= d <= len(shape) else None


def replicated_beside_partial(call: Call) -> tuple[str, ...]:
    """Return strategies of ``cat`` and ``stack`` for some operands partial (mean, maximum, minimum), others replicated."""
    mixed = [
        [op if layout.partials[mesh_dim] == op else "R" for layout in call.operands]
        for mesh_dim in range(call.mesh.ndim)
        for op in ("avg", "max", "min")
    ]
    strategies = (f"{','.join(operands)} -> {op}" for operands in mixed for op in set(operands) - {"R"})
    return (*ANY_PARTIAL, *dict.fromkeys(strategies))


def local_stack_args(call: Call, at: LocalView) -> dict[str, Any]:
    """Return for one rank which tensors of the list its block of the stack has, or {} if it has all."""
    result_shape, d, count = at.results[0], call["dim"] % len(at.results[0]), len(call.operands)
    first = at.result_offsets[0][d]
    return (
        {}
        if result_shape[d] == count
        else {"tensors_in_block": slice(first, first + result_shape[d]), "result_shape": result_shape}
    )


def stack_block(
    tensors: Sequence[Tensor], dim: int = 0, tensors_in_block: slice | None = None, result_shape: Sequence[int] = ()
) -> Tensor:
    """Stack the tensors that are in this rank's block, in the dtype of all."""
    if tensors_in_block is None:
        return torch.stack(list(tensors), dim)
    dtype = reduce(torch.promote_types, [x.dtype for x in tensors])  # the dtype of all tensors, not only of those in this block
    block_tensors = [x.to(dtype) for x in tensors[tensors_in_block]]
    return torch.stack(block_tensors, dim) if block_tensors else tensors[0].new_empty(result_shape, dtype=dtype)


view("cat", cat_factors, partials=replicated_beside_partial, shapes=cat_shapes)
declare_traits("cat", concatenates=True)
view(
    "stack",
    PositionFactors("operands"),
    partials=replicated_beside_partial,
    shapes=stack_shapes,
    local_args=local_stack_args,
    local=stack_block,
)


# --- repeat and move ---
def repeat_factors(call: Call) -> Factors:
    """Return the factors of ``repeat``. A repeated dim must be unsharded, because its copies follow one another."""
    dims, sizes = factors_of_first_operand(call)
    repeats = call["repeats"]
    first = len(repeats) - len(dims)
    unrepeated = tuple(dim if repeats[first + d] == 1 else () for d, dim in enumerate(dims))
    return Factors((unrepeated,), (((),) * first + unrepeated,), sizes)


def rot90_factors(call: Call) -> Factors:
    """Return the factors of ``rot90``: an odd number of quarter turns exchanges the two dims. Reversed dims must be unsharded."""
    dims, sizes = factors_of_first_operand(call)
    a, b = call.dims("dims", len(dims))
    turned = list(dims)
    if call["k"] % 2:
        turned[a], turned[b] = dims[b], dims[a]
    reversed_dims = ((), (b,), (a, b), (a,))[call["k"] % 4]
    return Factors((dims,), (tuple(turned),), sizes, unsharded=frozenset(f"d{d}" for d in reversed_dims))


view("repeat", repeat_factors)
view("roll", "a* [@dims] b* -> a* [@dims] b*")


def is_block_flippable(choice: StrategyChoice) -> bool:
    """Return True if nothing is sharded, or torch flips blocks of the dtype in any shape."""
    return not choice.splits or choice.call.operands[0].dtype in FLIPPABLE_DTYPES


FLIPPABLE_DTYPES = frozenset(
    {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16}
)
FLIPPABLE_DTYPES |= {torch.float32, torch.float64, torch.complex64, torch.complex128}
view("flip", "a* [@dims!] b* -> a* [@dims!] b*", when=is_block_flippable)
view("rot90", rot90_factors)


def local_empty_args(call: Call, at: LocalView) -> dict[str, Any]:
    """Return for an empty block the shape of its result, because torch refuses to shuffle empty tensors; else {}."""
    return {} if all(at.operands[0]) else {"empty_shape": at.results[0]}


def pixel_shuffle_block(x: torch.Tensor, upscale_factor: int, empty_shape: Any = None) -> torch.Tensor:
    return torch.pixel_shuffle(x, upscale_factor) if empty_shape is None else x.new_empty(empty_shape)


def pixel_unshuffle_block(x: torch.Tensor, downscale_factor: int, empty_shape: Any = None) -> torch.Tensor:
    return torch.pixel_unshuffle(x, downscale_factor) if empty_shape is None else x.new_empty(empty_shape)


UP, DOWN = dict.fromkeys("rq", "upscale_factor"), dict.fromkeys("rq", "downscale_factor")
# shuffled factors are unsharded: torch would derive another factor from a block
view("pixel_shuffle", "s* (c [r] [q]) h w -> s* c (h r) (w q)", sizes=UP, local_args=local_empty_args, local=pixel_shuffle_block)
view(
    "pixel_unshuffle",
    "s* c (h [r]) (w [q]) -> s* (c r q) h w",
    sizes=DOWN,
    local_args=local_empty_args,
    local=pixel_unshuffle_block,
)
view("channel_shuffle", "n [c] s* -> n [c] s*")


# --- pad ---
def pads_of_dims(call: Call, ndim: int) -> list[tuple[int, int]]:
    """Return the (before, after) padding of each dim of ``constant_pad_nd``. Negative values crop."""
    pad = list(call["pad"])
    last_first = list(zip(pad[::2], pad[1::2], strict=True))
    return [(0, 0)] * (ndim - len(last_first)) + last_first[::-1]


def pad_factors(call: Call) -> Factors:
    """Return the factors of padding: operand and result are windows of the longer of both. Only edge ranks pad."""
    dims, sizes = factors_of_first_operand(call)
    windows = {}
    for d, (before, after) in enumerate(pads_of_dims(call, len(dims))):
        if before or after:
            name, size = f"d{d}", sizes[f"d{d}"]
            operand, result = max(0, before), max(0, -before)
            sizes[name] = max(operand + size, result + size + before + after)
            windows["operand", 0, name] = range(operand, operand + size)
            windows["result", 0, name] = range(result, result + size + before + after)
    return Factors((dims,), (dims,), sizes, windows=windows)


def local_pad_args(call: Call, at: LocalView) -> dict[str, Any]:
    """Return the ``pad`` argument for one rank's block; negative where the block is cropped."""
    pad: list[int] = []
    for d, (before, _) in reversed(list(enumerate(pads_of_dims(call, len(at.operands[0]))))):
        size, result_size = at.operands[0][d], at.results[0][d]
        shift = at.operand_offsets[0][d] + before - at.result_offsets[0][d] if size and result_size else 0
        pad += [shift, result_size - size - shift]
    return {"pad": pad[: len(call["pad"])]}


def pad_partials(call: Call) -> tuple[str, ...]:
    """Return strategies for partial operands of padding, by the value.

    Each addend is padded with the value, so sums need the value 0, and products 0 or 1.
    """
    value = call.get("value", 0)
    strategies = ["avg -> avg", "max -> max", "min -> min"]
    return (*strategies, *(["sum -> sum"] if value == 0 else []), *(["product -> product"] if value in (0, 1) else []))


kernel_rule("constant_pad_nd", pad_factors, partials=pad_partials, local_args=local_pad_args, floats_matter=True)


# --- triangles and diagonals ---
def local_triangle_args(call: Call, at: LocalView) -> dict[str, Any]:
    """Return the ``diagonal`` argument of ``tril`` and ``triu`` for one rank's block, shifted by the block's offset."""
    rows, columns = at.operand_offsets[0][-2:]
    return {"diagonal": call["diagonal"] + rows - columns}


def trace_of_blocks(at: KernelContext, x: Any) -> Any:
    """Sum in each rank's block the elements of the global diagonal: addends of the trace (a kernel)."""
    layout = at.operands[0]

    def trace_of_block(here: At, block: torch.Tensor) -> torch.Tensor:
        """Sum the elements of the global diagonal that are in one rank's block."""
        rows, columns = layout.local_offset(layout.mesh.coordinates[here.member])
        total = block.diagonal(rows - columns).sum()
        return total.to(at.results[0].dtype) if at.results[0] is not None else total

    return at.map(trace_of_block, x)


view("tril triu", "s* -> s*", partials=ZERO_FILL_PARTIALS, local_args=local_triangle_args)
blockwise("trace", "[a] [b] ->", kernel=Kernel(trace_of_blocks, lacking=Partial("sum"), joint=True), partials=LINEAR_PARTIAL)
