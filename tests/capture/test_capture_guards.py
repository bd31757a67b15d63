"""Guards: after a change of state that a captured function reads, a call gives what the function gives, or raises."""

from __future__ import annotations

import argparse
import collections
import contextvars
import cProfile
import dataclasses
import datetime
import decimal
import enum
import functools
import gc
import io
import itertools
import logging
import os
import pathlib
import random
import resource
import sys
import tempfile
import time
import types
import uuid
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy
import pytest
import torch
from slow_case_marks import keep_every_nth_fast
from torch import nn

import dtensor as dt
from dtensor.errors import CaptureError

MESH = dt.init_device_mesh("cpu", (2,))
X = dt.distribute_tensor(torch.arange(1.0, 6.0), MESH, [dt.Shard(0)])

Case = tuple[Callable[[Any], Any], Callable[[], Any]]  # a function, and a change of what it reads
CASES: dict[str, Callable[[], Case]] = {}


def case(fn: Callable[[], Case]) -> Callable[[], Case]:
    CASES[fn.__name__] = fn
    return fn


def package() -> Any:
    """``pkg``, ``pkg.sub`` and ``pkg.sub.deep``, with variables, as imported modules."""
    pkg, sub, deep = (types.ModuleType(name) for name in ("given_pkg", "given_pkg.sub", "given_pkg.sub.deep"))
    pkg.sub, sub.deep = sub, deep
    for module in (pkg, sub, deep):
        module.alpha, module.items, module.table = 2.0, [1.0, 2.0], {"k": 3.0}
        sys.modules[module.__name__] = module
    return pkg


pkg = package()
alpha = 2.0
rates = [1.0, 2.0]
flags: dict[str, Any] = {}
settings = argparse.Namespace(scale=2.0)
variable: contextvars.ContextVar[float] = contextvars.ContextVar("variable", default=1.0)
array = numpy.ones(3)


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    global pkg, alpha, rates, array
    pkg, alpha, rates, array = package(), 2.0, [1.0, 2.0], numpy.ones(3)
    flags.clear()
    settings.scale = 2.0
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
    variable.set(1.0)


def change(**values: Any) -> Callable[[], None]:
    return lambda: globals().update(values)


@case
def a_global() -> Case:
    return lambda x: x * alpha, change(alpha=3.0)


@case
def a_global_that_is_defined_later() -> Case:
    space: dict[str, Any] = {"__name__": "given_space"}
    exec("def fn(x): return x * (later if 'later' in globals() else 1.0)", space)
    return space["fn"], lambda: space.update(later=3.0)


@case
def a_module_in_a_module() -> Case:
    return lambda x: x * pkg.sub.alpha, lambda: setattr(pkg.sub, "alpha", 5.0)


@case
def a_variable_of_a_nested_module() -> Case:
    return lambda x: x * pkg.sub.deep.alpha, lambda: setattr(pkg.sub.deep, "alpha", 5.0)


@case
def a_list_in_a_nested_module() -> Case:
    return lambda x: x * sum(pkg.sub.deep.items), lambda: pkg.sub.deep.items.append(5.0)


@case
def a_table_in_a_module() -> Case:
    return lambda x: x * pkg.sub.table["k"], lambda: pkg.sub.table.update(k=5.0)


@case
def a_module_replaced() -> Case:
    return lambda x: x * pkg.sub.alpha, lambda: setattr(pkg, "sub", types.SimpleNamespace(alpha=7.0))


@case
def a_name_added_to_a_module() -> Case:
    return lambda x: x * (2.0 if hasattr(pkg.sub, "extra") else 1.0), lambda: setattr(pkg.sub, "extra", 1)


@case
def a_name_replaced_by_another_in_a_module() -> Case:
    def swap() -> None:
        del pkg.sub.items
        pkg.sub.extra = 1

    return lambda x: x * getattr(pkg.sub, "extra", 3.0), swap


@case
def a_module_given_to_a_function() -> Case:
    def read(module: Any, name: str) -> Any:
        return getattr(module, name)

    return lambda x: x * read(pkg.sub, "alpha"), lambda: setattr(pkg.sub, "alpha", 5.0)


