"""Operations that keep some elements of a dim, and their inverses, which put them back.

A slice keeps a window of a dim (see ``windows``): every rank keeps the part of it that lies in its block, and the local result is
a view of the local. One position of a sharded dim is with one rank only, and so is all that has no other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...base.symbolic_sizes import has_symbols
from ...comm.local_reduce import nothing
from ...placement import REDUCE_OPS, Partial
from ..call import Call
from ..declare import local_size, view
from ..dim_windows import count_below
from ..indexing import no_foreign_zeros
from ..kernel_context import At, KernelContext
from ..partial_rules import copies, one_of
from ..rule import LINEAR_PARTIAL, Factors, Kernel, LocalView, Word, named, own_factors

ZEROS_PASS = tuple(f"{op} -> {op}" for op in REDUCE_OPS)  # zeros reduce to zero; by a user's reduction perhaps not
PUT_IN = one_of("self", "src")


# --- a window of one dim ---
@dataclass(frozen=True, slots=True)
class Window(Word):
    """The tensors have one shape, but that one of them holds a window of dim ``dim``: ``"result"``, ``"operand 0"`` (which is put
    back into zeros of ``input_sizes``) or ``"operand 1"`` (which is put into operand 0)."""

    of: str
    positions: Callable[[Call, int], range]

    def __call__(self, call: Call) -> Factors:
        dims, sizes = named("d", call["input_sizes"] if self.of == "operand 0" else call.shape(0))
        d = call["dim"] % len(dims)
        window = self.positions(call, sizes[f"d{d}"])
        if self.of == "operand 1":
            fits(call, *(len(window) if k == d else size for k, size in enumerate(call.shape(0))))
        side, _, place = self.of.partition(" ")
        made = Factors((dims,) * len(call.operands), (dims,), sizes, windows={(side, int(place or 0), f"d{d}"): window})
        shown = (len(window) if k == d else size for k, size in enumerate(sizes.values()))
        return put_back(self.of, call, made, *shown)


def sliced(call: Call, size: int) -> range:
    """The positions of a dim of ``size`` that a slice keeps."""
    return range(*slice(call.get("start"), call.get("end"), call.get("step", 1)).indices(size))


def narrowed(call: Call, size: int) -> range:
    start = call["start"] % max(1, size) if call["start"] < 0 else call["start"]
    return range(start, start + call["length"])


def fits(call: Call, *size: int) -> None:
    """What is put in has the size of its place, which torch's inference does not look at."""
    if call.shape(1) != size:
        raise RuntimeError(
            f"expected src to have a size equal to the slice of self. src size = {list(call.shape(1))}, slice size = {list(size)}"
        )


def put_back(of: str, call: Call, made: Factors, *size: int) -> Factors:
    """The factors; where a gradient is put back ("operand 0"), which may be one that expands to the size of its place, all is
    whole."""
    given = call.shape(0)
    if of != "operand 0" or given == size:
        return made
    dims = made.operands[0][len(size) - len(given) :]
    return Factors((dims,), made.results, made.sizes, whole=frozenset(made.sizes))


def _along(call: Call, at: LocalView) -> tuple[int, int, int, int, dict[str, Any]]:
    """The dim of a slice or position, or where one is put back; its size, that of the block and where it begins; what else the
    operator is told of the block."""
    back = "input_sizes" in call.arguments
    shape, own, offsets = (
        (call["input_sizes"], at.results[0], at.result_offsets[0])
        if back
        else (call.shape(0), at.operands[0], at.operand_offsets[0])
    )
    d = call["dim"] % len(shape)
    return d, shape[d], own[d], offsets[d], {"input_sizes": own} if back else {}


def local_slice(call: Call, at: LocalView) -> dict[str, Any]:
    """The slice of one block, as positions in it; nothing to change where the block is the whole dim."""
    d, size, own, offset, sizes = _along(call, at)
    if own == size:
        return sizes
    window = sliced(call, size)
    first, stop = count_below(window, offset), count_below(window, offset + own)
    start, end = (window[first] - offset, window[stop - 1] - offset + 1) if first < stop else (0, 0)
    return {**sizes, "dim": d, "start": start, "end": end, "step": window.step}


def local_narrow(call: Call, at: LocalView) -> dict[str, Any]:
    d = call["dim"] % len(at.operands[0])
    window = narrowed(call, call.shape(0)[d])
    start = max(0, min(window.start - at.operand_offsets[0][d], at.operands[0][d]))
    return {"start": start if at.results[0][d] else 0, "length": at.results[0][d]}


