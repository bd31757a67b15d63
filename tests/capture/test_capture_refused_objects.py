"""Refused objects: reads of compiled code that no guard can compare raise an error that names them."""

from __future__ import annotations

import argparse
import array
import codecs
import collections
import contextlib
import csv
import ctypes
import decimal
import functools
import gc
import hashlib
import inspect
import io
import itertools
import logging
import os
import pathlib
import sys
import sysconfig
import threading
import tracemalloc
import types
import weakref
import zlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy
import pytest
import torch
from torch import nn

import dtensor as dt
from dtensor.errors import CaptureError

MESH = dt.init_device_mesh("cpu", (2,))
X = dt.distribute_tensor(torch.arange(1.0, 6.0), MESH, [dt.Shard(0)])


def refused() -> dict[str, Callable[[], float]]:
    W = nn.Parameter(torch.ones(2))
    STORAGE, GENERATOR = torch.ones(2).untyped_storage(), torch.Generator()
    TABLE = csv.reader(["1", "2", "3", "4", "5", "6"])
    POPPED, NUMBERS = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0].pop, 9.0), iter(array.array("d", [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]))
    BITS, BUFFER = numpy.random.PCG64(1), io.BytesIO(b"123456789")
    LOCAL = collections.deque([1.0])
    CACHED = functools.cache(lambda: 1.0)
    NUMBER, LOCK, CONTEXT, DIGEST = ctypes.c_double(1.0), threading.Lock(), decimal.Context(prec=28), hashlib.sha256(b"a")
    POINTER, PACKED, COUNT, LINES = ctypes.pointer(NUMBER), zlib.compressobj(), itertools.count(1), io.StringIO("a\nbb\n\n")
    return {
        "version counter of a tensor": lambda: W._version,
        "data_ptr of a tensor": lambda: W.data_ptr() % 7,
        "storage offset of a tensor": lambda: float(W.storage_offset()),
        "_is_view of a tensor": lambda: float(W._is_view()),
        "size of a storage": lambda: float(STORAGE.nbytes()),
        "seed of a generator": lambda: float(GENERATOR.initial_seed()),
        "global seed": lambda: float(torch.initial_seed() % 7),
        "rows of a csv reader": lambda: float(next(TABLE)[0]),
        "an iterator of a callable": lambda: next(POPPED),
        "an iterator of an array": lambda: next(NUMBERS),
        "raw bits of a numpy generator": lambda: float(BITS.random_raw() % 7),
        "bytes of a BytesIO": lambda: float(BUFFER.read(1)[0]),
        "reference count of an object": lambda: float(sys.getrefcount(LOCAL)),
        "the size of an object": lambda: float(sys.getsizeof(LOCAL)),
        "state of the garbage collector": lambda: float(gc.isenabled()),
        "gc.get_objects": lambda: float(len(gc.get_objects())),
        "weak reference count": lambda: float(weakref.getweakrefcount(W)),
        "state of tracemalloc": lambda: float(tracemalloc.is_tracing()),
        "line number of a frame": lambda: float(sys._getframe().f_lineno),
        "error handlers of codecs": lambda: float(codecs.lookup_error("strict") is not None),
        "hits of a cache that the call also uses": lambda: CACHED() * CACHED.cache_info().hits,
        "process id": lambda: float(os.getpid() % 7),
        "the target of a pointer": lambda: POINTER.contents.value,
        "state of a lock": lambda: float(LOCK.locked()),
        "acquire of a lock": lambda: float(LOCK.acquire(False)),
        "the precision of a decimal context": lambda: float(CONTEXT.prec),
        "output of a compressor": lambda: float(len(PACKED.copy().flush())),
        "digest of a hash object": lambda: float(DIGEST.digest()[0]),
        "itertools.count": lambda: float(next(COUNT)),
        "lines of a StringIO": lambda: float(len(next(LINES))),
    }


def test_inspect_signature_in_a_captured_function_is_allowed() -> None:
    captured = dt.capture(lambda x: x * len(inspect.signature(refused).parameters) + x)
    with torch.no_grad():
        assert all(torch.equal(captured(X).full_tensor(), X.full_tensor()) for _ in range(4))
    assert captured.cache_info().replayed >= 2


@pytest.mark.parametrize("name", [*refused()])
def test_reads_of_compiled_objects_without_a_guard_raise(name: str) -> None:
    read = refused()[name]
    captured = dt.capture(lambda x: x * read())
    with torch.no_grad(), pytest.raises(CaptureError):
        _ = [captured(X) for _ in range(4)]