@case
def a_module_with_getattr() -> Case:
    pkg.sub.__getattr__ = lambda name: pkg.sub.table["k"]
    return lambda x: x * pkg.sub.missing, lambda: pkg.sub.table.update(k=5.0)


@case
def an_import_inside() -> Case:
    def fn(x: Any) -> Any:
        import given_pkg.sub.deep as deep
        from given_pkg.sub import alpha as inner

        return x * inner * deep.alpha

    return fn, lambda: setattr(pkg.sub.deep, "alpha", 5.0)


@case
def a_module_from_sys_modules() -> Case:
    return lambda x: x * sys.modules["given_pkg.sub"].alpha, lambda: setattr(pkg.sub, "alpha", 5.0)


class Thing:
    factor = 1.0

    def __init__(self) -> None:
        self.own = 1.0
        self.items = [1.0, 2.0]

    @property
    def through_property(self) -> float:
        return alpha * self.own

    @classmethod
    def through_class(cls) -> float:
        return alpha * cls.factor

    @staticmethod
    def through_static() -> float:
        return alpha

    @functools.cached_property
    def cached(self) -> float:
        return alpha

    def method(self) -> float:
        return 1.0

    def __call__(self, x: Any) -> Any:
        return x * self.own

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name == "flag":
            raise AttributeError(name)
        return alpha

    def __getitem__(self, k: int) -> float:
        return alpha * k

    def __len__(self) -> int:
        return len(self.items)


@case
def a_global_in_a_property() -> Case:
    thing = Thing()
    return lambda x: x * thing.through_property, change(alpha=3.0)


@case
def a_global_in_a_class_method() -> Case:
    return lambda x: x * Thing.through_class(), change(alpha=3.0)


@case
def a_global_in_a_static_method() -> Case:
    thing = Thing()
    return lambda x: x * thing.through_static(), change(alpha=3.0)


@case
def a_global_in_special_methods() -> Case:
    thing = Thing()
    return lambda x: x * thing[1] * thing.whatever, change(alpha=3.0)


@case
def a_cleared_cached_property() -> Case:
    thing = Thing()
    thing.cached  # noqa: B018

    def forget() -> None:
        globals()["alpha"] = 3.0
        del thing.cached

    return lambda x: x * thing.cached, forget


@case
def an_attribute_added() -> Case:
    thing = Thing()
    return lambda x: x * (2.0 if hasattr(thing, "flag") else 1.0), lambda: setattr(thing, "flag", 1)


@case
def a_class_attribute() -> Case:
    made = type("Made", (Thing,), {})
    return lambda x: x * made.factor, lambda: setattr(made, "factor", 3.0)


@case
def a_method_of_the_class() -> Case:
    made = type("Made", (Thing,), {})
    thing = made()
    return lambda x: x * thing.method(), lambda: setattr(made, "method", lambda self: 4.0)


@case
def a_method_of_the_instance() -> Case:
    thing = Thing()
    return lambda x: x * thing.method(), lambda: setattr(thing, "method", lambda: 4.0)


@case
def a_replaced_class_of_an_object() -> Case:
    thing = Thing()
    return lambda x: x * thing.method(), lambda: setattr(thing, "__class__", type("M", (Thing,), {"method": lambda self: 4.0}))


@case
def an_attribute_of_a_metaclass() -> Case:
    class Kind(type):
        rate = 1.0

    class Made(metaclass=Kind):
        pass

    return lambda x: x * Made.rate, lambda: setattr(Kind, "rate", 4.0)


@case
def the_length_of_a_list() -> Case:
    return lambda x: x * len(rates), lambda: rates.append(1.0)


@case
def an_element_of_a_long_list() -> Case:
    long = list(range(20_000))
    return lambda x: x * long[15_000], lambda: long.__setitem__(15_000, 7)


@case
def an_element_of_a_long_list_of_floats() -> Case:
    long = [float(k) for k in range(12_000)]
    return lambda x: x * long[11_000], lambda: long.__setitem__(11_000, 7.0)


@case
def an_element_of_a_long_dict() -> Case:
    long = {k: k for k in range(20_000)}
    return lambda x: x * long[15_000], lambda: long.__setitem__(15_000, 7)


