"""Views: operations that only rename, split, merge, drop or repeat dims. Where local views are impossible, see
``tensor/views/``."""

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
from ..rule import ANY_PARTIAL, LINEAR_PARTIAL, Dims, Factors, LocalView, factors_of_first_operand, make_unsharded_factors


def transpose_factors(call: Call) -> Factors:
    """Return the factors of ``transpose``: two dims are exchanged."""
    dims, sizes = factors_of_first_operand(call)
    if not dims:
        return Factors((dims,), (dims,), sizes)
    (a,), (b,) = call.dims("dim0", len(dims)), call.dims("dim1", len(dims))
    moved = list(dims)
    moved[a], moved[b] = dims[b], dims[a]
    return Factors((dims,), (tuple(moved),), sizes)


def permute_factors(call: Call) -> Factors:
    dims, sizes = factors_of_first_operand(call)
    return Factors((dims,), (tuple(dims[d] for d in call.dims("dims", len(dims))),), sizes)


def squeeze_factors(call: Call) -> Factors:
    """Return the factors of ``squeeze``: the result lacks dims of size one (the selected ones, if any)."""
    dims, sizes = factors_of_first_operand(call)
    dropped = set(squeezed_dims_of(call))
    operand_dims = tuple(() if d in dropped else dim for d, dim in enumerate(dims))
    return Factors((operand_dims,), (tuple(dim for d, dim in enumerate(dims) if d not in dropped),), sizes)


def squeezed_dims_of(call: Call) -> list[int]:
    """Return the dims of size one that a call of ``squeeze`` removes."""
    shape = call.shape(0)
    requested = call.get("dim", tuple(range(len(shape))))
    selected = () if isinstance(requested, (list, tuple)) and not requested else call.dims("dim", len(shape))
    return [d for d in selected if shape[d] == 1]


def local_squeeze_args(call: Call, at: LocalView) -> dict[str, Any]:
    """Return the dims to squeeze in a rank's block, if the block has dims of size one that must stay."""
    return {"dim": squeezed_dims_of(call)} if any(size == 1 for size in at.results[0]) else {}


def squeeze_block(x: torch.Tensor, dim: Any = None) -> torch.Tensor:
    return x.squeeze() if dim is None else torch.ops.aten.squeeze.dims(x, dim if isinstance(dim, (list, tuple)) else [dim])


def reshape_factors(call: Call) -> Factors:
    """Return the factors of ``view`` and ``reshape``, in which runs of dims with equal products share factors."""
    result = call.results[0]
    assert result is not None
    own, other, sizes, unsharded = factors_of_reshape(call.shape(0), result.shape)
    single = [d for d, split in enumerate(call.operands[0].splits) if split is not None and call.shape(0)[d] == 1]
    if single and 0 not in call.shape(0):
        own, other = _add_singleton_factors(call.shape(0), result.shape, own, other, single)
        sizes |= {f"s{d}": 1 for d in single}
    return Factors((own,), (other,), sizes, unsharded)


def _add_singleton_factors(
    old: Sequence[int], new: Sequence[int], own: Dims, other: Dims, single: Sequence[int]
) -> tuple[Dims, Dims]:
    """Add factors for sharded dims of size one to both sides of a reshape.

    One rank has all of such a dim, so another dim can carry the shard on that rank.

    They go to a dim of size one at the same place, else they lead the dim at that place.

    >>> _add_singleton_factors((1, 2, 4), (1, 8), ((), ("a",), ("b",)), ((), ("a", "b")), [0])
    ((('s0',), ('a',), ('b',)), (('s0',), ('a', 'b')))
    """
    if not new:
        return own, other
    left, right = list(own), list(other)
    for d in single:
        before = math.prod(old[:d])
        singleton_dims = [e for e, size in enumerate(new) if size == 1 and math.prod(new[:e]) == before and not right[e]]
        following_dims = [e for e in range(len(new)) if math.prod(new[: e + 1]) > before]
        e = (singleton_dims or following_dims or [len(new) - 1])[0]
        left[d], right[e] = (f"s{d}",), (f"s{d}", *right[e])
    return tuple(left), tuple(right)


def view_dtype_factors(call: Call) -> Factors:
    """Return the factors of a view as another dtype. The last dim grows or shrinks by the ratio of the element sizes."""
    dims, sizes = factors_of_first_operand(call)
    result = call.results[0]
    assert result is not None
    if not dims or result.shape == call.shape(0):
        return Factors((dims,), (dims,), sizes)
    old, new = call.shape(0)[-1], result.shape[-1]
    last = f"d{len(dims) - 1}"
    sizes[last], sizes["part"] = min(old, new), max(old, new) // max(1, min(old, new))
    long = (*dims[:-1], (last, "part"))
    return Factors((dims,), (long,), sizes) if new >= old else Factors((long,), (dims,), sizes)


