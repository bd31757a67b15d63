"""Object ownership: whether an object belongs to user code or to a library, and the keys of values in a guard set."""

from __future__ import annotations

import sys
import sysconfig
import types
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import torch

from ...base.caches import memoize
from ...dispatch.tensor_state import NOT_FOLLOWED

MISSING = object()  # a unique mark for "no value"

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
_LIBRARIES = frozenset({"torch", "dtensor", "numpy", "builtins"} | set(sys.stdlib_module_names))
_NOT_DATA = frozenset({"abc", "builtins", "importlib", "inspect", "logging", "re", "typing"})  # objects with internal state only
_DATA_MODULES = frozenset(sys.stdlib_module_names) - _NOT_DATA
_TORCH_DATA_MODULES = ("torch.amp", "torch.distributions", "torch.nn", "torch.optim", "torch.utils.data")
_INSTALL_FOLDERS = tuple({sysconfig.get_path(name) + "/" for name in ("purelib", "platlib", "stdlib")})
_TORCH_DATA_TYPES = (torch.nn.Module, torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler)
_DICT: Any = attrgetter("__dict__")


class ById:
    """An object that equals only itself. It is kept alive, so that its address is not used again."""

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        return type(other) is ById and self.value is other.value

    def __hash__(self) -> int:
        return id(self.value)


def value_key(value: Any) -> tuple[type, Any]:
    """Return a key of a plain value that also compares types, signed zeros and NaN."""
    return type(value), repr(value) if isinstance(value, (float, complex)) else value


def dict_key(key: Any) -> Any:
    """Return a guard key for a key of a dictionary. All tensors are equal, because a tensor may be replaced."""
    return ... if isinstance(key, torch.Tensor) else value_key(key) if isinstance(key, VALUES) else ById(key)


def module_name(kind: Any) -> str:
    """Return the name of the module that defines a class or function."""
    return str(kind.__module__ or "")


def _root_package(kind: Any) -> str:
    return module_name(kind).partition(".")[0]


def is_library(value: Any) -> bool:
    """Return True if a function, class or module belongs to a library that is trusted with its own state."""
    root = value.__name__.partition(".")[0] if isinstance(value, types.ModuleType) else _root_package(value)
    return root in _LIBRARIES


def is_installed(value: types.FunctionType | type) -> bool:
    """Return True if a function or class belongs to an installed package. Its name, docstring and bases are not guarded."""
    if isinstance(value, types.FunctionType):
        namespace = value.__globals__
    else:
        namespace = vars(sys.modules.get(module_name(value), types))
    return str(namespace.get("__file__")).startswith(_INSTALL_FOLDERS)


def is_user_object(value: Any) -> bool:
    """Return True if an object that a library holds is a function or class of the user, or an ``nn.Module``."""
    is_code = isinstance(value, (types.FunctionType, type))
    return not is_library(value) if is_code else isinstance(value, torch.nn.Module)


def slot_descriptors(kind: type) -> dict[str, Any]:
    """Return the slots of a class by name, except those of library classes with objects that are hashed by value."""
    bases = [base for base in kind.__mro__ if not is_library(base) or _is_mutable_record(base)]
    slots = {
        name: member for base in bases for name, member in vars(base).items() if isinstance(member, types.MemberDescriptorType)
    }
    return {name: member for name, member in slots.items() if name not in ("__dict__", "__weakref__")}


def read_slots(slots: Iterable[Any], value: Any) -> list[Any]:
    """Return what an object holds under these slot descriptors, MISSING for an empty one."""
    values = []
    for slot in slots:
        try:
            values.append(slot.__get__(value, type(value)))
        except AttributeError:
            values.append(MISSING)
    return values


def has_user_state(value: Any) -> bool:
    """Return True if the attributes of an object are user data: the class is the user's, or holds data of the user."""
    kind = type(value)
    if isinstance(value, (type, types.ModuleType, types.FunctionType)):
        return False
    if isinstance(value, _TORCH_DATA_TYPES):
        return True
    if is_library(kind) and not _is_data_class(kind):
        return False  # before its ``__dict__`` is read: reading may create it, as for an exception
    return type(getattr(value, "__dict__", None)) is dict or bool(slot_descriptors(kind))


def is_named_by_library(kind: type, name: str) -> bool:
    """Return True if code of a library's class among the bases of ``kind`` has this name."""
    return any(name in _names_in_class(base) for base in kind.__mro__ if is_library(base))


@memoize(1024)
def _names_in_class(kind: type) -> frozenset[str]:
    """Return all names in the code of a class."""
    functions = [getattr(member, "fget", getattr(member, "__wrapped__", member)) for member in vars(kind).values()]
    codes = [fn.__code__ for fn in functions if isinstance(fn, types.FunctionType)]
    for code in codes:
        codes += [constant for constant in code.co_consts if isinstance(constant, types.CodeType)]
    return frozenset(name for code in codes for name in code.co_names)


def _is_mutable_record(kind: type) -> bool:
    """Return True for a data class of a library that has slots and is not hashed by value."""
    return "__slots__" in vars(kind) and _is_data_class(kind) and getattr(kind, "__hash__", None) in (None, object.__hash__)


def _is_data_class(kind: type) -> bool:
    """Return True if the objects of a library's class hold data of the user."""
    root = _root_package(kind)
    return root in _DATA_MODULES or root == "numpy" or module_name(kind).startswith(_TORCH_DATA_MODULES)


def have_no_user_attributes(tensors: Iterable[Any]) -> bool:
    """Return True if user code has set no attribute on any of the tensors."""
    return all(map(NOT_FOLLOWED.issuperset, map(_DICT, tensors)))


def has_user_attributes(x: torch.Tensor) -> bool:
    """Return True if user code has set an attribute on a tensor."""
    return not x.__dict__.keys() <= NOT_FOLLOWED


def user_attributes(x: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that user code has set on a tensor."""
    return {name: value for name, value in x.__dict__.items() if name not in NOT_FOLLOWED}


def is_plain_data(value: Any) -> bool:
    """Return True for a plain value, or a dict, list, tuple or set of plain values."""
    items = value.values() if type(value) is dict else value if type(value) in (list, tuple, set) else (value,)
    return all(type(item) in VALUES for item in items)


def user_hooks(hooks: dict[int, Any]) -> list[Any]:
    """Return the hooks without those of ``dtensor.debug``, which only observe."""
    return [hook for hook in hooks.values() if not getattr(hook, "__module__", "").startswith("dtensor.debug")]
