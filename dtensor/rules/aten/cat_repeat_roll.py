"""Operations that put tensors together, repeat them, move their elements along dims, or set some to a constant.

Joining along a sharded dim: each operand is a window of the result (see ``windows``), so what was split there joins without
communication, and what lies otherwise moves once, operand by operand, to the ranks that hold its place in the result.
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
from ..op_traits import fact
from ..rule import ANY_PARTIAL, LINEAR_PARTIAL, Choice, Dims, Factors, Kernel, LocalView, Shapes, own_factors
from .slices import ZEROS_PASS, Picked


# --- join ---
def joined(call: Call) -> Factors:
    """The joined dim is one factor, of which every operand holds a window; operands of shape (0,) join with anything."""
    result = call.results[0]
    assert result is not None
    dims = tuple((f"d{k}",) for k in range(len(result.shape)))
    if result.shape == (0,):  # nothing joined with nothing: torch does not look at the dim
        return Factors(((dims),) * len(call.operands), (dims,), {"d0": 0}, whole=frozenset({"d0"}))
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


def joined_shapes(call: Call) -> Shapes | None:
    shapes = [call.shape(i) for i in range(len(call.operands))]
    if not shapes[0]:
        return None
    d = call.dims("dim", len(shapes[0]))[0]
    rests = {shape[:d] + shape[d + 1 :] for shape in shapes}
    if len({len(shape) for shape in shapes}) > 1 or len(rests) > 1 or not 0 <= d < len(shapes[0]):
        return None
    return ((*shapes[0][:d], sum(shape[d] for shape in shapes), *shapes[0][d + 1 :]),)


def stacked_shapes(call: Call) -> Shapes | None:
    shapes = {call.shape(i) for i in range(len(call.operands))}
    shape, d = next(iter(shapes)), call["dim"]
    d += len(shape) + 1 if d < 0 else 0
    return ((*shape[:d], len(call.operands), *shape[d:]),) if len(shapes) == 1 and 0 <= d <= len(shape) else None


def whole_beside_terms(call: Call) -> tuple[str, ...]:
    """Whole operands beside terms of a mean, a maximum or a minimum: a constant is all of these of itself."""
    mixed = [
        [op if layout.partials[mesh_dim] == op else "R" for layout in call.operands]
        for mesh_dim in range(call.mesh.ndim)
        for op in ("avg", "max", "min")
    ]
    rows = (f"{','.join(row)} -> {op}" for row in mixed for op in set(row) - {"R"})
    return (*ANY_PARTIAL, *dict.fromkeys(rows))


def local_stack(call: Call, at: LocalView) -> dict[str, Any]:
    """Which tensors a block holds; nothing to change where it holds all."""
    made, d, count = at.results[0], call["dim"] % len(at.results[0]), len(call.operands)
    first = at.result_offsets[0][d]
    return {} if made[d] == count else {"there": slice(first, first + made[d]), "made": made}


def stacked(tensors: Sequence[Tensor], dim: int = 0, there: slice | None = None, made: Sequence[int] = ()) -> Tensor:
    if there is None:
        return torch.stack(list(tensors), dim)
    dtype = reduce(torch.promote_types, [x.dtype for x in tensors])  # that of all, whichever are here
    held = [x.to(dtype) for x in tensors[there]]
    return torch.stack(held, dim) if held else tensors[0].new_empty(made, dtype=dtype)


view("cat", joined, partials=whole_beside_terms, shapes=joined_shapes)
fact("cat", joins=True)
view("stack", Picked("operands"), partials=whole_beside_terms, shapes=stacked_shapes, local_args=local_stack, local=stacked)


# --- repeat and move ---
def repeated(call: Call) -> Factors:
    """A repeated dim must be whole: its copies follow one another."""
    dims, sizes = own_factors(call)
    repeats = call["repeats"]
    first = len(repeats) - len(dims)
    kept = tuple(dim if repeats[first + d] == 1 else () for d, dim in enumerate(dims))
    return Factors((kept,), (((),) * first + kept,), sizes)


def rotated(call: Call) -> Factors:
    """A quarter turn reverses one of the two dims."""
    dims, sizes = own_factors(call)
    a, b = call.dims("dims", len(dims))
    turned = list(dims)
    if call["k"] % 2:
        turned[a], turned[b] = dims[b], dims[a]
    reversed_dims = ((), (b,), (a, b), (a,))[call["k"] % 4]
    return Factors((dims,), (tuple(turned),), sizes, whole=frozenset(f"d{d}" for d in reversed_dims))


view("repeat", repeated)
view("roll", "a* [@dims] b* -> a* [@dims] b*")


def has_flip_of_any_block(choice: Choice) -> bool:
    """Whether torch flips blocks of the dtype in whatever shape: rows of the others only, where a row has several elements."""
    return not choice.splits or choice.call.operands[0].dtype in FLIPPED


FLIPPED = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16})
FLIPPED |= {torch.float32, torch.float64, torch.complex64, torch.complex128}
view("flip", "a* [@dims!] b* -> a* [@dims!] b*", when=has_flip_of_any_block)
view("rot90", rotated)


def empty_result(call: Call, at: LocalView) -> dict[str, Any]:
    """torch does not shuffle nothing: an empty block is made as it should be."""
    return {} if all(at.operands[0]) else {"made": at.results[0]}


def shuffle(x: torch.Tensor, upscale_factor: int, made: Any = None) -> torch.Tensor:
    return torch.pixel_shuffle(x, upscale_factor) if made is None else x.new_empty(made)


def unshuffle(x: torch.Tensor, downscale_factor: int, made: Any = None) -> torch.Tensor:
    return torch.pixel_unshuffle(x, downscale_factor) if made is None else x.new_empty(made)


UP, DOWN = dict.fromkeys("rq", "upscale_factor"), dict.fromkeys("rq", "downscale_factor")
# what is shuffled is whole: a block of it would be another factor for torch
view("pixel_shuffle", "s* (c [r] [q]) h w -> s* c (h r) (w q)", sizes=UP, local_args=empty_result, local=shuffle)
view("pixel_unshuffle", "s* c (h [r]) (w [q]) -> s* (c r q) h w", sizes=DOWN, local_args=empty_result, local=unshuffle)
view("channel_shuffle", "n [c] s* -> n [c] s*")


# --- pad ---
def pads(call: Call, ndim: int) -> list[tuple[int, int]]:
    """(before, after) for each dim; negative ones crop."""
    given = list(call["pad"])
    last_first = list(zip(given[::2], given[1::2], strict=True))
    return [(0, 0)] * (ndim - len(last_first)) + last_first[::-1]


def padded(call: Call) -> Factors:
    """Operand and result are windows of the dim with all that either has; the first rank pads before, the last one after."""
    dims, sizes = own_factors(call)
    windows = {}
    for d, (before, after) in enumerate(pads(call, len(dims))):
        if before or after:
            name, size = f"d{d}", sizes[f"d{d}"]
            operand, result = max(0, before), max(0, -before)
            sizes[name] = max(operand + size, result + size + before + after)
            windows["operand", 0, name] = range(operand, operand + size)
            windows["result", 0, name] = range(result, result + size + before + after)
    return Factors((dims,), (dims,), sizes, windows=windows)


def local_pads(call: Call, at: LocalView) -> dict[str, Any]:
    pad: list[int] = []
    for d, (before, _) in reversed(list(enumerate(pads(call, len(at.operands[0]))))):
        size, made = at.operands[0][d], at.results[0][d]
        shift = at.operand_offsets[0][d] + before - at.result_offsets[0][d] if size and made else 0
        pad += [shift, made - size - shift]
    return {"pad": pad[: len(call["pad"])]}


def pad_partials(call: Call) -> tuple[str, ...]:
    """Every term is padded with the value: its sum is that only for zero, its product for zero or one."""
    value = call.get("value", 0)
    rows = ["avg -> avg", "max -> max", "min -> min"]
    return (*rows, *(["sum -> sum"] if value == 0 else []), *(["product -> product"] if value in (0, 1) else []))


kernel_rule("constant_pad_nd", padded, partials=pad_partials, local_args=local_pads, floats_matter=True)


# --- triangles and diagonals ---
def local_triangle(call: Call, at: LocalView) -> dict[str, Any]:
    """Element (i, j) of a block is (i + rows, j + columns) of the whole."""
    rows, columns = at.operand_offsets[0][-2:]
    return {"diagonal": call["diagonal"] + rows - columns}


def trace_of_blocks(at: KernelContext, x: Any) -> Any:
    """The part of the diagonal that crosses a block."""
    layout = at.operands[0]

    def crossing(here: At, block: torch.Tensor) -> torch.Tensor:
        rows, columns = layout.local_offset(layout.mesh.coordinates[here.member])
        total = block.diagonal(rows - columns).sum()
        return total.to(at.results[0].dtype) if at.results[0] is not None else total

    return at.map(crossing, x)


view("tril triu", "s* -> s*", partials=ZEROS_PASS, local_args=local_triangle)
blockwise("trace", "[a] [b] ->", kernel=Kernel(trace_of_blocks, lacking=Partial("sum"), joint=True), partials=LINEAR_PARTIAL)
