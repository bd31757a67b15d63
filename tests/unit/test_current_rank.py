"""Which rank asks: in one process the ranks' own numbers outside of ``map_ranks``, one rank's inside, in every thread."""

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


def shards(x: Any) -> list[Any]:
    assert type(x) is PerRank
    return [shard.tolist() for shard in x.shards]


# --- numbers of all ranks -------------------------------------------------------------------------------------------------
def test_all_ranks_have_their_own_number() -> None:
    assert [ROW.get_local_rank().values, SQUARE.get_local_rank("tp").values] == [(0, 1, 2), (0, 1, 0, 1)]
    assert [index.values for index in SQUARE.get_coordinate()] == [(0, 0, 1, 1), (0, 1, 0, 1)]
    assert SQUARE["tp", "dp"].get_local_rank(1).values == (0, 0, 1, 1)
    assert DeviceMesh("cpu", [5, 1, 3]).get_rank().values == (5, 1, 3)


def test_a_number_that_all_ranks_have_is_that_number() -> None:
    narrow = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "tp"))
    assert type(narrow.get_local_rank("dp")) is int
    assert type(narrow.get_coordinate()[0]) is int
    assert type(init_device_mesh("cpu", (1,)).get_rank()) is int
    rank = ROW.get_local_rank()
    assert (rank // 3, rank - rank, rank < 3, rank == 7) == (0, 0, True, False)
    assert all(type(value) is int for value in (rank // 3, rank - rank))


def test_a_dry_run_has_the_number_of_the_rank_that_it_runs() -> None:
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
def test_arithmetic_is_each_ranks_own(fn: Callable[[Any], Any]) -> None:
    found = fn(ROW.get_local_rank())
    assert type(found) is RankNumber
    assert [repr(value) for value in found.values] == [repr(fn(rank)) for rank in range(3)]


def test_numbers_of_other_ranks_do_not_go_together() -> None:
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
def test_a_plain_tensor_that_meets_it_is_each_ranks_own(fn: Callable[[Any, Any], Any]) -> None:
    assert shards(fn(DATA, ROW.get_local_rank())) == [fn(DATA, rank).tolist() for rank in range(3)]
    each = dt.per_rank([DATA + k for k in range(3)])
    if fn(DATA, 0).ndim:
        assert shards(fn(each, ROW.get_local_rank())) == [fn(DATA + rank, rank).tolist() for rank in range(3)]


def test_gradients_of_what_each_rank_picks() -> None:
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
def test_what_has_one_value_only_says_how_to_write_it(fn: Callable[[Any], Any]) -> None:
    with pytest.raises(LayoutError, match=r"rank 0: .*rank 1: (.|\n)*map_ranks") as told:
        fn(ROW.get_local_rank())
    assert "mesh.get_rank() == 0" in str(told.value)  # what one rank does alone


def test_it_has_no_place_in_an_array() -> None:
    with pytest.raises((TypeError, IndexError)):
        np.arange(3) * ROW.get_local_rank()
    with pytest.raises((TypeError, IndexError)):
        np.arange(3)[ROW.get_local_rank()]


def test_a_dtensor_refuses_arithmetic_with_a_per_rank_number() -> None:
    x = dt.distribute_tensor(DATA, ROW, [Shard(0)])
    for fn in (lambda: x * ROW.get_local_rank(), lambda: ROW.get_local_rank() + x, lambda: x[ROW.get_local_rank()]):
        with pytest.raises(DTensorError, match="cannot be combined with a Python number"):
            fn()


def test_it_prints_and_copies() -> None:
    rank = ROW.get_local_rank()
    assert f"part {rank:02d} of 3" == "part [rank 0: 00, rank 1: 01, rank 2: 02] of 3"
    assert repr(rank) == "RankNumber(rank 0: 0, rank 1: 1, rank 2: 2)"
    for made in (copy.deepcopy(rank), pickle.loads(pickle.dumps(rank))):
        assert made.values == (0, 1, 2)


# --- what one rank does for all -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mesh", [SQUARE, SQUARE["tp"], init_device_mesh("cpu", (1,)), DeviceMesh("cpu", [2, 3])], ids=repr)
def test_the_process_does_what_rank_0_does_alone(mesh: DeviceMesh) -> None:
    rank = mesh.get_rank()
    assert rank == 0
    assert 0 == rank  # noqa: SIM300 - the other side
    assert not rank != 0  # noqa: SIM202 - another method
    assert not rank
    assert rank in (-1, 0)


def test_but_its_number_is_each_ranks_own() -> None:
    rank = SQUARE.get_rank()
    assert shards((rank == 0) * torch.ones(1)) == [[1.0], [0.0], [0.0], [0.0]]  # the answer too, where it is calculated with
    assert shards(torch.where(torch.tensor(True), rank != 0, 2)) == [0, 1, 1, 1]
    assert shards(DATA[rank, 0]) == [0.0, 2.0, 4.0, 6.0]
    assert (rank % 2).values == (0, 1, 0, 1)
    for fn in (lambda: bool(rank == 1), lambda: bool(rank > 0), lambda: DATA[rank:], lambda: bool(rank % 2 == 0)):
        with pytest.raises(LayoutError, match="map_ranks"):
            fn()


# --- inside map_ranks --------------------------------------------------------------------------------------------------------
def test_inside_it_is_the_number_of_the_rank_that_runs() -> None:
    flat = init_device_mesh("cpu", (4,))
    part = DeviceMesh("cpu", [3, 1])

    def told(at: tuple[int, ...]) -> list[Any]:
        return [
            at,
            SQUARE.get_coordinate(),
            SQUARE["tp"].get_local_rank(),
            SQUARE.get_rank(),
            flat.get_rank(),
            part.get_coordinate(),
        ]

    assert list(dt.map_ranks(told, mesh=SQUARE)) == [
        [(0, 0), (0, 0), 0, 0, 0, None],
        [(0, 1), (0, 1), 1, 1, 1, (1,)],
        [(1, 0), (1, 0), 0, 2, 2, None],
        [(1, 1), (1, 1), 1, 3, 3, (0,)],
    ]
    with pytest.raises(MeshError, match="rank 0 is not part"):
        dt.map_ranks(lambda at: part.get_local_rank(), mesh=SQUARE)


def test_a_rank_that_runs_picks_its_data() -> None:
    picked = dt.map_ranks(lambda at: DATA[ROW.get_rank() * 2 : (ROW.get_rank() + 1) * 2], mesh=ROW)
    assert torch.equal(dt.DTensor.from_local(picked, ROW, [Shard(0)]).full_tensor(), DATA)


def test_numbers_given_to_it_are_taken_apart() -> None:
    assert dt.map_ranks(lambda at, rank: (rank, at[0]), ROW.get_local_rank() * 2, mesh=ROW) == ((0, 0), (2, 1), (4, 2))


def test_every_rank_has_a_loader_of_its_own() -> None:
    def loader_of(at: tuple[int, ...]) -> Any:
        sampler = DistributedSampler(range(12), num_replicas=3, rank=ROW.get_local_rank(), shuffle=False)
        return iter(DataLoader([[k, -k] for k in range(12)], batch_size=2, sampler=sampler))

    loaders = dt.map_ranks(loader_of, mesh=ROW)
    first, second = (dt.map_ranks(lambda at, loader: next(loader), loaders, mesh=ROW) for _ in range(2))
    assert shards(first[0]) == [[0, 3], [1, 4], [2, 5]]
    assert shards(second[1]) == [[-6, -9], [-7, -10], [-8, -11]]


def test_a_function_of_locals_uses_them() -> None:
    """Sharded by hand: the rows of a table that a rank has, the others zero."""
    table, ids = torch.randn(8, 3), torch.tensor([1, 7, 2, 4])

    def lookup(own: Any, ids: Any) -> Any:
        at = ids - SQUARE.get_local_rank("tp") * 4
        mine = (at >= 0) & (at < 4)
        return own[torch.where(mine, at, 0)] * mine.unsqueeze(1)

    placed = dt.distribute_tensor(table, SQUARE, [Replicate(), Shard(0)])
    found = dt.local_map(lookup, [Replicate(), Partial()])(placed, dt.distribute_tensor(ids, SQUARE, [Replicate()] * 2))
    assert torch.equal(found.full_tensor(), table[ids])


def test_a_rank_that_fails_leaves_nothing_behind() -> None:
    def fail(at: tuple[int, ...]) -> None:
        raise ValueError(at)

    with pytest.raises(ValueError, match="0"):
        dt.map_ranks(fail, mesh=ROW)
    assert ROW.get_local_rank().values == (0, 1, 2)


# --- threads -----------------------------------------------------------------------------------------------------------------
def in_threads(*programs: Callable[[], Any]) -> list[Any]:
    """What each program gives in a thread of its own, all at the same time."""
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


def test_threads_run_for_ranks_of_their_own() -> None:
    meet = threading.Barrier(2)

    def program() -> Any:
        def told(at: tuple[int, ...]) -> bool:
            meet.wait(10)
            return SQUARE.get_coordinate() == at and SQUARE.get_local_rank("tp") == at[1]

        return dt.map_ranks(told, mesh=SQUARE)

    def shifted() -> Any:
        with run_as_member(SQUARE._root, 3):
            meet.wait(10)
            own = [SQUARE.get_rank()]
            for _ in range(3):
                meet.wait(10)
                own.append(SQUARE.get_rank())
            return own

    assert in_threads(program, shifted) == [(True,) * 4, [3] * 4]


def test_a_thread_enters_meshes_of_its_own() -> None:
    meet = threading.Barrier(2)

    def program(size: int) -> Callable[[], Any]:
        def entered() -> tuple[int, ...]:
            meet.wait(10)
            with DeviceMesh("cpu", size):
                meet.wait(10)
                made = dt.zeros(4).device_mesh.shape
                meet.wait(10)
            return made

        return entered

    with ROW:
        assert in_threads(program(2), program(4)) == [(2,), (4,)]
        with pytest.raises(MeshError, match="no device mesh"):
            in_threads(lambda: as_mesh(None))
        assert as_mesh(None) is ROW
