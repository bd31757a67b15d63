"""States as trees: nested dicts, lists and tuples of tensors and plain values; and how they are written in JSON."""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from ..errors import CheckpointError

Path = tuple[Any, ...]


class Stored:
    """Where a tensor of this name stands in a tree."""

    def __init__(self, name: str) -> None:
        self.name = name


def name_of(path: Path) -> str:
    """The name of a leaf: its keys and indices joined by dots, as ``torch.distributed.checkpoint`` does."""
    return ".".join(map(str, path))


def leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    """Whatever is no dict, list or tuple, and where it stands, in order; a size is one, and a module.

    >>> [name_of(path) for path, _ in leaves({"a": 1, "b": [2, (3,)]})]
    ['a', 'b.0', 'b.1.0']
    """
    match tree:
        case torch.Size() | nn.Module():
            yield path, tree
        case Mapping():
            for key, item in tree.items():
                yield from leaves(item, (*path, key))
        case list() | tuple():
            for index, item in enumerate(tree):
                yield from leaves(item, (*path, index))
        case _:
            yield path, tree


def mapped(fn: Callable[[Any, Path], Any], tree: Any, path: Path = ()) -> Any:
    """The same dicts, lists and tuples of ``fn(leaf, path)``."""
    match tree:
        case torch.Size() | nn.Module():
            return fn(tree, path)
        case Mapping():
            return {key: mapped(fn, item, (*path, key)) for key, item in tree.items()}
        case list() | tuple():
            items = [mapped(fn, item, (*path, index)) for index, item in enumerate(tree)]
            return items if isinstance(tree, list) else tuple(items)
    return fn(tree, path)


def has_tensors(tree: Any) -> bool:
    """Whether there is a tensor in it, or the place of one."""
    return any(isinstance(leaf, (torch.Tensor, Stored)) for _, leaf in leaves(tree))


def named_tensors(tree: Any) -> dict[str, torch.Tensor]:
    """Name -> tensor.

    Raises:
        CheckpointError: two leaves have the same name, such as ``{"a": {"b": x}, "a.b": y}``.
    """
    found: dict[str, torch.Tensor] = {}
    for path, tensor in leaves(tree):
        if isinstance(tensor, torch.Tensor):
            if (name := name_of(path)) in found:
                raise CheckpointError(f"two tensors would have the name {name!r}; rename one of their keys")
            found[name] = tensor
    return found


# --- JSON ------------------------------------------------------------------------------------------------------------------
_TAG = "!"  # {"!": kind, "v": value} stands for what JSON has no word for
_SCALARS = (bool, int, float, str, type(None))


def encode(tree: Any, path: Path = ()) -> Any:
    """``tree`` as JSON; tensors by their names.

    Raises:
        CheckpointError: a leaf that is neither a tensor nor plain data.
    """
    match tree:
        case torch.Tensor() | Stored():
            return {_TAG: "tensor", "v": tree.name if isinstance(tree, Stored) else name_of(path)}
        case torch.Size() | tuple():
            kind = "size" if isinstance(tree, torch.Size) else "tuple"
            return {_TAG: kind, "v": [encode(item, (*path, i)) for i, item in enumerate(tree)]}
        case list():
            return [encode(item, (*path, i)) for i, item in enumerate(tree)]
        case Mapping():
            if all(isinstance(key, str) for key in tree) and _TAG not in tree:
                return {key: encode(item, (*path, key)) for key, item in tree.items()}
            return {_TAG: "dict", "v": [[encode(key, path), encode(item, (*path, key))] for key, item in tree.items()]}
        case np.generic():
            return encode(tree.item(), path)
        case set() | frozenset():
            return {_TAG: type(tree).__name__, "v": [encode(item, path) for item in sorted(tree, key=repr)]}
        case bytes():
            return {_TAG: "bytes", "v": base64.b64encode(tree).decode()}
        case complex():
            return {_TAG: "complex", "v": [tree.real, tree.imag]}
        case torch.dtype() | torch.device():
            return {_TAG: type(tree).__name__, "v": str(tree).removeprefix("torch.")}
    if type(tree) in _SCALARS:
        return tree
    raise CheckpointError(
        f"{name_of(path)!r} is a {type(tree).__name__}: only tensors and plain data (numbers, strings, "
        "bytes, None, lists, tuples, sets, dicts) are saved, because nothing else can be loaded safely; "
        "save its contents as plain data"
    )


def decode(data: Any, tensors: Mapping[str, Any]) -> Any:
    """The tree that :func:`encode` wrote, with ``tensors[name]`` for each tensor.

    >>> decode(encode({"a": (1, 2.5, None), 3: torch.float16}), {})
    {'a': (1, 2.5, None), 3: torch.float16}
    """
    if isinstance(data, list):
        return [decode(item, tensors) for item in data]
    if not isinstance(data, dict):
        return data
    if _TAG not in data:
        return {key: decode(item, tensors) for key, item in data.items()}
    value = data["v"]
    match data[_TAG]:
        case "tensor":
            return tensors[value]
        case "tuple":
            return tuple(decode(item, tensors) for item in value)
        case "size":
            return torch.Size(decode(value, tensors))
        case "dict":
            return {decode(key, tensors): decode(item, tensors) for key, item in value}
        case "set" | "frozenset" as kind:
            return (set if kind == "set" else frozenset)(decode(item, tensors) for item in value)
        case "bytes":
            return base64.b64decode(value)
        case "complex":
            return complex(*value)
        case "dtype":
            return dtype_of(value)
        case "device":
            return torch.device(value)
    raise CheckpointError(f"the manifest holds data of an unknown kind {data[_TAG]!r}; it was written by a newer version")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of this name, such as ``"float32"``."""
    found = getattr(torch, name, None) if isinstance(name, str) else None
    if not isinstance(found, torch.dtype):
        raise CheckpointError(f"unknown dtype {name!r}")
    return found