@case
def an_attribute_of_a_list() -> Case:
    class Listed(list):
        scale = 1.0

    held = Listed([1.0])
    return lambda x: x * held.scale, lambda: setattr(held, "scale", 3.0)


@case
def a_key_that_is_added_later() -> Case:
    return lambda x: x * flags.get("scale", 1.0), lambda: flags.update(scale=2.0)


@case
def a_field_of_a_dataclass() -> Case:
    @dataclasses.dataclass
    class Config:
        scale: float = 1.0
        nested: list[float] = dataclasses.field(default_factory=lambda: [1.0])

    config = Config()
    return lambda x: x * config.scale * config.nested[0], lambda: config.nested.__setitem__(0, 4.0)


@case
def a_slot() -> Case:
    class Slotted:
        __slots__ = ("__hidden", "scale")

        def __init__(self) -> None:
            self.scale = self.__hidden = 1.0

        def read(self) -> float:
            return self.scale * self.__hidden

    held = Slotted()
    return lambda x: x * held.read(), lambda: setattr(held, "_Slotted__hidden", 3.0)


@case
def an_argparse_namespace() -> Case:
    return lambda x: x * settings.scale, lambda: setattr(settings, "scale", 3.0)


@case
def a_partial() -> Case:
    held = [1.0]
    return functools.partial(lambda held, x: x * held[0], held), lambda: held.__setitem__(0, 3.0)


@case
def a_partial_method() -> Case:
    class Made:
        def times(self, factor: float, x: Any) -> Any:
            return x * factor * alpha

        twice = functools.partialmethod(times, 2.0)

    made = Made()
    return lambda x: made.twice(x), change(alpha=3.0)


@case
def a_variable_of_a_closure() -> Case:
    scale = 1.0

    def set_scale() -> None:
        nonlocal scale
        scale = 3.0

    return lambda x: x * scale, set_scale


@case
def a_nested_function() -> Case:
    def fn(x: Any) -> Any:
        def inner() -> Any:
            return sum(pkg.sub.alpha for _ in range(1))

        return x * inner()

    return fn, lambda: setattr(pkg.sub, "alpha", 3.0)


@case
def an_attribute_of_a_function() -> Case:
    def fn(x: Any) -> Any:
        return x * fn.scale

    fn.scale = 1.0
    return fn, lambda: setattr(fn, "scale", 3.0)


@case
def a_default_argument() -> Case:
    def fn(x: Any, scale: float = 1.0) -> Any:
        return x * scale

    return fn, lambda: setattr(fn, "__defaults__", (3.0,))


@case
def replaced_code_of_a_function() -> Case:
    def inner() -> float:
        return 1.0

    def other() -> float:
        return 3.0

    return lambda x: x * inner(), lambda: setattr(inner, "__code__", other.__code__)


@case
def a_decorated_function() -> Case:
    def twice(fn: Any) -> Any:
        @functools.wraps(fn)
        def run() -> Any:
            return 2 * fn()

        return run

    @twice
    def read() -> float:
        return alpha

    return lambda x: x * read(), change(alpha=3.0)


@case
def a_cached_function() -> Case:
    @functools.lru_cache
    def read() -> float:
        return alpha

    def forget() -> None:
        globals()["alpha"] = 3.0
        read.cache_clear()

    return lambda x: x * read(), forget


@case
def the_size_of_an_lru_cache() -> Case:
    read = functools.lru_cache(lambda n: n)
    return lambda x: x * read.cache_info().currsize, lambda: read(1.0)


@case
def the_hits_of_an_lru_cache() -> Case:
    read = functools.lru_cache(lambda: 1.0)
    read()
    return lambda x: x * read.cache_info().hits, read


@case
def the_environment() -> Case:
    return lambda x: x * float(os.environ.get("GIVEN_SCALE", "1")), lambda: os.environ.update(GIVEN_SCALE="3")


@case
def the_environment_through_getenv() -> Case:
    return lambda x: x * float(os.getenv("GIVEN_SCALE", "1")), lambda: os.environ.update(GIVEN_SCALE="3")


@case
def a_context_variable() -> Case:
    return lambda x: x * variable.get(), lambda: variable.set(3.0)


@case
def an_array() -> Case:
    return lambda x: x * float(array[1]), lambda: array.__setitem__(1, 3.0)


