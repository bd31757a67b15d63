"""Random state changes: programs read state in random ways while it changes between calls, and no replay is stale."""

from __future__ import annotations

import collections
import contextvars
import copy
import dataclasses
import enum
import functools
import importlib
import operator
import os
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from slow_case_marks import keep_chosen_fast, keep_every_nth_fast

import dtensor as dt

MESH = dt.init_device_mesh("cpu", (2,))
X = dt.distribute_tensor(torch.arange(6.0).reshape(2, 3) + 1, MESH, [dt.Shard(0)])
Read = Callable[[Any], Any]
Change = Callable[[float], Any]
context = contextvars.ContextVar("context", default=1.0)
local = threading.local()
G = 1.0


class Meta(type):
    level = 1.0

    @property
    def doubled(cls) -> float:
        return cls.level * Meta.level * 2


class Base(metaclass=Meta):
    rate = 1.0

    def scale(self) -> float:
        return self.rate


class Child(Base):
    def scale(self) -> float:
        return super().scale() * 2


class Weakly:
    """Descriptor that stores its values in a weak dictionary."""

    def __init__(self) -> None:
        self.held: Any = weakref.WeakKeyDictionary()

    def __get__(self, one: Any, kind: Any = None) -> Any:
        return self.held.get(one, 1.0)

    def __set__(self, one: Any, value: float) -> None:
        self.held[one] = value


class Special:
    far = Weakly()

    def __init__(self) -> None:
        self.inner = {"q": 1.0}

    def __getattr__(self, name: str) -> float:
        if name == "magic":
            return self.inner["q"]
        raise AttributeError(name)

    def __len__(self) -> int:
        return int(self.inner["q"])

    def __getitem__(self, key: str) -> float:
        return self.inner.get(key, 1.0)

    def __call__(self, x: Any) -> Any:
        return x * self.inner["q"]


@dataclasses.dataclass(eq=False)
class Config:
    a: float = 1.0
    b: list[float] = dataclasses.field(default_factory=lambda: [1.0])


class Slotted:
    __slots__ = ("v", "w")
    v: float


class Kind(enum.Enum):
    ONE = 1.0
    TWO = 2.0


def by_name(module: Any, name: str) -> Any:
    return getattr(module, name)


def scaled(x: Any, k: float = 1.0, *, by: float = 1.0) -> Any:
    return x * k * by


