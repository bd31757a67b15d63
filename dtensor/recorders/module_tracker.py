"""Module tracker: finds the module that issues a collective, and collects the placements of parameters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

from torch import nn
from torch.nn.modules.module import register_module_forward_pre_hook

from ..base.torch_internals import graph_task, sequence_number
from ..comm.events import Event
from ..tensor.dtensor import DTensor

# Per tracker: the modules entered in this context, with the sequence number of autograd at their entry.
_RUNNING_MODULES: ContextVar[tuple[tuple[Any, str, int], ...]] = ContextVar("running", default=())


def _is_never_tracked() -> bool:
    return False


class _ForwardEndHook:
    """Forward hook that reports the end of a module's forward to the tracker.

    A module may be copied or pickled during tracking. The copy of this hook has no tracker, and removes itself when it first
    runs.
    """

    def __init__(self, tracker: ModuleTracker | None = None) -> None:
        self._tracker = tracker

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if self._tracker is not None:
            self._tracker.on_forward_end(module)
            return
        for number in [number for number, hook in module._forward_hooks.items() if hook is self]:
            del module._forward_hooks[number], module._forward_hooks_always_called[number]

    def __reduce__(self) -> Any:
        return _ForwardEndHook, ()


class ModuleTracker:
    """Track modules from :meth:`start_tracking` to :meth:`stop_tracking`, and count collectives by the innermost running module.

    Backward passes run outside of modules, so their collectives count for "all modules".
    """

    def __init__(self) -> None:
        self.parameters: dict[str, dict[str, nn.Parameter]] = {}
        self.collectives: dict[tuple[str, str], Counter[str]] = {}  # (module, "forward" | "backward") -> kinds
        self._names: dict[nn.Module, str] = {}
        self._module_types: dict[str, str] = {}  # of the modules that ran, in order
        self._spans: list[tuple[int, int, str]] = []  # sequence numbers (first, end) and name of each finished forward
        self._hooks: list[Any] = []
        self._is_tracked_here = _is_never_tracked

    def start_tracking(self, is_tracked_here: Callable[[], bool]) -> None:
        """Clear the records, and track modules in the threads where ``is_tracked_here`` is True; torch's hooks run in all."""
        self.parameters.clear()
        self.collectives.clear()
        self._module_types.clear()
        self._spans.clear()
        self._is_tracked_here = is_tracked_here
        self._hooks.append(register_module_forward_pre_hook(self._on_forward_start))

    def stop_tracking(self) -> None:
        """Remove the hooks on modules, and stop tracking; the records of modules and collectives stay."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._names.clear()
        self._is_tracked_here = _is_never_tracked

    def _on_forward_start(self, module: nn.Module, _: Any) -> None:
        """Push the module on the stack of running modules; name it, and its submodules, at the first call."""
        if not self._is_tracked_here():
            return
        if module not in self._names:  # a root module: named by its type
            root = type(module).__name__
            for name, inner in module.named_modules():
                if inner not in self._names:  # last hook: its other hooks belong to the forward
                    self._names[inner] = f"{root}.{name}" if name else root
                    self._hooks.append(inner.register_forward_hook(_ForwardEndHook(self), always_call=True))
        name = self._names[module]
        _RUNNING_MODULES.set((*_RUNNING_MODULES.get(), (self, name, sequence_number())))
        self._module_types[name] = type(module).__name__
        own = dict(module.named_parameters(recurse=False))
        if own:
            self.parameters[name] = own

    def on_forward_end(self, module: nn.Module) -> None:
        """Take a module off the running ones, and store which autograd nodes its forward created."""
        running = _RUNNING_MODULES.get()
        own = (self, self._names.get(module))
        last = max((place for place, entered in enumerate(running) if entered[:2] == own), default=None)
        if last is not None:
            self._spans.append((running[last][2], sequence_number(), running[last][1]))
            _RUNNING_MODULES.set(running[:last] + running[last + 1 :])

    def record_collective(self, event: Event) -> None:
        """Count a collective for the running module and forward pass, or for the backward pass of all modules."""
        in_backward = graph_task() != -1
        where = ("all modules", "backward") if in_backward else (self.running_module() or "outside", "forward")
        self.collectives.setdefault(where, Counter())[event.kind] += 1

    def running_module(self) -> str:
        """Return the name of the innermost module that runs in this context; "" if there is none."""
        return next((name for tracker, name, _ in reversed(_RUNNING_MODULES.get()) if tracker is self), "")

    def module_of_node(self, node: Any) -> str:
        """Return the name of the innermost module that created an autograd node; "" if no module did."""
        number = node._sequence_nr()
        spans = [(first, -end, name) for first, end, name in self._spans if first <= number < end]
        return max(spans)[2] if spans else ""

    def counts_by_module(self) -> dict[str, dict[str, Counter[str]]]:
        """Return collectives by module and phase, submodules included. "Global" has all collectives."""
        by_module: dict[str, dict[str, Counter[str]]]
        by_module = {name: {"forward": Counter(), "backward": Counter()} for name in ("Global", *self._module_types)}
        for (name, phase), counts in self.collectives.items():
            by_module["Global"][phase].update(counts)
            for module in by_module:
                if module == name or name.startswith(f"{module}."):
                    by_module[module][phase].update(counts)
        return by_module

    def as_tree(self) -> dict[str, Any]:
        """Return the modules that ran as nested JSON values; children of a module are its submodules that ran."""
        nodes: dict[str, dict[str, Any]] = {}
        for name, phases in self.counts_by_module().items():
            nodes[name] = {
                "fqn": name,
                "module_type": self._module_types.get(name, ""),
                "parameters": [
                    [parameter, str(value.placements) if isinstance(value, DTensor) else "not distributed"]
                    for parameter, value in self.parameters.get(name, {}).items()
                ],
                "children": [],
                **{f"collectives_{phase}": [[kind, count] for kind, count in own.items()] for phase, own in phases.items()},
                **{f"operations_{phase}": [] for phase in phases},
            }
        for name in self._module_types:
            around = [other for other in self._module_types if name.startswith(f"{other}.")]
            nodes[max(around, key=len, default="Global")]["children"].append(nodes[name])
        return nodes["Global"]

    def placements_by_parameter(self) -> dict[str, tuple[Any, ...]]:
        """Return the placements of every parameter that is a DTensor, by ``module.parameter``."""
        return {
            f"{module}.{name}": p.placements
            for module, own in self.parameters.items()
            for name, p in own.items()
            if isinstance(p, DTensor)
        }

    def text_table(self) -> str:
        """Return the modules as text, in order of first use, with placements of parameters and collectives."""
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
