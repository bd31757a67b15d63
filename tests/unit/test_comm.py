"""Communicators: collectives in process, on gloo, on threads, in dry runs and on the fake backend, and their counts."""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable
from typing import Any

import comm_cases
import pytest
import torch
import torch.distributed as dist
from gloo_processes import run_gloo
from slow_case_marks import keep_diagonals_fast
from thread_backend import run_on_threads
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor.comm import PerRank, RankValues, per_rank
from dtensor.comm.local_reduce import fold
from dtensor.comm.map_ranks import communicator_of, map_ranks
from dtensor.comm.pending import Pending
from dtensor.comm.processes import traced_collectives
from dtensor.debug import CommDebugMode
from dtensor.errors import LayoutError, MeshError
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Monoid
from dtensor.rules.aten.reduction import MOMENTS
from dtensor.rules.aten.softmax import EXP_SUM

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf support")

SQUARE = DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]], mesh_dim_names=("dp", "tp"))
CUBE = DeviceMesh("cpu", [[[0, 1], [2, 3]], [[4, 5], [6, 7]]], mesh_dim_names=("a", "b", "c"))
MESHES = {
    "(2,)": DeviceMesh("cpu", 2),
    "(3,) of odd ranks": DeviceMesh("cpu", [5, 1, 3]),
    "(1,)": DeviceMesh("cpu", 1),
    "(2, 3)": SQUARE,
    "tp of (2, 3)": SQUARE["tp"],
    "tp, dp of (2, 3)": SQUARE["tp", "dp"],
    "c, a of (2, 2, 2)": CUBE["c", "a"],
    "flattened": CUBE.flatten("all"),
}


@pytest.mark.parametrize(("case", "mesh"), keep_diagonals_fast(comm_cases.CASES, MESHES, every=5))
def test_collective_in_process_gives_expected_values(case: str, mesh: str) -> None:
    comm_cases.run_case(case, MESHES[mesh])


@pytest.mark.parametrize("case", ["all_gather_of_ragged_pieces", "all_to_all_of_ragged_chunks", "monoids_fold_in_group_order"])
def test_collective_on_a_3d_mesh_in_process_gives_expected_values(case: str) -> None:
    comm_cases.run_case(case, CUBE)


@pytest.mark.gloo
def test_collectives_on_gloo_give_expected_values() -> None:
    ran = run_gloo(comm_cases.main, 4, timeout_s=60.0)
    assert all(len(names) == 7 for names in ran)


