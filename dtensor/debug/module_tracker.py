"""Which module's forward or backward a collective belongs to, and the layouts of the parameters met on the way."""

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

# by log, the modules entered here, and where autograd's count of nodes stood
_RUNNING: ContextVar[tuple[tuple[Any, str, int], ...]] = ContextVar("running", default=())


def _nowhere() -> bool:
    return False


class _Leaving:
    """The end of a module's forward. A module may be copied or pickled meanwhile: the log is no part of it, and the hook that a
    copy gets takes itself away."""

    def __init__(self, log: ModuleLog | None = None) -> None:
        self._log = log

    def __call__(self, module: nn.Module, *_: Any) -> None:
        if self._log is not None:
            self._log.left(module)
            return
        for number in [number for number, hook in module._forward_hooks.items() if hook is self]:
            del module._forward_hooks[number], module._forward_hooks_always_called[number]

    def __reduce__(self) -> Any:
        return _Leaving, ()


class ModuleLog:
    """Follows modules from :meth:`follow` to :meth:`stop`: ``record`` books a collective on the innermost one that is running.

    Backward runs outside of modules: what it communicates is booked on the whole.
    """

    def __init__(self) -> None:
        self.parameters: dict[str, dict[str, nn.Parameter]] = {}
        self.collectives: dict[tuple[str, str], Counter[str]] = {}  # (module, "forward" | "backward") -> kinds
        self._names: dict[nn.Module, str] = {}
        self._seen: dict[str, str] = {}  # names of the modules that ran, in order, and their types
        self._spans: list[tuple[int, int, str]] = []  # of the modules that have run, which of autograd's numbers they used
        self._hooks: list[Any] = []
        self._here = _nowhere

    def follow(self, here: Callable[[], bool]) -> None:
        """From now on; ``here`` tells whether a module runs where it shall be followed: hooks hear those of all threads."""
        self.parameters.clear()
        self.collectives.clear()
        self._seen.clear()
        self._spans.clear()
        self._here = here
        self._hooks.append(register_module_forward_pre_hook(self._entered))

    def stop(self) -> None:
        """No longer."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()
        self._names.clear()
        self._here = _nowhere

    def _entered(self, module: nn.Module, _: Any) -> None:
        if not self._here():
            return
        if module not in self._names:  # a root, named by its type, or a module that no other lists
            root = type(module).__name__
            for name, inner in module.named_modules():
                if inner not in self._names:  # its last hook: what its other hooks communicate is its own
                    self._names[inner] = f"{root}.{name}" if name else root
                    self._hooks.append(inner.register_forward_hook(_Leaving(self), always_call=True))
        name = self._names[module]
        _RUNNING.set((*_RUNNING.get(), (self, name, sequence_number())))
        self._seen[name] = type(module).__name__
        own = dict(module.named_parameters(recurse=False))
        if own:
            self.parameters[name] = own

    def left(self, module: nn.Module) -> None:
        """Its forward has ended."""
        running = _RUNNING.get()
        own = (self, self._names.get(module))
        last = max((place for place, entered in enumerate(running) if entered[:2] == own), default=None)
        if last is not None:
            self._spans.append((running[last][2], sequence_number(), running[last][1]))
            _RUNNING.set(running[:last] + running[last + 1 :])

    def record(self, event: Event) -> None:
        in_backward = graph_task() != -1
        where = ("all modules", "backward") if in_backward else (self.running() or "outside", "forward")
        self.collectives.setdefault(where, Counter())[event.kind] += 1

    def running(self) -> str:
        """The innermost module that runs here; "" if none does."""
        return next((name for log, name, _ in reversed(_RUNNING.get()) if log is self), "")

    def made_in(self, node: Any) -> str:
        """The innermost module that made a node of autograd's; "" if none did."""
        number = node._sequence_nr()
        found = [(first, -end, name) for first, end, name in self._spans if first <= number < end]
        return max(found)[2] if found else ""

    def inclusive(self) -> dict[str, dict[str, Counter[str]]]:
        """Collectives by module and phase, a module's with those of its parts; "Global" has all, and all of backward's."""
        found: dict[str, dict[str, Counter[str]]]
        found = {name: {"forward": Counter(), "backward": Counter()} for name in ("Global", *self._seen)}
        for (name, phase), counts in self.collectives.items():
            found["Global"][phase].update(counts)
            for module in found:
                if module == name or name.startswith(f"{module}."):
                    found[module][phase].update(counts)
        return found

    def tree(self) -> dict[str, Any]:
        """All that ran as nested values of JSON: each module below the innermost one around it that ran too."""
        nodes: dict[str, dict[str, Any]] = {}
        for name, phases in self.inclusive().items():
            nodes[name] = {
                "fqn": name,
                "module_type": self._seen.get(name, ""),
                "parameters": [
                    [parameter, str(value.placements) if isinstance(value, DTensor) else "not distributed"]
                    for parameter, value in self.parameters.get(name, {}).items()
                ],
                "children": [],
                **{f"collectives_{phase}": [[kind, count] for kind, count in own.items()] for phase, own in phases.items()},
                **{f"operations_{phase}": [] for phase in phases},
            }
        for name in self._seen:
            around = [other for other in self._seen if name.startswith(f"{other}.")]
            nodes[max(around, key=len, default="Global")]["children"].append(nodes[name])
        return nodes["Global"]

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
