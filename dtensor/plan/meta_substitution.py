"""Meta substitution: replaces the tensors of modules and optimizers by meta DTensors, so that a step can be recorded on any mesh.

The replacements are replicated and hold no data, so nothing is computed. Afterwards all tensors are restored.
"""

from __future__ import annotations

import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ..base.torch_internals import tree_leaves, tree_map
from ..mesh.device_mesh import DeviceMesh
from ..tensor.create import empty
from ..tensor.dtensor import DTensor


class MetaSubstitution:
    """Context manager in which modules and optimizers have meta DTensors in place of their tensors.

    Args:
        mesh: the mesh of a dry run.
        objects: objects by name; the modules and optimizers among them get replacements.

    Attributes:
        parameters: replacements of parameters and buffers by name; with several modules, the module's name comes first.
    """

    def __init__(self, mesh: DeviceMesh, objects: dict[str, Any]) -> None:
        self.mesh = mesh
        unique = {id(x): (name, x) for name, x in reversed(objects.items())}.values()
        self.modules = {name: x for name, x in unique if isinstance(x, nn.Module)}
        self.optimizers = [x for _, x in unique if isinstance(x, torch.optim.Optimizer)]
        self.parameters: dict[str, DTensor] = {}
        self._replacements: dict[int, tuple[Any, DTensor]] = {}  # by address of the original
        self._replacement_ids: set[int] = set()
        self._restore = ExitStack()

    @property
    def tensors(self) -> list[DTensor]:
        """Return all meta DTensors that replace a tensor."""
        return [replacement for _, replacement in self._replacements.values()]

    @property
    def states(self) -> dict[str, DTensor]:
        """Return the tensors of the optimizers' states, as ``"parameter.state"`` -> tensor, without 0-d tensors."""
        names = {id(x): name for name, x in self.parameters.items()}
        states: dict[str, DTensor] = {}
        for optimizer in self.optimizers:
            for p, state in optimizer.state.items():
                tensors = {key: x for key, x in state.items() if isinstance(x, DTensor) and x.ndim}
                states |= {f"{names[id(p)]}.{key}": x for key, x in tensors.items() if id(p) in names}
        return states

    def replace_tensor(self, x: Any) -> Any:
        """Return the meta DTensor that replaces a tensor, always the same one; any other object unchanged."""
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in self._replacements:
            replacement = empty(*x.shape, device_mesh=self.mesh, dtype=x.dtype)
            self._replacements[id(x)] = x, replacement.requires_grad_() if x.requires_grad else replacement
            self._replacement_ids.add(id(replacement))
        return self._replacements[id(x)][1]

    def __enter__(self) -> MetaSubstitution:
        for name, module in self.modules.items():
            self._replace_in_module("" if len(self.modules) == 1 else f"{name}.", module)
        for optimizer in self.optimizers:
            self._replace_in_optimizer(optimizer)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._restore.close()

    def _replace_in_module(self, prefix: str, module: nn.Module) -> None:
        """Replace the parameters and buffers of a module by meta DTensors, until the context ends."""
        for path, part in module.named_modules(remove_duplicate=False):
            for own in (part._parameters, part._buffers):
                before: dict[str, Any] = dict(own)
                for key, x in before.items():
                    if x is not None and id(x) not in self._replacement_ids:
                        own[key] = self.replace_tensor(x)
                        self._restore.callback(own.__setitem__, key, x)
                    if own[key] is not None:
                        self.parameters[f"{prefix}{path}{'.' if path else ''}{key}"] = own[key]

    def _replace_in_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Replace the parameters and states of an optimizer by meta DTensors, until the context ends."""
        state, groups = optimizer.state, [group["params"] for group in optimizer.param_groups]
        self._restore.callback(setattr, optimizer, "state", state)
        optimizer.state = defaultdict(
            dict, {self.replace_tensor(p): tree_map(self._replace_state, own) for p, own in state.items()}
        )
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [self.replace_tensor(p) for p in params]
            self._restore.callback(group.__setitem__, "params", params)

    def _replace_state(self, x: Any) -> Any:
        """Return the meta DTensor for an optimizer state; a copy of a 0-d tensor, such as a step counter."""
        if not isinstance(x, torch.Tensor):
            return x
        return self.replace_tensor(x) if x.ndim else x.clone()


def find_objects(step: Callable[..., Any], example: Iterable[Any]) -> dict[str, Any]:
    """Return by name the objects that ``step`` can use: its globals and closure variables, its ``self``, and the arguments."""
    unwrapped = inspect.unwrap(step)
    bound = getattr(unwrapped, "__self__", None)
    objects: dict[str, Any] = {}
    if bound is not None:
        objects = {"self": bound} if isinstance(bound, nn.Module) else dict(vars(bound))
    function = getattr(unwrapped, "__func__", unwrapped)
    if inspect.isfunction(function):
        names = inspect.getclosurevars(function)
        objects |= {**names.globals, **names.nonlocals}
    return objects | {f"argument {i}": x for i, x in enumerate(tree_leaves(example))}
