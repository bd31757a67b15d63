"""A checkpoint under other names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..errors import CheckpointError
from .manifest import Entry, Manifest
from .tree import Path, Stored, encode, name_of


def renamed(manifest: Manifest, rename: Callable[[str], str] | Mapping[str, str]) -> Manifest:
    """The manifest with other keys in its dicts; the names by which an optimizer's groups list parameters are keys too.

    Raises:
        CheckpointError: two keys of one dict get the same name.
    """
    new = (lambda key: rename.get(key, key)) if isinstance(rename, Mapping) else rename
    tensors: dict[str, Entry] = {}

    def visit(tree: Any, path: Path) -> Any:
        match tree:
            case Stored():
                tensors[name_of(path)] = manifest.tensors[tree.name]
                return Stored(name_of(path))
            case dict():
                keys = {key: new(key) if isinstance(key, str) else key for key in tree}
                if len(set(keys.values())) < len(keys):
                    raise CheckpointError(f"rename= maps two keys of {name_of(path) or 'the checkpoint'!r} to one name: {keys}")
                return {keys[key]: visit(_listed(key, item, new), (*path, keys[key])) for key, item in tree.items()}
            case torch.Size():
                return tree
            case list() | tuple():
                items = [visit(item, (*path, i)) for i, item in enumerate(tree)]
                return items if isinstance(tree, list) else tuple(items)
        return tree

    tree = visit(manifest.nested(), ())
    return replace(manifest, tensors=tensors, tree=encode(tree))


def _listed(key: Any, item: Any, new: Callable[[str], str]) -> Any:
    """The parameters of an optimizer's group."""
    if key == "params" and isinstance(item, list):
        return [new(name) if isinstance(name, str) else name for name in item]
    return item
