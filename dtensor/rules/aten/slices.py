"""Slices and other operations that keep some elements of a dim, and their inverses, which put them back.

A slice keeps a window of a dim (``dim_windows.py``): every rank keeps the part of it in its block, and the local result is a view
of the local tensor. One position of a sharded dim is on one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...base.symbolic_sizes import contains_symbols
from ...comm.local_reduce import sum_identity
from ...placement import REDUCE_OPS, Partial
from ..call import Call
from ..declare import local_size, view
from ..dim_windows import count_below
from ..kernel_context import At, KernelContext
from ..kernels.index_rules import allows_zero_fill
from ..partial_rules import copies, one_of
from ..rule import LINEAR_PARTIAL, Declaration, Factors, Kernel, LocalView, factors_of_first_operand, make_factor_per_dim

ZERO_FILL_PARTIALS = tuple(f"{op} -> {op}" for op in REDUCE_OPS)  # built-in reductions of zeros are zero; a user's may not be
SCATTER_PARTIALS = one_of("self", "src")


# --- a window of one dim ---
@dataclass(frozen=True, slots=True)
class WindowFactors(Declaration):
    """Factors of tensors with one shape, except that one of them has a window of dim ``dim``.

    It is ``"result"``, ``"operand 0"`` (put back into zeros of ``input_sizes``) or ``"operand 1"`` (put into operand 0).
    """

    of: str
    positions: Callable[[Call, int], range]

    def __call__(self, call: Call) -> Factors:
        """Return the factors of a slice or its inverse, in which one tensor has a window of dim ``dim``."""
        dims, sizes = make_factor_per_dim("d", call["input_sizes"] if self.of == "operand 0" else call.shape(0))
        d = call["dim"] % len(dims)
        window = self.positions(call, sizes[f"d{d}"])
        if self.of == "operand 1":
            check_source_shape(call, *(len(window) if k == d else size for k, size in enumerate(call.shape(0))))
        side, _, place = self.of.partition(" ")
        factors = Factors((dims,) * len(call.operands), (dims,), sizes, windows={(side, int(place or 0), f"d{d}"): window})
        shape = (len(window) if k == d else size for k, size in enumerate(sizes.values()))
        return unshard_expanded_gradient(self.of, call, factors, *shape)


def slice_positions(call: Call, size: int) -> range:
    """Return the range of positions that a slice keeps, of a dim of ``size``."""
    return range(*slice(call.get("start"), call.get("end"), call.get("step", 1)).indices(size))


def narrow_positions(call: Call, size: int) -> range:
    start = call["start"] % max(1, size) if call["start"] < 0 else call["start"]
    return range(start, start + call["length"])


def check_source_shape(call: Call, *size: int) -> None:
    """Raise unless operand 1, the source, has the size of the place that it is written to. Torch's inference does not check."""
    if call.shape(1) != size:
        raise RuntimeError(
            f"expected src to have a size equal to the slice of self. src size = {list(call.shape(1))}, slice size = {list(size)}"
        )


def unshard_expanded_gradient(of: str, call: Call, factors: Factors, *size: int) -> Factors:
    """Make ``factors`` unsharded if the gradient ("operand 0") has fewer or smaller dims than its place, so that it expands."""
    gradient_shape = call.shape(0)
    if of != "operand 0" or gradient_shape == size:
        return factors
    dims = factors.operands[0][len(size) - len(gradient_shape) :]
    return Factors((dims,), factors.results, factors.sizes, unsharded=frozenset(factors.sizes))


def _block_of_dim(call: Call, at: LocalView) -> tuple[int, int, int, int, dict[str, Any]]:
    """Return the dim of a slice, its global size, size and offset of one rank's block, and the block's ``input_sizes``.

    The last is in a dict, which is empty for operators without the argument.
    """
    back = "input_sizes" in call.arguments
    shape, own, offsets = (
        (call["input_sizes"], at.results[0], at.result_offsets[0])
        if back
        else (call.shape(0), at.operands[0], at.operand_offsets[0])
    )
    d = call["dim"] % len(shape)
    return d, shape[d], own[d], offsets[d], {"input_sizes": own} if back else {}