@case
def a_view_of_an_array() -> Case:
    whole = numpy.ones((4, 4))
    held = whole[::2, 1]
    return lambda x: x * float(held.sum()), lambda: whole.__setitem__((2, 1), 3.0)


@case
def a_bytearray() -> Case:
    held = bytearray(b"\1\2\3")
    return lambda x: x * held[1], lambda: held.__setitem__(1, 9)


@case
def a_generator() -> Case:
    held = (float(k) for k in itertools.count(1))
    return lambda x: x * next(held), lambda: None


@case
def an_iterator() -> Case:
    held = iter([1.0, 2.0, 3.0, 4.0, 5.0, 6.0])
    return lambda x: x * next(held), lambda: None


@case
def an_itertools_count() -> Case:
    held = itertools.count(1)
    return lambda x: x * next(held), lambda: None


@case
def a_random_generator_of_python() -> Case:
    held = random.Random(0)
    return lambda x: x * held.random(), lambda: None


@case
def a_random_generator_of_numpy() -> Case:
    held = numpy.random.default_rng(0)
    return lambda x: x * held.random(), lambda: None


@case
def a_member_of_an_enum() -> Case:
    class Level(enum.Enum):
        LOW = 1

        def scale(self) -> float:
            return alpha

    return lambda x: x * Level.LOW.scale(), change(alpha=3.0)


@case
def containers_of_the_library() -> Case:
    held: dict[str, Any] = {
        "deque": collections.deque([1.0]),
        "chain": collections.ChainMap({"a": 1.0}),
        "user": collections.UserDict({"a": 1.0}),
        "counts": collections.Counter(a=1),
        "default": collections.defaultdict(float),
    }

    def alter() -> None:
        held["chain"].maps[0]["a"] = 5.0
        held["user"].data["a"] = 3.0

    return lambda x: x * held["deque"][0] * held["chain"]["a"] * held["user"]["a"] * held["counts"]["a"], alter


@case
def a_set() -> Case:
    held = {1, 2}
    return lambda x: x * len(held), lambda: held.add(5)


@case
def the_default_dtype() -> Case:
    return lambda x: x * torch.ones(5).to(x.dtype).sum(), lambda: None


@case
def the_grad_mode() -> Case:
    torch.set_grad_enabled(True)
    return lambda x: x * (2.0 if torch.is_grad_enabled() else 1.0), lambda: torch.set_grad_enabled(False)


def test_module_attributes_with_names_like_hook_tables_are_guarded() -> None:
    model = dt.parallel.parallelize_module(nn.Sequential(nn.Linear(6, 4)), MESH, {"0": dt.parallel.ColwiseParallel()})
    model.my_hooks, model.kept_hooks = (2.0,), [len]

    def step(x: torch.Tensor) -> Any:
        return model(x).sum() * model.my_hooks[0]

    captured, x = dt.capture(step), torch.ones(3, 6)
    with torch.no_grad():
        for _ in range(3):
            captured(x)
        assert captured.cache_info().replayed >= 1
        model.my_hooks = (3.0,)
        assert torch.equal(captured(x), step(x))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Sequential(nn.Dropout(0.0), nn.Identity())
        self.drop[1].rates = [1.0, 2.0]
        self.drop[1].notes = types.SimpleNamespace(held=[{"scale": 1.0}])
        self.register_buffer("scale", dt.ones(5, device_mesh=MESH, placements=[dt.Shard(0)]))

    def forward(self, x: Any) -> Any:
        inner = self.drop[1]
        y = self.drop(x) * self.scale * sum(inner.rates) * inner.notes.held[0]["scale"]
        return y * 2 if inner.training else y


def net_case(name: str, alter: Callable[[Net], Any]) -> None:
    def made() -> Case:
        net = Net()
        return net, lambda: alter(net)

    CASES[f"a_module_{name}"] = made


