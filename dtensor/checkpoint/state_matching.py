"""State matching: match the requested state with the contents of a checkpoint, and put loaded values back into the state."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..errors import CheckpointError
from .coordinator import StateParts
from .load_targets import Target, describe_load_target
from .manifest import Manifest
from .manifest_transforms import nest_dotted_keys
from .stateful import Expanded, Install, check_param_groups
from .tree import Stored, TreePath, has_tensors, map_tree, name_of

_MAX_LISTED = 6  # greatest number of keys in an error


@dataclass(slots=True)
class MatchResult:
    """Match of the requested state with a checkpoint: the targets to fill, missing and unexpected keys, and mismatches.

    Attributes:
        tree: the tree of the state, with targets for tensors and the plain values of the checkpoint.
        targets: name in the checkpoint -> target.
        missing, unexpected: names that are requested and not found, found and not requested.
        wrong: texts of all mismatches.
        convert: True if values may have another dtype of the same kind.
    """

    tree: Any = None
    targets: dict[str, Target] = field(default_factory=dict)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    convert: bool = False

    @property
    def parts(self) -> StateParts:
        """Return (name, text) of the requested tensors and missing keys, which must be equal on all ranks."""
        parts = [(name, describe_load_target(target.like, target.dtype)) for name, target in self.targets.items()]
        return parts + [(name, "not in the checkpoint") for name in self.missing]


def match_trees(requested: Expanded, manifest: Manifest, strict: bool, convert: bool = False) -> MatchResult:
    """Match the requested state with the stored tree; return the tree to install, its targets, and what does not match.

    Raises:
        CheckpointError: other shapes, dtypes or types; with ``strict`` missing or unexpected keys.
    """
    stored = nest_dotted_keys(manifest.nested(), requested.tree)
    result = MatchResult(convert=convert)
    result.tree = _match_value(requested.tree, stored, (), manifest, result)
    if result.wrong:
        raise CheckpointError(_join_limited(result.wrong, "; "))
    if strict and (result.missing or result.unexpected):
        parts = [("not in the checkpoint: ", result.missing), ("in the checkpoint, not asked for: ", result.unexpected)]
        text = "; ".join(head + _join_limited(names, ", ") for head, names in parts if names)
        raise CheckpointError(f"{text}. Give strict=False to load what both have")
    for path in requested.installs:
        ours, theirs = _value_at(requested.tree, path), _value_at(stored, path)
        if all(isinstance(tree, Mapping) and "param_groups" in tree for tree in (ours, theirs)):
            check_param_groups(ours, theirs, path)
    return result


def _match_value(requested: Any, stored: Any, path: TreePath, manifest: Manifest, result: MatchResult) -> Any:
    """Return the value to install for ``requested``: a target, or the stored value; add mismatches to ``result``."""
    match requested, stored:
        case ((torch.Tensor() | Target()), Stored()):
            return _match_tensor(requested, stored.name, manifest, result)
        case Mapping(), Mapping() if _is_structure(requested, stored):
            return _match_dicts(requested, stored, path, manifest, result)
        case ((list() | tuple()), (list() | tuple())) if len(requested) == len(stored) and (
            has_tensors(requested) or has_tensors(stored)
        ):
            pairs = enumerate(zip(requested, stored, strict=True))
            items = [_match_value(a, s, (*path, i), manifest, result) for i, (a, s) in pairs]
            return items if isinstance(requested, list) else tuple(items)
    if has_tensors(requested) or has_tensors(stored):
        result.wrong.append(f"{name_of(path)!r} is {_kind_text(requested)} here and {_kind_text(stored)} in the checkpoint")
        return requested
    return stored


def _match_dicts(requested: Any, stored: Any, path: TreePath, manifest: Manifest, result: MatchResult) -> dict[Any, Any]:
    """Match the items of two dicts by key; record keys that only one of them has in ``result``."""
    unmatched = {str(key): key for key in stored}  # in torch's checkpoints all keys are strings
    filled = {}
    for key, item in requested.items():
        stored_key = key if key in stored else unmatched.get(str(key))
        if stored_key is None or stored_key not in stored:
            result.missing += _leaf_names(item, (*path, key))
            filled[key] = _drop_targets(item)
        else:
            unmatched.pop(str(stored_key))
            filled[key] = _match_value(item, stored[stored_key], (*path, key), manifest, result)
    for stored_key in unmatched.values():
        result.unexpected += _leaf_names(stored[stored_key], (*path, stored_key))
    return filled


def _is_structure(requested: Any, stored: Any) -> bool:
    """Return True if two dicts are matched key by key: all keys are strings, or tensors are inside. Others are plain values."""
    return all(isinstance(key, str) for key in (*requested, *stored)) or has_tensors(requested) or has_tensors(stored)


def _match_tensor(requested: Any, name: str, manifest: Manifest, result: MatchResult) -> Any:
    """Return the load target for the stored tensor ``name``; record a mismatch of shape or dtype in ``result``."""
    entry = manifest.tensors[name]
    target = requested if isinstance(requested, Target) else Target.of(name, requested)
    if target.shape != entry.shape:
        result.wrong.append(f"{name!r} has shape {list(target.shape)} here and {list(entry.shape)} in the checkpoint")
    elif target.dtype != entry.torch_dtype and not (result.convert and _is_convertible(target.dtype, entry.torch_dtype)):
        ours, remedy = str(target.dtype).removeprefix("torch."), "load it as such, then convert it"
        if _is_convertible(target.dtype, entry.torch_dtype):
            remedy = "give convert=True"
        result.wrong.append(f"{name!r} is {ours} here and {entry.dtype} in the checkpoint: {remedy}")
    elif target.problem is not None:
        result.wrong.append(f"{name!r} {target.problem}")
    result.targets[name] = target
    return target


def _is_convertible(a: torch.dtype, b: torch.dtype) -> bool:
    """Return True if both dtypes are floating, or both complex."""
    return (a.is_floating_point and b.is_floating_point) or (a.is_complex and b.is_complex)


def _drop_targets(item: Any) -> Any:
    """Return a missing item without the targets in its dicts, which only describe tensors to be made."""
    if isinstance(item, dict):
        return {key: _drop_targets(value) for key, value in item.items() if not isinstance(value, Target)}
    return item


def _leaf_names(tree: Any, path: TreePath) -> list[str]:
    """Return the dotted names of the tensors and plain values below ``path``, for messages."""
    if isinstance(tree, Mapping) and tree:
        return [name for key, item in tree.items() for name in _leaf_names(item, (*path, key))]
    if isinstance(tree, (list, tuple)) and has_tensors(tree):
        return [name for i, item in enumerate(tree) for name in _leaf_names(item, (*path, i))]
    return [name_of(path)]


def _kind_text(tree: Any) -> str:
    """Return the kind of a value for an error, such as "a tensor" or "a list of 3 with tensors"."""
    if isinstance(tree, (torch.Tensor, Stored)):
        return "a tensor"
    return f"a {type(tree).__name__}" + (f" of {len(tree)} with tensors" if has_tensors(tree) else "")


def _join_limited(items: list[str], between: str) -> str:
    more = f" and {len(items) - _MAX_LISTED} more" if len(items) > _MAX_LISTED else ""
    return between.join(items[:_MAX_LISTED]) + more


def _value_at(tree: Any, path: TreePath) -> Any:
    """Return the value at a path of a tree, or None."""
    for key in path:
        if not isinstance(tree, (Mapping, list, tuple)):
            return None
        tree = tree.get(key) if isinstance(tree, Mapping) else tree[key] if len(tree) > key else None
    return tree


# --- assignment to the state -----------------------------------------------------------------------------------------------
def assign_values(state: Any, filled: Any, installs: Mapping[TreePath, Install], path: TreePath = ()) -> Any:
    """Assign loaded values to ``state``, dicts and lists in place and objects by their installers; return the new value."""
    if path in installs:
        installs[path](_resolve_targets(filled))
        return state
    match state:
        case torch.Tensor():
            return _resolve_targets(filled)
        case dict():
            for key, item in filled.items():
                new = assign_values(state[key], item, installs, (*path, key)) if key in state else _resolve_targets(item)
                if key not in state or new is not state[key]:
                    state[key] = new
            for key in [key for key in state if key not in filled]:
                del state[key]
            return state
        case list() if isinstance(filled, (list, tuple)):
            same = len(state) == len(filled)
            state[:] = [
                assign_values(old, item, installs, (*path, i)) if same else _resolve_targets(item)
                for i, (old, item) in enumerate(zip(state if same else filled, filled, strict=True))
            ]
            return state
        case tuple() if isinstance(filled, (list, tuple)) and len(state) == len(filled) and not isinstance(state, torch.Size):
            new = tuple(
                assign_values(old, item, installs, (*path, i)) for i, (old, item) in enumerate(zip(state, filled, strict=True))
            )
            return state if all(a is b for a, b in zip(state, new, strict=True)) else new
    return _resolve_targets(filled)


def _resolve_targets(tree: Any) -> Any:
    """Return the tree with each load target replaced by its filled tensor."""
    return map_tree(lambda leaf, _: leaf.result if isinstance(leaf, Target) else leaf, tree)
