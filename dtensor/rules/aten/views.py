"""Operations that only rename, split, merge, drop or repeat dims (where locals cannot be views: see ``remote_view``)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate, takewhile
from operator import mul
from typing import Any

import torch

from ...base.memory_order import stride_like
from ...errors import LayoutError, UnsupportedOperationError
from ...layout.layout import Layout
from ...placement import REDUCE_OPS
from ..call import Call
from ..declare import local_size, view
from ..kernel_context import At, KernelContext
from ..rule import ANY_PARTIAL, LINEAR_PARTIAL, Dims, Factors, LocalView, own_factors, uncut


def transposed(call: Call) -> Factors:
    """Two dims change places."""
    dims, sizes = own_factors(call)
    if not dims:
        return Factors((dims,), (dims,), sizes)
    (a,), (b,) = call.dims("dim0", len(dims)), call.dims("dim1", len(dims))
    moved = list(dims)
    moved[a], moved[b] = dims[b], dims[a]
    return Factors((dims,), (tuple(moved),), sizes)


def permuted(call: Call) -> Factors:
    dims, sizes = own_factors(call)
    return Factors((dims,), (tuple(dims[d] for d in call.dims("dims", len(dims))),), sizes)


def squeezed(call: Call) -> Factors:
    """Dims of size one vanish (those picked, where given)."""
    dims, sizes = own_factors(call)
    gone = set(vanishing(call))
    own = tuple(() if d in gone else dim for d, dim in enumerate(dims))
    return Factors((own,), (tuple(dim for d, dim in enumerate(dims) if d not in gone),), sizes)


def vanishing(call: Call) -> list[int]:
    shape = call.shape(0)
    given = call.get("dim", tuple(range(len(shape))))
    picked = () if isinstance(given, (list, tuple)) and not given else call.dims("dim", len(shape))
    return [d for d in picked if shape[d] == 1]


def squeezed_dims(call: Call, at: LocalView) -> dict[str, Any]:
    """By name: a block may have one element in a dim in which the whole has more."""
    return {"dim": vanishing(call)} if any(size == 1 for size in at.results[0]) else {}


def squeeze_block(x: torch.Tensor, dim: Any = None) -> torch.Tensor:
    return x.squeeze() if dim is None else torch.ops.aten.squeeze.dims(x, dim if isinstance(dim, (list, tuple)) else [dim])


def reshaped(call: Call) -> Factors:
    """Dims split and merge; each run of dims with equal products shares factors."""
    result = call.results[0]
    assert result is not None
    own, other, sizes, whole = factors_of_reshape(call.shape(0), result.shape)
    single = [d for d, split in enumerate(call.operands[0].splits) if split is not None and call.shape(0)[d] == 1]
    if single and 0 not in call.shape(0):
        own, other = _with_singles(call.shape(0), result.shape, own, other, single)
        sizes |= {f"s{d}": 1 for d in single}
    return Factors((own,), (other,), sizes, whole)


def _with_singles(old: Sequence[int], new: Sequence[int], own: Dims, other: Dims, single: Sequence[int]) -> tuple[Dims, Dims]:
    """Factors for dims of size one that are cut: one rank holds it all, so whatever dim takes them up is whole on that rank.

    They go to a dim of size one at the same place, else they lead the dim that stands there.

    >>> _with_singles((1, 2, 4), (1, 8), ((), ("a",), ("b",)), ((), ("a", "b")), [0])
    ((('s0',), ('a',), ('b',)), (('s0',), ('a', 'b')))
    """
    if not new:
        return own, other
    left, right = list(own), list(other)
    for d in single:
        before = math.prod(old[:d])
        alike = [e for e, size in enumerate(new) if size == 1 and math.prod(new[:e]) == before and not right[e]]
        there = [e for e in range(len(new)) if math.prod(new[: e + 1]) > before]
        e = (alike or there or [len(new) - 1])[0]
        left[d], right[e] = (f"s{d}",), (f"s{d}", *right[e])
    return tuple(left), tuple(right)


def retyped(call: Call) -> Factors:
    """The same bytes as another dtype: the last dim grows or shrinks by the ratio of the element sizes."""
    dims, sizes = own_factors(call)
    result = call.results[0]
    assert result is not None
    if not dims or result.shape == call.shape(0):
        return Factors((dims,), (dims,), sizes)
    old, new = call.shape(0)[-1], result.shape[-1]
    last = f"d{len(dims) - 1}"
    sizes[last], sizes["part"] = min(old, new), max(old, new) // max(1, min(old, new))
    long = (*dims[:-1], (last, "part"))
    return Factors((dims,), (long,), sizes) if new >= old else Factors((long,), (dims,), sizes)


def retyped_partials(call: Call) -> tuple[str, ...]:
    result = call.results[0]
    return ANY_PARTIAL if result is not None and result.dtype == call.operands[0].dtype else ()


def factors_of_reshape(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[Dims, Dims, dict[str, int], frozenset[str]]:
    """Common factors of two shapes with the same elements in the same order, and the factors that are not common.

    >>> factors_of_reshape((6, 5), (2, 3, 5))[:2]
    ((('f0', 'f1'), ('f2',)), (('f0',), ('f1',), ('f2',)))
    >>> sorted(factors_of_reshape((4, 9), (2, 3, 6))[3])
    ['w1', 'w2', 'w3', 'w4']
    """
    sizes: dict[str, int] = {}
    left: list[list[str]] = [[] for _ in old]
    right: list[list[str]] = [[] for _ in new]
    if 0 in old:  # nothing to place: only dims that agree from the front keep their factor
        for d in takewhile(lambda d: old[d] == new[d], range(min(len(old), len(new)))):
            _shared(sizes, old[d], left[d], right[d])
        return tuple(map(tuple, left)), tuple(map(tuple, right)), sizes, frozenset()
    whole: list[str] = []
    done, total = 1, math.prod(old)  # how many elements the factors so far count
    sides = (left, _ends(old, total)), (right, _ends(new, total))
    while done < total:
        (i, a), (j, b) = (next(item for item in ends.items() if item[1] > done) for _, ends in sides)
        small, large = sorted((a // done, b // done))
        if large % small == 0:
            _shared(sizes, small, left[i], right[j])
            done *= small
            continue
        meet = min(end for end in {*sides[0][1].values()} & {*sides[1][1].values()} if end > done)
        for side, ends in sides:  # a run whose boundaries interleave (4 x 6 as 6 x 4) has no common factor
            start = done
            for d, end in ends.items():
                if done < end <= meet:
                    whole.append(f"w{len(sizes)}")
                    side[d].append(whole[-1])
                    sizes[whole[-1]], start = end // start, end
        done = meet
    return tuple(map(tuple, left)), tuple(map(tuple, right)), sizes, frozenset(whole)


def _ends(shape: Sequence[int], total: int) -> dict[int, int]:
    """How many elements the dims up to each that is longer than one count: to the last ``total``, also where sizes that are
    symbols do not show it."""
    ends = {d: end for d, end in enumerate(accumulate(shape, mul)) if shape[d] != 1}
    return ends | {max(ends): total} if ends else ends


def _shared(sizes: dict[str, int], size: int, *dims: list[str]) -> None:
    name = f"f{len(sizes)}"
    sizes[name] = size
    for dim in dims:
        dim.append(name)


def strided(call: Call) -> Factors:
    """Anything but the tensor's own strides mixes its dims: every rank needs it whole."""
    dims, sizes = own_factors(call)
    return Factors((dims,), (dims,), sizes) if own_strides(call) else uncut(call)


