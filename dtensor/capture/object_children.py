"""What objects hold that is neither in attributes nor in a dict, list or set: the parts of wrappers, and states as values."""

from __future__ import annotations

import abc
import functools
import gc
import re
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, ItemsView, KeysView, Mapping, ValuesView
from contextvars import Context, ContextVar
from typing import Any

import numpy

from .object_ownership import MISSING, foreign, module_of
from .opaque_state import CACHE, RUNNING, taken_from

_TELLS = 1 << 14  # of a class: the collector goes through its objects
_SHOWING = (types.CellType, types.MappingProxyType, KeysView, ValuesView, ItemsView)  # what something else holds
_PARTIAL = ("func", "args", "keywords")
_PARTS: dict[type, tuple[str, ...]] = {
    types.MethodType: ("__self__", "__func__"),
    types.BuiltinMethodType: ("__self__",),
    types.MethodWrapperType: ("__self__",),
    property: ("fget", "fset", "fdel"),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    functools.cached_property: ("func",),
    functools.partial: _PARTIAL,
    functools.partialmethod: _PARTIAL,
    functools.singledispatchmethod: ("func", "dispatcher"),
    CACHE: ("__wrapped__",),
    types.GenericAlias: ("__origin__", "__args__"),
    types.UnionType: ("__args__",),
}


def entries_of(held: Mapping[Any, Any]) -> Any:
    """What gives the keys, values and items of a mapping as they are stored, in its order; a subclass may compute others."""
    for kind in (OrderedDict, dict):
        if isinstance(held, kind):
            return [functools.partial(method, held) for method in (kind.keys, kind.values, kind.items)]
    return [held.keys, held.values, held.items]


def parts_of(value: Any) -> list[Any] | None:
    """What a method, property, partial or the like is made of; None for anything else."""
    for kind, names in _PARTS.items():
        if isinstance(value, kind):
            return [getattr(value, name, None) for name in names]
    return None


def contents_of(value: Any) -> Callable[[], list[Any]] | None:
    """Gives the objects that something holds now; what programs may set of a thing of the library's, its ``_guarded`` gives."""
    for kind, held in _CONTENTS:
        if isinstance(value, kind):
            return lambda: held(value)
    if isinstance(value, numpy.ndarray):
        return (lambda: _objects(value)) if value.dtype.hasobject else None
    if module_of(type(value)).startswith("dtensor."):
        return getattr(value, "_guarded", None)
    if taken_from(value) is not None:
        return lambda: taken_from(value) or []
    return None


def is_compiled(value: Any) -> bool:
    """Whether an object is one of compiled code that holds others, and tells the collector which."""
    kind = type(value)
    known = isinstance(value, (type, types.ModuleType, types.FunctionType, dict, list, tuple, set, frozenset, *_PASSING, *_FIXED))
    known = known or "__slots__" in vars(kind) or not kind.__flags__ & _TELLS  # it is of Python, or holds none
    return not known and foreign(kind) and not module_of(kind).startswith(("torch", "dtensor")) and not hasattr(value, "__dict__")


def referents(value: Any) -> list[Any]:
    """What an object of compiled code holds, without its class and what has no meaning."""
    return [x for x in gc.get_referents(value) if not isinstance(x, (type, types.ModuleType, *_PASSING))]


def _cached(value: Any) -> list[Any]:
    """The entries of a cache, and the results where they are apart from these: in a ring, which a call turns."""
    held = gc.get_referents(value)
    entries = next(x for x in reversed(held) if type(x) is dict and x is not vars(value))
    if value.cache_parameters()["maxsize"] is None:
        return [entries]
    keys, found, pairs = {*map(id, entries)}, {}, iter(held)
    for key in pairs:
        if id(key) in keys:
            found[id(key)] = next(pairs)
    return [entries, *(found[id(key)] for key in entries)]


def _objects(value: Any) -> list[Any]:
    return [x for row in value.ravel().tolist() for x in (row if isinstance(row, tuple) else (row,))]


def _frames(value: Any) -> list[Any]:
    frame, delegate = (getattr(value, name) for name in RUNNING[type(value)])
    return [] if frame is None else [*frame.f_locals.values(), delegate]


_PASSING = (types.FrameType, types.TracebackType, types.CodeType, type(vars(abc.ABC)["_abc_impl"]))  # of no meaning, or moving
_FIXED = (
    types.GetSetDescriptorType,
    types.MemberDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
    re.Pattern,
    *_PARTS,
)  # what holds the same for ever, or has been taken apart
_CONTENTS: tuple[tuple[Any, Callable[[Any], list[Any]]], ...] = (
    (ContextVar, lambda value: [value.get(MISSING)]),
    (Context, lambda value: [x for pair in value.items() for x in pair]),
    (threading.local, lambda value: [vars(value)]),  # of this thread
    (weakref.ref, lambda value: [value()]),
    (BaseException, referents),
    (defaultdict, lambda value: [value.default_factory]),
    (deque, lambda value: [value.maxlen]),
    (_SHOWING, gc.get_referents),
    (CACHE, _cached),
    (tuple(RUNNING), _frames),
    (numpy.ufunc, referents),  # one made of a function
)