def local_slice_args(call: Call, at: LocalView) -> dict[str, Any]:
    """Return the arguments of the slice for one rank's block. The bounds stay if the dim is not sharded."""
    d, size, own, offset, sizes = _block_of_dim(call, at)
    if own == size:
        return sizes
    window = slice_positions(call, size)
    first, stop = count_below(window, offset), count_below(window, offset + own)
    start, end = (window[first] - offset, window[stop - 1] - offset + 1) if first < stop else (0, 0)
    return {**sizes, "dim": d, "start": start, "end": end, "step": window.step}


def local_narrow_args(call: Call, at: LocalView) -> dict[str, Any]:
    """Return ``start`` and ``length`` of the part of ``narrow_copy`` in one rank's block."""
    d = call["dim"] % len(at.operands[0])
    window = narrow_positions(call, call.shape(0)[d])
    start = max(0, min(window.start - at.operand_offsets[0][d], at.operands[0][d]))
    return {"start": start if at.results[0][d] else 0, "length": at.results[0][d]}


view("slice slice_copy", WindowFactors("result", slice_positions), local_args=local_slice_args)
view("narrow_copy", WindowFactors("result", narrow_positions), local_args=local_narrow_args)
view("slice_backward", WindowFactors("operand 0", slice_positions), partials=ZERO_FILL_PARTIALS, local_args=local_slice_args)
view("slice_scatter", WindowFactors("operand 1", slice_positions), partials=SCATTER_PARTIALS, local_args=local_slice_args)


# --- splits: consecutive slices ---
def split_factors(call: Call) -> Factors:
    """Return the factors of a split (``split``, ``split_with_sizes``): each result is a window of the operand's dim."""
    dims, sizes = factors_of_first_operand(call)
    d = call["dim"] % len(dims)
    windows, start = {}, 0
    for r, meta in enumerate(call.results):
        assert meta is not None
        windows["result", r, f"d{d}"] = range(start, start + meta.shape[d])
        start += meta.shape[d]
    return Factors((dims,), (dims,) * len(call.results), sizes, windows=windows)


def local_split_args(call: Call, at: LocalView) -> dict[str, Any]:
    """Return the sizes of the results of a split in one rank's block."""
    d = call["dim"] % len(at.operands[0])
    name = "split_size" if "split_size" in call.arguments else "split_sizes"
    return {name: [shape[d] for shape in at.results]}


def split_and_copy(x: Tensor, sizes: Any, dim: int = 0) -> list[Tensor]:
    return [part.clone() for part in x.split_with_sizes(sizes, dim)]


view(
    "split split_with_sizes unsafe_split unsafe_split_with_sizes",
    split_factors,
    local_args=local_split_args,
    local=Tensor.split_with_sizes,
)
view("split_copy split_with_sizes_copy", split_factors, local_args=local_split_args, local=split_and_copy)


# --- one position of a dim ---
@dataclass(frozen=True, slots=True)
class PositionFactors(Declaration):
    """Factors of one position of dim ``dim``, in a tensor that lacks that dim (``of`` as in :class:`WindowFactors`).

    ``"operands"``: one position in each operand. The rank with the position has all of it. If the dim is sharded, another dim of
    the smaller tensor is, with one block that is not empty. A single number has no dim to shard: ``number`` is its kernel.
    """

    of: str
    number: Kernel | None = None

    def __call__(self, call: Call) -> Factors:
        """Return the factors of ``select``, ``stack`` and their inverses, in which a tensor has one position of dim ``dim``."""
        result = call.results[0]
        full: Sequence[int] = call.shape(0)
        if self.of == "operand 0":
            full = call["input_sizes"]
        elif self.of == "operands" and result is not None:
            full = result.shape
        dims, sizes = make_factor_per_dim("d", full)
        d = call["dim"] % max(1, len(dims))
        if self.of == "operand 1":
            check_source_shape(call, *(size for k, size in enumerate(full) if k != d))
        side, _, place = self.of.removesuffix("s").partition(" ")
        tensors = {"operand": [dims] * len(call.operands), "result": [dims]}
        if self.of == "operands":
            positions = {k: k for k in range(len(call.operands))}
        else:
            positions = {int(place or 0): call["index"] if call["index"] >= 0 else call["index"] + full[d]}
        carrier_dim, position_dims = next((k for k, size in enumerate(full) if k != d and size > 1), None), list(dims)
        kernels, windows = {f"d{d}": self.number} if self.number else {}, {}
        if carrier_dim is not None and not contains_symbols(tuple(positions.values())):
            position_dims[carrier_dim] = (f"d{d}", f"d{carrier_dim}")
            kernels, windows = {}, {(side, k, f"d{d}"): range(at, at + 1) for k, at in positions.items()}
        del position_dims[d]
        for k in positions:
            tensors[side][k] = tuple(position_dims)
        factors = Factors(tuple(tensors["operand"]), tuple(tensors["result"]), sizes, kernels=kernels, windows=windows)
        return unshard_expanded_gradient(self.of, call, factors, *(size for k, size in enumerate(full) if k != d))