view("slice slice_copy", Window("result", sliced), local_args=local_slice)
view("narrow_copy", Window("result", narrowed), local_args=local_narrow)
view("slice_backward", Window("operand 0", sliced), partials=ZEROS_PASS, local_args=local_slice)
view("slice_scatter", Window("operand 1", sliced), partials=PUT_IN, local_args=local_slice)


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


def copied_pieces(x: Tensor, sizes: Any, dim: int = 0) -> list[Tensor]:
    return [part.clone() for part in x.split_with_sizes(sizes, dim)]


view(
    "split split_with_sizes unsafe_split unsafe_split_with_sizes", pieces, local_args=local_pieces, local=Tensor.split_with_sizes
)
view("split_copy split_with_sizes_copy", pieces, local_args=local_pieces, local=copied_pieces)


# --- one position of a dim ---
@dataclass(frozen=True, slots=True)
class Picked(Word):
    """One position of dim ``dim``, in a tensor that lacks that dim (``of`` as in :class:`Window`), or each in one of all operands
    (``"operands"``): who has it has all of that.

    Where the dim is cut, another of that tensor is, and all blocks but one are empty. Of one number there is none to be cut:
    ``number`` is the kernel for it.
    """

    of: str
    number: Kernel | None = None

    def __call__(self, call: Call) -> Factors:
        made = call.results[0]
        full: Sequence[int] = call.shape(0)
        if self.of == "operand 0":
            full = call["input_sizes"]
        elif self.of == "operands" and made is not None:
            full = made.shape
        dims, sizes = named("d", full)
        d = call["dim"] % max(1, len(dims))
        if self.of == "operand 1":
            fits(call, *(size for k, size in enumerate(full) if k != d))
        side, _, place = self.of.removesuffix("s").partition(" ")
        tensors = {"operand": [dims] * len(call.operands), "result": [dims]}
        if self.of == "operands":
            positions = {k: k for k in range(len(call.operands))}
        else:
            positions = {int(place or 0): call["index"] if call["index"] >= 0 else call["index"] + full[d]}
        along, rest = next((k for k, size in enumerate(full) if k != d and size > 1), None), list(dims)
        kernels, windows = {f"d{d}": self.number} if self.number else {}, {}
        if along is not None and not has_symbols(tuple(positions.values())):
            rest[along] = (f"d{d}", f"d{along}")
            kernels, windows = {}, {(side, k, f"d{d}"): range(at, at + 1) for k, at in positions.items()}
        del rest[d]
        for k in positions:
            tensors[side][k] = tuple(rest)
        found = Factors(tuple(tensors["operand"]), tuple(tensors["result"]), sizes, kernels=kernels, windows=windows)
        return put_back(self.of, call, found, *(size for k, size in enumerate(full) if k != d))

    def own(self) -> tuple[Any, ...]:
        return () if self.number is None else (self.number,)


def local_picked(call: Call, at: LocalView) -> dict[str, Any]:
    """Where the position is in a block (None: it is in another's); nothing to change where the block is the whole dim."""
    d, size, own, offset, sizes = _along(call, at)
    if own == size:
        return sizes
    index = call["index"] % max(1, size) - offset
    if 0 <= index < own:
        return {**sizes, "dim": d, "index": index}
    none = {"none": at.results[0]} if len(call.operands) == 1 and not sizes else {}
    return {**sizes, "dim": d, "index": None, **none}


def picked(x: Tensor, dim: int, index: int | None, none: Sequence[int] = ()) -> Tensor:
    return x.narrow(dim, 0, 0).view(none) if index is None else x.select(dim, index)


def copied_position(x: Tensor, dim: int, index: int | None, none: Sequence[int] = ()) -> Tensor:
    return picked(x, dim, index, none).clone()


def among_zeros(grad: Tensor, input_sizes: Any, dim: int, index: int | None) -> Tensor:
    return grad.new_zeros(input_sizes) if index is None else torch.ops.aten.select_backward(grad, input_sizes, dim, index)


def put_in(x: Tensor, src: Tensor, dim: int, index: int | None) -> Tensor:
    return x.clone() if index is None else x.select_scatter(src, dim, index)