net_case("list_inside", lambda net: net.drop[1].rates.append(4.0))
net_case("namespace_inside", lambda net: net.drop[1].notes.held[0].update(scale=4.0))
net_case("part_in_evaluation", lambda net: net.drop[1].eval())
net_case("buffer_replaced", lambda net: setattr(net, "scale", net.scale * 3))
net_case("buffer_written", lambda net: net.scale.mul_(3))
net_case("part_replaced", lambda net: net.drop.__setitem__(0, nn.ReLU()))
net_case("part_appended", lambda net: net.drop.append(nn.ELU(0.5)))
net_case("hook", lambda net: net.drop[1].register_forward_hook(lambda module, args, out: out * 3))
net_case("hook_of_all", lambda net: CLEANUP.append(nn.modules.module.register_module_forward_hook(_tripled)))
net_case("forward_of_its_own", lambda net: setattr(net.drop[1], "forward", lambda x: x * 5))
CLEANUP: list[Any] = []


def _tripled(module: Any, args: Any, out: Any) -> Any:
    return out * 3 if type(module) is nn.Identity else None


@case
def a_parametrization() -> Case:
    net = nn.Linear(5, 5, bias=False)
    net.weight = nn.Parameter(dt.ones(5, 5, device_mesh=MESH, placements=[dt.Replicate()]))

    class Doubled(nn.Module):
        def forward(self, w: Any) -> Any:
            return w * 2

    return net, lambda: nn.utils.parametrize.register_parametrization(net, "weight", Doubled())


@case
def a_rate_of_an_optimizer() -> Case:
    opt = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    return lambda x: x * opt.param_groups[0]["lr"], lambda: opt.param_groups[0].update(lr=3.0)


@case
def an_epoch_of_a_schedule() -> Case:
    opt = torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1.0)
    schedule = torch.optim.lr_scheduler.StepLR(opt, 1)

    def alter() -> None:
        opt.step()
        schedule.step()

    return lambda x: x * (1 + schedule.last_epoch), alter


@pytest.mark.parametrize("name", CASES)
def test_call_after_a_change_of_read_state_equals_eager_or_raises(name: str) -> None:
    fn, alter = CASES[name]()
    captured = dt.capture(fn)
    twin = fn
    if name in STATEFUL:  # each call changes what the next one reads: refused within three calls
        with pytest.raises(CaptureError):
            _ = [captured(X) for _ in range(4)]
        return
    try:
        for _ in range(3):
            with torch.no_grad() if isinstance(fn, nn.Module) else torch.set_grad_enabled(torch.is_grad_enabled()):
                assert torch.equal(captured(X).full_tensor(), twin(X).full_tensor())
        assert captured.cache_info().replayed > 0, "the case shows nothing"
        alter()
        with torch.no_grad() if isinstance(fn, nn.Module) else torch.set_grad_enabled(torch.is_grad_enabled()):
            assert torch.equal(captured(X).full_tensor(), twin(X).full_tensor())
    finally:
        torch.set_grad_enabled(True)
        while CLEANUP:
            CLEANUP.pop().remove()


STATEFUL = {
    "a_generator",
    "an_iterator",
    "an_itertools_count",
    "a_random_generator_of_python",
    "a_random_generator_of_numpy",
}


class Config:
    def __init__(self) -> None:
        self.scale, self.array, self.items = 1.0, numpy.ones(2), [1.0]


def test_call_after_a_change_inside_an_object_argument_equals_eager() -> None:
    config, scales = Config(), numpy.ones(3)

    def fn(x: Any, held: Config, more: Any) -> Any:
        return x * held.scale * float(held.array[0]) * sum(held.items) * float(more[1]) * alpha

    captured = dt.capture(fn)

    def check() -> None:
        assert torch.equal(captured(X, config, scales).full_tensor(), fn(X, config, scales).full_tensor())

    check()
    check()
    assert captured.cache_info().replayed == 1
    for alter in (
        lambda: setattr(config, "scale", 2.0),
        lambda: config.array.__setitem__(0, 3.0),
        lambda: config.items.append(4.0),
        lambda: scales.__setitem__(1, 5.0),
    ):
        alter()
        check()


def read_lines() -> int:
    return len(pathlib.Path(__file__).read_text())


