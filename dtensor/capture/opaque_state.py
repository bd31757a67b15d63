"""The state of objects whose memory is compiled code's, as values that are compared: buffers, positions, generators, settings."""

from __future__ import annotations

import array
import contextvars
import ctypes
import decimal
import functools
import io
import logging
import mmap
import os
import random
import threading
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy

from ..errors import CaptureError
from .object_ownership import VALUES, foreign, module_of
from .setting_guards import of_logger

CACHE = type(functools.cache(len))
_CTYPES = ctypes.Structure.__mro__[1]  # what ctypes lays out in memory
_UNTOLD: Any = object.__reduce__
_LOCKS = (type(threading.Lock()), type(threading.RLock()))
RUNNING = {  # by type the attributes that have the frame, and what it waits for
    types.GeneratorType: ("gi_frame", "gi_yieldfrom"),
    types.CoroutineType: ("cr_frame", "cr_await"),
    types.AsyncGeneratorType: ("ag_frame", "ag_await"),
}
_HASH = ("hashlib", "md5", "sha1", "sha2", "sha256", "sha512", "sha3", "blake2")


class Unknowable:
    """The state of what may be another whenever it is asked: it equals none."""

    __slots__ = ()


def state_of(value: Any) -> Callable[[], Any] | None:
    """Gives a value, equal as long as what an object holds is the same. Large arrays are compared whole.

    Raises:
        CaptureError: it is an iterator that does not tell where it stands.
    """
    found = _state_of(value)
    if found is None:
        return None

    def state() -> Any:
        try:
            return found(value)
        except (ValueError, BufferError) as error:  # a view that was released, a file that was closed
            return type(error)

    return state


def _state_of(value: Any) -> Callable[[Any], Any] | None:
    for kind, state in _STATES:
        if isinstance(value, kind):
            return state
    kind = type(value)
    if kind in RUNNING:
        return _running
    if hasattr(kind, "hexdigest") and module_of(kind).strip("_").startswith(_HASH):
        return lambda value: value.hexdigest()
    if isinstance(value, Iterator) and foreign(kind) and not hasattr(value, "__dict__"):
        return lambda value: _position(value)[0]
    return None


def _array(value: numpy.ndarray[Any, Any]) -> Any:
    held = None if value.dtype.hasobject else value.tobytes()
    return value.dtype.str, value.shape, value.strides, value.flags.writeable, held


def _buffer(value: Any) -> Any:
    view = memoryview(value)
    return view.format, view.shape, view.tobytes()


def _computed(value: Any) -> Any:
    """How often a cache has had to compute: by that alone it comes to hold something else."""
    info = value.cache_info()
    return info.maxsize and info.misses


def _memory(value: Any) -> Any:
    if hasattr(type(value), "contents"):  # a pointer
        return bool(value) and _memory(value.contents)
    return memoryview(value).tobytes()


def _file(value: Any) -> Any:
    if value.closed:
        return None
    if not value.readable():
        return True
    try:
        known = os.fstat(value.fileno())
    except OSError:  # none of the system's
        return value.tell(), value.getvalue() if isinstance(value, io.StringIO) else value.getbuffer().tobytes()
    try:
        return value.tell(), known.st_size, known.st_mtime_ns
    except OSError:  # lines are being taken, or it is no file that one can go back in
        return Unknowable()


def _logger(value: logging.Logger) -> Any:
    return None if logging.Logger.manager.loggerDict.get(value.name) is value else of_logger(value)  # the first are settings


def _running(value: Any) -> Any:
    frame = getattr(value, RUNNING[type(value)][0])
    return None if frame is None else frame.f_lasti


def _position(value: Any) -> tuple[Any, list[Any]]:
    """Where an iterator stands, as values, and the objects that it takes from."""
    if type(value).__name__ in ("count", "repeat"):  # Python 3.14 has taken their other ways to tell
        return repr(value), []
    try:
        if type(value).__reduce__ is _UNTOLD:
            raise TypeError
        _, *found = value.__reduce__()
    except TypeError:
        raise CaptureError(
            f"capture: the function can reach a {type(value).__name__}, an iterator without a readable "
            "position, so a replay would not notice that it advanced. Keep it out of the captured function "
            "and pass its items as arguments"
        ) from None
    state: list[Any] = []
    held: list[Any] = []
    for part in _flat(found):
        if isinstance(part, Iterator) and foreign(type(part)) and not hasattr(part, "__dict__"):
            inner, beyond = _position(part)
            state.append(inner)
            held += beyond
        else:
            (state if type(part) in VALUES else held).append(part)
    return state, held


def _flat(value: Any) -> Iterator[Any]:
    if type(value) is tuple:
        for item in value:
            yield from _flat(item)
    else:
        yield value


def taken_from(value: Any) -> list[Any] | None:
    """The objects that an iterator of compiled code takes from; None of anything else."""
    kind = type(value)
    if kind in RUNNING or not isinstance(value, Iterator) or not foreign(kind) or hasattr(value, "__dict__"):
        return None
    return None if isinstance(value, tuple(known for known, _ in _STATES)) else _position(value)[1]


_STATES: tuple[tuple[Any, Callable[[Any], Any]], ...] = (
    (numpy.ndarray, _array),
    (CACHE, _computed),
    (numpy.flatiter, lambda value: value.index),
    (numpy.void, lambda value: value.tobytes()),
    (numpy.random.Generator, lambda value: repr(value.bit_generator.state)),
    (numpy.random.BitGenerator, lambda value: repr(value.state)),
    (numpy.random.SeedSequence, lambda value: repr(value.state)),
    (numpy.random.RandomState, lambda value: repr(value.get_state(legacy=False))),
    (random.Random, random.Random.getstate),
    ((bytearray, array.array, memoryview), _buffer),
    (mmap.mmap, lambda value: (value.tell(), value[:])),
    (_CTYPES, _memory),
    (io.IOBase, _file),
    (_LOCKS, repr),
    (type(zlib.compressobj()), lambda value: value.copy().flush()),
    (type(zlib.decompressobj()), lambda value: (value.copy().flush(), value.unconsumed_tail, value.unused_data, value.eof)),
    (decimal.Context, repr),
    (logging.Logger, _logger),
    (contextvars.Context, lambda value: len(value)),
)
