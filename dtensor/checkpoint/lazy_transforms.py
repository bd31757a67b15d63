"""A checkpoint whose tensors are put together otherwise: stacked, joined, cut and turned, without reading any.

Where a model has the matrices of its experts in one tensor, its files may have each by itself. What becomes of them is a function
of tensors, which is run on tensors that know where their blocks are stored and nothing else; what it gives has blocks too. So
each rank reads those that its own pieces are made of, as of any checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..base.memory_order import contiguous_stride
from ..base.torch_internals import make_wrapper_subclass, tree_map
from ..errors import CheckpointError
from .manifest import Block, Entry, Manifest
from .tree import Stored, encode

Arrange = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
Blocks = tuple[Block, ...]

_aten = torch.ops.aten


def arranged(manifest: Manifest, arrange: Arrange) -> Manifest:
    """The manifest of what ``arrange`` gives of the tensors, by name.

    Raises:
        CheckpointError: the checkpoint holds more than a dict of tensors; ``arrange`` computes with values, or gives what is not
            of the checkpoint.
    """
    tree = manifest.nested()
    if not isinstance(tree, dict) or not all(isinstance(value, Stored) for value in tree.values()):
        raise CheckpointError("only a checkpoint that is a dict of tensors can be rearranged before it is read")
    made = arrange({name: _of(manifest.tensors[value.name]) for name, value in tree.items()})
    wrong = [name for name, value in made.items() if not isinstance(value, _Placed)]
    if wrong:
        raise CheckpointError(f"{wrong[0]!r} is not computed from tensors of the checkpoint")
    tensors = {
        name: Entry(tuple(x.shape), str(x.dtype).removeprefix("torch."), x._blocks)  # type: ignore[attr-defined]  # checked
        for name, x in made.items()
    }
    return replace(manifest, tensors=tensors, tree=encode({name: Stored(name) for name in tensors}))


class _Placed(Tensor):
    """A tensor without values, which knows where its blocks are stored."""

    _blocks: Blocks

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's stub
        how = _HOW.get(func)
        if how is None:
            raise CheckpointError(
                "tensors of a checkpoint can be stacked, concatenated, sliced and transposed before they are "
                f"read; {func} is not supported"
            )
        given, named = tree_map(lambda x: _on_meta(x) if isinstance(x, _Placed) else x, (args, kwargs or {}))
        shown = func(*given, **named)
        found = how(*args, **{name: value for name, value in (kwargs or {}).items() if name == "dim"})
        if isinstance(shown, Tensor):
            if shown.dtype != (args[0] if isinstance(args[0], Tensor) else args[0][0]).dtype:
                raise CheckpointError("tensors of a checkpoint keep their dtype until they are read; convert them afterwards")
            return _made(shown, found)
        return [_made(each, own) for each, own in zip(shown, found, strict=True)]


def _on_meta(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _of(entry: Entry) -> Tensor:
    return _made(torch.empty(entry.shape, dtype=entry.torch_dtype, device="meta"), entry.blocks)


def _made(shown: Tensor, blocks: Blocks) -> Tensor:
    made: Any = make_wrapper_subclass(_Placed, tuple(shown.shape), dtype=shown.dtype, device="meta")
    made._blocks = blocks
    return made


# --- what becomes of blocks --------------------------------------------------------------------------------------------------
def _same(x: Any, *_: Any) -> Blocks:
    return x._blocks


def _stride(block: Block) -> tuple[int, ...]:
    return block.stride or contiguous_stride(block.shape)


def _with_dims(blocks: Blocks, of: Callable[[tuple[int, ...], int], tuple[int, ...]]) -> Blocks:
    """Blocks whose offsets, shapes and strides are what ``of`` gives of them; it is told what a new dim has there."""
    return tuple(
        replace(block, offset=of(block.offset, 0), shape=of(block.shape, 1), stride=of(_stride(block), 1), digest=None)
        for block in blocks
    )


def _unsqueezed(x: Any, dim: int) -> Blocks:
    d = dim % (x.ndim + 1)
    return _with_dims(x._blocks, lambda old, new: (*old[:d], new, *old[d:]))


def _ordered(x: Any, dims: Sequence[int]) -> Blocks:
    order = [d % x.ndim for d in dims]
    return _with_dims(x._blocks, lambda old, _: tuple(old[d] for d in order))


def _swapped(x: Any, one: int = 0, other: int = 1) -> Blocks:
    order = list(range(x.ndim))
    order[one], order[other] = order[other], order[one]
    return _ordered(x, order)


def _side_by_side(parts: Iterable[tuple[Blocks, int]], d: int) -> Blocks:
    """Blocks of parts, one behind the other along a dim: with each part how long it is."""
    found: list[Block] = []
    start = 0
    for blocks, length in parts:
        for block in blocks:
            offset = (*block.offset[:d], block.offset[d] + start, *block.offset[d + 1 :])
            found.append(replace(block, offset=offset, digest=None))
        start += length
    return tuple(found)


def _joined(parts: Sequence[Any], dim: int = 0) -> Blocks:
    return _side_by_side([(part._blocks, part.shape[dim]) for part in parts], dim % parts[0].ndim)


def _stacked(parts: Sequence[Any], dim: int = 0) -> Blocks:
    return _side_by_side([(_unsqueezed(part, dim), 1) for part in parts], dim % (parts[0].ndim + 1))


def _sliced(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Blocks:
    d = dim % x.ndim
    first, last, _ = slice(start, end).indices(x.shape[d])
    if step != 1:
        raise CheckpointError("tensors of a checkpoint can be sliced with step 1 only")
    found = []
    for block in x._blocks:
        low, high = max(first, block.offset[d]), min(last, block.offset[d] + block.shape[d])
        if low < high:
            stride = _stride(block)
            at = block.at + (low - block.offset[d]) * stride[d] * x.dtype.itemsize
            offset = (*block.offset[:d], low - first, *block.offset[d + 1 :])
            shape = (*block.shape[:d], high - low, *block.shape[d + 1 :])
            found.append(replace(block, offset=offset, shape=shape, at=at, stride=stride, digest=None))
    return tuple(found)


def _picked(x: Any, dim: int, index: int) -> Blocks:
    d, place = dim % x.ndim, index % x.shape[dim]
    return _with_dims(_sliced(x, d, place, place + 1), lambda old, _: (*old[:d], *old[d + 1 :]))


def _reshaped(x: Any, shape: Sequence[int]) -> Blocks:
    whole = x._blocks[0] if len(x._blocks) == 1 else None
    if whole is None or _stride(whole) != contiguous_stride(whole.shape):
        raise CheckpointError("tensors of a checkpoint must be reshaped before they are concatenated, sliced or transposed")
    made = torch.empty(x.shape, device="meta").view(*shape).shape
    return (replace(whole, offset=(0,) * len(made), shape=tuple(made), stride=None, digest=None),)


def _cut(x: Any, sizes: Sequence[int], dim: int = 0) -> list[Blocks]:
    ends = [*accumulate(sizes)]
    return [_sliced(x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _split(x: Any, size: int, dim: int = 0) -> list[Blocks]:
    count = math.ceil(x.shape[dim] / size)
    return [_sliced(x, dim, k * size, (k + 1) * size) for k in range(count)]


def _unbound(x: Any, dim: int = 0) -> list[Blocks]:
    return [_picked(x, dim, k) for k in range(x.shape[dim])]


_HOW: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _same,
    _aten.alias.default: _same,
    _aten.clone.default: _same,
    _aten._to_copy.default: _same,
    _aten.view.default: _reshaped,
    _aten._unsafe_view.default: _reshaped,
    _aten.unsqueeze.default: _unsqueezed,
    _aten.permute.default: _ordered,
    _aten.transpose.int: _swapped,
    _aten.t.default: _swapped,
    _aten.cat.default: _joined,
    _aten.stack.default: _stacked,
    _aten.slice.Tensor: _sliced,
    _aten.select.int: _picked,
    _aten.split.Tensor: _split,
    _aten.split_with_sizes.default: _cut,
    _aten.unbind.int: _unbound,
}