class Trainer:
    """Trainer with opaque objects that its step does not read."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.scale, self.lock, self.log = 2.0, threading.Lock(), logging.getLogger("given_trainer")
        self.batches: Any = (k for k in range(100))
        self.loaders: dict[str, Iterator[Any]] = {"train": iter([1] * 100), "test": itertools.cycle([1])}
        self.packed, self.digest, self.context = zlib.compressobj(), hashlib.sha256(), decimal.Context()
        self.read_file, self.written_file = open(__file__), (folder / "log").open("w")  # noqa: SIM115

    def step(self, x: Any) -> Any:
        with self.lock:
            self.log.info("a step")
            return x * self.scale

    def advance(self) -> None:
        next(self.batches)
        for loader in self.loaders.values():
            next(loader)
        self.packed.compress(b"given")
        self.digest.update(b"given")
        self.context.prec += 1
        self.read_file.readline()
        self.written_file.write("given")

    def close(self) -> None:
        self.read_file.close()
        self.written_file.close()


def test_changed_opaque_objects_that_the_step_does_not_read_are_ignored(tmp_path: pathlib.Path) -> None:
    trainer = Trainer(tmp_path)
    step = dt.capture(trainer.step)
    for number in range(6):
        trainer.advance()
        trainer.scale = 2.0 if number < 4 else 3.0
        assert torch.equal(step(X).full_tensor(), trainer.step(X).full_tensor())
    trainer.close()
    assert step.cache_info()[2:4] == (3, 3)  # one recording at first, and two for the float that changes


def test_function_decorated_by_a_context_manager_is_replayed() -> None:
    """Check a decorator with a generator that never starts: each call creates another one."""
    factor = [2.0]

    @contextlib.contextmanager
    def logged(values: list[float]) -> Iterator[None]:
        yield

    @logged(factor)
    def step(x: Any) -> Any:
        return x * factor[0]

    captured = dt.capture(step)
    for number in range(4):
        factor[0] = 2.0 if number < 3 else 3.0
        assert torch.equal(captured(X).full_tensor(), step(X).full_tensor())
    assert captured.cache_info().replayed == 2


def test_function_that_advances_a_generator_raises() -> None:
    def count() -> Iterator[int]:
        yield 2
        yield 3

    numbers = count()
    captured = dt.capture(lambda x: x * next(numbers))
    assert torch.equal(captured(X).full_tensor(), X.full_tensor() * 2)
    with pytest.raises(CaptureError, match="generator"):
        captured(X)


def test_opaque_object_of_a_trainer_raises_if_the_function_reads_it(tmp_path: pathlib.Path) -> None:
    trainer = Trainer(tmp_path)
    by_name, held = "load" + "ers", trainer.loaders
    readers: list[Callable[[Any], Any]] = [
        lambda x: trainer.step(x) * next(trainer.batches),
        lambda x: trainer.step(x) * next(trainer.loaders["train"]),
        lambda x: trainer.step(x) * next(held["test"]),
        lambda x: trainer.step(x) * next(getattr(trainer, by_name)["train"]),
        lambda x: trainer.step(x) * len(next(trainer.read_file)),
    ]
    for reader in readers:
        step = dt.capture(reader)
        with pytest.raises(CaptureError, match=r"iterator|file|generator"):
            _ = [step(X) for _ in range(3)]
    trainer.close()


def test_getattr_with_computed_name_in_installed_code_is_replayed(tmp_path: pathlib.Path) -> None:
    space: dict[str, Any] = {"__name__": "given_installed", "__file__": sysconfig.get_path("purelib") + "/given_installed.py"}
    exec("def pick(held, name): return getattr(held, 'sc' + name)", space)
    trainer, held, pick = Trainer(tmp_path), argparse.Namespace(scale=2.0), space["pick"]
    fn = lambda x: trainer.step(x) * pick(held, "ale")  # noqa: E731
    step = dt.capture(fn)
    for number in range(6):
        trainer.advance()
        held.scale = 2.0 if number < 4 else 3.0
        assert torch.equal(step(X).full_tensor(), fn(X).full_tensor())
    trainer.close()
    assert step.cache_info().replayed >= 2


INSTALLED = """
import itertools
TOKENS, STATE = itertools.count(2), {"next": itertools.count(5)}
class Pool:
    ids = itertools.count(7)
def draw(): return next(TOKENS)
def draw_of_state(): return next(STATE["next"])
def draw_of_class(): return next(Pool.ids)
def scale(x, drawing=None):
    if drawing == "global": return x * draw()
    if drawing == "item": return x * draw_of_state()
    if drawing == "class": return x * draw_of_class()
    return x * 2
"""


@pytest.mark.parametrize("drawing", [None, "global", "item", "class"])
def test_opaque_objects_of_installed_code_raise_only_if_executed_code_uses_them(drawing: str | None) -> None:
    space: dict[str, Any] = {"__name__": "given_drawing", "__file__": sysconfig.get_path("purelib") + "/given_drawing.py"}
    module = types.ModuleType("given_drawing")
    module.__dict__.update(space)
    with mock.patch.dict(sys.modules, given_drawing=module):
        exec(INSTALLED, module.__dict__)
        captured = dt.capture(lambda x: module.scale(x, drawing))
        if drawing is None:
            assert all(torch.equal(captured(X).full_tensor(), X.full_tensor() * 2) for _ in range(3))
            assert captured.cache_info().replayed == 2
        else:
            with pytest.raises(CaptureError, match="a count"):
                _ = [captured(X) for _ in range(3)]
