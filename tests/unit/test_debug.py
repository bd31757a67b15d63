"""Debug tools: CommDebugMode by kind and module, visualize_sharding, and repr of large tensors."""

from __future__ import annotations

import copy
import pickle
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

import dtensor as dt
from dtensor.comm import events
from dtensor.comm.map_ranks import communicator_of
from dtensor.debug import CommDebugMode, visualize_sharding
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

S0, S1, R, P = dt.Shard(0), dt.Shard(1), dt.Replicate(), dt.Partial()


def test_comm_counts_can_be_indexed_by_torch_operators() -> None:
    mesh = dt.init_device_mesh("cpu", (4,))
    x = dt.distribute_tensor(torch.ones(8, 3, requires_grad=True), mesh, [S0])
    with CommDebugMode() as comm:
        y = x.redistribute(placements=[R]).to_local(grad_placements=[P])
        y.backward(torch.ones_like(y))
    functional = torch.ops.c10d_functional
    assert comm.comm_counts[functional.all_gather_into_tensor] == comm.get_comm_counts()["all_gather"] == 1
    assert comm.get_comm_counts()[functional.reduce_scatter_tensor] == 1
    assert comm.get_comm_counts().get(functional.reduce_scatter_tensor) == 1
    assert [op in comm.get_comm_counts() for op in (functional.all_gather_into_tensor, functional.all_reduce)] == [True, False]
    assert set(comm.get_comm_counts()) == {"all_gather", "reduce_scatter"}  # iteration yields kinds
    assert comm.get_comm_counts()[functional.all_reduce] == comm.get_comm_counts()["all_reduce"] == 0
    assert comm.get_comm_counts() == {functional.all_gather_into_tensor: 1, functional.reduce_scatter_tensor: 1}
    assert comm.get_comm_counts() != {functional.all_gather_into_tensor: 1}
    assert comm.get_total_counts() == sum(comm.get_comm_counts().values()) == 2


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 8)
        self.down = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


def test_comm_debug_mode_lists_parameters_and_collectives_by_module() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    model = parallelize_module(MLP(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = torch.randn(2, 4, requires_grad=True)
    with CommDebugMode() as comm:
        model(x).sum().backward()
    assert comm.get_sharding_info() == {
        "MLP.up.weight": (S0,),
        "MLP.up.bias": (S0,),
        "MLP.down.weight": (S1,),
        "MLP.down.bias": (R,),
    }
    assert list(comm.get_parameter_info()) == ["MLP.up", "MLP.down"]
    counts = comm.comm_module_counts
    assert list(counts) == ["Global", "MLP", "MLP.up", "MLP.down"]
    assert [counts[name]["forward"]["all_reduce"] for name in counts] == [1, 1, 0, 1]
    assert counts["MLP.down"]["forward"][torch.ops.c10d_functional.all_reduce] == 1
    assert counts["Global"]["backward"] == {"all_reduce": 1}  # the gradient of x
    table = comm.generate_comm_debug_tracing_table()
    assert "forward all_reduce: 1" in table
    with pytest.raises(ZeroDivisionError), CommDebugMode():
        _ = 1 / 0
    with CommDebugMode() as comm:
        dt.ones(4, device_mesh=mesh, placements=[S0]).full_tensor()
    assert comm.get_sharding_info() == {}
    assert "outside" in comm.generate_comm_debug_tracing_table()


SHARDING_TABLES = [
    ((5, 4), [S0, R], "0:4\n0:3  0, 1\n3:5  2, 3"),
    ((5, 4), [S0, S1], "0:2  2:4\n0:3  0    1\n3:5  2    3"),
    ((5,), [S0, S0], "0:2  2:3  3:4  4:5\n0    1    2    3"),
    ((2, 2, 3), [S0, dt.Shard(2)], "[0:1, 0:2, 0:2]  0\n[0:1, 0:2, 2:3]  1\n[1:2, 0:2, 0:2]  2\n[1:2, 0:2, 2:3]  3"),
    ((), [R, R], "0, 1, 2, 3"),
    ((0, 3), [S0, R], "no elements"),
    ((3,), [P, R], "0:3\n0, 1, 2, 3 (partial)"),
]


@pytest.mark.parametrize(("shape", "placements", "table"), SHARDING_TABLES)
def test_visualize_sharding_prints_blocks_and_their_ranks(
    shape: tuple[int, ...], placements: list[dt.Placement], table: str, capsys
) -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2))
    visualize_sharding(dt.distribute_tensor(torch.zeros(shape), mesh, placements), header="x")
    head, printed = capsys.readouterr().out.split("\n", 1)
    assert head == "x"
    assert printed.strip() == table


