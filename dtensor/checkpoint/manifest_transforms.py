"""Manifest transforms of ``load``: the manifest of a checkpoint under other keys (``rename=``), or of lazily rearranged tensors.

``arrange=`` stacks, concatenates, slices and transposes stored tensors without reading them. A model may have the matrices of its
experts in one tensor, while its files have each separately. The transform is a function of tensors. It runs on tensors that know
only where their blocks are stored, and its results have blocks too. So each rank reads the blocks that its local tensors are made
of, as from any checkpoint.
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
from .manifest import Manifest, StoredBlock, StoredTensor
from .tree import Stored, TreePath, encode_tree, name_of

Arrange = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]
Blocks = tuple[StoredBlock, ...]

_aten = torch.ops.aten


def arrange_manifest(manifest: Manifest, arrange: Arrange) -> Manifest:
    """Return the manifest of the tensors that the user's ``arrange`` makes from the stored ones, without reading data.

    Raises:
        CheckpointError: the checkpoint has more than a dict of tensors; ``arrange`` computes with values, or returns a tensor
            that is not from the checkpoint.
    """
    tree = manifest.nested()
    if not isinstance(tree, dict) or not all(isinstance(value, Stored) for value in tree.values()):
        raise CheckpointError(
            "load(arrange=) needs a checkpoint that is a dict of tensors; load it without arrange= and rearrange the result"
        )
    entries = {name: manifest.tensors[value.name] for name, value in tree.items()}
    results = arrange({name: _make_stored(e.shape, e.torch_dtype, e.blocks) for name, e in entries.items()})
    wrong = [name for name, value in results.items() if not isinstance(value, _StoredTensor)]
    if wrong:
        raise CheckpointError(
            f"{wrong[0]!r} is not computed from tensors of the checkpoint; return what arrange= computes from its arguments"
        )
    tensors = {
        name: StoredTensor(tuple(x.shape), str(x.dtype).removeprefix("torch."), x._blocks)  # type: ignore[attr-defined]  # checked
        for name, x in results.items()
    }
    return replace(manifest, tensors=tensors, tree=encode_tree({name: Stored(name) for name in tensors}))


class _StoredTensor(Tensor):
    """Tensor without values that has the stored blocks it consists of; view and concatenation operators transform them."""

    _blocks: Blocks

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's stub
        """Return stored tensors with the blocks that the operator gives; raise if it computes with values."""
        transform = _BLOCK_TRANSFORMS.get(func)
        if transform is None:
            raise CheckpointError(
                "tensors of a checkpoint can be stacked, concatenated, sliced and transposed before they are "
                f"read; {func} is not supported"
            )

        def to_meta(x: Any) -> Any:
            return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, _StoredTensor) else x

        meta_args, meta_kwargs = tree_map(to_meta, (args, kwargs or {}))
        meta_result = func(*meta_args, **meta_kwargs)
        blocks = transform(*args, **{name: value for name, value in (kwargs or {}).items() if name == "dim"})
        if isinstance(meta_result, Tensor):
            if meta_result.dtype != (args[0] if isinstance(args[0], Tensor) else args[0][0]).dtype:
                raise CheckpointError("tensors of a checkpoint keep their dtype until they are read; convert them afterwards")
            return _make_stored(meta_result.shape, meta_result.dtype, blocks)
        return [_make_stored(one.shape, one.dtype, own_blocks) for one, own_blocks in zip(meta_result, blocks, strict=True)]


def _make_stored(shape: Sequence[int], dtype: torch.dtype, blocks: Blocks) -> Tensor:
    """Return a tensor without values that consists of these stored blocks."""
    result: Any = make_wrapper_subclass(_StoredTensor, tuple(shape), dtype=dtype, device="meta")
    result._blocks = blocks
    return result


# --- transforms of blocks ----------------------------------------------------------------------------------------------------
def _keep_blocks(x: Any, *_: Any) -> Blocks:
    return x._blocks


def _block_stride(block: StoredBlock) -> tuple[int, ...]:
    return block.stride or contiguous_stride(block.shape)


def _map_block_dims(blocks: Blocks, of: Callable[[tuple[int, ...], int], tuple[int, ...]]) -> Blocks:
    """Return blocks with offset, shape and stride mapped by ``of(values, value for a new dim)``, without digests."""
    return tuple(
        replace(block, offset=of(block.offset, 0), shape=of(block.shape, 1), stride=of(_block_stride(block), 1), digest=None)
        for block in blocks
    )


def _unsqueeze_blocks(x: Any, dim: int) -> Blocks:
    d = dim % (x.ndim + 1)
    return _map_block_dims(x._blocks, lambda old, new: (*old[:d], new, *old[d:]))


def _permute_blocks(x: Any, dims: Sequence[int]) -> Blocks:
    order = [d % x.ndim for d in dims]
    return _map_block_dims(x._blocks, lambda old, _: tuple(old[d] for d in order))


def _transpose_blocks(x: Any, one: int = 0, other: int = 1) -> Blocks:
    """Return the blocks of a stored tensor with two of its dims swapped."""
    order = list(range(x.ndim))
    order[one], order[other] = order[other], order[one]
    return _permute_blocks(x, order)


def _concatenate_blocks(parts: Iterable[tuple[Blocks, int]], d: int) -> Blocks:
    """Return the blocks of stored parts, given with their lengths, that are concatenated along dim ``d``."""
    result: list[StoredBlock] = []
    start = 0
    for blocks, length in parts:
        for block in blocks:
            offset = (*block.offset[:d], block.offset[d] + start, *block.offset[d + 1 :])
            result.append(replace(block, offset=offset, digest=None))
        start += length
    return tuple(result)


def _cat_blocks(parts: Sequence[Any], dim: int = 0) -> Blocks:
    return _concatenate_blocks([(part._blocks, part.shape[dim]) for part in parts], dim % parts[0].ndim)


def _stack_blocks(parts: Sequence[Any], dim: int = 0) -> Blocks:
    return _concatenate_blocks([(_unsqueeze_blocks(part, dim), 1) for part in parts], dim % (parts[0].ndim + 1))


def _slice_blocks(x: Any, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> Blocks:
    """Return the blocks of a slice of a stored tensor along one dim; they refer to parts of the same files."""
    d = dim % x.ndim
    first, last, _ = slice(start, end).indices(x.shape[d])
    if step != 1:
        raise CheckpointError("tensors of a checkpoint can be sliced with step 1 only; take the step from the loaded tensor")
    result = []
    for block in x._blocks:
        low, high = max(first, block.offset[d]), min(last, block.offset[d] + block.shape[d])
        if low < high:
            stride = _block_stride(block)
            at = block.at + (low - block.offset[d]) * stride[d] * x.dtype.itemsize
            offset = (*block.offset[:d], low - first, *block.offset[d + 1 :])
            shape = (*block.shape[:d], high - low, *block.shape[d + 1 :])
            result.append(replace(block, offset=offset, shape=shape, at=at, stride=stride, digest=None))
    return tuple(result)


def _select_blocks(x: Any, dim: int, index: int) -> Blocks:
    d, place = dim % x.ndim, index % x.shape[dim]
    return _map_block_dims(_slice_blocks(x, d, place, place + 1), lambda old, _: (*old[:d], *old[d + 1 :]))


def _reshape_blocks(x: Any, shape: Sequence[int]) -> Blocks:
    """Return the block of a reshaped stored tensor; raise unless it has one block, stored row-major."""
    only = x._blocks[0] if len(x._blocks) == 1 else None
    if only is None or _block_stride(only) != contiguous_stride(only.shape):
        raise CheckpointError("tensors of a checkpoint must be reshaped before they are concatenated, sliced or transposed")
    new_shape = torch.empty(x.shape, device="meta").view(*shape).shape
    return (replace(only, offset=(0,) * len(new_shape), shape=tuple(new_shape), stride=None, digest=None),)


def _split_by_sizes(x: Any, sizes: Sequence[int], dim: int = 0) -> list[Blocks]:
    ends = [*accumulate(sizes)]
    return [_slice_blocks(x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True)]


def _split_blocks(x: Any, size: int, dim: int = 0) -> list[Blocks]:
    count = math.ceil(x.shape[dim] / size)
    return [_slice_blocks(x, dim, k * size, (k + 1) * size) for k in range(count)]


def _unbind_blocks(x: Any, dim: int = 0) -> list[Blocks]:
    return [_select_blocks(x, dim, k) for k in range(x.shape[dim])]


_BLOCK_TRANSFORMS: dict[Any, Callable[..., Any]] = {
    _aten.detach.default: _keep_blocks,
    _aten.alias.default: _keep_blocks,
    _aten.clone.default: _keep_blocks,
    _aten._to_copy.default: _keep_blocks,
    _aten.view.default: _reshape_blocks,
    _aten._unsafe_view.default: _reshape_blocks,
    _aten.unsqueeze.default: _unsqueeze_blocks,
    _aten.permute.default: _permute_blocks,
    _aten.transpose.int: _transpose_blocks,
    _aten.t.default: _transpose_blocks,
    _aten.cat.default: _cat_blocks,
    _aten.stack.default: _stack_blocks,
    _aten.slice.Tensor: _slice_blocks,
    _aten.select.int: _select_blocks,
    _aten.split.Tensor: _split_blocks,
    _aten.split_with_sizes.default: _split_by_sizes,
    _aten.unbind.int: _unbind_blocks,
}


# --- other keys ------------------------------------------------------------------------------------------------------------
def rename_manifest(manifest: Manifest, rename: Callable[[str], str] | Mapping[str, str]) -> Manifest:
    """Return the manifest with renamed keys in its dicts, and in the parameter lists of optimizer groups.

    Args:
        rename: a function of each key of each dict; or a mapping from keys, or from dotted names as in messages
            (``"model.0.weight"``), to such.

    Raises:
        CheckpointError: two values get the same name, or no key of a mapping is in the checkpoint.
    """
    names = rename if isinstance(rename, Mapping) else {}
    new = (lambda key: names.get(key, key)) if isinstance(rename, Mapping) else rename
    tensors: dict[str, StoredTensor] = {}
    matched_keys: set[str] = set()
    moved_values: dict[str, Any] = {}

    def rename_tree(tree: Any, old: TreePath, path: TreePath) -> Any:
        """Return the tree with renamed keys, and store its tensors' entries under their new names."""
        match tree:
            case Stored():
                if name_of(path) in tensors:
                    raise _name_collision_error(path)
                tensors[name_of(path)] = manifest.tensors[tree.name]
                return Stored(name_of(path))
            case dict():
                return rename_dict(tree, old, path)
            case torch.Size():
                return tree
            case list() | tuple():
                items = [rename_tree(item, (*old, i), (*path, i)) for i, item in enumerate(tree)]
                return items if isinstance(tree, list) else tuple(items)
        return tree

    def rename_dict(tree: dict[Any, Any], old: TreePath, path: TreePath) -> dict[Any, Any]:
        """Return a dict with renamed keys; move items with a renamed dotted name to ``moved_values``."""
        result: dict[Any, Any] = {}
        for key, item in tree.items():
            dotted, value = name_of((*old, key)), item
            if key == "params" and isinstance(item, list):  # names of the parameters of an optimizer's group
                value = [new(name) if isinstance(name, str) else name for name in item]
            matched_keys.update(names.keys() & {dotted, key})
            if old and dotted in names:
                if names[dotted] in moved_values:
                    raise _name_collision_error((names[dotted],))
                moved_values[names[dotted]] = rename_tree(value, (*old, key), (names[dotted],))
                continue
            new_key = new(key) if isinstance(key, str) else key
            if new_key in result:
                raise _name_collision_error((*path, new_key))
            result[new_key] = rename_tree(value, (*old, key), (*path, new_key))
            if isinstance(item, dict) and item and not result[new_key]:  # all its items moved to other names
                del result[new_key]
        return result

    tree = rename_tree(manifest.nested(), (), ())
    for name, value in moved_values.items():
        if name in tree:
            raise _name_collision_error((name,))
        tree[name] = value
    if names and not matched_keys:
        raise _no_match_error(names, tensors)
    return replace(manifest, tensors=tensors, tree=encode_tree(tree))


