"""Operations that keep some elements of a dim, and their inverses, which put them back.

A slice keeps a window of a dim (see ``windows``): every rank keeps the part of it that lies in its block, and the local result is
a view of the local. One row of a sharded dim is with one rank only: the others add zeros.
"""

from __future__ import annotations

from typing import Any

import torch

from ...placement import REDUCE_OPS, Partial
from ..call import Call
from ..indexed import no_foreign_zeros
from ..kernels import At, KernelContext
from ..rule import LINEAR_PARTIAL, Factors, Kernel, LocalView
from ..verbs import kernel_rule, view
from ..windows import count_below
from .views import own_factors

ZEROS_PASS = tuple(f"{op} -> {op}" for op in REDUCE_OPS)  # zeros reduce to zero; by a user's reduction perhaps not
ONE_OF_TWO = tuple(f"{op},{op} -> {op}" for op in REDUCE_OPS) + tuple(
    row for op in ("avg", "max", "min") for row in (f"{op},R -> {op}", f"R,{op} -> {op}")
)


# --- slices ---
def positions(call: Call, size: int) -> range:
    """The positions of a dim of ``size`` that a slice keeps."""
    return range(*slice(call.get("start"), call.get("end"), call.get("step", 1)).indices(size))


def sliced(call: Call) -> Factors:
    dims, sizes = own_factors(call)
    d = call["dim"] % len(dims)
    return Factors((dims,), (dims,), sizes, windows={("result", 0, f"d{d}"): positions(call, sizes[f"d{d}"])})


def local_slice(call: Call, at: LocalView) -> dict[str, Any]:
    """The slice of one block, as positions in it; nothing to change where the block is the whole dim."""
    d = call["dim"] % len(at.operands[0])
    return _local_slice(call, d, call.shape(0)[d], at.operand_offsets[0][d], at.operands[0][d])


def _local_slice(call: Call, d: int, total: int, offset: int, size: int) -> dict[str, Any]:
    if size == total:
        return {}
    window = positions(call, total)
    first, stop = count_below(window, offset), count_below(window, offset + size)
    start, end = (window[first] - offset, window[stop - 1] - offset + 1) if first < stop else (0, 0)
    return {"dim": d, "start": start, "end": end, "step": window.step}


def slice_put_back(call: Call) -> Factors:
    """``slice_backward``: zeros but for the slice, which operand 0 is."""
    sizes = {f"d{d}": size for d, size in enumerate(call["input_sizes"])}
    dims = tuple((name,) for name in sizes)
    d = call["dim"] % len(dims)
    return Factors((dims,), (dims,), sizes, windows={("operand", 0, f"d{d}"): positions(call, sizes[f"d{d}"])})


def local_slice_put_back(call: Call, at: LocalView) -> dict[str, Any]:
    d = call["dim"] % len(at.results[0])
    changed = _local_slice(call, d, call["input_sizes"][d], at.result_offsets[0][d], at.results[0][d])
    return {"input_sizes": at.results[0], **changed}


def slice_put_in(call: Call) -> Factors:
    """``slice_scatter``: operand 1 is the slice."""
    dims, sizes = own_factors(call)
    d = call["dim"] % len(dims)
    window = positions(call, sizes[f"d{d}"])
    fits(call, *(len(window) if k == d else size for k, size in enumerate(call.shape(0))))
    return Factors((dims, dims), (dims,), sizes, windows={("operand", 1, f"d{d}"): window})


def fits(call: Call, *size: int) -> None:
    """What is put in has the size of its place, which torch's inference does not look at."""
    if call.shape(1) != size:
        raise RuntimeError(
            f"expected src to have a size equal to the slice of self. src size = {list(call.shape(1))}, slice size = {list(size)}"
        )


def narrowed(call: Call) -> Factors:
    dims, sizes = own_factors(call)
    d = call["dim"] % len(dims)
    start = call["start"] % max(1, sizes[f"d{d}"]) if call["start"] < 0 else call["start"]
    return Factors((dims,), (dims,), sizes, windows={("result", 0, f"d{d}"): range(start, start + call["length"])})


