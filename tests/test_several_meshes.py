"""Operands on several meshes: lists go mesh by mesh, 0-d values are numbers, all else is refused."""

from __future__ import annotations

import pytest
import torch

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.errors import ImplicitCommunicationError, MeshError, MixedTensorError
from dtensor.testing import scatter
from dtensor.testing.cases import mesh_of

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LINE, SQUARE = mesh_of((4,)), mesh_of((2, 2))
X, Y = torch.arange(30.0).reshape(5, 6), torch.arange(12.0).reshape(4, 3)


def test_a_number_of_another_mesh() -> None:
    x, total = dt.distribute_tensor(X, LINE, [S0]), dt.distribute_tensor(Y, SQUARE, [S0, S1]).sum()
    assert total.placements == (Partial(), Partial())
    for out in (x * total, total * x):
        assert out.device_mesh == LINE
        assert out.placements == (S0,)
        assert torch.equal(out.full_tensor(), X * Y.sum())
    x.mul_(total)
    assert torch.equal(x.full_tensor(), X * Y.sum())
    assert torch.equal(torch.stack([total, x.sum()]).full_tensor(), torch.stack([Y.sum(), (X * Y.sum()).sum()]))


def test_it_is_differentiable() -> None:
    x, y = dt.distribute_tensor(X, LINE, [S0]).requires_grad_(), dt.distribute_tensor(Y, SQUARE, [S0, S1]).requires_grad_()
    p, q = X.clone().requires_grad_(), Y.clone().requires_grad_()
    for a, b in ((x, y), (p, q)):
        (a * (b.square().sum() + b.mean() + b.amax() + b.norm())).sum().backward()
    for own, like in ((x, p), (y, q)):
        assert own.grad.placements == own.placements
        assert own.grad.device_mesh == own.device_mesh
        assert torch.allclose(own.grad.full_tensor(), like.grad)


@pytest.mark.parametrize("foreach", [True, False])
def test_clipping_and_stepping(foreach: bool) -> None:
    def train(distributed: bool) -> list[torch.Tensor]:
        values = [(X, LINE, [S0]), (Y, SQUARE, [S0, S1]), (X[:3], LINE, [S1]), (Y.flatten(), SQUARE, [R, S0])]
        put = lambda v, *where: dt.distribute_tensor(v, *where) if distributed else v.clone()  # noqa: E731
        parameters = [torch.nn.Parameter(put(*each)) for each in values]
        optimizer = torch.optim.AdamW(parameters, lr=0.1, foreach=foreach)
        for step in range(3):
            for p, (v, *where) in zip(parameters, values, strict=True):
                p.grad = put(v * 0.1 + step, *where)
            torch.nn.utils.clip_grad_norm_(parameters, 1.5, foreach=foreach)
            optimizer.step()
        return [p.detach().full_tensor() if isinstance(p, dt.DTensor) else p.detach() for p in parameters]

    for own, like in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(own, like)


def test_lists_of_norms_come_back_in_order() -> None:
    xs = [dt.distribute_tensor(X, LINE, [S0]), dt.distribute_tensor(Y, SQUARE, [S0, S1]), scatter(X * 2, LINE, [Partial()])]
    norms = torch._foreach_norm(xs)
    assert [round(norm.item(), 3) for norm in norms] == [round(v.norm().item(), 3) for v in (X, Y, X * 2)]


def test_tensors_with_dims_are_refused() -> None:
    x, y = dt.distribute_tensor(X, LINE, [S0]), dt.distribute_tensor(X, SQUARE, [S0, S1])
    for call in (lambda: x + y, lambda: torch.cat([x, y]), lambda: x.add_(y), lambda: torch._foreach_add([x], [y])):
        with pytest.raises(MeshError, match=r"different meshes.*redistribute"):
            call()


def test_numbers_on_submeshes_are_refused() -> None:
    named = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    total = dt.distribute_tensor(Y, named["tp"], [S0]).sum()
    with pytest.raises(MeshError, match="different meshes"):
        _ = dt.distribute_tensor(X, LINE, [S0]) * total


def test_the_reduction_is_an_error_under_explicit() -> None:
    x, total = dt.distribute_tensor(X, LINE, [S0]), dt.distribute_tensor(Y, SQUARE, [S0, S1]).sum()
    with dt.explicit(), pytest.raises(ImplicitCommunicationError, match="another mesh"):
        _ = x * total


# --- no mesh at all -----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_plain_and_distributed_parameters_train_together(options: dict[str, bool]) -> None:
    def train(distributed: bool) -> list[torch.Tensor]:
        put = lambda v, *where: dt.distribute_tensor(v, *where) if distributed and where else v.clone()  # noqa: E731
        values: list[tuple[torch.Tensor, ...]] = [(X, LINE, [S0]), (Y,), (X[:3], SQUARE, [S1, S0]), (Y[0],)]  # type: ignore[assignment]
        parameters = [torch.nn.Parameter(put(*each)) for each in values]
        optimizer = torch.optim.AdamW(parameters, lr=0.1, **options)
        for step in range(3):
            for p, (v, *where) in zip(parameters, values, strict=True):
                p.grad = put(v * 0.1 + step, *where)
            torch.nn.utils.clip_grad_norm_(parameters, 1.5, foreach=options.get("foreach"))
            optimizer.step()
        return [p.detach().full_tensor() if isinstance(p, dt.DTensor) else p.detach() for p in parameters]

    for own, like in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(own, like)


def test_distributed_numbers_are_written_to_plain_tensors() -> None:
    total = dt.distribute_tensor(Y, LINE, [S0]).sum()
    running, rows = torch.tensor(1.0), torch.ones(3)
    running += total
    running.add_(total, alpha=2)
    rows.mul_(total)
    torch._foreach_mul_([rows, running], total)
    assert running.item() == (1 + 3 * Y.sum().item()) * Y.sum().item()
    assert rows.tolist() == [Y.sum().item() ** 2] * 3
    with dt.explicit(), pytest.raises(ImplicitCommunicationError):
        running += total
    with pytest.raises(MixedTensorError, match="distribute_tensor"):
        rows += dt.distribute_tensor(Y[:, 0], LINE, [S0])[:3]


def test_numbers_that_differ_between_copies_of_a_submesh_are_not_written() -> None:
    named = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    alike = dt.DTensor.from_local(dt.per_rank([torch.tensor(float(k % 2)) for k in range(4)]), named["tp"], [Partial()])
    other = dt.DTensor.from_local(dt.per_rank([torch.tensor(float(k)) for k in range(4)]), named["tp"], [Partial()])
    running = torch.tensor(1.0)
    running += alike
    assert running.item() == 2
    with pytest.raises(MeshError, match="copies differ"):
        running += other
