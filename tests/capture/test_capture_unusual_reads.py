"""Unusual reads: attributes of tensors, settings, computed names and contents of buffers are guarded.

After a change a call gives what the function gives, or raises. No replay is stale.
"""

from __future__ import annotations

import abc
import builtins
import copy
import copyreg
import ctypes
import dataclasses
import decimal
import functools
import logging
import math
import mmap
import operator
import queue
import random
import sys
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
import torch._dynamo.config as compiler
from torch import nn
from torch.nn import functional

import dtensor as dt

FIRST = numpy.random.RandomState(0).get_state()[1][0]
MESH = dt.init_device_mesh("cpu", (2,))
X = dt.distribute_tensor(torch.arange(1.0, 6.0), MESH, [dt.Shard(0)])
HERE = sys.modules[__name__]
Read = Callable[[Any], Any]
Way = tuple[Read, Callable[[float], Any]]  # a program, and a change of what it reads; with 1.0 it is as it was


def setting(held: Any, name: str) -> Callable[[float], Any]:
    return lambda n: setattr(held, name, n)


def tensors() -> Iterator[Way]:
    class Kind(nn.Parameter):
        rate = 1.0

    w, plain, held = nn.Parameter(torch.ones(2)), torch.ones(2), [dt.ones(4, device_mesh=MESH, placements=[dt.Replicate()])]
    own, other, chosen = Kind(torch.ones(2)), torch.ones(2), [plain]
    w.info = {"scale": 1.0}
    yield lambda x: x * getattr(w, "scale", 1.0), setting(w, "scale")
    yield lambda x: x * w.info["scale"], lambda n: w.info.update(scale=n)
    yield lambda x: x * getattr(x, "scale", 1.0), lambda n: setattr(X, "scale", n)
    yield (
        lambda x: x * (2 if isinstance(plain, nn.Parameter) else 1),
        lambda n: setattr(plain, "__class__", nn.Parameter if n > 1 else torch.Tensor),
    )
    yield lambda x: x * own.rate, setting(Kind, "rate")
    yield (
        lambda x: x * (2 if held[0].placements == (dt.Replicate(),) else 1),
        lambda n: held.__setitem__(0, dt.ones(4, device_mesh=MESH, placements=[dt.Replicate() if n < 2 else dt.Shard(0)])),
    )
    table = {plain: 1.0, other: 2.0}
    yield lambda x: x * table[chosen[0]], lambda n: chosen.__setitem__(0, other if n > 1 else plain)


def settings() -> Iterator[Way]:
    def flag(get: Callable[[], Any], put: Callable[[Any], Any], one: Any, other: Any) -> Way:
        return lambda x: x * (2 if get() == one else 1), lambda n: put(other if n > 1 else one)

    yield flag(torch.get_num_threads, torch.set_num_threads, torch.get_num_threads(), torch.get_num_threads() + 1)
    yield flag(torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "highest", "high")
    put: Any = torch._C._set_cudnn_benchmark  # torch's own tests forbid the public way for the whole process
    yield flag(lambda: torch.backends.cudnn.benchmark, put, False, True)
    yield flag(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, True, False)
    yield flag(torch.is_warn_always_enabled, torch.set_warn_always, False, True)
    yield flag(torch.is_anomaly_enabled, torch.autograd.set_detect_anomaly, False, True)
    cpu = functools.partial(torch.set_autocast_dtype, "cpu")
    yield flag(lambda: torch.get_autocast_dtype("cpu"), cpu, torch.bfloat16, torch.float16)
    yield flag(lambda: compiler.recompile_limit, setting(compiler, "recompile_limit"), 8, 9)
    yield lambda x: x * len(repr(torch.tensor([1 / 3]))), lambda n: torch.set_printoptions(precision=int(4 * n))
    yield flag(lambda: numpy.random.get_state()[1][0] == FIRST, numpy.random.seed, 0, 1)
    yield flag(lambda: numpy.geterr()["divide"], lambda v: numpy.seterr(divide=v), "warn", "ignore")
    third = decimal.Decimal(3)
    yield lambda x: x * float(1 / third), lambda n: setattr(decimal.getcontext(), "prec", 3 if n > 1 else 28)
    log = logging.getLogger("given_found")
    yield lambda x: x * (2 if log.isEnabledFor(20) else 1), lambda n: log.setLevel(50 if n > 1 else 10)
    yield lambda x: x * (1 + logging.getLogger("given_found").level), lambda n: log.setLevel(50 if n > 1 else 10)
    yield lambda x: x * len(threading.current_thread().name), lambda n: setattr(threading.current_thread(), "name", "q" * int(n))


