"""Sparse values come plain and whole, sparse gradients dense."""

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
@pytest.mark.parametrize("where", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
def test_conversions_give_the_whole_value_and_pass_gradients(layout: torch.layout, where: dt.Placement) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    check(lambda x: x.to_sparse(layout=layout), X, mesh=mesh, placements=[[where]])
    check(lambda x: x.to_sparse().to_dense().sin(), X, mesh=mesh, placements=[[where]])
    check(lambda x: x.to_sparse(1), X, mesh=mesh, placements=[[where]])
    mask = X.flip(0).to_sparse(layout=layout)
    check(lambda x: x.sparse_mask(mask), X, mesh=mesh, placements=[[where]], gradients=layout is torch.sparse_coo)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")  # told once, by whatever makes the first one
@pytest.mark.parametrize("where", [Replicate(), Shard(0), Partial()], ids=str)
def test_what_is_made_of_parts_is_whole_and_passes_gradients(where: dt.Placement) -> None:
    mesh, values = dt.init_device_mesh("cpu", (2,)), torch.tensor([1.0, 2, 3], dtype=torch.float64)
    places, ends = torch.tensor([[0, 2, 1], [1, 0, 3]]), torch.tensor([0, 1, 1, 3])
    ranks = [[Shard(0)], [where]]
    check(lambda at, v: torch.sparse_coo_tensor(at, v, (3, 4)), places, values, mesh=mesh, placements=ranks)
    check(lambda at, v: torch.sparse_coo_tensor(at, v).to_dense().sin(), places, values, mesh=mesh, placements=ranks)
    for make in (torch.sparse_csr_tensor, torch.sparse_csc_tensor):
        check(
            lambda ends, v, make=make: make(ends, torch.tensor([1, 0, 2]), v, (3, 3)).to_dense(),
            ends,
            values,
            mesh=mesh,
            placements=ranks,
        )


def test_conversions_communicate_only_where_they_may() -> None:
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
def test_gradients_are_dense(fn: Callable[..., torch.Tensor]) -> None:
    mesh, rows = dt.init_device_mesh("cpu", (2,)), torch.tensor([0, 2, 2])
    for where in (Replicate(), Shard(0), Shard(1)):
        for placed in (Replicate(), Shard(0)):
            check(fn, X, rows, mesh=mesh, placements=[[where], [placed]])


def test_a_dense_gradient_is_announced() -> None:
    weight = dt.distribute_tensor(X, dt.init_device_mesh("cpu", (2,)), [Shard(0)]).requires_grad_()
    with pytest.warns(UserWarning, match="gradients are dense"):
        F.embedding(
            dt.distribute_tensor(torch.tensor([1]), weight.device_mesh, [Replicate()]), weight, sparse=True
        ).sum().backward()


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_gradients_that_torch_refuses_are_refused(mode: str) -> None:
    mesh, rows = dt.init_device_mesh("cpu", (2,)), torch.tensor([0, 2, 2])
    for where in (Replicate(), Shard(0), Shard(1)):
        for fn in (
            lambda w, i: F.embedding(i, w, sparse=True, scale_grad_by_freq=True),
            lambda w, i: F.embedding_bag(i.view(1, 3), w, sparse=True, scale_grad_by_freq=True, mode=mode),
        ):
            assert check(fn, X, rows, mesh=mesh, placements=[[where], [Replicate()]]).same_error


@pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")
@pytest.mark.parametrize("where", [Replicate(), Shard(0)], ids=str)
def test_nested_tensors_are_refused_with_what_to_do(where: dt.Placement) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x, mask = (dt.distribute_tensor(t, mesh, [where]) for t in (torch.ones(2, 3, 4), torch.ones(2, 3) > 0))
    for fn in (lambda: torch.nested.nested_tensor([x[0], x[1, :2]]), lambda: torch._nested_tensor_from_mask(x, mask)):
        with pytest.raises(UnsupportedOperationError, match=r"nested tensor.*enable_nested_tensor=False"):
            fn()


@pytest.mark.filterwarnings("ignore:Sparse C.. tensor support is in beta", "ignore::dtensor.errors.GatherWarning")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("where", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
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
def test_a_sparse_operand_is_the_same_on_all_ranks(
    fn: Callable[..., torch.Tensor], where: dt.Placement, layout: torch.layout
) -> None:
    """As where a graph's edges are a matrix: with ``cat``, which torch refuses, the error is torch's."""
    sparse = X.to_sparse(layout=layout)
    with dt.implicit_replication():
        check(lambda x: fn(sparse, x), X.t(), mesh=dt.init_device_mesh("cpu", (2,)), placements=[[where]])


@pytest.mark.filterwarnings("ignore:Sparse C.. tensor support is in beta")
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_sparse_operand_is_refused_with_what_to_do(layout: torch.layout) -> None:
    x, sparse = dt.distribute_tensor(X, dt.init_device_mesh("cpu", (2,)), [Shard(0)]), X.t().to_sparse(layout=layout)
    with pytest.raises(MixedTensorError, match="implicit_replication"):
        sparse @ x
    with dt.implicit_replication(), dt.explicit(), pytest.raises(ImplicitCommunicationError, match="gather"):
        sparse @ x
    with dt.implicit_replication(), pytest.raises(UnsupportedOperationError, match=r"strided.*to_dense"):
        sparse.add_(x.t())


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_of_pieces_are_refused_in_words() -> None:
    x = dt.distribute_tensor(X, dt.init_device_mesh("cpu", (2,)), [Shard(0)])
    for make in (
        lambda: torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged),
        lambda: torch.nested.nested_tensor([torch.ones(1, 4), torch.ones(2, 4)]) * x.sum(),
    ):
        with pytest.raises(UnsupportedOperationError, match="nested"):
            make()
