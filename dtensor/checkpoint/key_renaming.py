"""Names of a checkpoint: its manifest under the names that ``load(rename=)`` gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch

from ..errors import CheckpointError
from .manifest import Entry, Manifest
from .tree import Path, Stored, encode, name_of


def renamed(manifest: Manifest, rename: Callable[[str], str] | Mapping[str, str]) -> Manifest:
    """Return the manifest with other keys in its dicts; the names by which an optimizer's groups list parameters are keys too.

    Args:
        rename: a function of each dict's own keys; or a mapping from own keys, or from dotted names as in messages
            (``"model.0.weight"``), to such.

    Raises:
        CheckpointError: two values get the same name, or no key of a mapping is in the checkpoint.
    """
    names = rename if isinstance(rename, Mapping) else {}
    new = (lambda key: names.get(key, key)) if isinstance(rename, Mapping) else rename
    tensors: dict[str, Entry] = {}
    matched: set[str] = set()
    moved: dict[str, Any] = {}

    def visit(tree: Any, old: Path, path: Path) -> Any:
        match tree:
            case Stored():
                if name_of(path) in tensors:
                    raise _collision(path)
                tensors[name_of(path)] = manifest.tensors[tree.name]
                return Stored(name_of(path))
            case dict():
                return visit_dict(tree, old, path)
            case torch.Size():
                return tree
            case list() | tuple():
                items = [visit(item, (*old, i), (*path, i)) for i, item in enumerate(tree)]
                return items if isinstance(tree, list) else tuple(items)
        return tree

    def visit_dict(tree: dict[Any, Any], old: Path, path: Path) -> dict[Any, Any]:
        made: dict[Any, Any] = {}
        for key, item in tree.items():
            dotted, value = name_of((*old, key)), _listed(key, item, new)
            matched.update(names.keys() & {dotted, key})
            if old and dotted in names:
                if names[dotted] in moved:
                    raise _collision((names[dotted],))
                moved[names[dotted]] = visit(value, (*old, key), (names[dotted],))
                continue
            there = new(key) if isinstance(key, str) else key
            if there in made:
                raise _collision((*path, there))
            made[there] = visit(value, (*old, key), (*path, there))
            if isinstance(item, dict) and item and not made[there]:  # all that it had has moved
                del made[there]
        return made

    tree = visit(manifest.nested(), (), ())
    for name, value in moved.items():
        if name in tree:
            raise _collision((name,))
        tree[name] = value
    if names and not matched:
        raise _unmatched(names, tensors)
    return replace(manifest, tensors=tensors, tree=encode(tree))


def nested_like(stored: Any, asked: Any) -> Any:
    """Return ``stored`` with its dotted keys taken apart where dicts of ``asked`` are nested so.

    Raises:
        CheckpointError: ``stored`` has another value of the same dotted name.

    >>> nested_like({"net.0.weight": 1}, {"net": {"0.weight": 2}})
    {'net': {'0.weight': 1}}
    """
    if not isinstance(stored, dict) or not isinstance(asked, Mapping):
        return stored
    for name in [key for key in stored if isinstance(key, str) and "." in key and key not in asked]:
        path = _path_of(name, asked)
        if path is not None:
            _insert(stored, path, stored.pop(name))
    return stored


def _path_of(name: str, tree: Any) -> Path | None:
    """Return the path of the value that has this dotted name in ``tree``; None if there is none."""
    if not isinstance(tree, (Mapping, list, tuple)):
        return None
    for key, item in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        if str(key) == name:
            return (key,)
        inner = _path_of(name.removeprefix(f"{key}."), item) if name.startswith(f"{key}.") else None
        if inner is not None:
            return (key, *inner)
    return None


def _insert(tree: Any, path: Path, value: Any) -> None:
    for key in path[:-1]:
        tree = tree.setdefault(key, {}) if isinstance(tree, dict) else tree[key] if key < len(tree) else None
        if not isinstance(tree, (dict, list)):
            raise _collision(path)
    if not isinstance(tree, dict) or path[-1] in tree:
        raise _collision(path)
    tree[path[-1]] = value


def _unmatched(names: Mapping[str, str], tensors: Mapping[str, Entry]) -> CheckpointError:
    have = ", ".join(repr(name) for name in [*tensors][:3])
    return CheckpointError(
        f"rename matches nothing: none of {sorted(names)[:3]} is a key of a dict in the checkpoint or a dotted name, "
        f"as {have} are"
    )


def _collision(path: Path) -> CheckpointError:
    return CheckpointError(f"rename gives two values of the checkpoint the name {name_of(path)!r}, or one inside of another")


def _listed(key: Any, item: Any, new: Callable[[str], str]) -> Any:
    """Return the parameters of an optimizer's group under their new names; any other item as it is."""
    if key == "params" and isinstance(item, list):
        return [new(name) if isinstance(name, str) else name for name in item]
    return item
