"""What can be seen: collectives by kind and by module, and where blocks lie."""

from __future__ import annotations

import pytest
import torch
import torch.distributed._functional_collectives  # names torch's own operators
from torch import nn

import dtensor as dt
from dtensor.comm import communicator_of
from dtensor.debug import CommDebugMode, visualize_sharding
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

S0, S1, R, P = dt.Shard(0), dt.Shard(1), dt.Replicate(), dt.Partial()


def test_collectives_are_found_under_the_names_that_torch_gives_them() -> None:
    mesh = dt.init_device_mesh("cpu", (4,))
    x = dt.distribute_tensor(torch.ones(8, 3, requires_grad=True), mesh, [S0])
    with CommDebugMode() as comm:
        y = x.redistribute(placements=[R]).to_local(grad_placements=[P])
        y.backward(torch.ones_like(y))
    functional = torch.ops.c10d_functional
    assert comm.comm_counts[functional.all_gather_into_tensor] == comm.get_comm_counts()["all_gather"] == 1
    assert comm.get_comm_counts()[functional.reduce_scatter_tensor] == 1
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


def test_modules_parameters_and_collectives_are_listed() -> None:
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
    assert counts["Global"]["backward"] == {"all_reduce": 1}  # of x's gradient
    table = comm.generate_comm_debug_tracing_table()
    assert "forward all_reduce: 1" in table
    with pytest.raises(ZeroDivisionError), CommDebugMode():
        _ = 1 / 0
    with CommDebugMode() as comm:
        dt.ones(4, device_mesh=mesh, placements=[S0]).full_tensor()
    assert comm.get_sharding_info() == {}
    assert "outside" in comm.generate_comm_debug_tracing_table()


PICTURES = [
    ((5, 4), [S0, R], "0:4\n0:3  0, 1\n3:5  2, 3"),
    ((5, 4), [S0, S1], "0:2  2:4\n0:3  0    1\n3:5  2    3"),
    ((5,), [S0, S0], "0:2  2:3  3:4  4:5\n0    1    2    3"),
    ((2, 2, 3), [S0, dt.Shard(2)], "[0:1, 0:2, 0:2]  0\n[0:1, 0:2, 2:3]  1\n[1:2, 0:2, 0:2]  2\n[1:2, 0:2, 2:3]  3"),
    ((), [R, R], "0, 1, 2, 3"),
    ((0, 3), [S0, R], "no elements"),
    ((3,), [P, R], "0:3\n0, 1, 2, 3 (partial)"),
]


@pytest.mark.parametrize(("shape", "placements", "picture"), PICTURES)
def test_blocks_and_their_ranks(shape: tuple[int, ...], placements: list[dt.Placement], picture: str, capsys) -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2))
    visualize_sharding(dt.distribute_tensor(torch.zeros(shape), mesh, placements), header="x")
    head, drawn = capsys.readouterr().out.split("\n", 1)
    assert head == "x"
    assert drawn.strip() == picture


def test_values_that_ranks_tell_each_other_are_no_collectives_of_tensors() -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    with CommDebugMode() as comm:
        communicator_of(mesh).all_gather_object((1, 4), (0,))
        dt.distribute_tensor(torch.ones(5), mesh, [S0]).full_tensor()
    assert (comm.get_total_counts(), comm.get_exchange_count()) == (1, 1)
    assert comm.get_comm_counts() == {"all_gather": 1}
    assert "all_gather_object" in comm.get_table()
