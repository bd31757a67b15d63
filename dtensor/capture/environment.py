"""What a function reads besides its arguments: closure cells, defaults, globals that it names, modules and their attributes.

A *survey* lists every tensor that can be reached from the function, and every Python value on the way, in a fixed order. Tensors
are inputs of the tape, fetched anew at each call; the rest is guarded. Between surveys it is enough to see that every container
still holds the same objects.
"""

from __future__ import annotations

import enum
import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from ..remembered import remembered
from .watch import Watch, contents

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
        floats: entries of ``key`` that are floats in dictionaries (of attributes too): the dictionary, and the key there.
        version: how often only such floats were found to have changed.
    """

    __slots__ = ("_alive", "_numbers", "_seen", "_watch", "floats", "key", "paths", "tensors", "version")

    def __init__(self, fn: Callable[..., Any]) -> None:
        self.tensors: list[torch.Tensor] = []
        self.key: list[Any] = []
        self.paths: list[str] = []
        self.floats: dict[int, tuple[dict[Any, Any], Any]] = {}
        self.version = 0
        self._numbers: dict[int, int] = {}
        self._seen: dict[int, int] = {}
        self._watch = Watch()
        self._alive: list[Any] = []
        self._visit(fn, getattr(fn, "__name__", type(fn).__name__))
        self._watch.settle()

    def unchanged(self) -> bool:
        """Whether every container still holds the objects that the survey found."""
        return self._watch.unchanged()

    def refreshed(self) -> bool:
        """Whether nothing but floats has changed; then the key is brought up to date."""
        changed = self._watch.changed_entries()
        known = {(id(held), key): place for place, (held, key) in self.floats.items()}
        if changed is None or any(entry not in known for entry in changed):
            return False
        places = [known[entry] for entry in changed]
        if any(type(self.floats[place][0][self.floats[place][1]]) is not float for place in places):
            return False
        for place in places:
            held, key = self.floats[place]
            self.key[place] = (float, repr(held[key]))
        self._watch.settle()
        self.version += 1
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

    def _all(self, values: Iterable[Any], names: Iterable[str], path: str) -> None:
        values = list(values)
        self._note(len(values), path)
        for name, value in zip(names, values, strict=True):
            self._visit(value, f"{path}{name}")

    def _hold_dict(self, held: Mapping[Any, Any], path: str, shown: str) -> None:
        self._watch.dict_(held)
        self._note(tuple(key if isinstance(key, VALUES) else ... for key in held), path)
        for key, value in list(held.items()):
            if type(value) is float and isinstance(held, dict):
                self.floats[len(self.key)] = (held, key)
            self._visit(value, f"{path}{shown.format(key if isinstance(key, VALUES) else '...')}")

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
            self._hold_dict(value, path, "[{!r}]")
        elif isinstance(value, (list, tuple, deque)):
            if len(value) > LONG:
                self._note(ById(value), path)
            else:
                self._watch.other(value.__iter__)
                self._all(value, [f"[{i}]" for i in range(len(value))], path)
        elif isinstance(value, (set, frozenset)):
            self._watch.other(value.__iter__)
            self._note(frozenset(item if isinstance(item, VALUES) else ById(item) for item in value), path)
        elif isinstance(value, types.FunctionType):
            self._function(value, path)
        elif isinstance(value, types.MethodType):
            self._visit(value.__self__, path)
            self._visit(value.__func__, path)
        elif isinstance(value, functools.partial):
            self._visit([value.func, value.args, value.keywords], path)
        elif isinstance(value, torch.nn.Module | torch.optim.Optimizer) or _has_contents(value):
            self._attributes(value, path)
            self._visit(type(value), f"{path}.__class__")
        elif isinstance(value, type) and not _foreign(value):
            for kind in value.__mro__:
                if not _foreign(kind):
                    self._hold_dict(vars(kind), path, ".{}")
            self._note(ById(value), path)
        else:
            self._note(ById(value), path)

    def _attributes(self, value: Any, path: str) -> None:
        slots = _slots(type(value))
        if slots:
            self._watch.other(lambda: [getattr(value, name, None) for name in slots])
            self._all([getattr(value, name, None) for name in slots], [f".{name}" for name in slots], path)
        if not isinstance(value, torch.nn.Module):
            if hasattr(value, "__dict__"):
                self._hold_dict(vars(value), path, ".{}")
            return
        self._watch.dict_(vars(value))
        for name, held in list(vars(value).items()):
            if not name.endswith(_HOOKS):
                self._visit(held, f"{path}.{name}")
            elif name.endswith("_hooks"):
                found = _users(held)
                if held:
                    self._watch.other(functools.partial(_users, held))
                else:
                    self._watch.dict_(held)
                self._note(len(found), f"{path}.{name}")
                for hook in found:
                    self._visit(hook, f"{path}.{name}")

    def _function(self, fn: types.FunctionType, path: str) -> None:
        self._note(ById(fn.__code__), path)
        if _foreign(fn):
            return
        names = fn.__code__.co_freevars
        cells = fn.__closure__ or ()
        self._watch.cells(cells)
        self._all(map(contents, cells), [f" variable {name}" for name in names], path)
        self._all((fn.__defaults__, fn.__kwdefaults__), (" default", " default"), path)
        named = _names(fn.__code__)
        self._named(fn.__globals__, named, f"{path} global ")
        for name in named:
            module = fn.__globals__.get(name)
            if isinstance(module, types.ModuleType) and not _foreign(module):
                self._named(vars(module), named, f"{path} {name}.")

    def _named(self, space: dict[str, Any], names: tuple[str, ...], path: str) -> None:
        """What ``names`` are in a module."""
        read = [name for name in names if name in space]
        if read:
            self._watch.names(space, read)
            self._all(map(space.get, read), read, path)


def _users(hooks: dict[int, Any]) -> list[Any]:
    """The hooks without those of ``dtensor.debug``, which look on while a program runs."""
    return [hook for hook in hooks.values() if not getattr(hook, "__module__", "").startswith("dtensor.debug")]


@remembered(1024)
def _names(code: types.CodeType) -> tuple[str, ...]:
    """The names that a function and those defined in it look up."""
    inner = [name for constant in code.co_consts if isinstance(constant, types.CodeType) for name in _names(constant)]
    return tuple(dict.fromkeys((*code.co_names, *inner)))


def _foreign(value: Any) -> bool:
    """Whether a function, class or module belongs to a library whose state is its own affair."""
    name = value.__name__ if isinstance(value, types.ModuleType) else value.__module__ or ""
    return str(name).partition(".")[0] in _FOREIGN


def _slots(kind: type) -> list[str]:
    """Names of attributes that are not in ``__dict__``, of a user's class."""
    found = [vars(base).get("__slots__", ()) for base in kind.__mro__ if not _foreign(base)]
    return [name for names in found for name in ([names] if isinstance(names, str) else names) if not name.startswith("__")]


def _has_contents(value: Any) -> bool:
    """Whether an object's attributes are the user's."""
    kind = type(value)
    if isinstance(value, (type, types.ModuleType, types.BuiltinFunctionType)) or _foreign(kind):
        return kind is types.SimpleNamespace
    return hasattr(value, "__dict__") or bool(_slots(kind))
