"""What compiled code gives that no guard can compare is refused by name."""

from __future__ import annotations

import array
import codecs
import collections
import csv
import functools
import gc
import inspect
import io
import os
import sys
import tracemalloc
import weakref
from collections.abc import Callable

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
    return {
        "how often a tensor was written to": lambda: W._version,
        "where a tensor lies": lambda: W.data_ptr() % 7,
        "where in its memory a tensor begins": lambda: float(W.storage_offset()),
        "whether it is a view": lambda: float(W._is_view()),
        "how large memory is": lambda: float(STORAGE.nbytes()),
        "a seed": lambda: float(GENERATOR.initial_seed()),
        "the seed": lambda: float(torch.initial_seed() % 7),
        "rows of a table": lambda: float(next(TABLE)[0]),
        "an iterator that calls": lambda: next(POPPED),
        "an iterator of an array": lambda: next(NUMBERS),
        "bits of a generator": lambda: float(BITS.random_raw() % 7),
        "bytes of a buffer": lambda: float(BUFFER.read(1)[0]),
        "who refers to an object": lambda: float(sys.getrefcount(LOCAL)),
        "the size of an object": lambda: float(sys.getsizeof(LOCAL)),
        "whether the collector is on": lambda: float(gc.isenabled()),
        "all objects": lambda: float(len(gc.get_objects())),
        "weak references": lambda: float(weakref.getweakrefcount(W)),
        "whether memory is traced": lambda: float(tracemalloc.is_tracing()),
        "how deep the calls are": lambda: float(sys._getframe().f_lineno),
        "handlers of codecs": lambda: float(codecs.lookup_error("strict") is not None),
        "how often a cache that it asks was asked": lambda: CACHED() * CACHED.cache_info().hits,
        "the process": lambda: float(os.getpid() % 7),
    }


def test_the_standard_library_may_ask_the_process_for_itself() -> None:
    captured = dt.capture(lambda x: x * len(inspect.signature(refused).parameters) + x)
    with torch.no_grad():
        assert all(torch.equal(captured(X).full_tensor(), X.full_tensor()) for _ in range(4))
    assert captured.cache_info().replayed >= 2


@pytest.mark.parametrize("name", [*refused()])
def test_what_one_call_gives_alone_is_refused(name: str) -> None:
    read = refused()[name]
    captured = dt.capture(lambda x: x * read())
    with torch.no_grad(), pytest.raises(CaptureError):
        _ = [captured(X) for _ in range(4)]