# reads of compiled code with results that can change between calls, directly and through the standard library
SYSTEM_READS: dict[str, Callable[[], float]] = {
    "a clock": time.time,
    "a clock through getattr": lambda: getattr(time, "perf_counter")(),  # noqa: B009
    "a clock behind a partial": functools.partial(time.monotonic),
    "a date": lambda: datetime.datetime.now().timestamp(),
    "a file": lambda: len(open(__file__).read()),  # noqa: SIM115
    "a path": read_lines,
    "existence of a file": lambda: float(os.path.exists(__file__)),
    "bytes of a file": lambda: float(numpy.fromfile(__file__, dtype=numpy.uint8)[0]),
    "random numbers of the system": lambda: random.SystemRandom().random(),
    "a uuid": lambda: float(uuid.uuid4().int % 7),
    "resource usage of the process": lambda: resource.getrusage(resource.RUSAGE_SELF).ru_utime,
    "the precision of decimals": lambda: float(decimal.getcontext().prec),
    "recursion limit": lambda: float(sys.getrecursionlimit()),
}


@pytest.mark.parametrize("name", SYSTEM_READS)
def test_reads_of_clock_file_and_interpreter_state_raise_at_capture(name: str) -> None:
    read = SYSTEM_READS[name]
    with pytest.raises(CaptureError, match="compiled code"):
        dt.capture(lambda x: x * read())(X)


def test_capture_error_that_the_function_catches_is_raised_at_its_end() -> None:
    def fn(x: Any) -> Any:
        try:
            return x * time.time()
        except Exception:
            return x

    with pytest.raises(CaptureError, match=r"time\.time"):
        dt.capture(fn)(X)


def test_clock_read_raises_also_with_a_profile_function_which_stays_set() -> None:
    seen: list[str] = []

    def profiler(frame: Any, event: str, found: Any) -> None:
        seen.append(event)

    sys.setprofile(profiler)
    try:
        with pytest.raises(CaptureError, match=r"time\.time"):
            dt.capture(lambda x: x * time.time())(X)
        same = sys.getprofile() is profiler
    finally:
        sys.setprofile(None)
    assert same
    assert "c_call" in seen


def test_clock_read_raises_also_under_cprofile_which_continues_to_record() -> None:
    profile = cProfile.Profile()
    profile.enable()
    try:
        with pytest.raises(CaptureError, match=r"time\.time"):
            dt.capture(lambda x: x * time.time())(X)
        read_lines()
    finally:
        profile.disable()
    names = {getattr(entry.code, "co_name", "") for entry in profile.getstats()}
    assert "read_lines" in names


def test_functions_of_trusted_modules_may_be_called_in_capture() -> None:
    captured = dt.capture(lambda x: (x * 2, time.perf_counter())[0], trusted=["time"])
    for _ in range(2):
        assert torch.equal(captured(X).full_tensor(), X.full_tensor() * 2)
    assert captured.cache_info().replayed == 1


def test_prints_logs_warnings_and_imports_are_allowed_in_capture() -> None:
    """Check prints, logs, warnings and imports, which run while the function is recorded and give no values to it."""

    def fn(x: Any) -> Any:
        import this_is_not_there_yet as late

        print(x.shape, file=io.StringIO())
        logging.getLogger("given").warning("at %s", x.shape)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.warn("given", stacklevel=1)
        return x * late.scale

    with tempfile.TemporaryDirectory() as folder:
        pathlib.Path(folder, "this_is_not_there_yet.py").write_text("scale = 3.0")
        sys.path.insert(0, folder)
        try:
            captured = dt.capture(fn, trusted=["io"])
            for _ in range(3):
                assert torch.equal(captured(X).full_tensor(), X.full_tensor() * 3)
        finally:
            sys.path.remove(folder)
    assert captured.cache_info().replayed


def test_clock_reads_in_garbage_collector_callbacks_are_allowed_in_capture() -> None:
    class Ending:
        def __del__(self) -> None:
            time.time()

    def callback(phase: str, info: Any) -> None:
        time.perf_counter()

    def fn(x: Any) -> Any:
        Ending()
        gc.collect()
        return x * 2

    gc.callbacks.append(callback)
    try:
        captured = dt.capture(fn)
        for _ in range(2):
            assert torch.equal(captured(X).full_tensor(), X.full_tensor() * 2)
    finally:
        gc.callbacks.remove(callback)
    assert captured.cache_info().replayed == 1