class State:
    """State that programs read, with changes of each part."""

    def __init__(self) -> None:
        self.module: Any = sys.modules["capture_guards_pkg"]
        self.special, self.config, self.child, self.slotted = Special(), Config(), Child(), Slotted()
        self.slotted.v = 1.0
        self.method = self.child.scale
        self.chained: Any = collections.ChainMap({}, {"x": 1.0})
        self.ordered = collections.OrderedDict(a=1.0, b=2.0)
        self.proxy = types.MappingProxyType(self.ordered)
        self.made = collections.defaultdict(lambda: 1.0)
        self.deque = collections.deque([1.0, 2.0], maxlen=3)
        self.array, self.objects = np.array([1.0, 2.0]), np.array([Config(), 1.0], dtype=object)
        self.set, self.cycle = {1.0, 2.0}, [1.0]
        self.cycle.append(self.cycle)
        self.weak, self.weakly = weakref.ref(self.config), weakref.WeakValueDictionary(c=self.config)
        self.net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Dropout(0.5)).requires_grad_(False)
        self.parameter, self.plain = torch.nn.Parameter(torch.ones(())), torch.ones(())
        self.partial, self.error, self.bytes = functools.partial(scaled, k=1.0), ValueError(1.0), bytearray(b"ab")
        self.poly, self.zero, self.kind, self.path = 1.0, 0.0, Kind.ONE, "alpha"
        self.cached = functools.lru_cache(lambda a: G * a)
        self.closed, self.close = self._closure()

    @staticmethod
    def _closure() -> tuple[Read, Change]:
        v = 1.0

        def read(x: Any) -> Any:
            return x * v

        def change(value: float) -> None:
            nonlocal v
            v = value

        return read, change

    def ways(self) -> list[tuple[Read, list[Change]]]:
        return [*self._objects(), *self._containers(), *self._modules(), *self._tensors(), *_behind()]

    def _objects(self) -> list[tuple[Read, list[Change]]]:
        s, inner = self, self.special.inner
        return [
            (lambda x: x * s.child.scale(), [lambda n: setattr(Base, "rate", n), lambda n: setattr(s.child, "rate", n)]),
            (lambda x: x * s.method(), [lambda n: setattr(s.child, "rate", n)]),
            (lambda x: x * Base.doubled, [lambda n: setattr(Base, "level", n), lambda n: setattr(Meta, "level", n)]),
            (lambda x: x * s.special.far, [lambda n: setattr(s.special, "far", n)]),
            (lambda x: x * s.special.magic, [lambda n: inner.update(q=n)]),
            (lambda x: x * (len(s.special) + s.special["z"]), [lambda n: inner.update(q=n), lambda n: inner.update(z=n)]),
            (lambda x: s.special(x) if s.special else x, [lambda n: inner.update(q=n)]),
            (lambda x: x * s.config.a * s.config.b[0], [lambda n: setattr(s.config, "a", n), lambda n: s.config.b.insert(0, n)]),
            (lambda x: x * dataclasses.asdict(s.config)["a"], [lambda n: setattr(s.config, "a", n)]),
            (lambda x: x * copy.copy(s.slotted).v, [lambda n: setattr(s.slotted, "v", n)]),
            (lambda x: x * getattr(s.slotted, "w", 1.0), [lambda n: setattr(s.slotted, "w", n)]),
            (lambda x: x * s.error.args[0], [lambda n: setattr(s.error, "args", (n,))]),
            (lambda x: x * s.kind.value, [lambda n: setattr(s, "kind", Kind.ONE if n > 2 else Kind.TWO)]),
            (lambda x: x * 2 if s.poly is True else x, [lambda n: setattr(s, "poly", (1, 1.0, True)[int(n) % 3])]),
            (lambda x: x.copysign(s.zero), [lambda n: setattr(s, "zero", 0.0 if n > 2 else -0.0)]),
            (lambda x: x * 2 if hasattr(s, "new") else x, [lambda n: setattr(s, "new", n), lambda n: vars(s).pop("new", None)]),
            (lambda x: s.closed(x), [self.close]),
            (lambda x: s.partial(x), [lambda n: s.partial.keywords.update(k=n)]),
            (scaled, [lambda n: setattr(scaled, "__defaults__", (n,)), lambda n: setattr(scaled, "__kwdefaults__", {"by": n})]),
            (lambda x: x * s.cached(2.0), [lambda n: globals().update(G=n), lambda n: s.cached.cache_clear()]),
            (lambda x: x * context.get() * local.v, [lambda n: context.set(n), lambda n: setattr(local, "v", n)]),
        ]

    def _containers(self) -> list[tuple[Read, list[Change]]]:
        s = self
        return [
            (lambda x: x * s.chained["x"], [lambda n: s.chained.maps[-1].update(x=n), lambda n: s.chained.update(x=n)]),
            (lambda x: x * next(iter(s.ordered.values())), [lambda n: s.ordered.move_to_end("a" if n > 2 else "b")]),
            (lambda x: x * s.proxy["a"], [lambda n: s.ordered.update(a=n)]),
            (lambda x: x * s.made.default_factory(), [lambda n: setattr(s.made, "default_factory", lambda: n)]),
            (lambda x: x * s.deque[0], [lambda n: s.deque.append(n), lambda n: s.deque.rotate(1)]),
            (lambda x: x * (s.deque.maxlen or 1), [lambda n: setattr(s, "deque", collections.deque([n], maxlen=int(n)))]),
            (lambda x: x * float(s.array.reshape(2, 1)[1, 0]), [lambda n: s.array.fill(n)]),
            (lambda x: x * s.objects[0].a, [lambda n: setattr(s.objects[0], "a", n)]),
            (lambda x: x * sum(s.set) if 3.0 in s.set else x, [lambda n: s.set.add(n), lambda n: s.set.discard(n)]),
            (lambda x: x * s.cycle[1][1][0], [lambda n: s.cycle.__setitem__(0, n)]),
            (lambda x: x * s.weak().a * s.weakly["c"].a, [lambda n: setattr(s.config, "a", n)]),
            (lambda x: x * s.bytes[0] * len(s.bytes), [lambda n: s.bytes.__setitem__(0, int(n)), lambda n: s.bytes.append(1)]),
            (lambda x: x * float(os.environ.get("GUARDED", "1")), [lambda n: os.environ.update(GUARDED=str(n))]),
        ]

    def _modules(self) -> list[tuple[Read, list[Change]]]:
        s, module = self, self.module
        alter: list[Change] = [lambda n: setattr(module, "alpha", n)]
        deep: list[Change] = [lambda n: setattr(module.sub, "beta", n)]
        return [
            (lambda x: x * importlib.import_module("capture_guards_pkg").alpha, alter),
            (lambda x: x * sys.modules["capture_guards_pkg"].sub.beta, deep),
            (lambda x: x * by_name(module, s.path), alter),
            (lambda x: x * getattr(module, "".join(["al", "pha"])), alter),
            (lambda x: x * vars(module)[s.path], alter),
            (lambda x: x * operator.attrgetter("sub.beta")(module), deep),
        ]

    def _tensors(self) -> list[tuple[Read, list[Change]]]:
        s = self
        return [
            (lambda x: x * (2 if s.parameter.requires_grad else 1), [lambda n: s.parameter.requires_grad_(n > 2)]),
            (lambda x: x * sum(p.requires_grad for p in s.net.parameters()), [lambda n: s.net[0].bias.requires_grad_(n > 2)]),
            (lambda x: x * s.plain, [lambda n: s.plain.fill_(n), lambda n: setattr(s, "plain", torch.tensor(n))]),
            (lambda x: x * s.plain.dtype.itemsize, [lambda n: setattr(s, "plain", torch.tensor(n, dtype=torch.float64))]),
            (lambda x: x * s.net.get_submodule("1").p, [lambda n: setattr(s.net[1], "p", n / 10)]),
            (lambda x: x * (2 if s.net[1].training else 1), [lambda n: s.net.train(n > 2)]),
            (lambda x: x * len(s.net.state_dict()), [lambda n: s.net.register_buffer(f"b{n:.0f}", torch.ones(()))]),
            (lambda x: x * torch.tensor(1.0).element_size(), [lambda n: torch.set_default_dtype(_dtype(n))]),
        ]


