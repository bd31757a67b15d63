"""Reading by index. Along a sharded dim each rank reads what its own block holds and adds zeros: big operands do not move."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from ...layout.layout import Layout
from ...placement import REDUCE_OPS, Partial
from ..call import Call
from ..kernels import At, KernelContext
from ..owned import along_dim, located
from ..rule import Dims, Factors, Kernel
from ..verbs import kernel_rule
from .slices import no_foreign_zeros
from .views import own_factors

CHOSEN = tuple(f"{op},R -> {op}" for op in REDUCE_OPS)  # the same elements of every term


# --- rows: embedding, index_select ---
def embedded(call: Call) -> Factors:
    """Rows of a table. A vocabulary that is sharded: zeros where the row is with another rank."""
    indices = tuple((f"i{d}",) for d in range(len(call.shape(1))))
    sizes = {"v": call.shape(0)[0], "e": call.shape(0)[1]} | {f"i{d}": size for d, size in enumerate(call.shape(1))}
    owned = Kernel(embed_owned, lacking=Partial("sum"))
    return Factors(((("v",), ("e",)), indices), ((*indices, ("e",)),), sizes, kernels={"v": owned})


def embed_owned(at: KernelContext, weight: Any, indices: Any, *options: Any) -> Any:
    def owned(here: At, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        inside, position = located(index, here.offset, here.size, at.total, negative=False, error=IndexError)
        if not here.size:
            return rows.new_zeros((*index.shape, *rows.shape[1:]))
        found = rows.index_select(0, position.reshape(-1)).view(*index.shape, *rows.shape[1:])
        return found.masked_fill_(~inside.unsqueeze(-1), 0)

    return at.map(owned, weight, indices)


def embedding_gradient(call: Call) -> Factors:
    """Each rank adds the rows of its own indices (their frequencies count all ranks' indices)."""
    indices = tuple((f"i{d}",) for d in range(len(call.shape(1))))
    sizes = {f"i{d}": size for d, size in enumerate(call.shape(0))}
    last = ((f"i{len(call.shape(0)) - 1}",),)
    summed = [dim[0] for dim in indices]
    whole = frozenset(summed) if call["scale_grad_by_freq"] else frozenset()
    return Factors(((*indices, *last), indices), (((), *last),), sizes, whole, reduced=dict.fromkeys(summed, "sum"))


def rows_selected(call: Call) -> Factors:
    if len(call.shape(1)) > 1:
        raise IndexError("index_select(): Index is supposed to be a vector")
    dims, sizes = own_factors(call)
    if not dims or not call.shape(1):
        return Factors((dims, ((),) * len(call.shape(1))), (_with(dims, call, ()),), sizes, whole=_picked(dims, call))
    sizes["i"] = call.shape(1)[0]
    d = call["dim"] % len(dims)
    owned = Kernel(select_owned_rows, lacking=Partial("sum"))
    return Factors((dims, (("i",),)), (_with(dims, call, ("i",)),), sizes, kernels={f"d{d}": owned})


def _with(dims: Dims, call: Call, made: tuple[str, ...]) -> Dims:
    d = call["dim"] % max(1, len(dims))
    return (*dims[:d], made, *dims[d + 1 :]) if dims else ()


def _picked(dims: Dims, call: Call) -> frozenset[str]:
    return frozenset({f"d{call['dim'] % len(dims)}"}) if dims else frozenset()


def select_owned_rows(at: KernelContext, x: Any, dim: int, index: Any) -> Any:
    dim %= len(at.call.shape(0))

    def owned(here: At, block: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        inside, position = located(rows, here.offset, here.size, at.total, negative=False, error=IndexError)
        if not here.size:
            return block.new_zeros((*block.shape[:dim], rows.shape[0], *block.shape[dim + 1 :]))
        return block.index_select(dim, position).masked_fill_(~along_dim(inside, dim, block.ndim), 0)

    return at.map(owned, x, index)


kernel_rule("embedding", embedded, partials=CHOSEN, when=no_foreign_zeros)
kernel_rule("embedding_dense_backward", embedding_gradient, partials=("sum,R -> sum", "avg,R -> avg"))
kernel_rule("index_select", rows_selected, partials=CHOSEN, when=no_foreign_zeros, plain=("index",))


# --- elements: gather, take ---
def gathered(call: Call) -> Factors:
    """Dims other than ``dim`` go together; the index may be shorter there, a window of them."""
    dims, sizes = own_factors(call)
    shape = call.shape(1)
    if not dims or len(shape) != len(dims):
        return Factors((((),) * len(dims), ((),) * len(shape)), (((),) * len(shape),), {})
    at = call["dim"] % len(dims)
    sizes["i"] = shape[at]
    own = tuple(("i",) if d == at else dim for d, dim in enumerate(dims))
    short = {d: range(shape[d]) for d in range(len(dims)) if d != at and shape[d] != call.shape(0)[d]}
    windows = {key: window for d, window in short.items() for key in (("operand", 1, f"d{d}"), ("result", 0, f"d{d}"))}
    owned = Kernel(gather_owned, lacking=Partial("sum"))
    return Factors((dims, own), (own,), sizes, kernels={f"d{at}": owned}, windows=windows)


def gather_owned(at: KernelContext, x: Any, dim: int, index: Any, **options: Any) -> Any:
    def owned(here: At, block: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        inside, position = located(chosen, here.offset, here.size, at.total, negative=False, error=RuntimeError)
        if not here.size:
            return block.new_zeros(chosen.shape)
        return block.gather(dim, position).masked_fill_(~inside, 0)

    return at.map(owned, x, index)


def taken(call: Call) -> Factors:
    """Elements by their position in the flattened tensor, from which the position in each dim follows."""
    dims, sizes = own_factors(call)
    made = tuple((f"i{d}",) for d in range(len(call.shape(1))))
    owned = Kernel(take_owned, lacking=Partial("sum"), joint=True)
    kernels = dict.fromkeys(sizes, owned)
    sizes |= {f"i{d}": size for d, size in enumerate(call.shape(1))}
    return Factors((dims, made), (made,), sizes, kernels=kernels)


def take_owned(at: KernelContext, x: Any, index: Any) -> Any:
    def owned(here: At, block: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
        inside, position = located_flat(at.operands[0], here.member, chosen)
        if not block.numel():
            return block.new_zeros(chosen.shape)
        return block.take(position).masked_fill_(~inside, 0)

    return at.map(owned, x, index)


def located_flat(layout: Layout, member: int, index: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(whether the member's block holds each element of the flattened tensor, its position in the flattened block)."""
    coordinate = layout.mesh.coordinates[member]
    inside, flat = located(index, 0, layout.numel, layout.numel, negative=True, error=IndexError)
    position = torch.zeros_like(flat)
    rest = math.prod(layout.shape)
    for size, offset, block in zip(layout.shape, layout.local_offset(coordinate), layout.local_shape(coordinate), strict=True):
        rest //= max(1, size)
        own = flat // max(1, rest) % max(1, size) - offset
        inside = inside & (own >= 0) & (own < block)
        position = position * block + own.clamp(0, max(0, block - 1))
    return inside, position


kernel_rule("gather", gathered, partials=CHOSEN, when=no_foreign_zeros)
kernel_rule("take", taken, partials=CHOSEN, when=no_foreign_zeros)


# --- advanced indexing ---
def index_places(call: Call) -> list[int] | None:
    """The dims that index tensors pick, one for each; None if some is a mask, whose result depends on the data."""
    given = call["indices"]
    if any(isinstance(item, Layout) and item.dtype in (torch.bool, torch.uint8) for item in given):
        return None
    return [d for d, item in enumerate(given) if isinstance(item, Layout)]


def index_shape(call: Call) -> tuple[int, ...]:
    """The common shape of the index tensors."""
    return tuple(torch.broadcast_shapes(*(item.shape for item in call["indices"] if isinstance(item, Layout))))


def indexed_dims(dims: Dims, places: list[int], made: Dims) -> tuple[Dims, int]:
    """The dims of ``x[indices]``, and where those of the indices begin: in place of adjacent dims, else in front."""
    first = places[0] if places == list(range(places[0], places[-1] + 1)) else 0
    others = tuple(dim for d, dim in enumerate(dims) if d not in places)
    return (*others[:first], *made, *others[first:]), first


def aligned_index(shape: tuple[int, ...], common: tuple[int, ...]) -> Dims:
    first = len(common) - len(shape)
    return tuple((f"i{d}",) if size == common[d] else () for d, size in enumerate(shape, first))


def indexed(call: Call) -> Factors | None:
    places = index_places(call)
    if not places:
        return None
    dims, sizes = own_factors(call)
    common = index_shape(call)
    result, _ = indexed_dims(dims, places, tuple((f"i{d}",) for d in range(len(common))))
    operands = (dims, *(aligned_index(call.shape(i), common) for i in call.operands_of("indices")))
    owned = Kernel(index_owned, lacking=Partial("sum"), joint=True)
    kernels = {f"d{d}": owned for d in places}
    sizes |= {f"i{d}": size for d, size in enumerate(common)}
    return Factors(operands, (result,), sizes, kernels=kernels)


def index_owned(at: KernelContext, x: Any, indices: list[Any]) -> Any:
    places = index_places(at.call) or []

    def owned(here: At, block: torch.Tensor, *given: torch.Tensor) -> torch.Tensor:
        inside, positions = located_in_dims(at.operands[0], here.member, places, given)
        if 0 in (block.shape[d] for d in places):
            return block.new_zeros(_indexed_shape(block, places, inside))
        chosen: list[Any] = [None] * block.ndim
        for d, position in zip(places, positions, strict=True):
            chosen[d] = position
        found = torch.ops.aten.index.Tensor(block, chosen)
        _, first = indexed_dims(((),) * block.ndim, places, ())
        return found.masked_fill_(~inside.reshape(*inside.shape, *(1,) * (found.ndim - first - inside.ndim)), 0)

    return at.map(owned, x, *(index for index in indices if index is not None))


def _indexed_shape(block: torch.Tensor, places: list[int], inside: torch.Tensor) -> tuple[int, ...]:
    sizes: Dims = tuple((str(size),) for size in block.shape)
    shape, _ = indexed_dims(sizes, places, tuple((str(size),) for size in inside.shape))
    return tuple(int(size) for (size,) in shape)


def located_in_dims(layout: Layout, member: int, places: list[int], indices: Any) -> tuple[Any, list[Any]]:
    """(whether the member's block holds the element at each tuple of indices, the positions in it), all of one shape."""
    coordinate = layout.mesh.coordinates[member]
    offsets, sizes = layout.local_offset(coordinate), layout.local_shape(coordinate)
    inside: Any = True
    positions = []
    for d, index in zip(places, torch.broadcast_tensors(*indices), strict=True):
        here, position = located(index, offsets[d], sizes[d], layout.shape[d], negative=True, error=IndexError)
        inside = here & inside
        positions.append(position)
    return inside, positions


def index_partials(call: Call) -> tuple[str, ...]:
    rest = ",R" * (len(call.operands) - 1)
    return tuple(f"{op}{rest} -> {op}" for op in REDUCE_OPS)


def has_masks(call: Call) -> bool:
    return any(isinstance(item, Layout) and item.dtype in (torch.bool, torch.uint8) for item in call["indices"])


def by_number(indices: Sequence[Any]) -> list[Any]:
    """Masks replaced by the positions that they pick, one index for each of their dims."""
    numbered: list[Any] = []
    for item in indices:
        masked = isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
        numbered += item.nonzero().unbind(1) if masked else [item]
    return numbered


def index_by_number(op: Any, x: Any, indices: Sequence[Any]) -> Any:
    return op(x, by_number(indices))


for _name in ("index", "_unsafe_index"):
    kernel_rule(
        _name,
        indexed,
        partials=index_partials,
        when=no_foreign_zeros,
        decompose=functools.partial(index_by_number, getattr(torch.ops.aten, _name)),
        decomposes=has_masks,
        plain=("indices",),
    )


# --- places in a sorted sequence ---
def counted_below(call: Call) -> Factors | None:
    """How many elements of a sorted sequence come before each value: the sum over its blocks."""
    sequence, values = (1, 0) if "boundaries" in call.arguments else (0, 1)
    if len(call.shape(sequence)) != 1 and call.shape(sequence)[:-1] != call.shape(values)[:-1]:
        return None  # the operator says what is wrong
    sizes = {f"d{d}": size for d, size in enumerate(call.shape(values))}
    dims: Dims = tuple((name,) for name in sizes)
    batch = dims[:-1] if len(call.shape(sequence)) > 1 else ()
    ordered: Dims = (*batch, ("n",))
    sizes["n"] = call.shape(sequence)[-1]
    operands = [dims, dims]
    operands[sequence] = ordered
    permuted = len(call.operands) == 3
    operands += [ordered] if permuted else []
    return Factors(tuple(operands), (dims,), sizes, frozenset({"n"} if permuted else ()), reduced={"n": "sum"})


kernel_rule("bucketize searchsorted", counted_below)