class Tripled(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 3 if func is torch.Tensor.mul else result


def test_call_under_a_torch_function_mode_runs_the_mode_on_each_operation() -> None:
    captured = dt.capture(lambda x: x.mul(2))
    for _ in range(2):
        captured(X)
    with Tripled():
        found = captured(X)
    assert torch.equal(found.full_tensor(), X.full_tensor() * 6)
    assert torch.equal(captured(X).full_tensor(), X.full_tensor() * 2)


class State:
    """State of many kinds, a program that reads it, and changes."""

    rate = 1.0

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.numbers, self.table = [1.0, 2.0, 3.0], {"a": 1.0, "b": 2.0}
        self.nested = types.SimpleNamespace(inner=[{"x": 1.0}])
        self.net = Net()
        self.scale = 1.0

    @property
    def product(self) -> float:
        return self.scale * type(self).rate * alpha

    def changes(self) -> list[Callable[[], Any]]:
        value = float(self.rng.randrange(1, 5))
        return [
            lambda: None,
            lambda: self.numbers.__setitem__(self.rng.randrange(len(self.numbers)), value),
            lambda: self.numbers.append(value),
            lambda: self.table.update({self.rng.choice("abcd"): value}),
            lambda: self.table.pop(next(iter(self.table)), None),
            lambda: self.nested.inner[0].update(x=value),
            lambda: setattr(self.nested, "inner", [{"x": value}]),
            lambda: setattr(self, "scale", value),
            lambda: setattr(type(self), "rate", value),
            lambda: setattr(pkg.sub, "alpha", value),
            lambda: setattr(pkg.sub.deep, self.rng.choice(["alpha", "extra"]), value),
            lambda: globals().update(alpha=value),
            lambda: self.net.drop[1].train(self.rng.random() < 0.5),
            lambda: self.net.drop[1].rates.append(value),
            lambda: setattr(self.net, "scale", self.net.scale * value),
            lambda: self.net.scale.add_(value),
            lambda: settings.__dict__.update(scale=value),
            lambda: os.environ.update(GIVEN_SCALE=str(value)),
        ]

    def program(self) -> Callable[[Any], Any]:
        parts: list[Callable[[Any], Any]] = [
            lambda x: x * sum(self.numbers),
            lambda x: x * len(self.numbers),
            lambda x: x * self.table.get("c", 2.0) * len(self.table),
            lambda x: x * self.nested.inner[0]["x"],
            lambda x: x * self.product,
            lambda x: x * pkg.sub.alpha * getattr(pkg.sub.deep, "extra", 1.0),
            lambda x: x + (pkg.sub.deep.alpha if hasattr(pkg.sub.deep, "extra") else 0.0),
            lambda x: self.net(x),
            lambda x: x * settings.scale,
            lambda x: x * float(os.environ.get("GIVEN_SCALE", 1.0)),
        ]
        chosen = self.rng.sample(parts, 3)
        return lambda x: functools.reduce(lambda y, part: part(y), chosen, x)


@pytest.mark.parametrize("seed", keep_every_nth_fast(range(12)))
def test_random_programs_with_state_changes_between_calls_equal_eager(seed: int) -> None:
    rng = random.Random(seed)
    state = State(rng)
    fn = state.program()
    captured = dt.capture(fn, limit=100)
    with torch.no_grad():
        for _ in range(12):
            rng.choice(state.changes())()
            assert torch.equal(captured(X).full_tensor(), fn(X).full_tensor())
    State.rate = 1.0


@pytest.mark.parametrize("seed", range(6))
def test_random_programs_that_read_system_state_raise_at_capture(seed: int) -> None:
    rng = random.Random(seed)
    fn, read = State(rng).program(), rng.choice([*SYSTEM_READS.values()])
    held: list[Any] = []
    wrapped = rng.choice(
        [
            lambda x: fn(x) + 0 * read(),
            lambda x: fn(x * max(map(lambda _: read(), [0]))),  # noqa: C417
            lambda x: fn(x) if sorted([1, 2], key=lambda _: read()) else x,
            lambda x: held.append(read()) or fn(x),
        ]
    )
    with torch.no_grad(), pytest.raises(CaptureError):
        dt.capture(wrapped)(X)
