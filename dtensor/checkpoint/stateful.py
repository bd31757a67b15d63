"""Stateful objects: modules, optimizers and other objects as plain trees, and their states restored from trees.

If the state to be saved also has the module, an optimizer's state is saved under the names of its parameters. So it finds its
parameters again in a model that is wrapped, ordered or sharded differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..base.group_by import group_by_key
from ..errors import CheckpointError
from ..tensor.dtensor import DTensor
from .load_targets import Target
from .manifest import StoredTensor
from .tree import TreePath, iter_leaves, map_tree, name_of

Install = Callable[[Any], None]
Optimizer = torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class Expanded:
    """State with all objects replaced by their own states.

    Attributes:
        tree: nested dicts, lists and tuples with tensors and plain values.
        installs: path -> function that restores the object from its tree.
    """

    tree: Any
    installs: dict[TreePath, Install]


def expand_state(state: Any, stored: Mapping[str, StoredTensor] | None = None) -> Expanded:
    """Return the state with modules, optimizers and stateful objects replaced by their plain trees, and their installers.

    Args:
        stored: contents of the checkpoint, for a load. An optimizer that has made no step has no state yet, so the stored state
            of its parameters is requested, with their layouts.
    """
    installs: dict[TreePath, Install] = {}
    names = _parameter_names(state)

    def expand_object(value: Any, path: TreePath) -> Any:
        """Return the state dict of a module, optimizer or stateful object, and register its installer; else the value."""
        match value:
            case nn.Module():
                installs[path] = _module_installer(value)
                return _module_tree(value, path, stored)
            case Optimizer():
                installs[path] = _optimizer_installer(value, names)
                return _optimizer_tree(value, names, path, stored)
            case torch.Tensor():
                return value
        if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            installs[path] = value.load_state_dict
            return value.state_dict()
        return value

    return Expanded(map_tree(expand_object, state), installs)


# --- modules ---------------------------------------------------------------------------------------------------------------
def _tied_names(module: nn.Module) -> list[list[str]]:
    """Return the names of each tied parameter of a module, which is a parameter with several names."""
    names = group_by_key((id(parameter), name) for name, parameter in module.named_parameters(remove_duplicate=False))
    return [each for each in names.values() if len(each) > 1]


def _module_tree(module: nn.Module, path: TreePath, stored: Mapping[str, StoredTensor] | None) -> dict[str, Any]:
    """Return the state dict of a module; for a load without those names of tied parameters that the checkpoint lacks."""
    tree = module.state_dict()
    for names in _tied_names(module) if stored is not None else ():
        missing = [name for name in names if name_of((*path, name)) not in stored]  # type: ignore[operator]  # not None
        if len(missing) < len(names):
            for name in missing:
                tree.pop(name, None)
    return tree


def _module_installer(module: nn.Module) -> Install:
    """Return the function that installs loaded values in a module, with tied parameters tied again."""
    ties = _tied_names(module)

    def install(tree: dict[str, Any]) -> None:
        """Load the tensors that replace ``meta`` tensors, and extra states; tensors with memory were filled in place."""
        before = module.state_dict()
        new = {key: value for key, value in tree.items() if not isinstance(value, torch.Tensor) or before[key].is_meta}
        if not new:
            return
        module.load_state_dict(new, strict=False, assign=True)
        for names in ties:  # assign=True makes a separate parameter for each name
            first = next((name for name in names if name in new), None)
            for name in names if first is not None else ():
                owner, _, leaf = name.rpartition(".")
                module.get_submodule(owner).register_parameter(leaf, module.get_parameter(first))  # type: ignore[arg-type]  # found

    return install


# --- optimizers ------------------------------------------------------------------------------------------------------------
def _parameter_names(state: Any) -> dict[int, str]:
    """Return the name of every parameter of every module in a state by its id. A parameter with several names gets the first."""
    names: dict[int, str] = {}
    for path, module in iter_leaves(state):
        for name, p in module.named_parameters(remove_duplicate=False) if isinstance(module, nn.Module) else ():
            names.setdefault(id(p), name_of((*path, name)))
    return names


def _parameter_keys(optimizer: Optimizer, names: Mapping[int, str]) -> list[Any]:
    """Return the key of each parameter's optimizer state, in order: its name, or its position if some parameter has no name."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    keys = [names.get(id(p)) for p in parameters]
    return list(range(len(keys))) if None in keys else keys


def _optimizer_tree(
    optimizer: Optimizer, names: Mapping[int, str], path: TreePath, stored: Mapping[str, StoredTensor] | None
) -> Any:
    """Return the optimizer's state dict with state by parameter name, and targets for state that only the checkpoint has."""
    tree, keys = optimizer.state_dict(), _parameter_keys(optimizer, names)
    state = {keys[k]: value for k, value in tree["state"].items()}
    if stored is not None:
        parameters = [p for group in getattr(optimizer, "inner", optimizer).param_groups for p in group["params"]]
        for key, parameter in zip(keys, parameters, strict=True):
            if key not in state:
                requested = _stored_state_targets(parameter, (*path, "state", key), stored)
                state |= {key: requested} if requested else {}
    groups = [{**group, "params": [keys[k] for k in group["params"]]} for group in tree["param_groups"]]
    return {**tree, "state": state, "param_groups": groups}


def _stored_state_targets(parameter: Any, path: TreePath, stored: Mapping[str, StoredTensor]) -> dict[str, Target]:
    """Return load targets for the optimizer state of one parameter that the checkpoint has, in its layout."""
    prefix, targets = name_of(path) + ".", {}
    for name, entry in stored.items():
        if name.startswith(prefix):
            same_shape = entry.shape == tuple(parameter.shape)
            layout = parameter._layout if isinstance(parameter, DTensor) and same_shape else entry.shape
            device = parameter.device if same_shape else torch.device("cpu")
            targets[name.removeprefix(prefix)] = Target(name, layout, entry.torch_dtype, device)
    return targets


def _optimizer_installer(optimizer: Optimizer, names: Mapping[int, str]) -> Install:
    """Return the function that loads a tree with state by parameter name into the optimizer."""
    keys = _parameter_keys(optimizer, names)  # computed before loading, which may replace parameters

    def install(tree: dict[str, Any]) -> None:
        """Load the tree into the optimizer, with parameter names replaced by the optimizer's positions."""
        number = {key: k for k, key in enumerate(keys)}
        state = {number[key]: value for key, value in tree["state"].items()}
        groups = [{**group, "params": [number[key] for key in group["params"]]} for group in tree["param_groups"]]
        optimizer.load_state_dict({**tree, "state": state, "param_groups": groups})

    return install


def check_param_groups(requested: Any, found: Any, path: TreePath) -> None:
    """Raise if the parameter groups of an optimizer and of a checkpoint do not have the same parameters in order.

    Raises:
        CheckpointError: they differ.
    """
    ours, theirs = ([group["params"] for group in tree["param_groups"]] for tree in (requested, found))
    if ours != theirs:
        raise CheckpointError(
            f"{name_of(path)!r}: the parameter groups of the optimizer, {_shorten(ours)}, differ from those of "
            f"the checkpoint, {_shorten(theirs)}. Make the groups in the same order. If the module was saved "
            "too, pass it too: parameters are then matched by name"
        )


def _shorten(groups: Any) -> str:
    text = str(groups)
    return text if len(text) <= 200 else text[:197] + "..."
