"""Object model: which objects belong to user code and which to a library, their keys in a guard set, their children and contents.

Children are objects that a Python object holds outside of attributes and items: the parts of wrappers (partials, properties,
methods), the entries of caches, the referents of compiled objects. The content of arrays, buffers, caches and random generators
is a value that is compared.

An *opaque* object has a position or state that no guard compares: an iterator, a file that is read, a compressor. Code that reads
an opaque object is refused. A generator that has not started has no position yet, so it is guarded.
"""

from __future__ import annotations

import abc
import array
import ctypes
import decimal
import functools
import gc
import inspect
import io
import logging
import math
import mmap
import random
import re
import sys
import sysconfig
import threading
import types
import weakref
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, ItemsView, Iterable, Iterator, KeysView, Mapping, ValuesView
from contextvars import Context, ContextVar
from operator import attrgetter
from typing import Any

import numpy
import torch

from ...base.caches import memoize
from ...errors import CaptureError
from ...tensor.tensor_state import NOT_FOLLOWED

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
CACHE_TYPE = type(functools.cache(len))
_CTYPES_DATA = ctypes.Structure.__mro__[1]  # the base of all objects that ctypes lays out in memory
_OPAQUE_TYPES = (  # in addition to iterators and files
    types.CoroutineType,
    types.AsyncGeneratorType,
    decimal.Context,
    type(zlib.compressobj()),
    type(zlib.decompressobj()),
    ctypes.POINTER(ctypes.c_int).__mro__[1],
)
_HAS_GC = 1 << 14  # the type flag of classes with objects that the garbage collector traverses
_ALIASES = (types.CellType, types.MappingProxyType, KeysView, ValuesView, ItemsView)  # show the contents of another object
_PARTIAL_PARTS = ("func", "args", "keywords")
_PART_NAMES: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__self__", "__func__"),
    types.BuiltinMethodType: ("__self__",),
    types.MethodWrapperType: ("__self__",),
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    functools.cached_property: ("func",),
    functools.partial: _PARTIAL_PARTS,
    functools.partialmethod: _PARTIAL_PARTS,
    functools.singledispatchmethod: ("func", "dispatcher"),
    CACHE_TYPE: ("__wrapped__",),
    types.GenericAlias: ("__origin__", "__args__"),
    types.UnionType: ("__args__",),
}
# Frames and code move or have no meaning for the program.
_IGNORED_REFERENTS = (types.FrameType, types.TracebackType, types.CodeType, type(vars(abc.ABC)["_abc_impl"]))
# Objects that never change, or that are guarded by their parts.
_IMMUTABLE = (
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    re.Pattern,
    *_PART_NAMES,
)


# --- owners and keys ---------------------------------------------------------------------------------------------------------
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


def is_installed(value: types.FunctionType | types.ModuleType | type) -> bool:
    """Return True if code belongs to an installed package. Names, docstrings and bases in it are not guarded."""
    if isinstance(value, types.FunctionType):
        namespace = value.__globals__
    elif isinstance(value, types.ModuleType):
        namespace = vars(value)
    else:
        namespace = vars(sys.modules.get(module_name(value), types))
    return str(namespace.get("__file__")).startswith(_INSTALL_FOLDERS)


def is_user_object(value: Any) -> bool:
    """Return True if an object that a library holds is a function or class of the user, or an ``nn.Module``."""
    is_code = isinstance(value, (types.FunctionType, type))
    return not is_library(value) if is_code else isinstance(value, torch.nn.Module)


def check_class(value: Any, path: str) -> None:
    """Raise if an object computes its class and fails."""
    try:
        value.__class__  # noqa: B018
    except Exception as error:
        raise CaptureError(
            f"capture: {path} has attributes that capture cannot read ({type(error).__name__} when its class "
            "is read), so it cannot check them for changes; keep it out of the captured function"
        ) from error


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


def guarded_attributes(x: torch.Tensor) -> dict[str, Any]:
    """Return the attributes that user code has set on a tensor."""
    return {name: value for name, value in x.__dict__.items() if name not in NOT_FOLLOWED}