def local_narrow(call: Call, at: LocalView) -> dict[str, Any]:
    d = call["dim"] % len(at.operands[0])
    window = narrowed(call).windows["result", 0, f"d{d}"]
    start = max(0, min(window.start - at.operand_offsets[0][d], at.operands[0][d]))
    return {"start": start if at.results[0][d] else 0, "length": at.results[0][d]}


view("slice slice_copy", sliced, local_args=local_slice)
view("narrow_copy", narrowed, local_args=local_narrow)
view("slice_backward", slice_put_back, partials=ZEROS_PASS, local_args=local_slice_put_back)
view("slice_scatter", slice_put_in, partials=ONE_OF_TWO, local_args=local_slice)


# --- splits: several slices one after another ---
def pieces(call: Call) -> Factors:
    dims, sizes = own_factors(call)
    d = call["dim"] % len(dims)
    windows, start = {}, 0
    for r, meta in enumerate(call.results):
        assert meta is not None
        windows["result", r, f"d{d}"] = range(start, start + meta.shape[d])
        start += meta.shape[d]
    return Factors((dims,), (dims,) * len(call.results), sizes, windows=windows)


def local_pieces(call: Call, at: LocalView) -> dict[str, Any]:
    d = call["dim"] % len(at.operands[0])
    name = "split_size" if "split_size" in call.arguments else "split_sizes"
    return {name: [shape[d] for shape in at.results]}


def copies(x: torch.Tensor, sizes: Any, dim: int = 0) -> list[torch.Tensor]:
    return [part.clone() for part in x.split_with_sizes(sizes, dim)]


view(
    "split split_with_sizes unsafe_split unsafe_split_with_sizes",
    pieces,
    local_args=local_pieces,
    local=torch.Tensor.split_with_sizes,
)
view("split_copy split_with_sizes_copy", pieces, local_args=local_pieces, local=copies)


# --- one element of a dim ---
def selected(call: Call) -> Factors:
    dims, sizes = own_factors(call)
    d = call["dim"] % len(dims)
    owned = Kernel(select_owned, lacking=Partial("sum"))
    return Factors((dims,), ((*dims[:d], *dims[d + 1 :]),), sizes, kernels={f"d{d}": owned})


def select_owned(at: KernelContext, x: Any, dim: int, index: int) -> Any:
    """The row where it is, zeros elsewhere."""
    dim, index = dim % len(at.call.shape(0)), index % at.total

    def owned(here: At, block: torch.Tensor) -> torch.Tensor:
        if here.offset <= index < here.offset + here.size:
            return block.select(dim, index - here.offset).clone()
        return block.new_zeros((*block.shape[:dim], *block.shape[dim + 1 :]))

    return at.map(owned, x)


def select_put_in(call: Call) -> Factors:
    """``select_scatter``: operand 1 is the row."""
    dims, sizes = own_factors(call)
    d = call["dim"] % len(dims)
    fits(call, *(size for k, size in enumerate(call.shape(0)) if k != d))
    return Factors((dims, (*dims[:d], *dims[d + 1 :])), (dims,), sizes, kernels={f"d{d}": Kernel(select_scatter_owned)})


