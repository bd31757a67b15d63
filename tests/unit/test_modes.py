"""Modes belong to the thread or task that entered them, and to its backward passes, in whatever order they are left."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import random
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.comm import communicator_of, events
from dtensor.debug import CommDebugMode
from dtensor.errors import ArgumentError, ImplicitCommunicationError, MixedTensorError
from dtensor.mesh.device_mesh import as_mesh

MESH = dt.init_device_mesh("cpu", (2,))
X = dt.distribute_tensor(torch.arange(5.0), MESH, [dt.Shard(0)])
P = dt.DTensor.from_local(torch.ones(3), MESH, [dt.Partial()])


def _works(fn: Callable[[], Any], error: type[Exception]) -> bool:
    try:
        fn()
    except error:
        return False
    return True


def _explicit() -> bool:
    return not _works(lambda: P.exp(), ImplicitCommunicationError)


def _implicit() -> bool:
    return _works(lambda: X + torch.arange(5.0), MixedTensorError)


def _counted() -> bool:
    return dt.random.RANDOM_MODE.mode == "counter"


def _in_mesh() -> bool:
    return _works(lambda: as_mesh(None), dt.errors.MeshError)


def entered_mesh() -> AbstractContextManager[Any]:
    return MESH


MODES: list[tuple[Callable[[], AbstractContextManager[Any]], Callable[[], bool]]] = [
    (dt.explicit, _explicit),
    (dt.implicit_replication, _implicit),
    (lambda: dt.random_mode("counter"), _counted),
    (entered_mesh, _in_mesh),
]


@pytest.fixture(autouse=True)
def _left_alone(little_to_collect: None) -> Iterator[None]:
    yield
    gc.collect()
    assert not any(on() for _, on in MODES)


def _states() -> list[bool]:
    return [on() for _, on in MODES]


def _wander(seed: int, turn: Callable[[], Any], checks: int) -> list[str]:
    """Enter and leave modes at random; after each step compare all with what this walk has entered."""
    rng, entered, wrong = random.Random(seed), [], []
    for step in range(checks):
        if entered and rng.random() < 0.45:
            _, mode = entered.pop()
            mode.__exit__(None, None, None)
        else:
            number = rng.randrange(len(MODES))
            mode = MODES[number][0]()
            mode.__enter__()
            entered.append((number, mode))
        turn()
        expected = [any(number == k for number, _ in entered) for k in range(len(MODES))]
        if _states() != expected:
            wrong.append(f"{seed}.{step}: {_states()} instead of {expected}")
    while entered:
        entered.pop()[1].__exit__(None, None, None)
    return wrong


def _aborting(barrier: threading.Barrier, fn: Callable[..., Any], *args: Any) -> Any:
    """``fn(*args)``; the others do not wait for one that raises."""
    try:
        return fn(*args)
    except BaseException:
        barrier.abort()
        raise


def test_threads_do_not_see_each_others_modes() -> None:
    barrier = threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(_aborting, barrier, _wander, seed, barrier.wait, 30) for seed in range(4)]
        assert [line for future in found for line in future.result()] == []
        assert list(pool.map(lambda _: _states(), range(4))) == [[False] * len(MODES)] * 4


def test_tasks_do_not_see_each_others_modes() -> None:
    async def walk(seed: int) -> list[str]:
        rng, wrong = random.Random(seed), []
        for _ in range(20):
            number = rng.randrange(len(MODES))
            with MODES[number][0]():
                await asyncio.sleep(0)
                wrong += [f"{seed}: {k} in {number}" for k, on in enumerate(_states()) if on != (k == number)]
            await asyncio.sleep(0)
            wrong += [f"{seed}: outside" for on in _states() if on]
        return wrong

    async def main() -> list[list[str]]:
        return await asyncio.gather(*map(walk, range(5)))

    assert asyncio.run(main()) == [[]] * 5


@pytest.mark.parametrize("number", range(len(MODES)))
def test_blocks_end_in_any_order(number: int) -> None:
    enter, on = MODES[number]

    def suspended() -> Iterator[None]:
        with enter():
            yield

    first, second = suspended(), suspended()
    next(first), next(second)
    assert list(first) == []
    assert on()  # the second is still inside
    assert list(second) == []
    assert not on()


@pytest.mark.parametrize("number", range(len(MODES)))
def test_a_block_left_elsewhere_has_ended(number: int) -> None:
    enter, on = MODES[number]

    def suspended() -> Iterator[None]:
        with enter():
            yield

    walk = suspended()
    next(walk)
    thread = threading.Thread(target=walk.close)
    thread.start()
    thread.join()
    assert not on()
    walk = suspended()
    next(walk)
    contextvars.copy_context().run(walk.close)  # as an event loop ends asynchronous generators
    assert not on()
    walk = suspended()
    next(walk)
    del walk
    gc.collect()
    assert not on()


@pytest.mark.parametrize("number", range(len(MODES)))
def test_a_copied_context_keeps_what_it_saw(number: int) -> None:
    enter, on = MODES[number]
    outside = contextvars.copy_context()
    with enter():
        inside = contextvars.copy_context()
        assert on()
        assert inside.run(on)
        assert not outside.run(on)
    assert not on()
    assert inside.run(on)


@pytest.mark.parametrize("number", range(len(MODES)))
def test_exceptions_and_nesting(number: int) -> None:
    enter, on = MODES[number]
    with pytest.raises(ZeroDivisionError), enter():
        _ = 1 / 0
    assert not on()
    with ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(enter())
        with enter():
            pass
        assert on()
    assert not on()


@pytest.mark.parametrize("number", range(3))
def test_decorated_functions_run_inside(number: int) -> None:
    enter, on = MODES[number]

    @enter()
    def plain() -> bool:
        return on()

    @enter()
    async def later() -> bool:
        await asyncio.sleep(0)
        return on()

    def generator() -> Iterator[bool]:
        yield on()

    assert plain()
    assert asyncio.run(later())
    with pytest.raises(ArgumentError, match="inside"):
        enter()(generator)
    block = enter()
    with block:
        pass
    with pytest.raises(RuntimeError, match="entered before"), block:
        pass


def test_a_backward_pass_sees_the_modes_of_who_starts_it() -> None:
    w = dt.distribute_tensor(torch.ones(4, 3), MESH, [dt.Shard(0)]).requires_grad_()
    seen: list[list[bool]] = []
    y = (w * 2).sum()
    y.register_hook(lambda _: seen.append([_explicit(), _counted()]))
    with dt.explicit(), dt.random_mode("counter"):
        y.backward(retain_graph=True)
    y.backward()
    assert seen == [[True, True], [False, False]]


ELSEWHERE = """
import threading
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
import dtensor as dt
from dtensor.comm import events
from dtensor.base.modes import MODES
_setup_privateuseone_for_python_backend("pretended")