def is_plain_data(value: Any) -> bool:
    """Return True for a plain value, or a dict, list, tuple or set of plain values."""
    items = value.values() if type(value) is dict else value if type(value) in (list, tuple, set) else (value,)
    return all(type(item) in VALUES for item in items)


def user_hooks(hooks: dict[int, Any]) -> list[Any]:
    """Return the hooks without those of ``dtensor.recorders``, which only observe."""
    return [hook for hook in hooks.values() if not getattr(hook, "__module__", "").startswith("dtensor.recorders")]


def computed_attributes(module: types.ModuleType, names: list[str]) -> list[Any]:
    """Return keys of attributes that a module computes."""
    values = [getattr(module, name, MISSING) for name in names]
    return [
        value_key(value) if type(value) in VALUES else repr(value) if is_plain_data(value) else type(value) for value in values
    ]


def math_functions(names: list[str]) -> list[Any]:
    """Return the functions of ``math`` with these names, behind the patch of float_provenance."""
    return [getattr(fn, "__wrapped__", fn) for fn in map(vars(math).get, names)]


def keys_and_values(value: Any) -> list[Any]:
    """Return the keys and values of a dictionary, or the items of a list or set."""
    return [*value, *value.values()] if isinstance(value, dict) else [*value]


# --- children --------------------------------------------------------------------------------------------------------------
def stored_entries(mapping: Mapping[Any, Any]) -> Any:
    """Return functions for the keys, values and items that a mapping stores, in its order. A subclass may compute others."""
    for kind in (OrderedDict, dict):
        if isinstance(mapping, kind):
            return [functools.partial(method, mapping) for method in (kind.keys, kind.values, kind.items)]
    return [mapping.keys, mapping.values, mapping.items]


def wrapped_parts(value: Any) -> list[Any] | None:
    """Return the parts of a method, property, partial or the like; None for any other object."""
    for kind, names in _PART_NAMES.items():
        if isinstance(value, kind):
            return [getattr(value, name, None) for name in names]
    return None


def make_children_getter(value: Any) -> Callable[[], list[Any]] | None:
    """Return a function for the objects that an object holds; None if it holds none.

    An object of the library returns what programs may change of it from its method ``_guarded_children``.
    """
    for kind, get_children in _CHILDREN:
        if isinstance(value, kind):
            return lambda: get_children(value)
    if isinstance(value, numpy.ndarray):
        return (lambda: _array_objects(value)) if value.dtype.hasobject else None
    if module_name(type(value)).startswith("dtensor."):
        return getattr(value, "_guarded_children", None)
    return None


def is_compiled_object(value: Any) -> bool:
    """Return True for an object of compiled code that holds others, and reports them to the garbage collector."""
    kind = type(value)
    handled = (type, types.ModuleType, types.FunctionType, dict, list, tuple, set, frozenset, *_IGNORED_REFERENTS, *_IMMUTABLE)
    is_python_or_leaf = "__slots__" in vars(kind) or not kind.__flags__ & _HAS_GC
    if isinstance(value, handled) or is_python_or_leaf:
        return False
    return is_library(kind) and not module_name(kind).startswith(("torch", "dtensor")) and not hasattr(value, "__dict__")


def read_referents(value: Any) -> list[Any]:
    """Return the objects that an object of compiled code refers to, without classes, modules and frames."""
    return [x for x in gc.get_referents(value) if not isinstance(x, (type, types.ModuleType, *_IGNORED_REFERENTS))]


def _cache_children(value: Any) -> list[Any]:
    """Return the entries of a ``functools`` cache. A cache with a limit has its results in a ring, which each call turns."""
    referents = gc.get_referents(value)
    entries = next(x for x in reversed(referents) if type(x) is dict and x is not vars(value))
    if value.cache_parameters()["maxsize"] is None:
        return [entries]
    keys, results, pairs = {*map(id, entries)}, {}, iter(referents)
    for key in pairs:
        if id(key) in keys:
            results[id(key)] = next(pairs)
    return [entries, *(results[id(key)] for key in entries)]


