"""What objects hold that is neither in attributes nor in a dict, list or set: the parts of wrappers, and states as values."""

from __future__ import annotations

import array
import functools
import gc
import random
import threading
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, ItemsView, Iterator, KeysView, Mapping, ValuesView
from contextvars import ContextVar
from typing import Any

import numpy

from ..errors import CaptureError

MISSING = object()  # where there is nothing; nothing else is it

_CACHE = type(functools.cache(len))
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
    _CACHE: ("__wrapped__",),
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
    if isinstance(value, ContextVar):
        return lambda: [value.get(MISSING)]
    if isinstance(value, threading.local):
        return lambda: [vars(value)]  # of this thread
    if isinstance(value, weakref.ref):
        return lambda: [value()]
    if isinstance(value, BaseException):
        return lambda: [value.args]
    if isinstance(value, defaultdict):
        return lambda: [value.default_factory]
    if isinstance(value, deque):
        return lambda: [value.maxlen]
    if isinstance(value, _SHOWING):
        return lambda: gc.get_referents(value)
    if isinstance(value, _CACHE):
        return lambda: [entry for held in gc.get_referents(value) if type(held) is dict for entry in held.values()]
    if isinstance(value, types.GeneratorType):
        return lambda: [] if value.gi_frame is None else [*value.gi_frame.f_locals.values(), value.gi_yieldfrom]
    if isinstance(value, numpy.ndarray) and value.dtype.hasobject:
        return lambda: list(value.flat)
    return getattr(value, "_guarded", None) if type(value).__module__.startswith("dtensor.") else None


def state_of(value: Any) -> Callable[[], Any] | None:
    """Gives a value, equal as long as what an object holds is the same. Large arrays are compared whole.

    Raises:
        CaptureError: it is an iterator that does not tell where it stands.
    """
    if isinstance(value, numpy.ndarray):
        return None if value.dtype.hasobject else lambda: (value.dtype.str, value.shape, value.tobytes())
    if isinstance(value, (bytearray, array.array, memoryview)):
        return lambda: bytes(value)
    if isinstance(value, random.Random):
        return value.getstate
    if isinstance(value, numpy.random.Generator):
        return lambda: repr(value.bit_generator.state)
    if isinstance(value, numpy.random.RandomState):
        return lambda: repr(value.get_state(legacy=False))
    if isinstance(value, types.GeneratorType):
        return lambda: None if value.gi_frame is None else value.gi_frame.f_lasti
    if isinstance(value, Iterator) and type(value).__module__ in ("builtins", "itertools"):
        return functools.partial(_position, value)
    return None


def _position(value: Any) -> Any:
    if type(value).__name__ in ("count", "repeat"):  # Python 3.14 has taken their other ways to tell
        return repr(value)
    try:
        _, arguments, *rest = value.__reduce__()
    except TypeError:
        raise CaptureError(
            f"capture: the function can reach a {type(value).__name__}, an iterator that does not tell where it stands, so a "
            "replay could not see it move on; keep it out of the captured function and pass what it gives as an argument"
        ) from None
    return tuple(_position(x) if isinstance(x, Iterator) else len(x) if hasattr(x, "__len__") else x for x in arguments), repr(
        rest
    )
