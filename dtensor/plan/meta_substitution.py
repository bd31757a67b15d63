"""A program's modules and optimizers with tensors without data in place of their own, all whole, so that it can be recorded on
any mesh: nothing is computed, and afterwards everything is as it was."""

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


class StandIns:
    """Inside, the modules and optimizers among ``objects`` have stand-ins on ``mesh``, a dry run.

    Attributes:
        parameters: parameters and buffers by name (of several modules after the module's name); ``states``: an optimizer's
            states, each after its parameter.
    """

    def __init__(self, mesh: DeviceMesh, objects: dict[str, Any]) -> None:
        self.mesh = mesh
        unique = {id(x): (name, x) for name, x in reversed(objects.items())}.values()
        self.modules = {name: x for name, x in unique if isinstance(x, nn.Module)}
        self.optimizers = [x for _, x in unique if isinstance(x, torch.optim.Optimizer)]
        self.parameters: dict[str, DTensor] = {}
        self._made: dict[int, tuple[Any, DTensor]] = {}
        self._ours: set[int] = set()
        self._undo = ExitStack()

    @property
    def all(self) -> list[DTensor]:
        return [made for _, made in self._made.values()]

    @property
    def states(self) -> dict[str, DTensor]:
        """Tensors of the optimizers' states, by parameter and key; numbers are none."""
        names = {id(x): name for name, x in self.parameters.items()}
        found: dict[str, DTensor] = {}
        for optimizer in self.optimizers:
            for p, state in optimizer.state.items():
                tensors = {key: x for key, x in state.items() if isinstance(x, DTensor) and x.ndim}
                found |= {f"{names[id(p)]}.{key}": x for key, x in tensors.items() if id(p) in names}
        return found

    def of(self, x: Any) -> Any:
        """What stands for a tensor; anything else is itself."""
        if not isinstance(x, torch.Tensor):
            return x
        if id(x) not in self._made:
            made = empty(*x.shape, device_mesh=self.mesh, dtype=x.dtype)
            self._made[id(x)] = x, made.requires_grad_() if x.requires_grad else made
            self._ours.add(id(made))
        return self._made[id(x)][1]

    def __enter__(self) -> StandIns:
        for name, module in self.modules.items():
            self._enter_module("" if len(self.modules) == 1 else f"{name}.", module)
        for optimizer in self.optimizers:
            self._enter_optimizer(optimizer)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._undo.close()

    def _enter_module(self, prefix: str, module: nn.Module) -> None:
        for path, part in module.named_modules(remove_duplicate=False):
            for own in (part._parameters, part._buffers):
                before: dict[str, Any] = dict(own)
                for key, x in before.items():
                    if x is not None and id(x) not in self._ours:
                        own[key] = self.of(x)
                        self._undo.callback(own.__setitem__, key, x)
                    if own[key] is not None:
                        self.parameters[f"{prefix}{path}{'.' if path else ''}{key}"] = own[key]

    def _enter_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        state, groups = optimizer.state, [group["params"] for group in optimizer.param_groups]
        self._undo.callback(setattr, optimizer, "state", state)
        optimizer.state = defaultdict(dict, {self.of(p): tree_map(self._of_state, own) for p, own in state.items()})
        for group, params in zip(optimizer.param_groups, groups, strict=True):
            group["params"] = [self.of(p) for p in params]
            self._undo.callback(group.__setitem__, "params", params)

    def _of_state(self, x: Any) -> Any:
        """Numbers, as counters of steps, are copied: the program counts on."""
        return self.of(x) if isinstance(x, torch.Tensor) and x.ndim else x.clone() if isinstance(x, torch.Tensor) else x


def reached(step: Callable[..., Any], example: Iterable[Any]) -> dict[str, Any]:
    """What a function names, is bound to and is given: where its modules and optimizers are looked for."""
    plain = inspect.unwrap(step)
    bound = getattr(plain, "__self__", None)
    found: dict[str, Any] = {} if bound is None else dict(vars(bound)) if not isinstance(bound, nn.Module) else {"self": bound}
    function = getattr(plain, "__func__", plain)
    if inspect.isfunction(function):
        named = inspect.getclosurevars(function)
        found |= {**named.globals, **named.nonlocals}
    return found | {f"argument {i}": x for i, x in enumerate(tree_leaves(example))}
