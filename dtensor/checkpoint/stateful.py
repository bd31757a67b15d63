"""Modules, optimizers and other objects with a state, as plain trees; and trees handed back to them.

An optimizer's state is filed under its parameters' names wherever the state to be saved holds the module too, so that it finds
its parameters again in a model that is wrapped, ordered or sharded otherwise.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..base.group_by import by_key
from ..errors import CheckpointError
from ..tensor.dtensor import DTensor
from .load_targets import Target
from .manifest import Entry
from .tree import Path, leaves, mapped, name_of

Install = Callable[[Any], None]
Optimizer = torch.optim.Optimizer


@dataclass(frozen=True, slots=True)
class Expanded:
    """A state with all objects replaced by their own states.

    Attributes:
        tree: nested dicts, lists and tuples with tensors and plain values.
        installs: path -> what takes the object's tree back.
    """

    tree: Any
    installs: dict[Path, Install]


def expand(state: Any, stored: Mapping[str, Entry] | None = None) -> Expanded:
    """The state's plain tree.

    Args:
        stored: what a checkpoint holds, when it is to be loaded: an optimizer that has made no step yet has no state of its own,
            so it asks for what is stored for its parameters, laid out like them.
    """
    installs: dict[Path, Install] = {}
    names = _parameter_names(state)

    def visit(value: Any, path: Path) -> Any:
        match value:
            case nn.Module():
                installs[path] = _into_module(value)
                return _module_tree(value, path, stored)
            case Optimizer():
                installs[path] = _into_optimizer(value, names)
                return _optimizer_tree(value, names, path, stored)
            case torch.Tensor():
                return value
        if callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None)):
            installs[path] = value.load_state_dict
            return value.state_dict()
        return value

    return Expanded(mapped(visit, state), installs)


# --- modules ---------------------------------------------------------------------------------------------------------------
def _tied(module: nn.Module) -> list[list[str]]:
    """The names of each parameter that has several."""
    names = by_key((id(parameter), name) for name, parameter in module.named_parameters(remove_duplicate=False))
    return [each for each in names.values() if len(each) > 1]


def _module_tree(module: nn.Module, path: Path, stored: Mapping[str, Entry] | None) -> dict[str, Any]:
    """Its state dict; of a parameter with several names a checkpoint need not have all."""
    tree = module.state_dict()
    for names in _tied(module) if stored is not None else ():
        missing = [name for name in names if name_of((*path, name)) not in stored]  # type: ignore[operator]  # not None
        if len(missing) < len(names):
            for name in missing:
                tree.pop(name, None)
    return tree


def _into_module(module: nn.Module) -> Install:
    ties = _tied(module)

    def install(tree: dict[str, Any]) -> None:
        """Tensors with memory hold their values already; those on ``meta`` and extra states are set."""
        before = module.state_dict()
        new = {key: value for key, value in tree.items() if not isinstance(value, torch.Tensor) or before[key].is_meta}
        if not new:
            return
        module.load_state_dict(new, strict=False, assign=True)
        for names in ties:  # assigning makes a parameter for each name
            first = next((name for name in names if name in new), None)
            for name in names if first is not None else ():
                owner, _, leaf = name.rpartition(".")
                module.get_submodule(owner).register_parameter(leaf, module.get_parameter(first))  # type: ignore[arg-type]  # found

    return install


# --- optimizers ------------------------------------------------------------------------------------------------------------
def _parameter_names(state: Any) -> dict[int, str]:
    """id -> name of every parameter of every module in a state; of several names the first, so that ties do not matter."""
    found: dict[int, str] = {}
    for path, module in leaves(state):
        for name, p in module.named_parameters(remove_duplicate=False) if isinstance(module, nn.Module) else ():
            found.setdefault(id(p), name_of((*path, name)))
    return found


def _keys(optimizer: Optimizer, names: Mapping[int, str]) -> list[Any]:
    """What each parameter's state is filed under, in the optimizer's order: names, or positions if some have none."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    found = [names.get(id(p)) for p in parameters]
    return list(range(len(found))) if None in found else found


def _optimizer_tree(optimizer: Optimizer, names: Mapping[int, str], path: Path, stored: Mapping[str, Entry] | None) -> Any:
    tree, keys = optimizer.state_dict(), _keys(optimizer, names)
    state = {keys[k]: value for k, value in tree["state"].items()}
    if stored is not None:
        like = [p for group in getattr(optimizer, "inner", optimizer).param_groups for p in group["params"]]
        for key, parameter in zip(keys, like, strict=True):
            if key not in state:
                asked = _stored_state(parameter, (*path, "state", key), stored)
                state |= {key: asked} if asked else {}
    groups = [{**group, "params": [keys[k] for k in group["params"]]} for group in tree["param_groups"]]
    return {**tree, "state": state, "param_groups": groups}


def _stored_state(parameter: Any, path: Path, stored: Mapping[str, Entry]) -> dict[str, Target]:
    prefix, found = name_of(path) + ".", {}
    for name, entry in stored.items():
        if name.startswith(prefix):
            alike = entry.shape == tuple(parameter.shape)
            layout = parameter._layout if isinstance(parameter, DTensor) and alike else entry.shape
            device = parameter.device if alike else torch.device("cpu")
            found[name.removeprefix(prefix)] = Target(name, layout, entry.torch_dtype, device)
    return found


def _into_optimizer(optimizer: Optimizer, names: Mapping[int, str]) -> Install:
    keys = _keys(optimizer, names)  # now: loading may put other parameters in their places

    def install(tree: dict[str, Any]) -> None:
        number = {key: k for k, key in enumerate(keys)}
        state = {number[key]: value for key, value in tree["state"].items()}
        groups = [{**group, "params": [number[key] for key in group["params"]]} for group in tree["param_groups"]]
        optimizer.load_state_dict({**tree, "state": state, "param_groups": groups})

    return install


def check_groups(asked: Any, found: Any, path: Path) -> None:
    """The parameter groups of an optimizer and those of a checkpoint hold the same parameters.

    Raises:
        CheckpointError: they do not.
    """
    ours, theirs = ([group["params"] for group in tree["param_groups"]] for tree in (asked, found))
    if ours != theirs:
        raise CheckpointError(
            f"{name_of(path)!r}: the parameter groups of the optimizer, {_short(ours)}, differ from those of "
            f"the checkpoint, {_short(theirs)}. Make the groups in the same order. If the module was saved "
            "too, pass it too: parameters are then matched by name"
        )


def _short(groups: Any) -> str:
    text = str(groups)
    return text if len(text) <= 200 else text[:197] + "..."
