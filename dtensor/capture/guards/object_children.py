"""Object children: the objects that a Python object holds outside of attributes and items, and its comparable state.

Children are the parts of wrappers (partials, properties, methods), the entries of caches, the variables of running generators.
The state of an object of compiled code is a value that is compared: contents of buffers, positions of iterators, generators.
"""

from __future__ import annotations

import abc
import array
import contextvars
import ctypes
import decimal
import functools
import gc
import io
import logging
import mmap
import os
import random
import re
import threading
import types
import weakref
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextvars import Context, ContextVar
from typing import Any

import numpy

from ...errors import CaptureError
from .object_ownership import MISSING, is_library, module_name
from .setting_guards import logger_settings

CACHE_TYPE = type(functools.cache(len))
_CTYPES_DATA = ctypes.Structure.__mro__[1]  # the base of all objects that ctypes lays out in memory
_DEFAULT_REDUCE: Any = object.__reduce__
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
_SUSPENDED = {  # by type the attributes with the frame, and with the object that it waits for
    types.GeneratorType: ("gi_frame", "gi_yieldfrom"),
    types.CoroutineType: ("cr_frame", "cr_await"),
    types.AsyncGeneratorType: ("ag_frame", "ag_await"),
}
_HASH_MODULES = ("hashlib", "md5", "sha1", "sha2", "sha256", "sha512", "sha3", "blake2")
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

    An object of the library returns what programs may change of it from its method ``_guarded``.
    """
    for kind, get_children in _CHILDREN:
        if isinstance(value, kind):
            return lambda: get_children(value)
    if isinstance(value, numpy.ndarray):
        return (lambda: _array_objects(value)) if value.dtype.hasobject else None
    if module_name(type(value)).startswith("dtensor."):
        return getattr(value, "_guarded", None)
    if _iterator_sources(value) is not None:
        return lambda: _iterator_sources(value) or []
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


def _suspended_children(value: Any) -> list[Any]:
    frame, delegate = (getattr(value, name) for name in _SUSPENDED[type(value)])
    return [] if frame is None else [*frame.f_locals.values(), delegate]


_CHILDREN: tuple[tuple[Any, Callable[[Any], list[Any]]], ...] = (
    (ContextVar, lambda value: [value.get(MISSING)]),
    (Context, lambda value: [x for pair in value.items() for x in pair]),
    (threading.local, lambda value: [vars(value)]),  # of this thread
    (weakref.ref, lambda value: [value()]),
    (BaseException, read_referents),
    (defaultdict, lambda value: [value.default_factory]),
    (deque, lambda value: [value.maxlen]),
    (_ALIASES, gc.get_referents),
    (CACHE_TYPE, _cache_children),
    (tuple(_SUSPENDED), _suspended_children),
    (numpy.ufunc, read_referents),  # for one that was made of a Python function
)


# --- state -----------------------------------------------------------------------------------------------------------------
class UnknownState:
    """The state of an object that may change without notice: it equals no other state."""

    __slots__ = ()


def make_state_getter(value: Any) -> Callable[[], Any] | None:
    """Return a function for a value that is equal as long as an object's content is; None if the object needs none.

    Large arrays are compared completely.

    Raises:
        CaptureError: the object is an iterator without a readable position.
    """
    read_state = _find_state_reader(value)
    if read_state is None:
        return None

    def state() -> Any:
        try:
            return read_state(value)
        except (ValueError, BufferError) as error:  # a released view, a closed file
            return type(error)

    return state


def _find_state_reader(value: Any) -> Callable[[Any], Any] | None:
    for kind, read_state in _STATES:
        if isinstance(value, kind):
            return read_state
    kind = type(value)
    if kind in _SUSPENDED:
        return _suspended_state
    if hasattr(kind, "hexdigest") and module_name(kind).strip("_").startswith(_HASH_MODULES):
        return lambda value: value.hexdigest()
    if _is_compiled_iterator(value):
        return _iterator_state
    return None


def _array_state(value: numpy.ndarray[Any, Any]) -> Any:
    content = None if value.dtype.hasobject else value.tobytes()
    return value.dtype.str, value.shape, value.strides, value.flags.writeable, content


def _buffer_state(value: Any) -> Any:
    view = memoryview(value)
    return view.format, view.shape, view.tobytes()


def _cache_state(value: Any) -> Any:
    """Return the count of misses: the contents of a cache change only with a miss."""
    info = value.cache_info()
    return info.maxsize and info.misses


def _ctypes_state(value: Any) -> Any:
    if hasattr(type(value), "contents"):  # a pointer
        return bool(value) and _ctypes_state(value.contents)
    return memoryview(value).tobytes()


def _file_state(value: Any) -> Any:
    if value.closed:
        return None
    if not value.readable():
        return True
    try:
        status = os.fstat(value.fileno())
    except OSError:  # no file of the operating system
        return value.tell(), value.getvalue() if isinstance(value, io.StringIO) else value.getbuffer().tobytes()
    try:
        return value.tell(), status.st_size, status.st_mtime_ns
    except OSError:  # the file is being iterated over, or cannot seek
        return UnknownState()


def _logger_state(value: logging.Logger) -> Any:
    is_registered = logging.Logger.manager.loggerDict.get(value.name) is value  # then it is among the settings of ``logging``
    return None if is_registered else logger_settings(value)


def _suspended_state(value: Any) -> Any:
    frame = getattr(value, _SUSPENDED[type(value)][0])
    return None if frame is None else frame.f_lasti


def _is_compiled_iterator(value: Any) -> bool:
    return isinstance(value, Iterator) and is_library(type(value)) and not hasattr(value, "__dict__")


def _iterator_state(value: Any) -> str | None:
    """Return the position of an iterator without sources (``itertools.count``, ``repeat``); None for any other iterator.

    The position of any other iterator is among its sources.
    """
    if type(value).__name__ in ("count", "repeat"):  # Python 3.14 has removed their ``__reduce__``
        return repr(value)
    _iterator_sources(value)  # raises
    return None


def _iterator_sources(value: Any) -> list[Any] | None:
    """Return the arguments that would rebuild an iterator at its position; None for an object that is no compiled iterator.

    Raises:
        CaptureError: the iterator cannot be rebuilt.
    """
    if type(value) in _SUSPENDED or not _is_compiled_iterator(value) or isinstance(value, tuple(kind for kind, _ in _STATES)):
        return None
    if type(value).__name__ in ("count", "repeat"):
        return []
    try:
        if type(value).__reduce__ is _DEFAULT_REDUCE:
            raise TypeError
        _, *arguments = value.__reduce__()
    except TypeError:
        raise CaptureError(
            f"capture: the function can reach a {type(value).__name__}, an iterator without a readable "
            "position, so a replay would not notice that it advanced. Keep it out of the captured function "
            "and pass its items as arguments"
        ) from None
    return [arguments]


_STATES: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (numpy.ndarray, _array_state),
    (CACHE_TYPE, _cache_state),
    (numpy.flatiter, lambda value: value.index),
    (numpy.void, lambda value: value.tobytes()),
    (numpy.random.Generator, lambda value: repr(value.bit_generator.state)),
    (numpy.random.BitGenerator, lambda value: repr(value.state)),
    (numpy.random.SeedSequence, lambda value: repr(value.state)),
    (numpy.random.RandomState, lambda value: repr(value.get_state(legacy=False))),
    (random.Random, random.Random.getstate),
    ((bytearray, array.array, memoryview), _buffer_state),
    (mmap.mmap, lambda value: (value.tell(), value[:])),
    (_CTYPES_DATA, _ctypes_state),
    (io.IOBase, _file_state),
    (_LOCKS, repr),
    (type(zlib.compressobj()), lambda value: value.copy().flush()),
    (type(zlib.decompressobj()), lambda value: (value.copy().flush(), value.unconsumed_tail, value.unused_data, value.eof)),
    (decimal.Context, repr),
    (logging.Logger, _logger_state),
    (contextvars.Context, lambda value: len(value)),
)
