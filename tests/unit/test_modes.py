"""Modes: each holds in the thread or task that entered it and in backward passes started there, in any exit order."""

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
from dtensor.comm import events
from dtensor.comm.map_ranks import communicator_of
from dtensor.debug import CommDebugMode
from dtensor.errors import ArgumentError, ImplicitCommunicationError, MixedTensorError
from dtensor.mesh.device_mesh import as_mesh

MESH = dt.init_device_mesh("cpu", (2,))
X = dt.distribute_tensor(torch.arange(5.0), MESH, [dt.Shard(0)])
P = dt.DTensor.from_local(torch.ones(3), MESH, [dt.Partial()])


def _succeeds(fn: Callable[[], Any], error: type[Exception]) -> bool:
    try:
        fn()
    except error:
        return False
    return True


def _is_explicit() -> bool:
    return not _succeeds(lambda: P.exp(), ImplicitCommunicationError)


def _is_implicit() -> bool:
    return _succeeds(lambda: X + torch.arange(5.0), MixedTensorError)


def _is_counter() -> bool:
    return dt.random.RANDOM_MODE.mode == "counter"


def _has_mesh() -> bool:
    return _succeeds(lambda: as_mesh(None), dt.errors.MeshError)


def entered_mesh() -> AbstractContextManager[Any]:
    return MESH


MODE_NAMES = ["explicit", "implicit_replication", "random_mode", "entered_mesh"]  # of MODES, in order
MODES: list[tuple[Callable[[], AbstractContextManager[Any]], Callable[[], bool]]] = [
    (dt.explicit, _is_explicit),
    (dt.implicit_replication, _is_implicit),
    (lambda: dt.random_mode("counter"), _is_counter),
    (entered_mesh, _has_mesh),
]


@pytest.fixture(autouse=True)
def _check_modes_left(frozen_garbage: None) -> Iterator[None]:
    yield
    gc.collect()
    assert not any(on() for _, on in MODES)


def _active_modes() -> list[bool]:
    return [on() for _, on in MODES]


def _enter_and_leave_at_random(seed: int, wait_for_others: Callable[[], Any], steps: int) -> list[str]:
    """Enter and leave modes at random. Return the steps after which the active modes are not those that were entered."""
    rng, entered, wrong = random.Random(seed), [], []
    for step in range(steps):
        if entered and rng.random() < 0.45:
            _, mode = entered.pop()
            mode.__exit__(None, None, None)
        else:
            number = rng.randrange(len(MODES))
            mode = MODES[number][0]()
            mode.__enter__()
            entered.append((number, mode))
        wait_for_others()
        expected = [any(number == k for number, _ in entered) for k in range(len(MODES))]
        if _active_modes() != expected:
            wrong.append(f"{seed}.{step}: {_active_modes()} instead of {expected}")
    while entered:
        entered.pop()[1].__exit__(None, None, None)
    return wrong


def _abort_on_error(barrier: threading.Barrier, fn: Callable[..., Any], *args: Any) -> Any:
    """Call ``fn(*args)``, and abort the barrier if it raises, so that other threads do not wait."""
    try:
        return fn(*args)
    except BaseException:
        barrier.abort()
        raise


def test_modes_of_threads_are_independent() -> None:
    barrier = threading.Barrier(4)
    with ThreadPoolExecutor(4) as pool:
        found = [pool.submit(_abort_on_error, barrier, _enter_and_leave_at_random, seed, barrier.wait, 30) for seed in range(4)]
        assert [line for future in found for line in future.result()] == []
        assert list(pool.map(lambda _: _active_modes(), range(4))) == [[False] * len(MODES)] * 4


def test_modes_of_asyncio_tasks_are_independent() -> None:
    async def walk(seed: int) -> list[str]:
        rng, wrong = random.Random(seed), []
        for _ in range(20):
            number = rng.randrange(len(MODES))
            with MODES[number][0]():
                await asyncio.sleep(0)
                wrong += [f"{seed}: {k} in {number}" for k, on in enumerate(_active_modes()) if on != (k == number)]
            await asyncio.sleep(0)
            wrong += [f"{seed}: outside" for on in _active_modes() if on]
        return wrong

    async def main() -> list[list[str]]:
        return await asyncio.gather(*map(walk, range(5)))

    assert asyncio.run(main()) == [[]] * 5


@pytest.mark.parametrize("number", range(len(MODES)), ids=MODE_NAMES)
def test_mode_blocks_can_end_in_any_order(number: int) -> None:
    enter, on = MODES[number]

    def suspended() -> Iterator[None]:
        with enter():
            yield

    first, second = suspended(), suspended()
    next(first), next(second)
    assert list(first) == []
    assert on()  # the second block has not ended
    assert list(second) == []
    assert not on()


@pytest.mark.parametrize("number", range(len(MODES)), ids=MODE_NAMES)
def test_a_mode_block_closed_in_another_thread_or_context_has_ended(number: int) -> None:
    enter, on = MODES[number]

    def suspended() -> Iterator[None]:
        with enter():
            yield

    block = suspended()
    next(block)
    thread = threading.Thread(target=block.close)
    thread.start()
    thread.join()
    assert not on()
    block = suspended()
    next(block)
    contextvars.copy_context().run(block.close)  # an event loop closes asynchronous generators like this
    assert not on()
    block = suspended()
    next(block)
    del block
    gc.collect()
    assert not on()


