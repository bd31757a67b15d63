"""What a function reads besides its arguments: closure cells, defaults, globals that it names, modules and their attributes.

A *survey* lists every tensor that can be reached from the function, and every Python value on the way, in a fixed order. Tensors
are inputs of the tape, fetched anew at each call; the rest is guarded. Between surveys it is enough to see that every container
still holds the same objects.
"""

from __future__ import annotations

import enum
import functools
import operator
import sys
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from ..remembered import remembered

VALUES = (
    int,
    float,
    complex,
    bool,
    str,
    bytes,
    type(None),
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    enum.Enum,
)
LONG = 10_000  # elements of a list of Python values, from which on it is known by identity
_FOREIGN = frozenset({"torch", "dtensor", "numpy", "builtins"} | set(sys.stdlib_module_names))
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")  # of modules; the latter say how the first are called


class ById:
    """An object that only equals itself; kept alive, so that its address is not used again."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is ById and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


class Environment:
    """One survey.

    Attributes:
        tensors: all that were found, each once, in the order found.
        key: everything else, and which places hold the same tensor; equal keys mean that a replay reads the same.
        paths: for each entry of ``key`` where it stands, to tell the user.
    """

    __slots__ = ("_alive", "_holders", "_numbers", "_seen", "key", "paths", "tensors")

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.key: list[Any] = []
        self.paths: list[str] = []
        self._numbers: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._holders: list[tuple[Callable[[], Iterable[Any]], list[Any]]] = []
        self._alive: list[Any] = []
        self._visit(fn, getattr(fn, "__name__", type(fn).__name__))

    def unchanged(self) -> bool:
        """Whether every container still holds the objects that the survey found."""
        for held, before in self._holders:
            now = list(held())
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                return False
        return True

    def difference(self, other: Environment) -> str | None:
        """Where ``other``, a later survey, holds something else; None if it does not."""
        for path, mine, its in zip(self.paths, self.key, other.key, strict=False):
            if mine != its:
                return path
        if len(self.key) != len(other.key):
            return (self.paths if len(self.paths) > len(other.paths) else other.paths)[min(len(self.key), len(other.key))]
        for number, (mine, its) in enumerate(zip(self.tensors, other.tensors, strict=True)):
            if mine is not its:
                return self.paths[self.key.index(("tensor", number))]
        return None

    # --- the walk ------------------------------------------------------------------------------------------------------
    def _note(self, part: Any, path: str) -> None:
        self.key.append(part)
        self.paths.append(path)

    def _hold(self, held: Callable[[], Iterable[Any]], names: Iterable[str], path: str) -> None:
        values = list(held())
        self._holders.append((held, values))
        self._note(len(values), path)
        for name, value in zip(names, values, strict=False):
            self._visit(value, f"{path}{name}")

    def _visit(self, value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            number = self._numbers.setdefault(id(value), len(self.tensors))
            if number == len(self.tensors):
                self.tensors.append(value)
            self._note(("tensor", number), path)
        elif isinstance(value, VALUES):
            self._note((type(value), repr(value) if isinstance(value, (float, complex)) else value), path)
        elif id(value) in self._seen:
            self._note(("again", self._seen[id(value)]), path)
        else:
            self._seen[id(value)] = len(self.key)
            self._alive.append(value)  # its address is not used again
            self._note(type(value), path)
            self._descend(value, path)

    def _descend(self, value: Any, path: str) -> None:
        if isinstance(value, dict):
            self._note(tuple(key if isinstance(key, VALUES) else ... for key in value), path)
            self._hold(value.values, [f"[{key!r}]" if isinstance(key, VALUES) else "[...]" for key in value], path)
        elif isinstance(value, (list, tuple)):
            if len(value) > LONG:
                self._note(ById(value), path)
            else:
                self._hold(value.__iter__, [f"[{i}]" for i in range(len(value))], path)
        elif isinstance(value, (set, frozenset)):
            self._note(frozenset(item if isinstance(item, VALUES) else ById(item) for item in value), path)
        elif isinstance(value, types.FunctionType):
            self._function(value, path)
        elif isinstance(value, types.MethodType):
            self._visit(value.__self__, path)
            self._visit(value.__func__, path)
        elif isinstance(value, functools.partial):
            self._visit([value.func, value.args, value.keywords], path)
        elif isinstance(value, torch.nn.Module | torch.optim.Optimizer) or _has_contents(value):
            self._note(ById(type(value)), path)
            self._attributes(value, path)
            self._methods(type(value), path)
        else:
            self._note(ById(value), path)

    def _attributes(self, value: Any, path: str) -> None:
        contents = vars(value)
        if not isinstance(value, torch.nn.Module):
            self._hold(contents.values, [f".{name}" for name in contents], path)
            return
        self._hold(contents.values, (), path)
        for name, held in list(contents.items()):
            if not name.endswith(_HOOKS):
                self._visit(held, f"{path}.{name}")
            elif name.endswith("_hooks"):
                self._hold(lambda hooks=held: _users(hooks) if hooks else (), (), f"{path}.{name}")  # type: ignore[misc]  # a default
                for hook in _users(held):
                    self._visit(hook, f"{path}.{name}")

    def _methods(self, kind: type, path: str) -> None:
        """What a user's own class does when it is called."""
        for name in ("forward", "__call__"):
            method = getattr(kind, name, None)
            if isinstance(method, types.FunctionType) and not _foreign(method):
                self._visit(method, f"{path}.{name}")

    def _function(self, fn: types.FunctionType, path: str) -> None:
        self._note(ById(fn.__code__), path)
        if _foreign(fn):
            return
        names = fn.__code__.co_freevars
        cells = [(name, cell) for name, cell in zip(names, fn.__closure__ or (), strict=True)]
        self._hold(lambda: [_contents(cell) for _, cell in cells], [f" variable {name}" for name, _ in cells], path)
        self._hold(lambda: (fn.__defaults__, fn.__kwdefaults__), [" default", " default"], path)
        read = [name for name in _names(fn.__code__) if name in fn.__globals__]
        space = fn.__globals__
        self._hold(lambda: [space.get(name) for name in read], [f" global {name}" for name in read], path)


def _users(hooks: dict[int, Any]) -> list[Any]:
    """The hooks without those of ``dtensor.debug``, which look on while a program runs."""
    return [hook for hook in hooks.values() if not getattr(hook, "__module__", "").startswith("dtensor.debug")]


def _contents(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


@remembered(1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The names that a function and those defined in it look up."""
    inner = [name for constant in code.co_consts if isinstance(constant, types.CodeType) for name in _names(constant)]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def _foreign(fn: types.FunctionType) -> bool:
    """Whether it belongs to a library whose state is its own affair."""
    return (fn.__module__ or "").partition(".")[0] in _FOREIGN


def _has_contents(value: Any) -> bool:
    """Whether an object's attributes are the user's."""
    kind = type(value)
    if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)) or kind.__module__.partition(".")[0] in _FOREIGN:
        return kind is types.SimpleNamespace
    return hasattr(value, "__dict__")
