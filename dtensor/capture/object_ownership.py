"""Whose an object is, and how it stands in a survey's key."""

from __future__ import annotations

import sys
import sysconfig
import types
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch

from ..dispatch.tensor_state import NOT_FOLLOWED

MISSING = object()  # where there is nothing; nothing else is it

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
_OWN = frozenset({"abc", "builtins", "importlib", "inspect", "logging", "re", "typing"})  # whose objects are their own affair
_STANDARD = frozenset(sys.stdlib_module_names) - _OWN
_TORCHS_DATA = ("torch.amp", "torch.distributions", "torch.nn", "torch.optim", "torch.utils.data")
_INSTALLED = tuple({sysconfig.get_path(name) + "/" for name in ("purelib", "platlib", "stdlib")})
_TORCHS = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)


_HOME: Any = attrgetter("__dict__")


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


def module_of(kind: Any) -> str:
    """Where a class or function stands."""
    return str(kind.__module__ or "")


def _root_of(kind: Any) -> str:
    return module_of(kind).partition(".")[0]


def foreign(value: Any) -> bool:
    """Whether a function, class or module belongs to a library whose state is its own affair."""
    return (value.__name__.partition(".")[0] if isinstance(value, types.ModuleType) else _root_of(value)) in _FOREIGN


def installed(value: types.FunctionType | type) -> bool:
    """Whether a function or class is of an installed package, of which names, documents and bases are taken as they are."""
    space = value.__globals__ if isinstance(value, types.FunctionType) else vars(sys.modules.get(module_of(value), types))
    return str(space.get("__file__")).startswith(_INSTALLED)


def is_users(value: Any) -> bool:
    """Whether something that another library holds is the user's."""
    named = isinstance(value, (types.FunctionType, type))
    return not foreign(value) if named else isinstance(value, torch.nn.Module)


def slots_of(kind: type) -> dict[str, Any]:
    """Attributes that are not in ``__dict__``, of a user's class, or one of the library's that is not hashed by value: name ->
    descriptor."""
    users = [base for base in kind.__mro__ if not foreign(base) or _is_record(base)]
    found = {name: held for base in users for name, held in vars(base).items() if isinstance(held, types.MemberDescriptorType)}
    return {name: held for name, held in found.items() if name not in ("__dict__", "__weakref__")}


def held_in(slots: Iterable[Any], value: Any) -> list[Any]:
    """What an object holds under these descriptors, MISSING for nothing."""
    found = []
    for slot in slots:
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
    return (not foreign(kind) or _is_data(kind)) and (type(getattr(value, "__dict__", None)) is dict or bool(slots_of(kind)))


def _is_record(kind: type) -> bool:
    """Whether a library's objects of this class have slots that may be set, and are not hashed by them."""
    return "__slots__" in vars(kind) and _is_data(kind) and getattr(kind, "__hash__", None) in (None, object.__hash__)


def _is_data(kind: type) -> bool:
    """Whether a library's objects of this class are the user's data."""
    return _root_of(kind) in _STANDARD or _root_of(kind) == "numpy" or module_of(kind).startswith(_TORCHS_DATA)


def all_bare(tensors: Iterable[Any]) -> bool:
    """Whether :func:`bare` holds for each."""
    return all(map(NOT_FOLLOWED.issuperset, map(_HOME, tensors)))


def bare(x: torch.Tensor) -> bool:
    """Whether nobody but the library has put anything on a tensor."""
    return x.__dict__.keys() <= NOT_FOLLOWED


def attributes_of(x: torch.Tensor) -> dict[str, Any]:
    """What was put on a tensor by others than the library."""
    return {name: held for name, held in x.__dict__.items() if name not in NOT_FOLLOWED}


def plain(held: Any) -> bool:
    """Whether something is a container of plain values."""
    items = held.values() if type(held) is dict else held if type(held) in (list, tuple, set) else (held,)
    return all(type(item) in VALUES for item in items)


def users_hooks(hooks: dict[int, Any]) -> list[Any]:
    """The hooks without those of ``dtensor.debug``, which look on while a program runs."""
    return [hook for hook in hooks.values() if not getattr(hook, "__module__", "").startswith("dtensor.debug")]