def names() -> Iterator[Way]:
    HERE.found_list, HERE.found_thing = [1.0], types.SimpleNamespace(v=1.0)
    HERE.found_call = lambda: HERE.found_list[0]
    far = sys.modules["found_far"] = types.ModuleType("found_far")
    far.v, word, held = 1.0, ["found"], [1.0]

    class Thing:
        rate_one = 1.0

        def by_one(self) -> float:
            return held[0]

    class Holder:
        def __init__(self) -> None:  # only assigns: no code reads these attributes by name
            self.call_two = lambda: held[0]
            self.call_three = [lambda: held[0]]

    def owner() -> None: ...

    def change(n: float) -> None:
        HERE.found_list[0] = n

    thing, taken, called = Thing(), operator.attrgetter("found_thing.v"), operator.methodcaller("by_one")
    given, module = functools.partial(getattr, HERE, "found_list"), HERE
    yield lambda x: x * globals()[word[0] + "_list"][0], change
    yield lambda x: x * globals()[word[0] + "_call"](), change
    yield lambda x: x * owner.__globals__["found_list"][0], change
    yield lambda x: x * eval(word[0] + "_list[0]"), change
    yield lambda x: x * vars(module)[word[0] + "_list"][0], change
    yield lambda x: x * given()[0], change
    yield lambda x: x * taken(module), setting(HERE.found_thing, "v")
    yield lambda x: x * getattr(thing, "rate_" + "".join(["one"])), setting(Thing, "rate_one")
    yield lambda x: x * getattr(thing, "by_" + "".join(["one"]))(), lambda n: held.__setitem__(0, n)
    yield lambda x: x * called(thing), lambda n: held.__setitem__(0, n)
    holder = Holder()
    yield lambda x: x * getattr(holder, "call_" + "".join(["two"]))(), lambda n: held.__setitem__(0, n)
    yield lambda x: x * next(reversed(vars(holder).values()))[0](), lambda n: held.__setitem__(0, n)
    yield lambda x: x * sys.modules["found_" + "".join(["far"])].v, setting(far, "v")


def classes() -> Iterator[Way]:
    class One:
        rate = 1.0

    class Two:
        rate = 2.0

    class Child(One):
        pass

    class Asked(abc.ABC):  # noqa: B024  # whose registrations are asked for
        pass

    def fn(a: int) -> None:
        "given"

    thing, relu, identity = Child(), nn.ReLU(), nn.Identity()
    forward, rectify, rounded, root = nn.Identity.forward, functional.relu, builtins.round, math.sqrt
    yield lambda x: x * thing.rate, lambda n: setattr(Child, "__bases__", (Two if n > 1 else One,))
    yield lambda x: x * (2 if isinstance(thing, Asked) else 1), lambda n: Asked.register(Child) if n > 1 else None
    yield lambda x: x * len(fn.__name__), lambda n: setattr(fn, "__name__", "f" * int(n))
    yield lambda x: x * len(fn.__doc__ or ""), lambda n: setattr(fn, "__doc__", "d" * int(n))
    yield lambda x: x * len(One.__name__), lambda n: setattr(One, "__name__", "O" * int(n))
    yield lambda x: x * thing.__dict__.get("v", 1.0), lambda n: setattr(thing, "__dict__", {"v": n})
    yield identity, lambda n: setattr(nn.Identity, "forward", forward if n < 2 else lambda self, x: x * 3)
    yield relu, lambda n: setattr(functional, "relu", rectify if n < 2 else lambda x, inplace=False: x * 3)
    yield lambda x: x * round(1.2), lambda n: setattr(builtins, "round", rounded if n < 2 else lambda v: 7)
    yield lambda x: x * math.sqrt(4.0), lambda n: setattr(math, "sqrt", root if n < 2 else lambda v: 7.0)
    yield lambda x: x.neg(), lambda n: setattr(dt.DTensor, "neg", (lambda x: x * 3) if n > 1 else torch.Tensor.neg)
    yield (
        lambda x: x * copy.copy(thing).__dict__.get("v", 1.0),
        lambda n: (
            copyreg.pickle(Child, lambda held: (_other_child, (Child, n))) if n > 1 else copyreg.dispatch_table.pop(Child, None)
        ),
    )