def nest_dotted_keys(stored: Any, requested: Any) -> Any:
    """Return ``stored`` with its dotted keys split into nested dicts where ``requested`` has them nested.

    Raises:
        CheckpointError: ``stored`` has another value of the same dotted name.

    >>> nest_dotted_keys({"net.0.weight": 1}, {"net": {"0.weight": 2}})
    {'net': {'0.weight': 1}}
    """
    if not isinstance(stored, dict) or not isinstance(requested, Mapping):
        return stored
    for name in [key for key in stored if isinstance(key, str) and "." in key and key not in requested]:
        path = _find_path(name, requested)
        if path is not None:
            _set_at_path(stored, path, stored.pop(name))
    return stored


def _find_path(name: str, tree: Any) -> TreePath | None:
    """Return the path of the value with this dotted name in ``tree``, or None if there is none."""
    if not isinstance(tree, (Mapping, list, tuple)):
        return None
    for key, item in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        if str(key) == name:
            return (key,)
        inner = _find_path(name.removeprefix(f"{key}."), item) if name.startswith(f"{key}.") else None
        if inner is not None:
            return (key, *inner)
    return None


def _set_at_path(tree: Any, path: TreePath, value: Any) -> None:
    """Set a value at a path of nested dicts, and make missing dicts; raise if the path has a value already."""
    for key in path[:-1]:
        tree = tree.setdefault(key, {}) if isinstance(tree, dict) else tree[key] if key < len(tree) else None
        if not isinstance(tree, (dict, list)):
            raise _name_collision_error(path)
    if not isinstance(tree, dict) or path[-1] in tree:
        raise _name_collision_error(path)
    tree[path[-1]] = value


def _no_match_error(names: Mapping[str, str], tensors: Mapping[str, StoredTensor]) -> CheckpointError:
    """Return the error for a ``rename`` mapping of which no key is in the checkpoint."""
    have = ", ".join(repr(name) for name in [*tensors][:3])
    return CheckpointError(
        f"rename matches nothing: none of {sorted(names)[:3]} is a key of a dict in the checkpoint or a dotted name, "
        f"as {have} are"
    )


def _name_collision_error(path: TreePath) -> CheckpointError:
    return CheckpointError(f"rename gives two values of the checkpoint the name {name_of(path)!r}, or one inside of another")
