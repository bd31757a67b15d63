"""Which module's forward or backward a collective belongs to, and the layouts of the parameters met on the way."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ..comm.events import Event
from ..tensor import DTensor


class ModuleLog:
    """Follows modules while it is entered: ``record`` books a collective on the innermost one that is running.

    Backward runs outside of modules: what it communicates is booked on the whole.
    """

    def __init__(self) -> None:
        self.parameters: dict[str, dict[str, nn.Parameter]] = {}
        self.collectives: dict[tuple[str, str], Counter[str]] = {}  # (module, "forward" | "backward") -> kinds
        self._names: dict[nn.Module, str] = {}
        self._running: list[str] = []
        self._hooks: list[Any] = []
        self._thread = 0  # whose modules are followed: ranks may be threads, and hooks hear all of them

    def __enter__(self) -> ModuleLog:
        self.parameters.clear()
        self.collectives.clear()
        self._thread = threading.get_ident()
        self._hooks = [
            register_module_forward_pre_hook(self._entered),
            register_module_forward_hook(self._left, always_call=True),
        ]
        return self

    def __exit__(self, *exception: Any) -> None:
        for hook in self._hooks:
            hook.remove()
        self._names.clear()
        self._running.clear()

    def _entered(self, module: nn.Module, _: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        if module not in self._names:  # a root, named by its type, or a module that no other lists
            root = type(module).__name__
            for name, inner in module.named_modules():
                self._names.setdefault(inner, f"{root}.{name}" if name else root)
        name = self._names[module]
        self._running.append(name)
        own = dict(module.named_parameters(recurse=False))
        if own:
            self.parameters[name] = own

    def _left(self, module: nn.Module, *_: Any) -> None:
        if threading.get_ident() == self._thread:
            self._running.pop()

    def record(self, event: Event) -> None:
        in_backward = torch._C._current_graph_task_id() != -1
        where = ("all modules", "backward") if in_backward else (self._running[-1] if self._running else "outside", "forward")
        self.collectives.setdefault(where, Counter())[event.kind] += 1

    def sharding(self) -> dict[str, tuple[Any, ...]]:
        """Placements of every parameter that is a DTensor, by ``module.parameter``."""
        return {
            f"{module}.{name}": p.placements
            for module, own in self.parameters.items()
            for name, p in own.items()
            if isinstance(p, DTensor)
        }

    def table(self) -> str:
        """The modules in order of first use, indented by depth, with the placements of their parameters and their collectives."""
        names = list(dict.fromkeys([*self.parameters, *(name for name, _ in self.collectives)]))
        lines = []
        for name in names:
            depth = name.count(".")
            lines.append("  " * depth + name)
            for parameter, value in self.parameters.get(name, {}).items():
                where = f"{value.placements}" if isinstance(value, DTensor) else "not distributed"
                lines.append("  " * depth + f"  *{parameter}: {tuple(value.shape)} {where}")
            for phase in ("forward", "backward"):
                counts = self.collectives.get((name, phase), Counter())
                lines += ["  " * depth + f"  {phase} {kind}: {count}" for kind, count in counts.items()]
        return "\n".join(lines)