def number_owned(at: KernelContext, x: Any, dim: int, index: int) -> Any:
    """The number where it is, what changes no sum elsewhere."""
    dim, index = dim % len(at.call.shape(0)), index % at.total

    def owned(here: At, block: Tensor) -> Tensor:
        if here.offset <= index < here.offset + here.size:
            return block.select(dim, index - here.offset).clone()
        return block.new_full((*block.shape[:dim], *block.shape[dim + 1 :]), nothing(block.dtype))

    return at.map(owned, x)


def number_put_in(at: KernelContext, x: Any, src: Any, dim: int, index: int) -> Any:
    dim, index = dim % len(at.call.shape(0)), index % at.total

    def owned(here: At, block: Tensor, row: Tensor) -> Tensor:
        return put_in(block, row, dim, index - here.offset if here.offset <= index < here.offset + here.size else None)

    return at.map(owned, x, src)


NUMBER = Kernel(number_owned, lacking=Partial("sum"))
POSITION: dict[str, Any] = {"partials": copies, "when": no_foreign_zeros, "local_args": local_picked}
view("select", Picked("result", NUMBER), local=picked, **POSITION)
view("select_copy", Picked("result", NUMBER), local=copied_position, **POSITION)
view("select_scatter", Picked("operand 1", Kernel(number_put_in)), partials=PUT_IN, local_args=local_picked, local=put_in)
view("select_backward", Picked("operand 0"), partials=ZEROS_PASS, local_args=local_picked, local=among_zeros)
view("unbind unbind_copy", "a* [@dim] b* -> each: a* b*")


# --- diagonals and windows that slide ---
@dataclass(frozen=True, slots=True)
class Diagonal(Word):
    """The diagonal of two dims, a last dim of the tensor that holds it (as in :class:`Window`): it follows the rows, columns must
    be whole."""

    of: str

    def __call__(self, call: Call) -> Factors:
        made = call.results[0]
        assert made is not None
        dims, sizes = named("d", made.shape if self.of == "operand 0" else call.shape(0))
        rows, columns = call["dim1"] % len(dims), call["dim2"] % len(dims)
        first = max(0, -call["offset"])
        window = range(first, max(first, min(sizes[f"d{rows}"], sizes[f"d{columns}"] - call["offset"])))
        others = [d for d in range(len(dims)) if d not in (rows, columns)]
        line = (*(dims[d] for d in others), (f"d{rows}",))
        if self.of == "operand 1":
            fits(call, *(call.shape(0)[d] for d in others), len(window))
        operands, results = {
            "result": ((dims,), (line,)),
            "operand 0": ((line,), (dims,)),
            "operand 1": ((dims, line), (dims,)),
        }[self.of]
        side, _, place = self.of.partition(" ")
        windows = {(side, int(place or 0), f"d{rows}"): window}
        found = Factors(operands, results, sizes, frozenset({f"d{columns}"}), windows=windows)
        return put_back(self.of, call, found, *(sizes[f"d{d}"] for d in others), len(window))


def local_diagonal(call: Call, at: LocalView) -> dict[str, Any]:
    """Row r of a block is row r + its offset of the whole."""
    if len(at.results[0]) > len(at.operands[0]):
        rows = call["dim1"] % len(at.results[0])
        return {"input_sizes": at.results[0], "offset": call["offset"] + at.result_offsets[0][rows]}
    return {"offset": call["offset"] + at.operand_offsets[0][call["dim1"] % len(at.operands[0])]}


def embedded(x: Tensor, offset: int = 0, dim1: int = -2, dim2: int = -1, *, input_sizes: Any = None) -> Tensor:
    """A block of the rows is no square."""
    return (
        x.diag_embed(offset, dim1, dim2)
        if input_sizes is None
        else torch.ops.aten.diagonal_backward(x, input_sizes, offset, dim1, dim2)
    )


view("diagonal diagonal_copy", Diagonal("result"), local_args=local_diagonal)
view("diagonal_scatter", Diagonal("operand 1"), partials=PUT_IN, local_args=local_diagonal)
view("diagonal_backward", Diagonal("operand 0"), partials=ZEROS_PASS, local_args=local_diagonal)
view("diag_embed", Diagonal("operand 0"), partials=ZEROS_PASS, local_args=local_diagonal, local=embedded)
view("unfold unfold_copy", "a* [@dimension] b* -> a* [] b* [] | -> []")
view("unfold_backward", "a* [] b* [] -> a* @dim b* | [] ->", partials=LINEAR_PARTIAL, local_args=local_size("input_sizes"))
