"""Figures that the documents of the seed projects print, computed by this library."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.mesh.current_rank import run_as_member

TP = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("TP",))
R = Replicate()


def pieces(x: Any) -> list[Any]:
    return [piece.tolist() for piece in x._local.shards]


def put(x: torch.Tensor, *placements: Any, mesh: dt.DeviceMesh = TP) -> dt.DTensor:
    return dt.distribute_tensor(x, mesh, placements)


# --- a mesh of two: matrix products ---------------------------------------------------------------------------------
X, Y = torch.arange(1, 9).reshape(2, 4), torch.arange(9, 17).reshape(2, 4)


def test_a_product_of_replicas() -> None:
    product = put(X, R) @ put(Y, R).T
    assert product.placements == (R,)
    assert pieces(product) == [[[110, 150], [278, 382]]] * 2


def test_a_product_with_a_sharded_operand() -> None:
    product = put(X, R) @ put(Y, Shard(0)).T
    assert pieces(product) == [[[110], [278]], [[150], [382]]]
    assert product.placements == (Shard(1),)


def test_column_wise_then_row_wise() -> None:
    x = put(torch.ones(3, 2), R)
    w1, w3 = (put(torch.arange(start, start + 8.0).reshape(2, 4), Shard(-1)) for start in (1.0, 9.0))
    w2 = put(torch.tril(torch.ones(4, 2), -1), Shard(0))
    c = (x @ w1) * (x @ w3)
    assert pieces(c) == [[[132.0, 192.0]] * 3, [[260.0, 336.0]] * 3]
    assert c.placements == (Shard(1),)
    d = c @ w2
    assert pieces(d) == [[[192.0, 0.0]] * 3, [[596.0, 596.0]] * 3]
    assert d.placements == (Partial("sum"),)
    assert pieces(d.redistribute(placements=[R])) == [[[788.0, 596.0]] * 3] * 2


class FeedForward(nn.Module):
    """``w2(w1(x) * w3(x))``."""

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(2, 4, bias=False), nn.Linear(4, 2, bias=False), nn.Linear(2, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(self.w1(x) * self.w3(x))


def test_a_module_of_three_linears() -> None:
    module = FeedForward()
    values = {"w1": (torch.arange(1.0, 9.0).reshape(4, 2), Shard(0)), "w3": (torch.arange(9.0, 17.0).reshape(4, 2), Shard(0))}
    values["w2"] = (torch.tril(torch.ones(2, 4), -1), Shard(1))
    for name, (weight, placement) in values.items():
        getattr(module, name).weight = nn.Parameter(put(weight, placement))
    assert pieces(module.w1.weight)[0] == [[1, 2], [3, 4]]
    x = put(torch.ones(3, 2), R)
    product = module.w1(x) * module.w3(x)
    assert pieces(product) == [[[57.0, 161.0]] * 3, [[297.0, 465.0]] * 3]
    output = module(x).redistribute(placements=[R])
    assert pieces(output) == [[[0.0, 57.0]] * 3] * 2


# --- meshes of eight ------------------------------------------------------------------------------------------------
CUBE = dt.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("DDP", "FSDP", "TP"))


def test_slices_of_a_mesh_of_three_dims() -> None:
    assert CUBE["TP"].mesh.tolist() == [0, 1]
    assert CUBE["DDP", "FSDP"].mesh.tolist() == [[0, 2], [4, 6]]
    with run_as_member(CUBE._root, 5):
        assert CUBE["TP"].mesh.tolist() == [4, 5]


def test_tensor_parallel_then_fully_sharded() -> None:
    weight = torch.arange(1.0, 65.0).reshape(8, 8)
    columns = put(weight, R, R, Shard(0), mesh=CUBE)
    assert [sorted({x for row in piece for x in row}) for piece in pieces(columns)] == [
        [float(k) for k in (range(1, 33) if rank % 2 == 0 else range(33, 65))] for rank in range(8)
    ]
    # FSDP splits what TP has split: TP outermost
    sharded = columns.redistribute(placements=[R, Shard(0, level=1), Shard(0, level=0)])
    first = {0: 1, 4: 1, 2: 17, 6: 17, 1: 33, 5: 33, 3: 49, 7: 49}
    for rank, piece in enumerate(pieces(sharded)):
        assert [x for row in piece for x in row] == [float(first[rank] + k) for k in range(16)]
    assert torch.equal(sharded.full_tensor(), weight)


def test_fully_sharded_over_two_dims_of_three() -> None:
    """Hybrid sharding: replicated over DDP, sharded over FSDP and TP; gradients come back in that layout."""
    weight = put(torch.arange(1.0, 65.0).reshape(8, 8), R, Shard(0, level=1), Shard(0, level=0), mesh=CUBE).requires_grad_()
    batch = put(torch.ones(4, 8), Shard(0), Shard(0), R, mesh=CUBE)
    (batch @ weight.t()).sum().backward()
    assert weight.grad.placements == weight.placements
    assert weight.grad.full_tensor().unique().tolist() == [4]


# --- a 2 x 2 mesh of FSDP and TP ------------------------------------------------------------------------------------
MESH_22 = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("FSDP", "TP"))


def test_two_dimensional_parallelism() -> None:
    """Row-wise over TP, fully sharded over FSDP: the averaged gradient of the document, piece by piece."""
    weight = put(torch.arange(1.0, 17.0).reshape(4, 4), Shard(0), Shard(1), mesh=MESH_22).requires_grad_()
    gradients = []
    for k in range(2):  # FSDP rank k: its own batch and its own noise, drawn alike on every rank
        torch.manual_seed(42)
        out = put(torch.ones(2, 4) * (k + 1), R, Shard(1), mesh=MESH_22) @ weight.t()
        noise = put(torch.randn(2, 4), R, R, mesh=MESH_22)
        (gradient,) = torch.autograd.grad(((noise - out) ** 2).sum(), weight)
        gradients.append(gradient)
    averaged = ((gradients[0] + gradients[1]) / 2).redistribute(placements=weight.placements)
    rows = torch.tensor([102.3585, 260.1725, 412.6720, 581.2230])
    assert torch.allclose(averaged.full_tensor(), rows[:, None].expand(4, 4), atol=2e-4)
    held = averaged._local.shards
    assert torch.allclose(held[0], rows[:2, None].expand(2, 2), atol=2e-4)
    assert torch.allclose(held[2], rows[2:, None].expand(2, 2), atol=2e-4)
    assert averaged.placements == (Shard(0), Shard(1))


# --- the RFC of DTensor ---------------------------------------------------------------------------------------------
def test_factories_of_the_rfc() -> None:
    mesh = dt.DeviceMesh("cpu", [[0, 1], [2, 3]])
    for placements in ([Shard(0), R], [Shard(0), Shard(1)], [R, R]):
        x = dt.full((4, 6), 2.0, device_mesh=mesh, placements=placements)
        assert x.full_tensor().unique().tolist() == [2]
    assert pieces(dt.ones(4, 2, device_mesh=mesh, placements=[Shard(0), R]))[3] == [[1.0, 1.0]] * 2


def test_redistribution_of_the_rfc() -> None:
    rowwise = dt.DTensor.from_local(torch.ones(4, 8), TP, [Shard(0)])
    assert rowwise.shape == (8, 8)
    columnwise = rowwise.redistribute(TP, [Shard(1)])
    assert [piece.shape for piece in columnwise._local.shards] == [(8, 4)] * 2
    assert columnwise.redistribute(TP, [R]).to_local().shape == (8, 8)


def test_a_large_embedding_of_the_rfc() -> None:
    sharded = dt.distribute_tensor(torch.zeros(100_000, 88), dt.init_device_mesh("cpu", (4,)), [Shard(0)])
    assert [tuple(piece.shape) for piece in sharded._local.shards] == [(25_000, 88)] * 4
