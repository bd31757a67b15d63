"""Current rank: ``get_rank`` and ``get_local_rank`` give numbers of all ranks in process, and of one rank in ``map_ranks``."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.comm import PerRank, RankNumber
from dtensor.errors import DTensorError, LayoutError, MeshError
from dtensor.mesh.current_rank import run_as_member
from dtensor.mesh.device_mesh import DeviceMesh, as_mesh, init_device_mesh

SQUARE = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
ROW = init_device_mesh("cpu", (3,), mesh_dim_names=("dp",))
DATA = torch.arange(12.0).reshape(6, 2)


def shard_lists(x: Any) -> list[Any]:
    assert type(x) is PerRank
    return [shard.tolist() for shard in x.shards]


# --- rank numbers outside of map_ranks ------------------------------------------------------------------------------
def test_get_local_rank_and_get_coordinate_have_the_numbers_of_all_ranks() -> None:
    assert [ROW.get_local_rank().values, SQUARE.get_local_rank("tp").values] == [(0, 1, 2), (0, 1, 0, 1)]
    assert [index.values for index in SQUARE.get_coordinate()] == [(0, 0, 1, 1), (0, 1, 0, 1)]
    assert SQUARE["tp", "dp"].get_local_rank(1).values == (0, 0, 1, 1)
    assert DeviceMesh("cpu", [5, 1, 3]).get_rank().values == (5, 1, 3)


def test_a_rank_number_that_is_equal_on_all_ranks_is_an_int() -> None:
    narrow = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    assert type(narrow.get_local_rank("dp")) is int
    assert type(narrow.get_coordinate()[0]) is int
    assert type(init_device_mesh("cpu", (1,)).get_rank()) is int
    rank = ROW.get_local_rank()
    assert (rank // 3, rank - rank, rank < 3, rank == 7) == (0, 0, True, False)
    assert all(type(value) is int for value in (rank // 3, rank - rank))


def test_a_dry_run_has_the_numbers_of_rank_0() -> None:
    mesh = init_device_mesh("meta", (4, 2))
    assert (mesh.get_rank(), mesh.get_coordinate(), mesh.get_local_rank(1)) == (0, (0, 0), 0)


@pytest.mark.parametrize(
    "fn",
    [
        lambda rank: rank * 4 + 1,
        lambda rank: 10 - rank,
        lambda rank: (rank + 1) % 3,
        lambda rank: 0.1 * rank,
        lambda rank: rank / 3,
        lambda rank: 2**rank,
        lambda rank: rank**2 - rank,
        lambda rank: -rank // 2,
        lambda rank: divmod(rank, 2)[1],
        lambda rank: divmod(7, rank + 1)[0],
        lambda rank: (rank ^ 1) | 8,
        lambda rank: 1 << rank,
        lambda rank: abs(rank - 1),
        lambda rank: rank >= 1,
        lambda rank: 0 == rank,  # noqa: SIM300 - the other side
        lambda rank: rank != 2,
        lambda rank: rank * rank + rank,
    ],
)
def test_arithmetic_with_a_rank_number_runs_for_each_rank(fn: Callable[[Any], Any]) -> None:
    found = fn(ROW.get_local_rank())
    assert type(found) is RankNumber
    assert [repr(value) for value in found.values] == [repr(fn(rank)) for rank in range(3)]


def test_sum_of_rank_numbers_of_meshes_of_different_sizes_raises() -> None:
    with pytest.raises(MeshError, match="3 ranks and one of 4 ranks cannot be combined"):
        ROW.get_local_rank() + SQUARE.get_rank()


@pytest.mark.parametrize(
    "fn",
    [
        lambda data, rank: data * rank,
        lambda data, rank: rank - data,
        lambda data, rank: data[rank],
        lambda data, rank: data[rank, 1:],
        lambda data, rank: data.narrow(0, rank * 2, 2),
        lambda data, rank: data.roll(rank, 0),
        lambda data, rank: data.select(0, rank) @ data.t(),
        lambda data, rank: torch.full((2,), rank),
        lambda data, rank: torch.zeros(2, rank + 1),
        lambda data, rank: torch.arange(rank, 4.0),
        lambda data, rank: torch.where(data >= rank * 4, data, 0.0),
        lambda data, rank: data.clamp(min=rank),
        lambda data, rank: data.double() ** (rank + 0.5),
    ],
)
def test_operators_of_a_plain_tensor_and_a_rank_number_give_per_rank_tensors(fn: Callable[[Any, Any], Any]) -> None:
    assert shard_lists(fn(DATA, ROW.get_local_rank())) == [fn(DATA, rank).tolist() for rank in range(3)]
    each = dt.per_rank([DATA + k for k in range(3)])
    if fn(DATA, 0).ndim:
        assert shard_lists(fn(each, ROW.get_local_rank())) == [fn(DATA + rank, rank).tolist() for rank in range(3)]


def test_backward_through_indexing_by_a_rank_number_gives_per_rank_gradients() -> None:
    data = dt.per_rank([DATA.clone().requires_grad_() for _ in range(3)])
    (data[ROW.get_local_rank()] * (ROW.get_local_rank() + 1)).sum().backward()
    assert [shard.grad.sum(1).tolist()[:3] for shard in data.shards] == [[2.0, 0.0, 0.0], [0.0, 4.0, 0.0], [0.0, 0.0, 6.0]]


@pytest.mark.parametrize(
    "fn",
    [
        lambda rank: DATA[rank * 2 : (rank + 1) * 2],
        lambda rank: DATA.tolist()[rank],
        lambda rank: DATA.tolist()[rank * 2 :],
        lambda rank: DATA.numpy()[rank : rank + 1],
        lambda rank: DATA.chunk(3)[rank],
        lambda rank: range(rank),
        lambda rank: [0] * rank,
        lambda rank: torch.manual_seed(rank),
        lambda rank: torch.tensor(float(rank)),
        lambda rank: int(rank),
        lambda rank: {0: "a", 1: "b"}[rank],
        lambda rank: max(rank, 1),
        lambda rank: "first" if rank == 0 else "other",
        lambda rank: "first" if not rank else "other",
        lambda rank: list(DistributedSampler(range(12), num_replicas=3, rank=rank)),
        lambda rank: "%d" % rank,  # noqa: UP031
    ],
)
def test_uses_of_a_rank_number_that_need_one_value_raise_and_name_map_ranks(fn: Callable[[Any], Any]) -> None:
    with pytest.raises(LayoutError, match=r"rank 0: .*rank 1: (.|\n)*map_ranks") as caught:
        fn(ROW.get_local_rank())
    assert "mesh.get_rank() == 0" in str(caught.value)  # the way to run code on one rank only


def test_numpy_arrays_refuse_a_rank_number() -> None:
    with pytest.raises((TypeError, IndexError)):
        np.arange(3) * ROW.get_local_rank()
    with pytest.raises((TypeError, IndexError)):
        np.arange(3)[ROW.get_local_rank()]


def test_a_dtensor_refuses_arithmetic_with_a_rank_number() -> None:
    x = dt.distribute_tensor(DATA, ROW, [Shard(0)])
    for fn in (lambda: x * ROW.get_local_rank(), lambda: ROW.get_local_rank() + x, lambda: x[ROW.get_local_rank()]):
        with pytest.raises(DTensorError, match="cannot be combined with a Python number"):
            fn()


def test_a_rank_number_can_be_formatted_copied_and_pickled() -> None:
    rank = ROW.get_local_rank()
    assert f"part {rank:02d} of 3" == "part [rank 0: 00, rank 1: 01, rank 2: 02] of 3"
    assert repr(rank) == "RankNumber(rank 0: 0, rank 1: 1, rank 2: 2)"
    for made in (copy.deepcopy(rank), pickle.loads(pickle.dumps(rank))):
        assert made.values == (0, 1, 2)


# --- comparisons of get_rank() with 0 -------------------------------------------------------------------------------
@pytest.mark.parametrize("mesh", [SQUARE, SQUARE["tp"], init_device_mesh("cpu", (1,)), DeviceMesh("cpu", [2, 3])], ids=repr)
def test_get_rank_compares_equal_to_0_in_process(mesh: DeviceMesh) -> None:
    rank = mesh.get_rank()
    assert rank == 0
    assert 0 == rank  # noqa: SIM300 - the other side
    assert not rank != 0  # noqa: SIM202 - another method
    assert not rank
    assert rank in (-1, 0)


def test_get_rank_in_calculations_is_the_number_of_each_rank() -> None:
    rank = SQUARE.get_rank()
    assert shard_lists((rank == 0) * torch.ones(1)) == [[1.0], [0.0], [0.0], [0.0]]  # the comparison is per rank too
    assert shard_lists(torch.where(torch.tensor(True), rank != 0, 2)) == [0, 1, 1, 1]
    assert shard_lists(DATA[rank, 0]) == [0.0, 2.0, 4.0, 6.0]
    assert (rank % 2).values == (0, 1, 0, 1)
    for fn in (lambda: bool(rank == 1), lambda: bool(rank > 0), lambda: DATA[rank:], lambda: bool(rank % 2 == 0)):
        with pytest.raises(LayoutError, match="map_ranks"):
            fn()


# --- inside map_ranks -----------------------------------------------------------------------------------------------
def test_map_ranks_gives_the_numbers_of_the_running_rank() -> None:
    flat = init_device_mesh("cpu", (4,))
    part = DeviceMesh("cpu", [3, 1])

    def numbers(at: tuple[int, ...]) -> list[Any]:
        return [
            at,
            SQUARE.get_coordinate(),
            SQUARE["tp"].get_local_rank(),
            SQUARE.get_rank(),
            flat.get_rank(),
            part.get_coordinate(),
        ]

    assert list(dt.map_ranks(numbers, mesh=SQUARE)) == [
        [(0, 0), (0, 0), 0, 0, 0, None],
        [(0, 1), (0, 1), 1, 1, 1, (1,)],
        [(1, 0), (1, 0), 0, 2, 2, None],
        [(1, 1), (1, 1), 1, 3, 3, (0,)],
    ]
    with pytest.raises(MeshError, match="rank 0 is not part"):
        dt.map_ranks(lambda at: part.get_local_rank(), mesh=SQUARE)


def test_map_ranks_slices_data_by_the_running_rank() -> None:
    picked = dt.map_ranks(lambda at: DATA[ROW.get_rank() * 2 : (ROW.get_rank() + 1) * 2], mesh=ROW)
    assert torch.equal(dt.DTensor.from_local(picked, ROW, [Shard(0)]).full_tensor(), DATA)


def test_map_ranks_passes_each_rank_its_value_of_a_rank_number() -> None:
    assert dt.map_ranks(lambda at, rank: (rank, at[0]), ROW.get_local_rank() * 2, mesh=ROW) == ((0, 0), (2, 1), (4, 2))


def test_map_ranks_makes_a_data_loader_for_each_rank() -> None:
    def loader_of(at: tuple[int, ...]) -> Any:
        sampler = DistributedSampler(range(12), num_replicas=3, rank=ROW.get_local_rank(), shuffle=False)
        return iter(DataLoader([[k, -k] for k in range(12)], batch_size=2, sampler=sampler))

    loaders = dt.map_ranks(loader_of, mesh=ROW)
    first, second = (dt.map_ranks(lambda at, loader: next(loader), loaders, mesh=ROW) for _ in range(2))
    assert shard_lists(first[0]) == [[0, 3], [1, 4], [2, 5]]
    assert shard_lists(second[1]) == [[-6, -9], [-7, -10], [-8, -11]]


def test_local_map_runs_with_the_numbers_of_each_rank() -> None:
    """An embedding lookup by hand: each rank looks up its own rows of the table and gives zeros for other rows."""
    table, ids = torch.randn(8, 3), torch.tensor([1, 7, 2, 4])

    def lookup(own: Any, ids: Any) -> Any:
        at = ids - SQUARE.get_local_rank("tp") * 4
        mine = (at >= 0) & (at < 4)
        return own[torch.where(mine, at, 0)] * mine.unsqueeze(1)

    placed = dt.distribute_tensor(table, SQUARE, [Replicate(), Shard(0)])
    found = dt.local_map(lookup, [Replicate(), Partial()])(placed, dt.distribute_tensor(ids, SQUARE, [Replicate()] * 2))
    assert torch.equal(found.full_tensor(), table[ids])


def test_an_error_in_map_ranks_restores_the_numbers_of_all_ranks() -> None:
    def fail(at: tuple[int, ...]) -> None:
        raise ValueError(at)

    with pytest.raises(ValueError, match="0"):
        dt.map_ranks(fail, mesh=ROW)
    assert ROW.get_local_rank().values == (0, 1, 2)


# --- threads --------------------------------------------------------------------------------------------------------
def run_in_threads(*programs: Callable[[], Any]) -> list[Any]:
    """Run each program in its own thread, all at the same time, and return their results."""
    found: list[Any] = [None] * len(programs)

    def run(k: int) -> None:
        try:
            found[k] = programs[k]()
        except BaseException as error:
            found[k] = error

    threads = [threading.Thread(target=run, args=(k,)) for k in range(len(programs))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    for value in found:
        if isinstance(value, BaseException):
            raise value
    return found


def test_each_thread_has_its_own_running_rank() -> None:
    barrier = threading.Barrier(2)

    def program() -> Any:
        def is_own_rank(at: tuple[int, ...]) -> bool:
            barrier.wait(10)
            return SQUARE.get_coordinate() == at and SQUARE.get_local_rank("tp") == at[1]

        return dt.map_ranks(is_own_rank, mesh=SQUARE)

    def shifted() -> Any:
        with run_as_member(SQUARE._root, 3):
            barrier.wait(10)
            own = [SQUARE.get_rank()]
            for _ in range(3):
                barrier.wait(10)
                own.append(SQUARE.get_rank())
            return own

    assert run_in_threads(program, shifted) == [(True,) * 4, [3] * 4]


def test_each_thread_has_its_own_entered_mesh() -> None:
    barrier = threading.Barrier(2)

    def program(size: int) -> Callable[[], Any]:
        def entered() -> tuple[int, ...]:
            barrier.wait(10)
            with DeviceMesh("cpu", size):
                barrier.wait(10)
                made = dt.zeros(4).device_mesh.shape
                barrier.wait(10)
            return made

        return entered

    with ROW:
        assert run_in_threads(program(2), program(4)) == [(2,), (4,)]
        with pytest.raises(MeshError, match="no device mesh"):
            run_in_threads(lambda: as_mesh(None))
        assert as_mesh(None) is ROW