class Seen(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.empty(x.shape, device=x.device)

    @staticmethod
    def backward(ctx, g):
        assert threading.get_ident() != main
        events.report("event")
        with dt.implicit_replication():
            states.append((MODES.explicit, dt.random.DRAWING.mode, MODES.implicit_replication))
        return g

def backward():
  with fake:
    Seen.apply(x).backward(torch.empty(3, device="pretended"))

main, states, told = threading.get_ident(), [], []
with FakeTensorMode() as fake:
    x = torch.empty(3, device="pretended", requires_grad=True)
    with dt.explicit(), dt.random_mode("counter"), events.listening(told.append):
        backward()
        other = threading.Thread(target=backward)
        other.start()
        other.join()
    backward()
print(states, told)
"""


@pytest.mark.slow
def test_autograds_own_threads_see_the_modes_of_who_starts_the_pass() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", ELSEWHERE], capture_output=True, text=True, timeout=120, check=False
    )
    plain = (False, "exact", True)
    assert done.stdout.strip() == f"{[(True, 'counter', True), plain, plain]} ['event']", done.stderr[-2000:]


def test_a_seed_sets_the_mode_of_the_process_or_of_the_block() -> None:
    with dt.random_mode("exact"):
        dt.manual_seed(0, mode="counter")
        assert _counted()
    assert not _counted()
    dt.manual_seed(0, mode="counter")
    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(_counted).result()  # as the seed
    finally:
        dt.manual_seed(0, mode="exact")


def test_collectives_are_counted_where_they_are_issued() -> None:
    at_rest = set(events.listeners)
    started, counted = threading.Barrier(2), threading.Barrier(2)

    def elsewhere() -> int:
        started.wait(60)
        with CommDebugMode() as comm:
            X.full_tensor()
            counted.wait(60)
        return comm.get_total_counts()

    with ThreadPoolExecutor(1) as pool, CommDebugMode() as comm:
        found = pool.submit(elsewhere)
        started.wait(60)
        counted.wait(60)
        P.full_tensor()
        assert found.result() == 1
    assert dict(comm.get_comm_counts()) == {"all_reduce": 1}

    async def one(calls: int) -> int:
        with CommDebugMode() as comm:
            for _ in range(calls):
                await asyncio.sleep(0)
                torch.nn.Identity()(X).full_tensor()
        assert list(comm.comm_module_counts) == ["Global", "Identity"]
        return comm.get_total_counts()

    async def main() -> list[int]:
        return await asyncio.gather(*map(one, range(1, 5)))

    assert asyncio.run(main()) == [1, 2, 3, 4]
    assert events.listeners == at_rest


def test_each_thread_runs_for_its_own_rank() -> None:
    wrong: list[Any] = []

    def walk() -> None:
        for _ in range(50):
            ranks = communicator_of(MESH).map(lambda member: torch.tensor([member, MESH.get_rank()]))
            wrong.extend(shard for rank, shard in enumerate(ranks.shards) if shard.tolist() != [rank, rank])

    threads = [threading.Thread(target=walk) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
