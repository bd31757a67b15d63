"""What a state asks for, laid beside what a checkpoint holds; and values put back where they were asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CheckpointError
from .coordinator import Parts
from .key_renaming import nested_like
from .load_targets import Target, described
from .manifest import Manifest
from .stateful import Expanded, Install, check_groups
from .tree import Path, Stored, has_tensors, mapped, name_of

_MOST = 6  # keys that an error lists


@dataclass(slots=True)
class Matched:
    """The outcome of a match.

    Attributes:
        tree: the state's tree with targets for tensors and the checkpoint's plain values.
        targets: name in the checkpoint -> target.
        missing, unexpected: names asked for and not found, found and not asked for.
        wrong: what does not fit, in words.
        convert: whether values of one kind may have another dtype.
    """

    tree: Any = None
    targets: dict[str, Target] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    convert: bool = False

    @property
    def parts(self) -> Parts:
        """What must be alike on all ranks that load together."""
        told = [(name, described(target.like, target.dtype)) for name, target in self.targets.items()]
        return told + [(name, "not in the checkpoint") for name in self.missing]


def match_trees(asked: Expanded, manifest: Manifest, strict: bool, convert: bool = False) -> Matched:
    """Every leaf of the state with its value in the checkpoint.

    Raises:
        CheckpointError: other shapes, dtypes or kinds; under ``strict`` missing or unexpected keys.
    """
    stored = nested_like(manifest.nested(), asked.tree)
    result = Matched(convert=convert)
    result.tree = _match(asked.tree, stored, (), manifest, result)
    if result.wrong:
        raise CheckpointError(_listed(result.wrong, "; "))
    if strict and (result.missing or result.unexpected):
        parts = [("not in the checkpoint: ", result.missing), ("in the checkpoint, not asked for: ", result.unexpected)]
        said = "; ".join(head + _listed(names, ", ") for head, names in parts if names)
        raise CheckpointError(f"{said}. Give strict=False to load what both have")
    for path in asked.installs:
        ours, theirs = _at(asked.tree, path), _at(stored, path)
        if all(isinstance(tree, Mapping) and "param_groups" in tree for tree in (ours, theirs)):
            check_groups(ours, theirs, path)
    return result


def _match(asked: Any, stored: Any, path: Path, manifest: Manifest, result: Matched) -> Any:
    match asked, stored:
        case ((torch.Tensor() | Target()), Stored()):
            return _target(asked, stored.name, manifest, result)
        case Mapping(), Mapping() if _is_structure(asked, stored):
            return _match_dicts(asked, stored, path, manifest, result)
        case ((list() | tuple()), (list() | tuple())) if len(asked) == len(stored) and (
            has_tensors(asked) or has_tensors(stored)
        ):
            pairs = enumerate(zip(asked, stored, strict=True))
            items = [_match(a, s, (*path, i), manifest, result) for i, (a, s) in pairs]
            return items if isinstance(asked, list) else tuple(items)
    if has_tensors(asked) or has_tensors(stored):
        result.wrong.append(f"{name_of(path)!r} is {_kind(asked)} here and {_kind(stored)} in the checkpoint")
        return asked
    return stored


def _match_dicts(asked: Any, stored: Any, path: Path, manifest: Manifest, result: Matched) -> dict[Any, Any]:
    alike = {str(key): key for key in stored}  # torch's checkpoints have strings for all keys
    filled = {}
    for key, item in asked.items():
        there = key if key in stored else alike.get(str(key))
        if there is None or there not in stored:
            result.missing += _leaves(item, (*path, key))
            filled[key] = _kept(item)
        else:
            alike.pop(str(there))
            filled[key] = _match(item, stored[there], (*path, key), manifest, result)
    for there in alike.values():
        result.unexpected += _leaves(stored[there], (*path, there))
    return filled


def _is_structure(asked: Any, stored: Any) -> bool:
    """Dicts with strings for keys or tensors inside have the same keys on both sides; others are plain values."""
    return all(isinstance(key, str) for key in (*asked, *stored)) or has_tensors(asked) or has_tensors(stored)


def _target(asked: Any, name: str, manifest: Manifest, result: Matched) -> Any:
    entry = manifest.tensors[name]
    target = asked if isinstance(asked, Target) else Target.of(name, asked)
    if target.shape != entry.shape:
        result.wrong.append(f"{name!r} has shape {list(target.shape)} here and {list(entry.shape)} in the checkpoint")
    elif target.dtype != entry.torch_dtype and not (result.convert and _one_kind(target.dtype, entry.torch_dtype)):
        ours, remedy = str(target.dtype).removeprefix("torch."), "load it as such, then convert it"
        if _one_kind(target.dtype, entry.torch_dtype):
            remedy = "give convert=True"
        result.wrong.append(f"{name!r} is {ours} here and {entry.dtype} in the checkpoint: {remedy}")
    elif target.problem is not None:
        result.wrong.append(f"{name!r} {target.problem}")
    result.targets[name] = target
    return target


def _one_kind(a: torch.dtype, b: torch.dtype) -> bool:
    """Whether values of one dtype are those of the other up to rounding."""
    return (a.is_floating_point and b.is_floating_point) or (a.is_complex and b.is_complex)


def _kept(item: Any) -> Any:
    """What was asked for in vain stays as it is; what was only to be made is not."""
    if isinstance(item, dict):
        return {key: _kept(value) for key, value in item.items() if not isinstance(value, Target)}
    return item


def _leaves(tree: Any, path: Path) -> list[str]:
    if isinstance(tree, Mapping) and tree:
        return [name for key, item in tree.items() for name in _leaves(item, (*path, key))]
    if isinstance(tree, (list, tuple)) and has_tensors(tree):
        return [name for i, item in enumerate(tree) for name in _leaves(item, (*path, i))]
    return [name_of(path)]


def _kind(tree: Any) -> str:
    if isinstance(tree, (torch.Tensor, Stored)):
        return "a tensor"
    return f"a {type(tree).__name__}" + (f" of {len(tree)} with tensors" if has_tensors(tree) else "")


def _listed(items: list[str], between: str) -> str:
    more = f" and {len(items) - _MOST} more" if len(items) > _MOST else ""
    return between.join(items[:_MOST]) + more


def _at(tree: Any, path: Path) -> Any:
    for key in path:
        if not isinstance(tree, (Mapping, list, tuple)):
            return None
        tree = tree.get(key) if isinstance(tree, Mapping) else tree[key] if len(tree) > key else None
    return tree


# --- back into the state ---------------------------------------------------------------------------------------------------
def put_back(state: Any, filled: Any, installs: Mapping[Path, Install], path: Path = ()) -> Any:
    """``state`` with the values of ``filled``: dicts and lists changed in place, objects given theirs; what stands there now."""
    if path in installs:
        installs[path](_final(filled))
        return state
    match state:
        case torch.Tensor():
            return _final(filled)
        case dict():
            for key, item in filled.items():
                new = put_back(state[key], item, installs, (*path, key)) if key in state else _final(item)
                if key not in state or new is not state[key]:
                    state[key] = new
            for key in [key for key in state if key not in filled]:
                del state[key]
            return state
        case list() if isinstance(filled, (list, tuple)):
            same = len(state) == len(filled)
            state[:] = [
                put_back(old, item, installs, (*path, i)) if same else _final(item)
                for i, (old, item) in enumerate(zip(state if same else filled, filled, strict=True))
            ]
            return state
        case tuple() if isinstance(filled, (list, tuple)) and len(state) == len(filled) and not isinstance(state, torch.Size):
            new = tuple(
                put_back(old, item, installs, (*path, i)) for i, (old, item) in enumerate(zip(state, filled, strict=True))
            )
            return state if all(a is b for a, b in zip(state, new, strict=True)) else new
    return _final(filled)


def _final(tree: Any) -> Any:
    """Targets replaced by what they became."""
    return mapped(lambda leaf, _: leaf.result if isinstance(leaf, Target) else leaf, tree)