def strided_put_in(call: Call) -> Factors:
    """The tensor that is written through other strides is whole, and so is what is written."""
    check_memory(call)
    return uncut(call)


def check_memory(call: Call) -> None:
    """Raises unless the tensor has all elements that its memory seen through other strides shows."""
    layout = call.operands[0]
    if not _is_dense(layout.shape, layout.stride):
        raise UnsupportedOperationError(
            f"as_strided on a tensor of shape {tuple(layout.shape)} and strides {layout.stride} would read "
            "memory between its elements, which a DTensor does not have; call x.contiguous() or x.clone() "
            "first, or index the base of the view"
        )
    _check_bounds(layout, call["size"], call["stride"], call["storage_offset"] or 0)


def _check_bounds(layout: Layout, size: Sequence[int], stride: Sequence[int], offset: int) -> None:
    """Raises what plain torch does for elements behind the tensor's last."""
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if math.prod(size) and last >= layout.numel:
        raise LayoutError(
            f"as_strided with sizes {list(size)}, strides {list(stride)}, storage offset {offset} requires {last + 1} elements, "
            f"out of bounds for the {layout.numel} elements of a tensor of shape {tuple(layout.shape)}"
        )


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    long = [d for d, size in enumerate(shape) if size != 1]
    steps = [stride[d] for d in long]
    return list(stride_like([shape[d] for d in long], steps)) == steps