def _behind() -> list[tuple[Read, list[Change]]]:
    """Return reads of objects behind dict keys, set members, bound methods, dict views and cells."""
    key, member, one, far = Config(), Config(), Config(), Config()
    keyed, members, tupled = {key: 1.0}, {member}, {(one, 1): 1.0}
    refs, bound, shown, seen = weakref.WeakSet([far]), {"a": 1.0}, {"a": 1.0}, {"a": 1.0}
    values = shown.values()
    cell = (lambda x: lambda: x)(Config()).__closure__[0]
    of_keys: Read = lambda x, keyed=keyed, members=members: x * sum(k.a for k in [*keyed, *members])  # noqa: E731
    return [
        (of_keys, [lambda n: setattr(key, "a", n), lambda n: setattr(member, "a", n)]),
        (lambda x, found=tupled: x * next(iter(found))[0].a, [lambda n: setattr(one, "a", n)]),
        (lambda x, found=refs: x * sum(k.a for k in found), [lambda n: setattr(far, "a", n)]),
        (lambda x, get=bound.get: x * get("a"), [lambda n: bound.update(a=n)]),
        (lambda x, get=seen.__getitem__: x * get("a"), [lambda n: seen.update(a=n)]),
        (lambda x, found=values: x * sum(found), [lambda n: shown.update(a=n)]),
        (lambda x, found=types.MappingProxyType(shown): x * found["a"], [lambda n: shown.update(a=n)]),
        (lambda x, found=cell: x * found.cell_contents.a, [lambda n: setattr(cell.cell_contents, "a", n)]),
    ]


def _dtype(n: float) -> torch.dtype:
    return torch.float64 if n > 2 else torch.float32


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    for name, names in (("capture_guards_pkg", {"alpha": 1.0}), ("capture_guards_pkg.sub", {"beta": 1.0})):
        sys.modules[name] = types.ModuleType(name)
        vars(sys.modules[name]).update(names)
    vars(sys.modules["capture_guards_pkg"])["sub"] = sys.modules["capture_guards_pkg.sub"]
    context.set(1.0)
    local.v = 1.0
    yield
    del sys.modules["capture_guards_pkg"], sys.modules["capture_guards_pkg.sub"]
    os.environ.pop("GUARDED", None)
    torch.set_default_dtype(torch.float32)
    Base.rate, Meta.level = 1.0, 1.0
    if "level" in vars(Base):
        del Base.level
    scaled.__defaults__, scaled.__kwdefaults__ = (1.0,), {"by": 1.0}


def check(ways: list[tuple[Read, list[Change]]], draw: random.Random, calls: int) -> dt.Captured[Any, Any]:
    """Compare calls of a program with these reads with eager, with random changes in between."""
    reads, changes = [read for read, _ in ways], [change for _, found in ways for change in found]

    def fn(x: Any) -> Any:
        return functools.reduce(lambda y, read: read(y), reads, x)

    captured = dt.capture(fn, limit=200)
    for _ in range(calls):
        if draw.random() < 0.7:
            draw.choice(changes)(float(draw.randrange(1, 5)))
        with torch.no_grad():
            expected, found = fn(X), captured(X)
        assert found.dtype == expected.dtype
        assert torch.equal(found.full_tensor().nan_to_num(), expected.full_tensor().nan_to_num())
    return captured


@pytest.mark.parametrize("half", keep_every_nth_fast(range(2)))
def test_calls_after_a_change_of_each_kind_of_read_state_equal_eager(half: int) -> None:
    for number in range(half, len(State().ways()), 2):
        captured = check([State().ways()[number]], random.Random(number), 10)
        assert captured.cache_info().replayed, number


@pytest.mark.parametrize("block", keep_chosen_fast(range(40), [26]))
def test_random_reads_with_random_changes_between_calls_equal_eager(block: int) -> None:
    for seed in range(block * 10, block * 10 + 10):
        draw = random.Random(seed)
        check(draw.sample(State().ways(), 4), draw, 12)