def local_position_args(call: Call, at: LocalView) -> dict[str, Any]:
    """Return ``index`` in one rank's block, None if another rank has it. It stays if the dim is not sharded."""
    d, size, own, offset, sizes = _block_of_dim(call, at)
    if own == size:
        return sizes
    index = call["index"] % max(1, size) - offset
    if 0 <= index < own:
        return {**sizes, "dim": d, "index": index}
    shape_if_elsewhere = {"empty_shape": at.results[0]} if len(call.operands) == 1 and not sizes else {}
    return {**sizes, "dim": d, "index": None, **shape_if_elsewhere}


def select_block(x: Tensor, dim: int, index: int | None, empty_shape: Sequence[int] = ()) -> Tensor:
    return x.narrow(dim, 0, 0).view(empty_shape) if index is None else x.select(dim, index)


def select_and_copy_block(x: Tensor, dim: int, index: int | None, empty_shape: Sequence[int] = ()) -> Tensor:
    return select_block(x, dim, index, empty_shape).clone()


def select_backward_block(grad: Tensor, input_sizes: Any, dim: int, index: int | None) -> Tensor:
    return grad.new_zeros(input_sizes) if index is None else torch.ops.aten.select_backward(grad, input_sizes, dim, index)


def select_scatter_block(x: Tensor, src: Tensor, dim: int, index: int | None) -> Tensor:
    return x.clone() if index is None else x.select_scatter(src, dim, index)


def select_number(at: KernelContext, x: Any, dim: int, index: int) -> Any:
    """Select the number on the rank that has its position; the identity of sums elsewhere, so that ranks add up (a kernel)."""
    dim, index = dim % len(at.call.shape(0)), index % at.total

    def select_from_block(here: At, block: Tensor) -> Tensor:
        """Select the position in one rank's block, or return the identity of sums if the block does not have it."""
        if here.offset <= index < here.offset + here.size:
            return block.select(dim, index - here.offset).clone()
        return block.new_full((*block.shape[:dim], *block.shape[dim + 1 :]), sum_identity(block.dtype))

    return at.map(select_from_block, x)


def scatter_number(at: KernelContext, x: Any, src: Any, dim: int, index: int) -> Any:
    """Write ``src`` at the position, on the rank that has it (a kernel)."""
    dim, index = dim % len(at.call.shape(0)), index % at.total

    def scatter_into_block(here: At, block: Tensor, row: Tensor) -> Tensor:
        """Write ``row`` at the position if one rank's block has it, else copy the block."""
        return select_scatter_block(
            block, row, dim, index - here.offset if here.offset <= index < here.offset + here.size else None
        )

    return at.map(scatter_into_block, x, src)


