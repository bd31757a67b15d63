"""Seed documents: the numbers that the documents of the seed projects print, computed with this library."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.mesh.current_rank import run_as_member

TP = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("TP",))
R = Replicate()


def local_lists(x: Any) -> list[Any]:
    return [shard.tolist() for shard in x._local.shards]


def distribute(x: torch.Tensor, *placements: Any, mesh: dt.DeviceMesh = TP) -> dt.DTensor:
    return dt.distribute_tensor(x, mesh, placements)


# --- a mesh of two: matrix products ---------------------------------------------------------------------------------
X, Y = torch.arange(1, 9).reshape(2, 4), torch.arange(9, 17).reshape(2, 4)


def test_matmul_of_replicated_operands_is_replicated() -> None:
    product = distribute(X, R) @ distribute(Y, R).T
    assert product.placements == (R,)
    assert local_lists(product) == [[[110, 150], [278, 382]]] * 2


def test_matmul_with_a_column_sharded_operand_is_sharded() -> None:
    product = distribute(X, R) @ distribute(Y, Shard(0)).T
    assert local_lists(product) == [[[110], [278]], [[150], [382]]]
    assert product.placements == (Shard(1),)


def test_column_wise_then_row_wise_matmul_is_partial() -> None:
    x = distribute(torch.ones(3, 2), R)
    w1, w3 = (distribute(torch.arange(start, start + 8.0).reshape(2, 4), Shard(-1)) for start in (1.0, 9.0))
    w2 = distribute(torch.tril(torch.ones(4, 2), -1), Shard(0))
    c = (x @ w1) * (x @ w3)
    assert local_lists(c) == [[[132.0, 192.0]] * 3, [[260.0, 336.0]] * 3]
    assert c.placements == (Shard(1),)
    d = c @ w2
    assert local_lists(d) == [[[192.0, 0.0]] * 3, [[596.0, 596.0]] * 3]
    assert d.placements == (Partial("sum"),)
    assert local_lists(d.redistribute(placements=[R])) == [[[788.0, 596.0]] * 3] * 2


class FeedForward(nn.Module):
    """``w2(w1(x) * w3(x))``."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(2, 4, bias=False), nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.w1(x) * self.w3(x))


def test_feed_forward_module_with_sharded_weights_has_documented_local_values() -> None:
    module = FeedForward()
    values = {"w1": (torch.arange(1.0, 9.0).reshape(4, 2), Shard(0)), "w3": (torch.arange(9.0, 17.0).reshape(4, 2), Shard(0))}
    values["w2"] = (torch.tril(torch.ones(2, 4), -1), Shard(1))
    for name, (weight, placement) in values.items():
        getattr(module, name).weight = nn.Parameter(distribute(weight, placement))
    assert local_lists(module.w1.weight)[0] == [[1, 2], [3, 4]]
    x = distribute(torch.ones(3, 2), R)
    product = module.w1(x) * module.w3(x)
    assert local_lists(product) == [[[57.0, 161.0]] * 3, [[297.0, 465.0]] * 3]
    output = module(x).redistribute(placements=[R])
    assert local_lists(output) == [[[0.0, 57.0]] * 3] * 2


# --- meshes of eight ------------------------------------------------------------------------------------------------
CUBE = dt.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("DDP", "FSDP", "TP"))


def test_submeshes_of_a_3d_mesh_have_the_documented_ranks() -> None:
    assert CUBE["TP"].mesh.tolist() == [0, 1]
    assert CUBE["DDP", "FSDP"].mesh.tolist() == [[0, 2], [4, 6]]
    with run_as_member(CUBE._root, 5):
        assert CUBE["TP"].mesh.tolist() == [4, 5]


