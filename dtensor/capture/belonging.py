"""Whose an object is, and how it stands in a survey's key."""

from __future__ import annotations

import sys
import types
from typing import Any

import torch

from .holding import MISSING

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
)
_FOREIGN = frozenset({"torch", "dtensor", "numpy", "builtins"} | set(sys.stdlib_module_names))
_DATA = frozenset(
    {"argparse", "collections", "types", "os", "configparser", "optparse", "weakref", "_weakrefset"}
)  # whose objects are the user's data
_TORCHS = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)


class ById:
    """An object that only equals itself; kept alive, so that its address is not used again."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is ById and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def value_of(value: Any) -> tuple[type, Any]:
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


def key_of(key: Any) -> Any:
    """A key of a dictionary in a survey's key; tensors may be replaced."""
    return ... if isinstance(key, torch.Tensor) else value_of(key) if isinstance(key, VALUES) else ById(key)


def _root_of(kind: Any) -> str:
    return str(kind.__module__ or "").partition(".")[0]


def foreign(value: Any) -> bool:
    """Whether a function, class or module belongs to a library whose state is its own affair."""
    return (value.__name__.partition(".")[0] if isinstance(value, types.ModuleType) else _root_of(value)) in _FOREIGN


def is_users(value: Any) -> bool:
    """Whether something that another library holds is the user's."""
    named = isinstance(value, (types.FunctionType, type))
    return not foreign(value) if named else isinstance(value, torch.nn.Module)


def slots_of(kind: type) -> dict[str, Any]:
    """Attributes that are not in ``__dict__``, of a user's class: name -> descriptor."""
    users = [base for base in kind.__mro__ if not foreign(base)]
    return {name: held for base in users for name, held in vars(base).items() if isinstance(held, types.MemberDescriptorType)}


def held_in(slots: dict[str, Any], value: Any) -> list[Any]:
    found = []
    for slot in slots.values():
        try:
            found.append(slot.__get__(value, type(value)))
        except AttributeError:
            found.append(MISSING)
    return found


def has_contents(value: Any) -> bool:
    """Whether an object's attributes are the user's, or data of the user's."""
    kind = type(value)
    if isinstance(value, (type, types.ModuleType, types.FunctionType)):
        return False
    if isinstance(value, _TORCHS):
        return True
    if foreign(kind):
        return _root_of(kind) in _DATA and hasattr(value, "__dict__")
    return hasattr(value, "__dict__") or bool(slots_of(kind))


def plain(held: Any) -> bool:
    """Whether something is a container of plain values."""
    items = held.values() if type(held) is dict else held if type(held) in (list, tuple, set) else (held,)
    return all(type(item) in VALUES for item in items)


def users_hooks(hooks: dict[int, Any]) -> list[Any]:
    """The hooks without those of ``dtensor.debug``, which look on while a program runs."""
    return [hook for hook in hooks.values() if not getattr(hook, "__module__", "").startswith("dtensor.debug")]
