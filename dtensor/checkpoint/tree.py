"""Trees: states as nested dicts, lists and tuples of tensors and plain values, and their JSON encoding."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import CheckpointError

TreePath = tuple[Any, ...]


class Stored:
    """Placeholder in a tree for the stored tensor ``name``."""

    def __init__(self, name: str) -> None:
        self.name = name


def name_of(path: TreePath) -> str:
    """Return the name of a leaf: its keys and indices joined by dots, as ``torch.distributed.checkpoint`` does."""
    return ".".join(map(str, path))


def iter_leaves(tree: Any, path: TreePath = ()) -> Iterator[tuple[TreePath, Any]]:
    """Yield every leaf with its path, in order: everything that is not a dict, list or tuple, and also sizes and modules.

    >>> [name_of(path) for path, _ in iter_leaves({"a": 1, "b": [2, (3,)]})]
    ['a', 'b.0', 'b.1.0']
    """
    match tree:
        case torch.Size() | nn.Module():
            yield path, tree
        case Mapping():
            for key, item in tree.items():
                yield from iter_leaves(item, (*path, key))
        case list() | tuple():
            for index, item in enumerate(tree):
                yield from iter_leaves(item, (*path, index))
        case _:
            yield path, tree


def map_tree(fn: Callable[[Any, TreePath], Any], tree: Any, path: TreePath = ()) -> Any:
    """Return a tree of the same nesting with ``fn(leaf, path)`` in place of each leaf."""
    match tree:
        case torch.Size() | nn.Module():
            return fn(tree, path)
        case Mapping():
            return {key: map_tree(fn, item, (*path, key)) for key, item in tree.items()}
        case list() | tuple():
            items = [map_tree(fn, item, (*path, index)) for index, item in enumerate(tree)]
            return items if isinstance(tree, list) else tuple(items)
    return fn(tree, path)


def has_tensors(tree: Any) -> bool:
    """Return True if the tree contains a tensor, or a ``Stored`` placeholder of one."""
    return any(isinstance(leaf, (torch.Tensor, Stored)) for _, leaf in iter_leaves(tree))


def named_tensors(tree: Any) -> dict[str, torch.Tensor]:
    """Return all tensors of a tree by dotted name, such as ``"net.0.weight"``.

    Raises:
        CheckpointError: two leaves have the same name, such as ``{"a": {"b": x}, "a.b": y}``.
    """
    tensors: dict[str, torch.Tensor] = {}
    for path, tensor in iter_leaves(tree):
        if isinstance(tensor, torch.Tensor):
            if (name := name_of(path)) in tensors:
                raise CheckpointError(f"two tensors would have the name {name!r}; rename one of their keys")
            tensors[name] = tensor
    return tensors


# --- JSON ------------------------------------------------------------------------------------------------------------------
_TYPE_TAG = "!"  # {"!": kind, "v": value} encodes values that JSON does not have
_SCALAR_TYPES = (bool, int, float, str, type(None))


def encode_tree(tree: Any, path: TreePath = ()) -> Any:
    """Return ``tree`` as JSON-compatible data, with each tensor as its name.

    Raises:
        CheckpointError: a leaf that is neither a tensor nor plain data.
    """
    match tree:
        case torch.Tensor() | Stored():
            return {_TYPE_TAG: "tensor", "v": tree.name if isinstance(tree, Stored) else name_of(path)}
        case torch.Size() | tuple():
            kind = "size" if isinstance(tree, torch.Size) else "tuple"
            return {_TYPE_TAG: kind, "v": [encode_tree(item, (*path, i)) for i, item in enumerate(tree)]}
        case list():
            return [encode_tree(item, (*path, i)) for i, item in enumerate(tree)]
        case Mapping():
            if all(isinstance(key, str) for key in tree) and _TYPE_TAG not in tree:
                return {key: encode_tree(item, (*path, key)) for key, item in tree.items()}
            return {
                _TYPE_TAG: "dict",
                "v": [[encode_tree(key, path), encode_tree(item, (*path, key))] for key, item in tree.items()],
            }
        case np.generic():
            return encode_tree(tree.item(), path)
        case set() | frozenset():
            return {_TYPE_TAG: type(tree).__name__, "v": [encode_tree(item, path) for item in sorted(tree, key=repr)]}
        case bytes():
            return {_TYPE_TAG: "bytes", "v": base64.b64encode(tree).decode()}
        case complex():
            return {_TYPE_TAG: "complex", "v": [tree.real, tree.imag]}
        case torch.dtype() | torch.device():
            return {_TYPE_TAG: type(tree).__name__, "v": str(tree).removeprefix("torch.")}
    if type(tree) in _SCALAR_TYPES:
        return tree
    raise CheckpointError(
        f"{name_of(path)!r} is a {type(tree).__name__}: only tensors and plain data (numbers, strings, "
        "bytes, None, lists, tuples, sets, dicts) are saved, because nothing else can be loaded safely; "
        "save its contents as plain data"
    )


def decode_tree(data: Any, tensors: Mapping[str, Any]) -> Any:
    """Return the tree that :func:`encode_tree` encoded, with ``tensors[name]`` in place of each tensor.

    >>> decode_tree(encode_tree({"a": (1, 2.5, None), 3: torch.float16}), {})
    {'a': (1, 2.5, None), 3: torch.float16}
    """
    if isinstance(data, list):
        return [decode_tree(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    if _TYPE_TAG not in data:
        return {key: decode_tree(item, tensors) for key, item in data.items()}
    value = data["v"]
    match data[_TYPE_TAG]:
        case "tensor":
            return tensors[value]
        case "tuple":
            return tuple(decode_tree(item, tensors) for item in value)
        case "size":
            return torch.Size(decode_tree(value, tensors))
        case "dict":
            return {decode_tree(key, tensors): decode_tree(item, tensors) for key, item in value}
        case "set" | "frozenset" as kind:
            return (set if kind == "set" else frozenset)(decode_tree(item, tensors) for item in value)
        case "bytes":
            return base64.b64decode(value)
        case "complex":
            return complex(*value)
        case "dtype":
            return parse_dtype(value)
        case "device":
            return torch.device(value)
    raise CheckpointError(f"the manifest holds data of an unknown kind {data[_TYPE_TAG]!r}; it was written by a newer version")


def parse_dtype(name: str) -> torch.dtype:
    """Return the dtype with this name, such as ``"float32"``.

    Raises:
        CheckpointError: this version of torch has no such dtype.
    """
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(dtype, torch.dtype):
        raise CheckpointError(f"the checkpoint has values of the unknown dtype {name!r}; load it with the torch that saved it")
    return dtype