NUMBER_KERNEL = Kernel(select_number, lacking=Partial("sum"))
SELECT_OPTIONS: dict[str, Any] = {"partials": copies, "when": allows_zero_fill, "local_args": local_position_args}
view("select", PositionFactors("result", NUMBER_KERNEL), local=select_block, **SELECT_OPTIONS)
view("select_copy", PositionFactors("result", NUMBER_KERNEL), local=select_and_copy_block, **SELECT_OPTIONS)
view(
    "select_scatter",
    PositionFactors("operand 1", Kernel(scatter_number)),
    partials=SCATTER_PARTIALS,
    local_args=local_position_args,
    local=select_scatter_block,
)
view(
    "select_backward",
    PositionFactors("operand 0"),
    partials=ZERO_FILL_PARTIALS,
    local_args=local_position_args,
    local=select_backward_block,
)
view("unbind unbind_copy", "a* [@dim] b* -> each: a* b*")


# --- diagonals and sliding windows ---
@dataclass(frozen=True, slots=True)
class DiagonalFactors(Declaration):
    """Factors of the diagonal of two dims, a last dim of the tensor that has it (``of`` as in :class:`WindowFactors`).

    It is sharded as the rows; columns must be unsharded.
    """

    of: str

    def __call__(self, call: Call) -> Factors:
        """Return the factors of a diagonal or its inverse: the diagonal is sharded as the rows, columns are unsharded."""
        result = call.results[0]
        assert result is not None
        dims, sizes = make_factor_per_dim("d", result.shape if self.of == "operand 0" else call.shape(0))
        rows, columns = call["dim1"] % len(dims), call["dim2"] % len(dims)
        first = max(0, -call["offset"])
        window = range(first, max(first, min(sizes[f"d{rows}"], sizes[f"d{columns}"] - call["offset"])))
        others = [d for d in range(len(dims)) if d not in (rows, columns)]
        diagonal_dims = (*(dims[d] for d in others), (f"d{rows}",))
        if self.of == "operand 1":
            check_source_shape(call, *(call.shape(0)[d] for d in others), len(window))
        operands, results = {
            "result": ((dims,), (diagonal_dims,)),
            "operand 0": ((diagonal_dims,), (dims,)),
            "operand 1": ((dims, diagonal_dims), (dims,)),
        }[self.of]
        side, _, place = self.of.partition(" ")
        windows = {(side, int(place or 0), f"d{rows}"): window}
        factors = Factors(operands, results, sizes, frozenset({f"d{columns}"}), windows=windows)
        return unshard_expanded_gradient(self.of, call, factors, *(sizes[f"d{d}"] for d in others), len(window))


def local_diagonal_args(call: Call, at: LocalView) -> dict[str, Any]:
    """Return the ``offset`` of the diagonal for one rank's block of rows (and ``input_sizes`` for inverses)."""
    if len(at.results[0]) > len(at.operands[0]):
        rows = call["dim1"] % len(at.results[0])
        return {"input_sizes": at.results[0], "offset": call["offset"] + at.result_offsets[0][rows]}
    return {"offset": call["offset"] + at.operand_offsets[0][call["dim1"] % len(at.operands[0])]}


def diag_embed_block(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1, *, input_sizes: Any = None) -> Tensor:
    """Embed one rank's part of a diagonal in a block of rows, which is not square."""
    return (
        x.diag_embed(offset, dim1, dim2)
        if input_sizes is None
        else torch.ops.aten.diagonal_backward(x, input_sizes, offset, dim1, dim2)
    )


view("diagonal diagonal_copy", DiagonalFactors("result"), local_args=local_diagonal_args)
view("diagonal_scatter", DiagonalFactors("operand 1"), partials=SCATTER_PARTIALS, local_args=local_diagonal_args)
view("diagonal_backward", DiagonalFactors("operand 0"), partials=ZERO_FILL_PARTIALS, local_args=local_diagonal_args)
view(
    "diag_embed",
    DiagonalFactors("operand 0"),
    partials=ZERO_FILL_PARTIALS,
    local_args=local_diagonal_args,
    local=diag_embed_block,
)
view("unfold unfold_copy", "a* [@dimension] b* -> a* [] b* [] | -> []")
view("unfold_backward", "a* [] b* [] -> a* @dim b* | [] ->", partials=LINEAR_PARTIAL, local_args=local_size("input_sizes"))