@pytest.mark.parametrize("number", range(len(MODES)), ids=MODE_NAMES)
def test_a_copied_context_keeps_its_modes(number: int) -> None:
    enter, on = MODES[number]
    outside = contextvars.copy_context()
    with enter():
        inside = contextvars.copy_context()
        assert on()
        assert inside.run(on)
        assert not outside.run(on)
    assert not on()
    assert inside.run(on)


@pytest.mark.parametrize("number", range(len(MODES)), ids=MODE_NAMES)
def test_mode_blocks_end_after_exceptions_and_nest(number: int) -> None:
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


@pytest.mark.parametrize("number", range(3), ids=MODE_NAMES[:3])
def test_decorated_functions_run_in_the_mode_and_generator_functions_raise(number: int) -> None:
    enter, on = MODES[number]

    @enter()
    def plain() -> bool:
        return on()

    @enter()
    async def coroutine() -> bool:
        await asyncio.sleep(0)
        return on()

    def generator() -> Iterator[bool]:
        yield on()

    assert plain()
    assert asyncio.run(coroutine())
    with pytest.raises(ArgumentError, match="inside"):
        enter()(generator)
    block = enter()
    with block:
        pass
    with pytest.raises(RuntimeError, match="entered before"), block:
        pass


def test_backward_hooks_run_in_the_modes_of_the_caller_of_backward() -> None:
    w = dt.distribute_tensor(torch.ones(4, 3), MESH, [dt.Shard(0)]).requires_grad_()
    observed: list[list[bool]] = []
    y = (w * 2).sum()
    y.register_hook(lambda _: observed.append([_is_explicit(), _is_counter()]))
    with dt.explicit(), dt.random_mode("counter"):
        y.backward(retain_graph=True)
    y.backward()
    assert observed == [[True, True], [False, False]]


AUTOGRAD_THREAD_PROGRAM = """
import threading
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
import dtensor as dt
from dtensor.comm import events
from dtensor.base.modes import MODES
_setup_privateuseone_for_python_backend("pretended")

class RecordModes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.empty(x.shape, device=x.device)

    @staticmethod
    def backward(ctx, g):
        assert threading.get_ident() != main
        events.report_event("event")
        with dt.implicit_replication():
            states.append((MODES.explicit, dt.random.RANDOM_MODE.mode, MODES.implicit_replication))
        return g

def backward():
  with fake:
    RecordModes.apply(x).backward(torch.empty(3, device="pretended"))

main, states, reported = threading.get_ident(), [], []
with FakeTensorMode() as fake:
    x = torch.empty(3, device="pretended", requires_grad=True)
    with dt.explicit(), dt.random_mode("counter"), events.listening(reported.append):
        backward()
        other = threading.Thread(target=backward)
        other.start()
        other.join()
    backward()
print(states, reported)
"""


@pytest.mark.slow
def test_autograd_threads_run_in_the_modes_of_the_caller_of_backward() -> None:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", AUTOGRAD_THREAD_PROGRAM], capture_output=True, text=True, timeout=120, check=False
    )
    plain = (False, "exact", True)
    assert done.stdout.strip() == f"{[(True, 'counter', True), plain, plain]} ['event']", done.stderr[-2000:]


def test_manual_seed_sets_the_random_mode_of_the_process_or_block() -> None:
    with dt.random_mode("exact"):
        dt.manual_seed(0, mode="counter")
        assert _is_counter()
    assert not _is_counter()
    dt.manual_seed(0, mode="counter")
    try:
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(_is_counter).result()  # the mode of the seed
    finally:
        dt.manual_seed(0, mode="exact")


def test_comm_debug_mode_counts_only_collectives_of_its_thread_or_task() -> None:
    listeners_before = set(events.listeners)
    started, counted = threading.Barrier(2), threading.Barrier(2)

    def count_in_thread() -> int:
        started.wait(60)
        with CommDebugMode() as comm:
            X.full_tensor()
            counted.wait(60)
        return comm.get_total_counts()

    with ThreadPoolExecutor(1) as pool, CommDebugMode() as comm:
        found = pool.submit(count_in_thread)
        started.wait(60)
        counted.wait(60)
        P.full_tensor()
        assert found.result() == 1
    assert dict(comm.get_comm_counts()) == {"all_reduce": 1}

    async def count_in_task(calls: int) -> int:
        with CommDebugMode() as comm:
            for _ in range(calls):
                await asyncio.sleep(0)
                torch.nn.Identity()(X).full_tensor()
        assert list(comm.comm_module_counts) == ["Global", "Identity"]
        return comm.get_total_counts()

    async def main() -> list[int]:
        return await asyncio.gather(*map(count_in_task, range(1, 5)))

    assert asyncio.run(main()) == [1, 2, 3, 4]
    assert events.listeners == listeners_before


def test_communicator_map_in_threads_runs_with_the_right_current_rank() -> None:
    wrong: list[Any] = []

    def check_ranks() -> None:
        for _ in range(50):
            ranks = communicator_of(MESH).map(lambda member: torch.tensor([member, MESH.get_rank()]))
            wrong.extend(shard for rank, shard in enumerate(ranks.shards) if shard.tolist() != [rank, rank])

    threads = [threading.Thread(target=check_ranks) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
