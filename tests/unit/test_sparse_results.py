"""Sparse results: conversions give plain sparse global values, and sparse gradients become dense."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional as F

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.errors import ImplicitCommunicationError, MixedTensorError, UnsupportedOperationError
from dtensor.testing.oracle import check

X = torch.tensor([[0.0, 2, 0, 1], [0, 0, 3, 0], [4, 0, 0, 0]], dtype=torch.float64)
LAYOUTS = [torch.sparse_coo, torch.sparse_csr, torch.sparse_csc]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
def test_to_sparse_gives_the_global_value_and_gradients(layout: torch.layout, placement: dt.Placement) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    check(lambda x: x.to_sparse(layout=layout), X, mesh=mesh, placements=[[placement]])
    check(lambda x: x.to_sparse().to_dense().sin(), X, mesh=mesh, placements=[[placement]])
    check(lambda x: x.to_sparse(1), X, mesh=mesh, placements=[[placement]])
    mask = X.flip(0).to_sparse(layout=layout)
    check(lambda x: x.sparse_mask(mask), X, mesh=mesh, placements=[[placement]], gradients=layout is torch.sparse_coo)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")  # torch warns at the first sparse CSR tensor only
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Partial()], ids=str)
def test_sparse_constructors_give_the_global_value_and_gradients(placement: dt.Placement) -> None:
    mesh, values = dt.init_device_mesh("cpu", (2,)), torch.tensor([1.0, 2, 3], dtype=torch.float64)
    indices, crow_indices = torch.tensor([[0, 2, 1], [1, 0, 3]]), torch.tensor([0, 1, 1, 3])
    placements = [[Shard(0)], [placement]]
    check(lambda at, v: torch.sparse_coo_tensor(at, v, (3, 4)), indices, values, mesh=mesh, placements=placements)
    check(lambda at, v: torch.sparse_coo_tensor(at, v).to_dense().sin(), indices, values, mesh=mesh, placements=placements)
    for make in (torch.sparse_csr_tensor, torch.sparse_csc_tensor):
        check(
            lambda crow_indices, v, make=make: make(crow_indices, torch.tensor([1, 0, 2]), v, (3, 3)).to_dense(),
            crow_indices,
            values,
            mesh=mesh,
            placements=placements,
        )


def test_to_sparse_of_a_sharded_tensor_raises_under_explicit() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    with dt.explicit():
        assert dt.distribute_tensor(X, mesh, [Replicate()]).to_sparse().is_sparse
        with pytest.raises(ImplicitCommunicationError, match="full_tensor"):
            dt.distribute_tensor(X, mesh, [Shard(0)]).to_sparse()


@pytest.mark.filterwarnings("ignore:.*gradients are dense")
@pytest.mark.parametrize(
    "fn",
    [
        lambda w, i: F.embedding(i, w, sparse=True),
        lambda w, i: F.embedding_bag(i.view(1, 3), w, sparse=True, mode="sum"),
        lambda w, i: torch.gather(w, 0, i.view(1, 3), sparse_grad=True),
    ],
    ids=["embedding", "bags", "gather"],
)
def test_gradients_of_sparse_embedding_and_gather_are_dense(fn: Callable[..., torch.Tensor]) -> None:
    mesh, rows = dt.init_device_mesh("cpu", (2,)), torch.tensor([0, 2, 2])
    for placement in (Replicate(), Shard(0), Shard(1)):
        for index_placement in (Replicate(), Shard(0)):
            check(fn, X, rows, mesh=mesh, placements=[[placement], [index_placement]])


def test_sparse_embedding_warns_that_its_gradient_is_dense() -> None:
    weight = dt.distribute_tensor(X, dt.init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()
    with pytest.warns(UserWarning, match="gradients are dense"):
        F.embedding(
            dt.distribute_tensor(torch.tensor([1]), weight.device_mesh, [Replicate()]), weight, sparse=True
        ).sum().backward()


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_sparse_gradients_with_scale_grad_by_freq_raise_the_error_of_torch(mode: str) -> None:
    mesh, rows = dt.init_device_mesh("cpu", (2,)), torch.tensor([0, 2, 2])
    for placement in (Replicate(), Shard(0), Shard(1)):
        for fn in (
            lambda w, i: F.embedding(i, w, sparse=True, scale_grad_by_freq=True),
            lambda w, i: F.embedding_bag(i.view(1, 3), w, sparse=True, scale_grad_by_freq=True, mode=mode),
        ):
            assert check(fn, X, rows, mesh=mesh, placements=[[placement], [Replicate()]]).same_error


@pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")
@pytest.mark.parametrize("placement", [Replicate(), Shard(0)], ids=str)
def test_nested_tensors_of_dtensors_raise_and_name_enable_nested_tensor(placement: dt.Placement) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x, mask = (dt.distribute_tensor(t, mesh, [placement]) for t in (torch.ones(2, 3, 4), torch.ones(2, 3) > 0))
    for fn in (lambda: torch.nested.nested_tensor([x[0], x[1, :2]]), lambda: torch._nested_tensor_from_mask(x, mask)):
        with pytest.raises(UnsupportedOperationError, match=r"nested tensor.*enable_nested_tensor=False"):
            fn()


@pytest.mark.filterwarnings("ignore:Sparse C.. tensor support is in beta", "ignore::dtensor.errors.GatherWarning")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
@pytest.mark.parametrize(
    "fn",
    [
        lambda s, x: s @ x,
        lambda s, x: s @ x[:, 0],
        lambda s, x: x.t() @ s.t(),
        lambda s, x: F.linear(s, x.t()).sin(),
        lambda s, x: torch.addmm(x[:3, :3], s, x),
        lambda s, x: torch.sparse.mm(s, x),
        lambda s, x: torch.cat([x, s]),
    ],
    ids=["matmul", "vector", "from the right", "linear", "addmm", "sparse.mm", "cat"],
)
def test_a_plain_sparse_operand_is_accepted_under_implicit_replication(
    fn: Callable[..., torch.Tensor], placement: dt.Placement, layout: torch.layout
) -> None:
    """Example: the adjacency matrix of a graph. Torch refuses ``cat``, and the error is equal."""
    sparse = X.to_sparse(layout=layout)
    with dt.implicit_replication():
        check(lambda x: fn(sparse, x), X.t(), mesh=dt.init_device_mesh("cpu", (2,)), placements=[[placement]])


@pytest.mark.filterwarnings("ignore:Sparse C.. tensor support is in beta")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_plain_sparse_operand_raises_and_names_the_fix(layout: torch.layout) -> None:
    x, sparse = dt.distribute_tensor(X, dt.init_device_mesh("cpu", (2,)), [Shard(0)]), X.t().to_sparse(layout=layout)
    with pytest.raises(MixedTensorError, match="implicit_replication"):
        sparse @ x
    with dt.implicit_replication(), dt.explicit(), pytest.raises(ImplicitCommunicationError, match="gather"):
        sparse @ x
    with dt.implicit_replication(), pytest.raises(UnsupportedOperationError, match=r"strided.*to_dense"):
        sparse.add_(x.t())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_sharded_views_and_mixed_nested_operands_raise() -> None:
    x = dt.distribute_tensor(X, dt.init_device_mesh("cpu", (2,)), [Shard(0)])
    for make in (
        lambda: torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged),
        lambda: torch.nested.nested_tensor([torch.ones(1, 4), torch.ones(2, 4)]) * x.sum(),
    ):
        with pytest.raises(UnsupportedOperationError, match="nested"):
            make()
