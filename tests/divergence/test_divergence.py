"""Divergence: a rank that differs is named, an error of one rank raises on all, and no rank hangs, aborts or gets a wrong number.
Only some programs of the table run here; ``make test-chaos`` runs all.
"""

from __future__ import annotations

import contextlib
import copy
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from all_divergent_programs import DEADLY, DIFFERENT, FAILING, HEALTHY, RAISING
from gloo_processes import run_gloo
from outcome import Judge
from process_pool import Pool

import dtensor as dt
from dtensor.errors import DivergenceError
from dtensor.parallel import fully_shard
from dtensor.watchdog import collective_hooks

SIZE = 3
ALL = bool(os.environ.get("DTENSOR_CHAOS"))

pytestmark = pytest.mark.gloo


def some(programs: dict[str, Any], few: str) -> list[str]:
    """Return all names of ``programs``, or without DTENSOR_CHAOS those listed in ``few``."""
    assert programs.keys() >= set(few.split(", ")), f"unknown: {sorted(set(few.split(', ')) - programs.keys())}"
    return list(programs) if ALL else few.split(", ")


@pytest.fixture(scope="module", params=["watch", "strict"])
def judge(request: pytest.FixtureRequest) -> Iterator[Judge]:
    pool = Pool(SIZE, request.param)
    yield Judge(pool, request.param)
    pool.close()


def check(judge: Judge, name: str) -> None:
    assert not (wrong := judge.of(name).wrong), wrong


@pytest.mark.parametrize(
    "name",
    some(
        DIFFERENT,
        "sum0/sum1, sum0/mean0, full/large, large_sum/large, nothing/barrier, full/rows_of_5, nothing/item, blocks/wide blocks, "
        "random/drawn before, all to all/all to all of others, sharded/inside backward/sums, sum_then_large_sum/item, "
        "sharded/before optimizer/sums, nothing/destroyed, caught/embedding, caught/out of memory to send, meta/local tensors, "
        "own calls/all_to_all of one, own calls/async all_reduce of one, own calls/barrier of all but one, "
        "hostile/an expert left out, hostile/a checkpoint not saved, hostile/another number of no dims, "
        "hostile/another tensor of one element, "
        "units/other divisors of gradients, units/causal context, states/in the background, states/saves where others load, "
        "states/another folder that is there, around/another way to draw",
    ),
)
def test_rank_with_different_calls_is_named(name: str, judge: Judge) -> None:
    check(judge, name)


@pytest.mark.parametrize(
    "name",
    some(
        RAISING,
        "sum0/raises, full/raises and goes on, sharded/inside forward/raises, item/is interrupted, a state drifts, "
        "own calls/recv beside barrier goes on, amid messages/is interrupted, hostile/raises what ends a loop, "
        "hostile/raises before a save of 0",
    ),
)
def test_error_on_one_rank_raises_on_the_other_ranks(name: str, judge: Judge) -> None:
    check(judge, name)


@pytest.mark.parametrize(
    "name", some(DEADLY, "sum0/killed, full/stopped, replicated/before optimizer/is killed, amid gathers/killed")
)
def test_death_of_one_rank_raises_on_the_other_ranks(name: str, judge: Judge) -> None:
    check(judge, name)


@pytest.mark.parametrize(
    "name", some(FAILING, "failing/embedding, failing/one hot, failing/binary cross entropy, failing/svd of NaN")
)
def test_invalid_values_on_one_rank_raise_on_all_ranks(name: str, judge: Judge) -> None:
    check(judge, name)


@pytest.mark.parametrize(
    "name",
    some(
        HEALTHY,
        "healthy/backward, healthy/many, healthy/forked, healthy/gradients held, "
        "healthy/dropped, slow/sum0, healthy/loaded by a worker, healthy/caught by all, healthy/called by all, "
        "healthy/left pending",
    ),
)
def test_equal_calls_on_all_ranks_raise_no_divergence_error(name: str, judge: Judge) -> None:
    check(judge, name)


def test_divergence_of_two_ranks_is_named_also_for_different_sharding_rules() -> None:
    """Check a rank with another sharding rule, which issues the same collectives."""
    pool = Pool(2, "strict")
    check(Judge(pool, "strict"), "around/a rule of its own")
    check(Judge(pool, "strict"), "sum0/mean0")  # its odd rank does not exist on two ranks
    pool.close()


@pytest.fixture(scope="module")
def hosts() -> Iterator[Judge]:
    pool = Pool(SIZE, "watch", apart=True)
    yield Judge(pool, "watch")
    pool.close()


@pytest.mark.parametrize(
    "name",
    some(
        {name: DIFFERENT[name] for name in DIFFERENT if "nothing" not in name.split("/")},
        "sum0/sum1, full/large, all to all/all to all of others",
    ),
)
def test_divergence_between_hosts_is_named(name: str, hosts: Judge) -> None:
    check(hosts, name)