def select_scatter_owned(at: KernelContext, x: Any, src: Any, dim: int, index: int) -> Any:
    dim, index = dim % len(at.call.shape(0)), index % at.total

    def owned(here: At, block: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
        inside = here.offset <= index < here.offset + here.size
        return block.select_scatter(row, dim, index - here.offset) if inside else block.clone()

    return at.map(owned, x, src)


def select_put_back(call: Call) -> Factors:
    """``select_backward``: zeros but for the row, which operand 0 is."""
    dims, sizes = own_factors(call)
    d = call["dim"] % (len(dims) + 1)
    return Factors((dims,), ((*dims[:d], (), *dims[d:]),), sizes)


def unbound(call: Call) -> Factors:
    dims, sizes = own_factors(call)
    d = call["dim"] % len(dims)
    return Factors((dims,), ((*dims[:d], *dims[d + 1 :]),) * len(call.results), sizes, whole=frozenset({f"d{d}"}))


def local_input_sizes(call: Call, at: LocalView) -> dict[str, Any]:
    return {"input_sizes": at.results[0]}


view("select select_copy", selected, when=no_foreign_zeros)
kernel_rule("select_scatter", select_put_in, partials=ONE_OF_TWO)
view("select_backward", select_put_back, partials=ZEROS_PASS, local_args=local_input_sizes)
view("unbind unbind_copy", unbound)


# --- diagonals and windows that slide ---
def diagonal_dims(call: Call, ndim: int) -> tuple[int, int]:
    return call["dim1"] % ndim, call["dim2"] % ndim


def diagonal_window(call: Call, rows: int, columns: int) -> range:
    """The rows that the diagonal passes."""
    first = max(0, -call["offset"])
    return range(first, max(first, min(rows, columns - call["offset"])))


def on_diagonal(call: Call) -> Factors:
    """The diagonal follows the rows; columns must be whole."""
    dims, sizes = own_factors(call)
    return _diagonal(call, dims, sizes, ("result", 0), lambda line: ((dims,), (line,)))


def diagonal_put_in(call: Call) -> Factors:
    dims, sizes = own_factors(call)
    rows, columns = diagonal_dims(call, len(dims))
    window = diagonal_window(call, sizes[f"d{rows}"], sizes[f"d{columns}"])
    fits(call, *(size for k, size in enumerate(call.shape(0)) if k not in (rows, columns)), len(window))
    return _diagonal(call, dims, sizes, ("operand", 1), lambda line: ((dims, line), (dims,)))


def diagonal_put_back(call: Call) -> Factors:
    sizes = {f"d{d}": size for d, size in enumerate(call["input_sizes"])}
    dims = tuple((name,) for name in sizes)
    return _diagonal(call, dims, sizes, ("operand", 0), lambda line: ((line,), (dims,)))


def _diagonal(call: Call, dims: Any, sizes: dict[str, int], where: tuple[str, int], sides: Any) -> Factors:
    rows, columns = diagonal_dims(call, len(dims))
    window = diagonal_window(call, sizes[f"d{rows}"], sizes[f"d{columns}"])
    line = (*(dim for d, dim in enumerate(dims) if d not in (rows, columns)), (f"d{rows}",))
    operands, results = sides(line)
    whole = frozenset({f"d{columns}"})
    return Factors(operands, results, sizes, whole, windows={(*where, f"d{rows}"): window})


def local_diagonal(call: Call, at: LocalView) -> dict[str, Any]:
    """Row r of a block is row r + its offset of the whole."""
    rows, _ = diagonal_dims(call, len(at.operands[0]))
    return {"offset": call["offset"] + at.operand_offsets[0][rows]}


def local_diagonal_put_back(call: Call, at: LocalView) -> dict[str, Any]:
    rows, _ = diagonal_dims(call, len(at.results[0]))
    return {"input_sizes": at.results[0], "offset": call["offset"] + at.result_offsets[0][rows]}


def unfolded(call: Call) -> Factors:
    """Windows that slide along one dim, their elements a new last dim."""
    dims, sizes = own_factors(call)
    if not dims:
        return Factors((dims,), (((),),), sizes)
    d = call["dimension"] % len(dims)
    return Factors((dims,), ((*dims[:d], (), *dims[d + 1 :], ()),), sizes, whole=frozenset({f"d{d}"}))


def unfold_put_back(call: Call) -> Factors:
    sizes = {f"d{d}": size for d, size in enumerate(call["input_sizes"])}
    dims = tuple((name,) for name in sizes)
    if not dims:
        return Factors((((),),), ((),), sizes)
    d = call["dim"] % len(dims)
    return Factors(((*dims[:d], (), *dims[d + 1 :], ()),), ((*dims[:d], (), *dims[d + 1 :]),), sizes)


view("diagonal diagonal_copy", on_diagonal, local_args=local_diagonal)
view("diagonal_scatter", diagonal_put_in, partials=ONE_OF_TWO, local_args=local_diagonal)
view("diagonal_backward", diagonal_put_back, partials=ZEROS_PASS, local_args=local_diagonal_put_back)
view("unfold unfold_copy", unfolded)
view("unfold_backward", unfold_put_back, partials=LINEAR_PARTIAL, local_args=local_input_sizes)