def test_fsdp_shards_the_tensor_parallel_shards() -> None:
    weight = torch.arange(1.0, 65.0).reshape(8, 8)
    columns = distribute(weight, R, R, Shard(0), mesh=CUBE)
    assert [sorted({x for row in shard for x in row}) for shard in local_lists(columns)] == [
        [float(k) for k in (range(1, 33) if rank % 2 == 0 else range(33, 65))] for rank in range(8)
    ]
    # FSDP splits what TP has split: TP outermost
    sharded = columns.redistribute(placements=[R, Shard(0, level=1), Shard(0, level=0)])
    first = {0: 1, 4: 1, 2: 17, 6: 17, 1: 33, 5: 33, 3: 49, 7: 49}
    for rank, shard in enumerate(local_lists(sharded)):
        assert [x for row in shard for x in row] == [float(first[rank] + k) for k in range(16)]
    assert torch.equal(sharded.full_tensor(), weight)


def test_gradient_of_a_hybrid_sharded_weight_has_its_placements() -> None:
    """The weight is replicated over DDP and sharded over FSDP and TP."""
    weight = distribute(
        torch.arange(1.0, 65.0).reshape(8, 8), R, Shard(0, level=1), Shard(0, level=0), mesh=CUBE
    ).requires_grad_()
    batch = distribute(torch.ones(4, 8), Shard(0), Shard(0), R, mesh=CUBE)
    (batch @ weight.t()).sum().backward()
    assert weight.grad.placements == weight.placements
    assert weight.grad.full_tensor().unique().tolist() == [4]


# --- a 2 x 2 mesh of FSDP and TP ------------------------------------------------------------------------------------
MESH_22 = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("FSDP", "TP"))


def test_averaged_gradient_of_fsdp_and_tensor_parallelism_equals_the_document() -> None:
    """Row-wise over TP and sharded over FSDP: the averaged gradient of the document for each local tensor."""
    weight = distribute(torch.arange(1.0, 17.0).reshape(4, 4), Shard(0), Shard(1), mesh=MESH_22).requires_grad_()
    gradients = []
    for k in range(2):  # FSDP rank k has its own batch; all ranks draw equal noise
        torch.manual_seed(42)
        out = distribute(torch.ones(2, 4) * (k + 1), R, Shard(1), mesh=MESH_22) @ weight.t()
        noise = distribute(torch.randn(2, 4), R, R, mesh=MESH_22)
        (gradient,) = torch.autograd.grad(((noise - out) ** 2).sum(), weight)
        gradients.append(gradient)
    averaged = ((gradients[0] + gradients[1]) / 2).redistribute(placements=weight.placements)
    rows = torch.tensor([102.3585, 260.1725, 412.6720, 581.2230])
    assert torch.allclose(averaged.full_tensor(), rows[:, None].expand(4, 4), atol=2e-4)
    local = averaged._local.shards
    assert torch.allclose(local[0], rows[:2, None].expand(2, 2), atol=2e-4)
    assert torch.allclose(local[2], rows[2:, None].expand(2, 2), atol=2e-4)
    assert averaged.placements == (Shard(0), Shard(1))


# --- the RFC of DTensor ---------------------------------------------------------------------------------------------
def test_rfc_full_and_ones_with_placements_have_their_values() -> None:
    mesh = dt.DeviceMesh("cpu", [[0, 1], [2, 3]])
    for placements in ([Shard(0), R], [Shard(0), Shard(1)], [R, R]):
        x = dt.full((4, 6), 2.0, device_mesh=mesh, placements=placements)
        assert x.full_tensor().unique().tolist() == [2]
    assert local_lists(dt.ones(4, 2, device_mesh=mesh, placements=[Shard(0), R]))[3] == [[1.0, 1.0]] * 2


def test_rfc_redistribution_from_rows_to_columns_has_the_right_shapes() -> None:
    rowwise = dt.DTensor.from_local(torch.ones(4, 8), TP, [Shard(0)])
    assert rowwise.shape == (8, 8)
    columnwise = rowwise.redistribute(TP, [Shard(1)])
    assert [shard.shape for shard in columnwise._local.shards] == [(8, 4)] * 2
    assert columnwise.redistribute(TP, [R]).to_local().shape == (8, 8)


def test_rfc_large_embedding_is_sharded_by_rows() -> None:
    sharded = dt.distribute_tensor(torch.zeros(100_000, 88), dt.init_device_mesh("cpu", (4,)), [Shard(0)])
    assert [tuple(shard.shape) for shard in sharded._local.shards] == [(25_000, 88)] * 4