@pytest.mark.parametrize(("case", "shape"), keep_diagonals_fast(comm_cases.CASES, [(4,), (2, 2)]))
def test_collective_on_a_thread_backend_gives_expected_values(
    case: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    def program(mesh_of: Callable[..., DeviceMesh]) -> None:
        comm_cases.run_case(case, mesh_of(*shape))

    run_on_threads(monkeypatch, 4, program)


# --- map ------------------------------------------------------------------------------------------------------------
def test_communicator_map_splits_arguments_and_combines_results_per_rank() -> None:
    comm = communicator_of(SQUARE)
    x = comm.map(lambda member: torch.full((member,), float(member)))
    assert isinstance(x, PerRank)
    pair, number, nothing = (
        comm.map(lambda member, d: (d["x"][0] + 1, d["y"]), {"x": [x], "y": torch.ones(1)}),
        comm.map(lambda member, x: x.numel(), x),
        comm.map(lambda member: None),
    )
    assert type(pair) is tuple
    assert all(isinstance(item, PerRank) for item in pair)
    assert [shard.tolist() for shard in pair[0].shards] == [[member + 1.0] * member for member in range(6)]
    assert isinstance(number, RankValues)
    assert number == tuple(range(6))
    assert nothing is None
    assert comm.map(operator.add, number) == tuple(2 * member for member in range(6))
    lists = comm.map(lambda member: [torch.zeros(member)] * member)
    assert isinstance(lists, RankValues)
    assert [len(item) for item in lists] == list(range(6))


def test_communicator_map_sets_the_current_rank() -> None:
    mesh = MESHES["(3,) of odd ranks"]
    assert communicator_of(mesh).map(lambda member: mesh.get_rank()) == (5, 1, 3)
    coordinates = map_ranks(lambda coordinate: (coordinate, SQUARE.get_coordinate(), SQUARE["tp"].get_local_rank()), mesh=SQUARE)
    assert all(argument == current and argument[1] == tp for argument, current, tp in coordinates)
    assert SQUARE.get_local_rank("dp").values == (0, 0, 0, 1, 1, 1)  # outside of map_ranks: the numbers of all ranks


def test_per_rank_values_of_another_number_of_ranks_raise() -> None:
    with pytest.raises(MeshError, match="2 ranks and one of 6 ranks cannot be combined"):
        communicator_of(SQUARE).all_reduce(per_rank([torch.ones(1), torch.ones(1)]), (0,)).wait()
    with pytest.raises(MeshError, match="2 ranks and one of 6 ranks cannot be combined"):
        communicator_of(SQUARE).map(lambda member, x: x, per_rank([torch.ones(1), torch.ones(1)]))


def test_all_reduce_of_addends_of_different_shapes_raises() -> None:
    with pytest.raises(LayoutError, match="same shape to a reduction"):
        communicator_of(MESHES["(2,)"]).all_reduce(per_rank([torch.ones(3), torch.ones(1)]), (0,)).wait()


def test_communicator_is_cached_per_mesh_and_get_group_in_process_raises() -> None:
    assert communicator_of(SQUARE) is communicator_of(SQUARE)
    with pytest.raises(MeshError, match="torchrun"):
        SQUARE.get_group("tp")


def test_monoid_in_process_runs_as_the_first_rank_of_its_group() -> None:
    mesh = DeviceMesh("cpu", 2)
    comm = communicator_of(mesh)
    monoid = Monoid("first", lambda a, b: a + mesh.get_rank(), torch.zeros_like)
    assert comm.all_reduce(torch.zeros(1), (0,), monoid).wait().item() == 0.0


# --- dry runs and the fake backend ----------------------------------------------------------------------------------
def test_collectives_of_a_dry_run_give_shapes_and_counts() -> None:
    mesh = DeviceMesh("meta", [[0, 1, 2], [3, 4, 5]])
    comm = communicator_of(mesh)
    x = torch.empty(2, 3, device="meta")
    with CommDebugMode() as counted:
        assert comm.map(lambda member, x: x, x) is x
        assert comm.all_reduce(x, (0, 1)).wait().shape == (2, 3)
        assert [tuple(shard.shape) for shard in comm.all_gather(x, (1,), lambda m: (2 + m, 3)).wait()] == [(2, 3), (3, 3), (4, 3)]
        chunks = [torch.empty(k, device="meta") for k in (4, 5, 6)]
        assert comm.reduce_scatter(chunks, (1,)).wait().shape == (4,)
        assert [tuple(shard.shape) for shard in comm.all_to_all(chunks, (1,), lambda s, t: (4 + s + t,)).wait()] == [
            (4,),
            (5,),
            (6,),
        ]
        assert comm.broadcast(x, (0,)).wait().is_meta
        assert comm.all_gather_object("a", (1,)) == ["a"] * 3
    assert counted.get_comm_counts()["all_reduce"] == 1
    assert counted.get_comm_bytes()["all_gather"] == (3 + 4) * 3 * 4
    with pytest.raises(MeshError, match="dry run"):
        comm.process_group((0,))


def test_collectives_on_the_fake_backend_give_shapes() -> None:
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        square = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        for mesh, dims in [(square, (0,)), (square, (1, 0)), (square["tp"], (0,)), (DeviceMesh("cpu", [3, 1]), (0,))]:
            comm = communicator_of(mesh)
            n = comm.group_size(dims)
            for dtype in (torch.float32, torch.bool, torch.complex64, torch.int16):
                x = torch.ones(2, 3, dtype=dtype)
                assert comm.all_reduce(x, dims, "sum").wait().shape == (2, 3)
                assert [shard.shape for shard in comm.all_gather(x, dims, lambda m: (2, 3)).wait()] == [(2, 3)] * n
                ragged = comm.all_gather(x, dims, lambda m, comm=comm: (2 + abs(m - comm.mesh.current_member()), 3)).wait()
                assert {shard.dtype for shard in ragged} == {dtype}
                assert comm.reduce_scatter([x] * n, dims).wait().dtype == dtype
                assert len(comm.all_to_all([x] * n, dims, lambda source, target: (2, 3)).wait()) == n
                assert comm.broadcast(x, dims, 1).wait().shape == (2, 3)
            assert comm.process_group(dims) is mesh.get_group() if mesh.ndim == 1 else True
    finally:
        dist.destroy_process_group()


def test_traced_collective_binds_its_group_once_and_again_after_reinitialization() -> None:
    for _ in range(2):
        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
        try:
            world = dist.group.WORLD
            assert world is not None
            bound_before = {*traced_collectives._BOUND_COLLECTIVES}
            for _ in range(2):
                traced_collectives.TracedCollective(
                    "reduce", world.group_name, 4, "all_reduce(sum)", dist.ReduceOp.SUM
                ).add_to_graph(torch.ones(3))
            (key,) = {*traced_collectives._BOUND_COLLECTIVES} - bound_before or bound_before
            assert traced_collectives._BOUND_COLLECTIVES[key][0] is world
        finally:
            dist.destroy_process_group()


# --- reductions in process ------------------------------------------------------------------------------------------


def test_in_process_all_reduce_adds_in_rank_order() -> None:
    numbers = [random.Random(seed).uniform(-1e8, 1e8) for seed in range(6)]
    comm = communicator_of(SQUARE)
    x = comm.map(lambda member: torch.tensor(numbers[member]))
    assert comm.all_reduce(x, (0, 1)).wait().item() == torch.tensor(numbers).cumsum(0)[-1].item()


@pytest.mark.parametrize("count", [2, 3, 5, 8])
@pytest.mark.parametrize("monoid", [EXP_SUM, MOMENTS], ids=str)
def test_combine_all_of_a_monoid_equals_pairwise_combine(monoid: Monoid, count: int) -> None:
    numbers = 2 if monoid is EXP_SUM else 3
    addends = [torch.rand(numbers, 3, 1, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in range(count)]
    if monoid is MOMENTS:
        for k, addend in enumerate(addends):
            addend[0] = k  # number of elements
    else:
        addends[1][0, 0] = -torch.inf
    one_by_one = functools.reduce(monoid.combine, addends)
    torch.testing.assert_close(fold(addends, monoid), one_by_one)
    assert monoid.combine_all is not None


def make_two_rounds(log: list[str]) -> Pending[int]:
    def begin() -> Callable[[], int]:
        log.append("second round")
        return lambda: log.append("end") or 7

    return Pending.of_two_rounds(begin)


def log_around(name: str, log: list[str]) -> Callable[[Callable[[], Any]], Any]:
    def run(fn: Callable[[], Any]) -> Any:
        log.append(f"{name} (")
        found = fn()
        log.append(")")
        return found

    return run


@pytest.mark.parametrize("advances", [False, True])
def test_pending_result_of_two_rounds_runs_each_round_once_in_order(advances):
    log: list[str] = []
    pending = make_two_rounds(log)
    if advances:
        assert pending.advance()
        assert log == ["second round"]
        assert not pending.ended
        assert not pending.advance()
    assert pending.then(lambda x: x + 1).wait() == 8
    assert pending.wait() == 7
    assert log == ["second round", "end"]
    assert pending.ended
    assert not pending.advance()


@pytest.mark.parametrize("advances", [False, True])
def test_wrap_completion_wraps_the_end_or_each_round_of_a_pending_result(advances):
    log: list[str] = []
    pending = make_two_rounds(log).wrap_completion(log_around("wait", log), rounds=True).wrap_completion(log_around("outer", log))
    if advances:
        pending.advance()
        assert log == ["wait (", "second round", ")"]
    assert pending.wait() == 7
    rounds = ["wait (", "second round", ")"], ["wait (", "end", ")"]
    assert log == ([*rounds[0], "outer (", *rounds[1], ")"] if advances else ["outer (", *rounds[0], *rounds[1], ")"])


def test_advance_of_a_pending_result_of_one_round_returns_false():
    assert not Pending(lambda: 1).advance()
    assert not Pending.of(1).advance()