def _other_child(kind: Any, value: float) -> Any:
    made = kind()
    made.v = value
    return made


def objects() -> Iterator[Way]:
    number, numbers, raw = ctypes.c_double(1.0), (ctypes.c_double * 2)(1, 2), mmap.mmap(-1, 8)
    values, refused = numpy.ones((3, 3)), ValueError("given")
    event, waiting, late = threading.Event(), queue.Queue[float](), [1.0]

    @dataclasses.dataclass
    class Record:
        k: float = 1.0

    computed, vector = numpy.frompyfunc(lambda a: a * late[0], 1, 1), numpy.vectorize(lambda a: a * late[0])
    void, cell, order = numpy.zeros(2, dtype=[("a", float)]), slice(0, late), [{8, 0}]
    yield lambda x: x * number.value, setting(number, "value")
    yield lambda x: x * numbers[0], lambda n: numbers.__setitem__(0, n)
    yield lambda x: x * (1 + raw[0]), lambda n: raw.__setitem__(0, int(n))
    yield lambda x: x * (2 if values.flags.writeable else 1), lambda n: values.setflags(write=n < 2)
    yield lambda x: x * getattr(refused, "k", 1.0), setting(refused, "k")
    yield lambda x: x * (2 if event.is_set() else 1), lambda n: event.set() if n > 1 else event.clear()
    yield lambda x: x * waiting.qsize(), waiting.put
    yield lambda x: x * dataclasses.fields(Record)[0].default, setting(dataclasses.fields(Record)[0], "default")
    yield lambda x: x * float(computed(1.0)) * float(vector(1.0)), lambda n: late.__setitem__(0, n)
    yield lambda x: x * float(1 + void[0]["a"]), lambda n: void["a"].fill(n)
    yield lambda x: x * cell.stop[0], lambda n: late.__setitem__(0, n)
    yield lambda x: x * (1 + next(iter(order[0]))), lambda n: order.__setitem__(0, {0, 8} if n > 1 else {8, 0})


def libraries() -> Iterator[Way]:
    @functools.lru_cache
    def kept(name: str) -> list[float]:
        return [1.0]

    builtins.found_list = [1.0]
    yield lambda x: x * found_list[0], lambda n: found_list.__setitem__(0, n)  # noqa: F821
    yield lambda x: x * kept("a")[0], lambda n: kept("a").__setitem__(0, n)


WAYS = [tensors, settings, names, classes, objects, libraries]


@pytest.fixture(autouse=True)
def _restore_state() -> Iterator[None]:
    yield
    X.__dict__.pop("scale", None)
    sys.modules.pop("found_far", None)
    if "neg" in vars(dt.DTensor):
        del dt.DTensor.neg


def check(fn: Read, change: Callable[[float], Any]) -> dt.Captured[Any, Any]:
    captured = dt.capture(fn, limit=100)
    with torch.no_grad():
        try:
            for n in (1.0, None, None, None, 3.0, None, None):
                if n is not None:
                    change(n)
                assert torch.equal(captured(X).full_tensor(), fn(X).full_tensor())
        finally:
            change(1.0)
    return captured


@pytest.mark.parametrize("ways", WAYS)
def test_calls_after_a_change_of_unusually_read_state_equal_eager(ways: Callable[[], Iterator[Way]]) -> None:
    for number, (fn, change) in enumerate(ways()):
        assert check(fn, change).cache_info().replayed >= 2, number


@pytest.mark.parametrize("seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 60))])
def test_random_programs_of_unusual_reads_equal_eager_after_changes(seed: int) -> None:
    draw = random.Random(seed)
    found = draw.sample([way for ways in WAYS for way in ways()], 4)
    captured = dt.capture(fn := lambda x: functools.reduce(lambda y, way: way[0](y), found, x), limit=100)
    try:
        with torch.no_grad():
            for _ in range(10):
                if draw.random() < 0.6:
                    draw.choice(found)[1](float(draw.randrange(1, 4)))
                assert torch.equal(captured(X).full_tensor(), fn(X).full_tensor())
    finally:
        for _, change in found:
            change(1.0)