def view_dtype_partials(call: Call) -> tuple[str, ...]:
    result = call.results[0]
    return ANY_PARTIAL if result is not None and result.dtype == call.operands[0].dtype else ()


def factors_of_reshape(old: tuple[int, ...], new: tuple[int, ...]) -> tuple[Dims, Dims, dict[str, int], frozenset[str]]:
    """Return the factors of the dims of two shapes of equal elements, their sizes, and those that must be unsharded.

    >>> factors_of_reshape((6, 5), (2, 3, 5))[:2]
    ((('f0', 'f1'), ('f2',)), (('f0',), ('f1',), ('f2',)))
    >>> sorted(factors_of_reshape((4, 9), (2, 3, 6))[3])
    ['w1', 'w2', 'w3', 'w4']
    """
    sizes: dict[str, int] = {}
    left: list[list[str]] = [[] for _ in old]
    right: list[list[str]] = [[] for _ in new]
    if 0 in old:  # an empty tensor: only leading dims of equal size keep their factor
        for d in takewhile(lambda d: old[d] == new[d], range(min(len(old), len(new)))):
            _add_shared_factor(sizes, old[d], left[d], right[d])
        return tuple(map(tuple, left)), tuple(map(tuple, right)), sizes, frozenset()
    unsharded: list[str] = []
    elements, total = 1, math.prod(old)  # elements that the factors so far count
    sides = (left, _cumulative_sizes(old, total)), (right, _cumulative_sizes(new, total))
    while elements < total:
        (i, a), (j, b) = (next(item for item in ends.items() if item[1] > elements) for _, ends in sides)
        small, large = sorted((a // elements, b // elements))
        if large % small == 0:
            _add_shared_factor(sizes, small, left[i], right[j])
            elements *= small
            continue
        common_end = min(end for end in {*sides[0][1].values()} & {*sides[1][1].values()} if end > elements)
        for side, ends in sides:  # a run whose boundaries interleave (4 x 6 as 6 x 4) has no common factor
            start = elements
            for d, end in ends.items():
                if elements < end <= common_end:
                    unsharded.append(f"w{len(sizes)}")
                    side[d].append(unsharded[-1])
                    sizes[unsharded[-1]], start = end // start, end
        elements = common_end
    return tuple(map(tuple, left)), tuple(map(tuple, right)), sizes, frozenset(unsharded)


def _cumulative_sizes(shape: Sequence[int], total: int) -> dict[int, int]:
    """Return, for each dim longer than one, the product of the sizes up to it.

    The last is ``total``, also if symbolic sizes do not show it.
    """
    ends = {d: end for d, end in enumerate(accumulate(shape, mul)) if shape[d] != 1}
    return ends | {max(ends): total} if ends else ends


def _add_shared_factor(sizes: dict[str, int], size: int, *dims: list[str]) -> None:
    """Append a new factor of this size to the factors of several dims."""
    name = f"f{len(sizes)}"
    sizes[name] = size
    for dim in dims:
        dim.append(name)


def as_strided_factors(call: Call) -> Factors:
    """Return the factors of ``as_strided``. Strides other than the tensor's own mix its dims, so that it must be unsharded."""
    dims, sizes = factors_of_first_operand(call)
    return Factors((dims,), (dims,), sizes) if own_strides(call) else make_unsharded_factors(call)


def as_strided_scatter_factors(call: Call) -> Factors:
    """Return factors with destination and source unsharded. Raise for strides beyond the tensor's memory."""
    check_memory(call)
    return make_unsharded_factors(call)


def check_memory(call: Call) -> None:
    """Raise unless a DTensor has all elements that ``as_strided`` would read: no gaps between them, and none beyond the last."""
    layout = call.operands[0]
    if not _is_dense(layout.shape, layout.stride):
        raise UnsupportedOperationError(
            f"as_strided on a tensor of shape {tuple(layout.shape)} and strides {layout.stride} would read "
            "memory between its elements, which a DTensor does not have; call x.contiguous() or x.clone() "
            "first, or index the base of the view"
        )
    _check_bounds(layout, call["size"], call["stride"], call["storage_offset"] or 0)


def _check_bounds(layout: Layout, size: Sequence[int], stride: Sequence[int], offset: int) -> None:
    """Raise, as plain torch, if ``as_strided`` would read beyond the tensor's last element."""
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if math.prod(size) and last >= layout.numel:
        raise LayoutError(
            f"as_strided with sizes {list(size)}, strides {list(stride)}, storage offset {offset} requires {last + 1} elements, "
            f"out of bounds for the {layout.numel} elements of a tensor of shape {tuple(layout.shape)}"
        )


def _is_dense(shape: Sequence[int], stride: Sequence[int]) -> bool:
    """Return True if the strides are those of a tensor without gaps, in some order of dims."""
    long = [d for d, size in enumerate(shape) if size != 1]
    steps = [stride[d] for d in long]
    return list(stride_like([shape[d] for d in long], steps)) == steps


def own_strides(call: Call) -> bool:
    layout = call.operands[0]
    return tuple(call["size"]) == tuple(layout.shape) and tuple(call["stride"]) == layout.stride and not call["storage_offset"]


def as_strided_of_blocks(at: KernelContext, x: Any, size: Any, stride: Any, storage_offset: int | None = None) -> Any:
    """Compute ``as_strided`` on each rank's block, copied to the strides of the layout if it has others (a kernel)."""
    if own_strides(at.call):
        return at.map(lambda here, block: torch.ops.aten.alias(block), x)
    check_memory(at.call)
    layout = at.operands[0]

    def view_block(here: At, block: torch.Tensor) -> torch.Tensor:
        strided_block = _copy_to_strides(block, layout.stride)
        return strided_block.as_strided(size, stride, strided_block.storage_offset() + (storage_offset or 0))

    return at.map(view_block, x)


def as_strided_scatter_of_blocks(
    at: KernelContext, x: Any, src: Any, size: Any, stride: Any, storage_offset: int | None = None
) -> Any:
    """Copy each rank's block in the strides of the layout, and write ``src`` through a strided view of the copy (a kernel)."""
    layout = at.operands[0]

    def scatter_block(here: At, block: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """Copy one rank's block in the strides of the layout, and write ``value`` through a strided view of the copy."""
        strided_block = torch.empty_strided(block.shape, layout.stride, dtype=block.dtype, device=block.device).copy_(block)
        strided_block.as_strided(size, stride, storage_offset or 0).copy_(value)
        return strided_block

    return at.map(scatter_block, x, src)


def _copy_to_strides(block: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """Copy ``block`` into memory with these strides, or return it if it has them."""
    if all(n == 1 or own == step for n, own, step in zip(block.shape, block.stride(), stride, strict=True)):
        return block
    return torch.empty_strided(block.shape, stride, dtype=block.dtype, device=block.device).copy_(block)


def reshape_and_copy(x: torch.Tensor, size: Any, *rest: Any) -> torch.Tensor:
    """Reshape and copy a block, because its strides need not allow a view where the global ones do."""
    return x.reshape(size).clone()


def local_dtype_args(call: Call, at: LocalView) -> dict[str, Any]:
    return {"dtype": call["dtype"]}


def view_block_as_dtype(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """View one rank's block as another dtype. An empty block gets a new tensor, because its strides need not divide."""
    if x.numel() or not x.ndim:
        return x.view(dtype)
    last = x.shape[-1] * x.dtype.itemsize // dtype.itemsize  # strides of an empty tensor need not divide
    return torch.empty((*x.shape[:-1], last), dtype=dtype, device=x.device)


view("detach detach_copy", "s* -> s*")
view("t t_copy", "m n -> n m | s* -> s*")
view("transpose transpose_copy", transpose_factors)
view("permute permute_copy", permute_factors)
view("unsqueeze unsqueeze_copy", "a* b* -> a* @dim b*")
view("squeeze", squeeze_factors, local_args=local_squeeze_args, local=squeeze_block)
view("squeeze_copy", squeeze_factors, local_args=local_squeeze_args, local=lambda x, dim=None: squeeze_block(x, dim).clone())
view("expand expand_copy", "s* -> s*", local_args=local_size("size"))
view("view", reshape_factors, local_args=local_size("size"))
view("_reshape_alias", reshape_factors, local_args=local_size("size"), local=lambda x, size, stride: x.view(size))
view("_unsafe_view", reshape_factors, local_args=local_size("size"), local=lambda x, size: x.reshape(size))
view("view_copy _reshape_alias_copy", reshape_factors, local_args=local_size("size"), local=reshape_and_copy)
view("view.dtype", view_dtype_factors, partials=view_dtype_partials, local_args=local_dtype_args, local=view_block_as_dtype)
view(
    "view_copy.dtype",
    view_dtype_factors,
    partials=view_dtype_partials,
    local_args=local_dtype_args,
    local=lambda x, dtype: view_block_as_dtype(x.contiguous(), dtype).clone(),
)
view("view_as_real view_as_real_copy", "s* -> s* []", partials=LINEAR_PARTIAL)
view("view_as_complex view_as_complex_copy", "s* [pair] -> s*", partials=LINEAR_PARTIAL)
view("as_strided as_strided_copy", as_strided_factors, run=as_strided_of_blocks)
view(
    "as_strided_scatter",
    as_strided_scatter_factors,
    run=as_strided_scatter_of_blocks,
    partials=tuple(f"{op},{op} -> {op}" for op in REDUCE_OPS),
)