def own_strides(call: Call) -> bool:
    layout = call.operands[0]
    return tuple(call["size"]) == tuple(layout.shape) and tuple(call["stride"]) == layout.stride and not call["storage_offset"]


def restride(at: KernelContext, x: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """``as_strided`` of blocks in the memory order of the layout (``storage_offset`` counts from the tensor's first element)."""
    if own_strides(at.call):
        return at.map(lambda here, block: torch.ops.aten.alias(block), x)
    check_memory(at.call)
    layout = at.operands[0]

    def seen(here: At, block: torch.Tensor) -> torch.Tensor:
        lying = _ordered(block, layout.stride)
        return lying.as_strided(size, stride, lying.storage_offset() + (storage_offset or 0))

    return at.map(seen, x)


def restrided_scatter(at: KernelContext, x: Any, src: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    layout = at.operands[0]

    def scattered(here: At, block: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        made = torch.empty_strided(block.shape, layout.stride, dtype=block.dtype, device=block.device).copy_(block)
        made.as_strided(size, stride, storage_offset or 0).copy_(value)
        return made

    return at.map(scattered, x, src)


def _ordered(block: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """``block`` itself if it lies in memory with these strides; else a copy that does."""
    if all(n == 1 or own == step for n, own, step in zip(block.shape, block.stride(), stride, strict=True)):
        return block
    return torch.empty_strided(block.shape, stride, dtype=block.dtype, device=block.device).copy_(block)


def reshaped_copy(x: torch.Tensor, size: Any, *rest: Any) -> torch.Tensor:
    """What the copying variants do on locals, whose strides need not allow a view where the global ones do."""
    return x.reshape(size).clone()


def per_block(call: Call, at: LocalView) -> dict[str, Any]:
    return {"dtype": call["dtype"]}


def retype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if x.numel() or not x.ndim:
        return x.view(dtype)
    last = x.shape[-1] * x.dtype.itemsize // dtype.itemsize  # strides of nothing need not divide
    return torch.empty((*x.shape[:-1], last), dtype=dtype, device=x.device)


view("detach detach_copy", "s* -> s*")
view("t t_copy", "m n -> n m | s* -> s*")
view("transpose transpose_copy", transposed)
view("permute permute_copy", permuted)
view("unsqueeze unsqueeze_copy", "a* b* -> a* @dim b*")
view("squeeze", squeezed, local_args=squeezed_dims, local=squeeze_block)
view("squeeze_copy", squeezed, local_args=squeezed_dims, local=lambda x, dim=None: squeeze_block(x, dim).clone())
view("expand expand_copy", "s* -> s*", local_args=local_size("size"))
view("view", reshaped, local_args=local_size("size"))
view("_reshape_alias", reshaped, local_args=local_size("size"), local=lambda x, size, stride: x.view(size))
view("_unsafe_view", reshaped, local_args=local_size("size"), local=lambda x, size: x.reshape(size))
view("view_copy _reshape_alias_copy", reshaped, local_args=local_size("size"), local=reshaped_copy)
view("view.dtype", retyped, partials=retyped_partials, local_args=per_block, local=retype)
view(
    "view_copy.dtype",
    retyped,
    partials=retyped_partials,
    local_args=per_block,
    local=lambda x, dtype: retype(x.contiguous(), dtype).clone(),
)
view("view_as_real view_as_real_copy", "s* -> s* []", partials=LINEAR_PARTIAL)
view("view_as_complex view_as_complex_copy", "s* [pair] -> s*", partials=LINEAR_PARTIAL)
view("as_strided as_strided_copy", strided, run=restride)
view("as_strided_scatter", strided_put_in, run=restrided_scatter, partials=tuple(f"{op},{op} -> {op}" for op in REDUCE_OPS))