@pytest.mark.parametrize(
    "name",
    some(FAILING, "failing/embedding")
    + some(RAISING, "sum0/raises, full/raises and goes on")
    + some({name: DEADLY[name] for name in DEADLY if "stopped" not in name}, "sum0/killed"),
)
def test_errors_of_a_rank_reach_other_hosts(name: str, hosts: Judge) -> None:
    check(hosts, name)


def _raises() -> None:
    raise ValueError("no data here")


def _is_killed() -> None:
    time.sleep(2.0)  # other ranks have reached their first mesh
    os.kill(os.getpid(), signal.SIGKILL)


def _ends_early(folder: str, rank: int, end: Callable[[], None], told: Any) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=3)
    dist.barrier()
    if rank == 1:
        end()
    begin = time.monotonic()
    try:
        dt.distribute_tensor(torch.ones(6), dt.init_device_mesh("cpu", (3,)), [dt.Shard(0)]).sum().item()
    except Exception as error:
        told.put((type(error).__name__, str(error).partition(" (on")[0].partition(":")[0], time.monotonic() - begin < 60.0))


@pytest.mark.parametrize(
    ("end", "name", "words"), [(_raises, "ValueError", "no data here"), (_is_killed, "RankLostError", "rank 1 is gone")]
)
def test_rank_that_ends_before_its_first_mesh_is_named(end: Callable[[], None], name: str, words: str, tmp_path: Path) -> None:
    spawn = torch.multiprocessing.get_context("spawn")
    told = spawn.Queue()
    ranks = [spawn.Process(target=_ends_early, args=(str(tmp_path), rank, end, told)) for rank in range(3)]
    for process in ranks:
        process.start()
    assert [told.get(timeout=100.0) for _ in range(2)] == [(name, words, True)] * 2
    for process in ranks:
        process.join()


def _meet_after_different_operations() -> str:
    dt.check_ranks("strict")
    x, rank, found = (
        dt.ones(4, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)]),
        dist.get_rank(),
        collective_hooks.find_event,
    )

    def slowly(board: Any, key: int, of: int, number: int) -> Any:
        entry = found(board, key, of, number)
        time.sleep(0.5 * (of == 1))  # meanwhile the other rank arrives
        return entry

    if rank:
        time.sleep(1.2)
        x.sin()
    else:
        x.cos()
        collective_hooks.find_event = slowly
    try:
        collective_hooks.wait_for_group_members([0, 1], "gloo")
    except DivergenceError:
        time.sleep(rank)  # keep the process alive for a while
        return "named"
    return "met"


def test_rank_that_arrives_during_a_comparison_raises_divergence_on_both_ranks() -> None:
    assert run_gloo(_meet_after_different_operations, 2) == ["named", "named"]


def _continue_after_divergence() -> list[str]:
    x, found = dt.ones(6, 4, device_mesh=dt.init_device_mesh("cpu", (3,)), placements=[dt.Shard(0)]), []
    x.full_tensor()
    with contextlib.suppress(IndexError, DivergenceError):
        if dist.get_rank() == 1:
            raise IndexError("caught by its program, which goes on with something else")
        x.full_tensor()
    for _ in range(3):  # immediately, before any rank has compared
        try:
            dt.distribute_tensor(torch.ones(5, 7), x.device_mesh, [dt.Shard(0)])
        except DivergenceError as error:
            found.append(str(error).partition(": ")[2].partition("\n")[0])
    return found


def test_all_ranks_raise_at_every_collective_after_a_divergence() -> None:
    assert run_gloo(_continue_after_divergence, 3) == [["rank 1 differs from ranks 0, 2"] * 3] * 3


def _run_units_in_another_order() -> str:
    mesh = dt.init_device_mesh("cpu", (2,))
    # of one size, so that lengths cannot distinguish them
    experts = [fully_shard(torch.nn.Linear(4, 4), mesh=mesh) for _ in range(3)]
    copied = copy.deepcopy(experts[0]) if dist.get_rank() else experts[0]  # a copy is no new unit
    fully_shard(torch.nn.Linear(4, 4), mesh=mesh)(torch.ones(1, 4))
    copied(torch.ones(1, 4))
    try:
        experts[1 + dist.get_rank()](torch.ones(1, 4))
    except DivergenceError as error:
        return " ".join(word for word in ("unit 1", "unit 2", "unit 3", "unit 4") if word in str(error).partition("\n")[2])
    return "nothing"


def test_ranks_that_gather_different_units_of_equal_size_raise_divergence() -> None:
    assert run_gloo(_run_units_in_another_order, 2) == ["unit 2 unit 3"] * 2