def _array_objects(value: Any) -> list[Any]:
    return [x for row in value.ravel().tolist() for x in (row if isinstance(row, tuple) else (row,))]


_CHILDREN: tuple[tuple[Any, Callable[[Any], list[Any]]], ...] = (
    (ContextVar, lambda value: [value.get(MISSING)]),
    (Context, lambda value: [x for pair in value.items() for x in pair]),
    (threading.local, lambda value: [vars(value)]),  # of this thread
    (weakref.ref, lambda value: [value()]),
    (BaseException, read_referents),
    (defaultdict, lambda value: [value.default_factory]),
    (deque, lambda value: [value.maxlen]),
    (types.GeneratorType, lambda value: [*value.gi_frame.f_locals.values()] if value.gi_frame else []),
    (_ALIASES, gc.get_referents),
    (CACHE_TYPE, _cache_children),
    (numpy.ufunc, read_referents),  # for one that was made of a Python function
)


# --- content ---------------------------------------------------------------------------------------------------------------
def make_content_getter(value: Any) -> Callable[[], Any] | None:
    """Return a function for a value that is equal as long as an object's content is; None if the object needs none.

    Large arrays are compared completely.
    """
    read_content = next((read for kind, read in _CONTENTS if isinstance(value, kind)), None)
    if read_content is None or is_opaque(value):
        return None

    def get_content() -> Any:
        try:
            return read_content(value)
        except (ValueError, BufferError) as error:  # a released view, a closed map
            return type(error)

    return get_content


def is_opaque(value: Any) -> bool:
    """Return True if an object of compiled code has a position or state that no guard compares."""
    kind = type(value)
    if isinstance(value, io.IOBase):
        return not value.closed and value.readable() and not (value is sys.stdout or value is sys.stderr)
    if isinstance(value, _OPAQUE_TYPES):
        return True
    if isinstance(value, types.GeneratorType) and _has_not_started(value):
        return False
    return is_library(kind) and (hasattr(kind, "hexdigest") or (isinstance(value, Iterator) and not hasattr(value, "__dict__")))


def _has_not_started(generator: Any) -> bool:
    """Return True if a generator has not run yet, as that of a context manager that serves as a decorator never does."""
    return inspect.getgeneratorstate(generator) == inspect.GEN_CREATED


def has_content(value: Any) -> bool:
    """Return True if an object has a content that is guarded, or is opaque."""
    return is_opaque(value) or make_content_getter(value) is not None


def opaque_object_error(value: Any, path: str) -> CaptureError:
    """Return the error for an opaque object that the captured function reads."""
    return CaptureError(
        f"capture: the function can read {path}, a {type(value).__name__}. It has a position or a state that capture cannot "
        "compare, so a replay would not notice that it advanced. Keep it out of the captured function, and pass what it gives "
        "(the items of an iterator, the lines of a file) as arguments"
    )


def _array_content(value: numpy.ndarray[Any, Any]) -> Any:
    content = None if value.dtype.hasobject else value.tobytes()
    return value.dtype.str, value.shape, value.strides, value.flags.writeable, content


def _buffer_content(value: Any) -> Any:
    view = memoryview(value)
    return view.format, view.shape, view.tobytes()


def _cache_misses(value: Any) -> Any:
    """Return the count of misses: the contents of a cache change only with a miss."""
    info = value.cache_info()
    return info.maxsize and info.misses


_CONTENTS: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (numpy.ndarray, _array_content),
    (numpy.void, lambda value: value.tobytes()),
    ((bytearray, array.array, memoryview, mmap.mmap, _CTYPES_DATA), _buffer_content),
    (CACHE_TYPE, _cache_misses),
    (types.GeneratorType, _has_not_started),
    # No profile event shows that numpy's generators draw, and code may draw in training only.
    (numpy.random.Generator, lambda value: repr(value.bit_generator.state)),
    ((numpy.random.BitGenerator, numpy.random.SeedSequence), lambda value: repr(value.state)),
    (numpy.random.RandomState, lambda value: repr(value.get_state(legacy=False))),
    (random.Random, random.Random.getstate),
    (logging.Logger, attrgetter("level", "disabled", "propagate")),
)