def test_comm_debug_mode_counts_object_exchanges_separately() -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    with CommDebugMode() as comm:
        communicator_of(mesh).all_gather_object((1, 4), (0,))
        dt.distribute_tensor(torch.ones(5), mesh, [S0]).full_tensor()
    assert (comm.get_total_counts(), comm.get_exchange_count()) == (1, 1)
    assert comm.get_comm_counts() == {"all_gather": 1}
    assert "all_gather_object" in comm.get_table()


@pytest.fixture
def fake_world() -> Iterator[dt.DeviceMesh]:
    """Yield a mesh of four ranks on the fake backend. This process is rank 1, and collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    try:
        yield dt.DeviceMesh("cpu", 4)
    finally:
        dist.destroy_process_group()


def _direct_collectives() -> dict[str, tuple[int, Any]]:
    """Return, for each kind, the bytes that rank 1 receives and a call of ``torch.distributed``. A row has 12 bytes."""
    x, rows = torch.ones(3), [torch.ones(3) for _ in range(4)]
    uneven = {"output_split_sizes": [1, 2, 0, 3], "input_split_sizes": [3, 0, 0, 0]}
    return {
        "all_reduce": (18, lambda: dist.all_reduce(x)),
        "broadcast": (12, lambda: dist.broadcast(x, 0)),
        "all_gather": (36, lambda: dist.all_gather(rows, x)),
        "all_gather of rows": (36, lambda: dist.all_gather_into_tensor(torch.ones(12), x)),
        "reduce_scatter": (36, lambda: dist.reduce_scatter(x, rows)),
        "reduce_scatter of rows": (36, lambda: dist.reduce_scatter_tensor(x, torch.ones(12))),
        "all_to_all": (36, lambda: dist.all_to_all(rows, rows)),
        "all_to_all of uneven rows": (16, lambda: dist.all_to_all_single(torch.ones(6), x, **uneven)),
        "all_to_all of even rows": (12, lambda: dist.all_to_all_single(torch.ones(4), torch.ones(4))),
        "reduce": (12, lambda: dist.reduce(x, 0)),
        "gather": (36, lambda: dist.gather(x, rows, dst=1)),
        "scatter": (12, lambda: dist.scatter(x, rows, src=1)),
        "send": (0, lambda: dist.send(x, 0)),
        "recv": (12, lambda: dist.recv(x, 0)),
        "recv of batch_isend_irecv": (12, lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, x, 0)])),
        "barrier": (0, dist.barrier),
        "all_reduce of many": (36, lambda: dist.all_reduce_coalesced([x, torch.ones(3)])),
        "all_reduce by name": (18, lambda: functional.all_reduce(x, "sum", dist.group.WORLD)),
        "all_reduce of many by name": (36, lambda: functional.all_reduce_coalesced([x, x], "sum", dist.group.WORLD)),
        "all_gather of many by name": (72, lambda: functional.all_gather_into_tensor_coalesced([x, x], dist.group.WORLD)),
        "all_gather by name": (36, lambda: functional.all_gather_tensor(x, 0, dist.group.WORLD)),
    }


@pytest.mark.filterwarnings("ignore")
def test_comm_debug_mode_counts_direct_torch_distributed_calls_once(fake_world: dt.DeviceMesh) -> None:
    for name, (nbytes, call) in _direct_collectives().items():
        kind = name.split()[0]
        with CommDebugMode() as comm:
            call()
        assert comm.get_comm_counts() == comm.get_direct_counts() == {kind: 1}, name
        assert comm.get_comm_bytes() == {kind: nbytes}, name
        assert f"{kind}  direct" in " ".join(comm.get_table().split()).replace(" ", "  ")
        with CommDebugMode() as comm:
            pass
        call()
        assert comm.get_total_counts() == 0, name
        (movement,) = dt.explain(call).movements
        assert (movement.operator, movement.bytes, movement.place.file) == ("torch.distributed", nbytes, __file__), name
    assert not torch._C._dispatch_has_kernel_for_dispatch_key("c10d::allreduce_", "BackendSelect") or threading.active_count() > 1


def test_comm_debug_mode_counts_collectives_of_dtensors_once_and_not_as_direct(fake_world: dt.DeviceMesh) -> None:
    x = dt.DTensor.from_local(torch.ones(3, 5), fake_world, [P], shape=(3, 5), stride=(5, 1))
    s = dt.DTensor.from_local(torch.ones(3, 5), fake_world, [S0], shape=(12, 5), stride=(5, 1))
    uneven_shards = dt.DTensor.from_local(torch.ones(3, 5), fake_world, [S0], shape=(9, 5), stride=(5, 1))
    comm_of = communicator_of(fake_world)
    calls = {
        "all_reduce": lambda: x.redistribute(placements=[R]),
        "all_gather": lambda: s.full_tensor(),
        "reduce_scatter": lambda: x.redistribute(placements=[S1]),
        "all_to_all": lambda: uneven_shards.redistribute(placements=[S1]),
        "broadcast": lambda: comm_of.broadcast(torch.ones(3), (0,)),
        "all_reduce of products": lambda: comm_of.all_reduce(torch.ones(7), (0,), "product").wait(),
        "all_gather of flat tensors": lambda: comm_of.all_gather(torch.ones(7), (0,), lambda member: (7,)),
    }
    for name, call in calls.items():
        with CommDebugMode() as comm:
            call()
        assert (comm.get_comm_counts(), comm.get_direct_counts()) == ({name.split()[0]: 1}, {}), name
    with CommDebugMode() as comm:
        comm_of.all_gather_object(1, (0,))
    assert (comm.get_total_counts(), comm.get_exchange_count()) == (0, 1)


def test_comm_counts_compare_with_dicts_of_kinds_or_operators() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    with CommDebugMode() as comm:
        dt.ones(4, device_mesh=mesh, placements=[S0]).full_tensor()
    counts, operators = comm.get_comm_counts(), torch.ops._c10d_functional
    for same in ({"all_gather": 1}, {operators.all_gather_into_tensor: 1}, {operators.all_gather_into_tensor_coalesced: 1}):
        assert counts == same
        assert not counts != same  # noqa: SIM202 - checks __ne__
    for other in ({}, {"all_gather": 2}, {"all_reduce": 1}, None):
        assert counts != other
        assert not counts == other  # noqa: SIM201
    assert counts[operators.all_gather_into_tensor_coalesced] == counts[torch.ops.c10d.allgather_.default] == 1
    assert counts[operators.all_reduce_coalesced] == counts[operators.wait_tensor] == 0


def test_modules_copied_or_pickled_under_comm_debug_mode_keep_no_hooks() -> None:
    """A copy must not keep the hooks of the mode, which hold the complete log."""
    layer = nn.Linear(2, 2)
    with CommDebugMode() as comm:
        layer(torch.ones(2))
        copied, read = copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))
        for other in (copied, read):
            assert torch.equal(other(torch.ones(2)), layer(torch.ones(2)))
    assert list(comm.comm_module_counts) == ["Global", "Linear"]
    for module in (layer, copied, read):
        module(torch.ones(2))
        assert not module._forward_hooks
        assert not module._forward_hooks_always_called


SQUARE = dt.DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]], mesh_dim_names=("dp", "tp"))


def test_nested_comm_debug_modes_count_the_collectives_of_their_blocks() -> None:
    listeners_before = set(events.listeners)
    comm = communicator_of(SQUARE)
    x = torch.ones(4)
    with CommDebugMode() as outer:
        comm.all_reduce(x, (0,)).wait()
        with CommDebugMode() as inner:
            comm.all_gather(x, (1,), lambda m: (4,)).wait()
            communicator_of(SQUARE["tp"]).all_gather(x, (0,), lambda m: (4,)).wait()
        comm.all_reduce(x, (0, 1)).wait()
    comm.all_reduce(x, (0,)).wait()
    assert events.listeners == listeners_before  # without listeners a collective builds no event context
    assert dict(inner.get_comm_counts()) == {"all_gather": 2}
    assert dict(outer.get_comm_counts()) == {"all_reduce": 2, "all_gather": 2}
    assert outer.get_total_counts() == 4
    assert outer.get_comm_counts()["broadcast"] == 0
    assert inner.get_comm_bytes()["all_gather"] == 2 * 2 * 16
    assert [line.split() for line in str(outer).splitlines()] == [
        ["collective", "over", "ranks", "count", "received", "per", "rank"],
        ["all_reduce", "dp", "2", "1", "16", "B"],
        ["all_gather", "tp", "3", "2", "64", "B"],
        ["all_reduce", "dp+tp", "6", "1", "27", "B"],
        ["total", "4", "107", "B"],
    ]


def test_comm_debug_mode_counts_the_bytes_of_the_rank_that_receives_most() -> None:
    comm = communicator_of(SQUARE)
    with CommDebugMode() as counted:
        comm.all_gather(comm.map(lambda member: torch.ones(member)), (1,), lambda member: (member,)).wait()
        chunks = comm.map(lambda member: [torch.ones(member * to) for to in SQUARE.members_of((0,), member)])
        comm.all_to_all(chunks, (0,), lambda source, target: (source * target,)).wait()
    assert [event.bytes for event in counted.events] == [4 * (4 + 5), 4 * 2 * 5]
