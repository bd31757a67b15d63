"""Object children: the objects that a Python object holds outside of attributes and items, and its comparable content.

Children are the parts of wrappers (partials, properties, methods), the entries of caches, the referents of compiled objects.
The content of arrays, buffers, caches and random generators is a value that is compared. An *opaque* object has a position or
state that no guard compares: an iterator, a file that is read, a compressor. Code that names an opaque object is refused.
"""

from __future__ import annotations

import abc
import array
import ctypes
import decimal
import functools
import gc
import io
import logging
import mmap
import random
import re
import sys
import threading
import types
import weakref
import zlib
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextvars import Context, ContextVar
from operator import attrgetter
from typing import Any

import numpy

from .object_ownership import MISSING, is_library, module_name

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
    return is_library(kind) and (hasattr(kind, "hexdigest") or (isinstance(value, Iterator) and not hasattr(value, "__dict__")))


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
    # No profile event shows that numpy's generators draw, and code may draw in training only.
    (numpy.random.Generator, lambda value: repr(value.bit_generator.state)),
    ((numpy.random.BitGenerator, numpy.random.SeedSequence), lambda value: repr(value.state)),
    (numpy.random.RandomState, lambda value: repr(value.get_state(legacy=False))),
    (random.Random, random.Random.getstate),
    (logging.Logger, attrgetter("level", "disabled", "propagate")),
)
