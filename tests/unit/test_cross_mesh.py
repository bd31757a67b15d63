"""Operands on several meshes: list operators run per mesh, 0-d values are used as numbers, other operands raise."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.errors import ImplicitCommunicationError, MeshError, MixedTensorError
from dtensor.testing import scatter
from dtensor.testing.placements import get_or_make_mesh

R, S0, S1 = Replicate(), Shard(0), Shard(1)
LINE, SQUARE = get_or_make_mesh((4,)), get_or_make_mesh((2, 2))
X, Y = torch.arange(30.0).reshape(5, 6), torch.arange(12.0).reshape(4, 3)


def test_a_0d_operand_on_another_mesh_is_used_as_a_number() -> None:
    x, total = dt.distribute_tensor(X, LINE, [S0]), dt.distribute_tensor(Y, SQUARE, [S0, S1]).sum()
    assert total.placements == (Partial(), Partial())
    for out in (x * total, total * x):
        assert out.device_mesh == LINE
        assert out.placements == (S0,)
        assert torch.equal(out.full_tensor(), X * Y.sum())
    x.mul_(total)
    assert torch.equal(x.full_tensor(), X * Y.sum())
    assert torch.equal(torch.stack([total, x.sum()]).full_tensor(), torch.stack([Y.sum(), (X * Y.sum()).sum()]))


def test_0d_operand_on_another_mesh_has_the_gradients_of_plain_torch() -> None:
    x, y = dt.distribute_tensor(X, LINE, [S0]).requires_grad_(), dt.distribute_tensor(Y, SQUARE, [S0, S1]).requires_grad_()
    p, q = X.clone().requires_grad_(), Y.clone().requires_grad_()
    for a, b in ((x, y), (p, q)):
        (a * (b.square().sum() + b.mean() + b.amax() + b.norm())).sum().backward()
    for own, expected in ((x, p), (y, q)):
        assert own.grad.placements == own.placements
        assert own.grad.device_mesh == own.device_mesh
        assert torch.allclose(own.grad.full_tensor(), expected.grad)


@pytest.mark.parametrize("foreach", [True, False])
def test_clip_grad_norm_and_adamw_with_parameters_on_two_meshes_equal_plain_torch(foreach: bool) -> None:
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

    for own, expected in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(own, expected)


def test_foreach_norm_over_two_meshes_keeps_the_order_of_the_list() -> None:
    xs = [dt.distribute_tensor(X, LINE, [S0]), dt.distribute_tensor(Y, SQUARE, [S0, S1]), scatter(X * 2, LINE, [Partial()])]
    norms = torch._foreach_norm(xs)
    assert [round(norm.item(), 3) for norm in norms] == [round(v.norm().item(), 3) for v in (X, Y, X * 2)]


def test_operands_of_one_or_more_dims_on_different_meshes_raise() -> None:
    x, y = dt.distribute_tensor(X, LINE, [S0]), dt.distribute_tensor(X, SQUARE, [S0, S1])
    for call in (lambda: x + y, lambda: torch.cat([x, y]), lambda: x.add_(y), lambda: torch._foreach_add([x], [y])):
        with pytest.raises(MeshError, match=r"different meshes.*redistribute"):
            call()


NAMED = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
DP, TP = NAMED["dp"], NAMED["tp"]


def test_a_0d_operand_on_a_submesh_with_equal_copies_is_used_on_any_mesh() -> None:
    x = dt.distribute_tensor(X, NAMED, [S0, S1])
    for total in (dt.distribute_tensor(Y, TP, [S0]).sum(), dt.distribute_tensor(Y, DP, [S1]).sum()):
        assert torch.equal((x * total).full_tensor(), X * Y.sum())
        assert torch.equal((dt.distribute_tensor(X, LINE, [S0]) * total).full_tensor(), X * Y.sum())
        for mesh in (DP, TP):
            out = dt.distribute_tensor(X, mesh, [S0]) * total
            assert out.device_mesh == mesh
            assert torch.equal(out.full_tensor(), X * Y.sum())
        both = torch.stack([total, x.sum()])
        assert both.device_mesh == NAMED  # the value is sent to all ranks once
        assert torch.equal(both.full_tensor(), torch.stack([Y.sum(), X.sum()]))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.complex64])
def test_a_0d_operand_on_a_submesh_with_different_copies_raises_on_other_meshes(dtype: torch.dtype) -> None:
    local = dt.per_rank([torch.tensor(k % 2, dtype=dtype) for k in range(4)])  # differs along tp
    number = dt.DTensor.from_local(local, DP, [R])
    x = dt.distribute_tensor(X.to(dtype), NAMED, [S0, S1])
    for call in (lambda: x * number, lambda: torch.stack([number, x.sum()]), lambda: x.mul_(number)):
        with pytest.raises(MeshError, match=r"values on submeshes of .* differ"):
            call()
    within = dt.distribute_tensor(X.to(dtype), DP, [S0]) * number
    assert [torch.equal(s, (k % 2) * X.to(dtype).chunk(2)[k // 2]) for k, s in enumerate(within._local.shards)] == [True] * 4


def test_submesh_copies_that_differ_by_rounding_become_one_value_on_all_ranks() -> None:
    eps = torch.finfo(torch.float32).eps
    number = dt.DTensor.from_local(dt.per_rank([torch.tensor(1.0 + (k % 2) * eps) for k in range(4)]), DP, [R])
    out = dt.distribute_tensor(torch.ones(3), NAMED, [R, R]) * number
    assert [shard.tolist() for shard in out._local.shards] == [[1.0] * 3] * 4
    nan = dt.DTensor.from_local(dt.per_rank([torch.tensor(torch.nan)] * 4), DP, [R])
    assert (dt.ones(3, device_mesh=NAMED) * nan).full_tensor().isnan().all()


def test_0d_operands_of_one_submesh_are_compared_in_one_collective() -> None:
    norms = [dt.distribute_tensor(X * k, DP, [S0]).norm() for k in range(5)]
    with dt.debug.CommDebugMode() as comm:
        out = torch.stack([*norms, dt.distribute_tensor(X, NAMED, [S0, S1]).norm()])
    assert comm.get_comm_counts() == {"all_reduce": 1, "all_gather": 1}
    assert torch.allclose(out.full_tensor(), torch.stack([*((X * k).norm() for k in range(5)), X.norm()]))
    with dt.explicit(), pytest.raises(ImplicitCommunicationError, match=r"another mesh|copies"):
        torch.stack([*norms, dt.distribute_tensor(X, NAMED, [R, R]).norm()])
    replicated = dt.distribute_tensor(X, DP, [R]).norm()
    with dt.explicit(), pytest.raises(ImplicitCommunicationError, match="compare the values"):
        _ = dt.distribute_tensor(X, NAMED, [R, R]) * replicated
    with dt.explicit():
        _ = dt.distribute_tensor(X, DP, [R]) * dt.distribute_tensor(X, NAMED, [R, R]).norm()  # all ranks have this value


def test_copies_of_a_0d_operand_on_a_mesh_with_permuted_ranks_are_compared_by_rank() -> None:
    turned = dt.DeviceMesh("cpu", torch.tensor([[3, 1], [0, 2]]), mesh_dim_names=("a", "b"))
    local = dt.per_rank([torch.tensor(float(k // 2)) for k in range(4)])  # ranks 3 and 1 hold 0, ranks 0 and 2 hold 1
    number = dt.DTensor.from_local(local, turned["b"], [R])
    x = dt.DTensor.from_local(dt.per_rank([torch.ones(1)] * 4), NAMED["tp"], [S0])
    with pytest.raises(MeshError, match="values"):
        _ = x * number  # tp's groups are ranks 0, 1 and 2, 3
    pairs = dt.DeviceMesh("cpu", torch.tensor([[1, 3], [2, 0]]), mesh_dim_names=("c", "d"))["d"]
    out = dt.DTensor.from_local(dt.per_rank([torch.ones(1)] * 4), pairs, [S0]) * number
    assert [shard.item() for shard in out._local.shards] == [0.0, 0.0, 1.0, 1.0]


def test_0d_operand_on_a_submesh_has_the_gradients_of_plain_torch() -> None:
    x, y = dt.distribute_tensor(X, NAMED, [S0, S1]).requires_grad_(), dt.distribute_tensor(Y, DP, [S0]).requires_grad_()
    z = dt.distribute_tensor(Y * 3, TP, [S1]).requires_grad_()
    p, q, r = X.clone().requires_grad_(), Y.clone().requires_grad_(), (Y * 3).requires_grad_()
    for a, b, c in ((x, y, z), (p, q, r)):
        ((a * (b.square().sum() + b.norm())).sum() + c.mean() * b.amax() + (c * a.norm()).sum()).backward()
    for own, expected in ((x, p), (y, q), (z, r)):
        assert (own.grad.placements, own.grad.device_mesh) == (own.placements, own.device_mesh)
        assert torch.allclose(own.grad.full_tensor(), expected.grad)


CLIPPED_PARAMETERS = {
    "submesh, root mesh": [(X, DP, [S0]), (Y, NAMED, [S0, S1])],
    "root mesh, submesh": [(Y, NAMED, [S0, S1]), (X, DP, [S0]), (X[:3], DP, [R])],
    "two submeshes, root mesh": [(X, DP, [S0]), (Y, NAMED, [R, S1]), (X[:3], TP, [S0]), (Y * 2, DP, [R])],
    "two submeshes": [(X, TP, [S1]), (Y, DP, [S0])],
    "submesh, other mesh": [(X, TP, [S0]), (Y, LINE, [S0])],
    "submesh, plain tensors": [(X, TP, [S0]), (Y,), (Y * 2, NAMED, [S0, S0])],
}


@pytest.mark.parametrize("foreach", [True, False])
@pytest.mark.parametrize("meshes", CLIPPED_PARAMETERS)
def test_gradient_clipping_with_parameters_on_submeshes_equals_plain_torch(meshes: str, foreach: bool) -> None:
    """Example: a model with experts on ``dp`` and other parameters on ``dp`` and ``tp``."""
    utils = torch.nn.utils

    def parameters(distributed: bool, scale: float) -> list[torch.nn.Parameter]:
        made = []
        for value, *where in CLIPPED_PARAMETERS[meshes]:
            put = lambda v, where=where: dt.distribute_tensor(v, *where) if distributed and where else v.clone()  # noqa: E731
            made.append(torch.nn.Parameter(put(value)))
            made[-1].grad = put(value * scale - 1)
        return made

    def compared(clip: Callable[[list[torch.nn.Parameter]], Any], scale: float = 0.5) -> None:
        own, expected = parameters(True, scale), parameters(False, scale)
        results = [clip(own), clip(expected)]
        pairs = list(zip((p.grad for p in own), (p.grad for p in expected), strict=True))
        if results[0] is not None:
            pairs.append(tuple(results))
        for a, b in pairs:
            torch.testing.assert_close(a.full_tensor() if isinstance(a, dt.DTensor) else a, b, equal_nan=True)

    for norm_type in (1.0, 2.0, torch.inf):
        compared(lambda ps, n=norm_type: utils.clip_grad_norm_(ps, 1.5, n, error_if_nonfinite=True, foreach=foreach))
        compared(lambda ps, n=norm_type: utils.get_total_norm([p.grad for p in ps], n, foreach=foreach))
    compared(lambda ps: utils.clip_grads_with_norm_(ps, 2.0, utils.get_total_norm([p.grad for p in ps]), foreach=foreach))
    compared(lambda ps: utils.clip_grad_value_(ps, 0.75, foreach=foreach))
    compared(lambda ps: utils.clip_grad_norm_(ps, 1.5, foreach=foreach), scale=torch.inf)
    with pytest.raises(RuntimeError, match="non-finite"):
        utils.clip_grad_norm_(parameters(True, torch.nan), 1.5, error_if_nonfinite=True, foreach=foreach)


def test_gradient_clipping_over_submeshes_replays_when_captured() -> None:
    def step(clip: Callable[..., Any]) -> list[torch.Tensor]:
        found = []
        for k in range(4):
            grads = [dt.distribute_tensor(X + k, DP, [S0]), dt.distribute_tensor(Y * k, NAMED, [S0, S1])]
            clip(grads)
            found += [grad.full_tensor() for grad in grads]
        return found

    def clip(grads: list[Any]) -> None:
        torch._foreach_mul_(grads, torch.stack(torch._foreach_norm(grads)).norm())

    captured = dt.capture(clip)
    for own, expected in zip(step(captured), step(clip), strict=True):
        assert torch.equal(own, expected)
    assert captured.cache_info().replayed > 0


def _clip_gradients_over_submeshes() -> None:
    torch.set_num_threads(1)
    named = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    dp, tp = named["dp"], named["tp"]
    places = [(X, dp, [S0]), (Y, named, [S0, S1]), (X[:3], tp, [S0]), (Y * 2, dp, [R])]
    for foreach, norm_type in ((True, 2.0), (False, torch.inf)):
        own = [torch.nn.Parameter(dt.distribute_tensor(v, *where)) for v, *where in places]
        plain = [torch.nn.Parameter(v.clone()) for v, *_ in places]
        for p, q, (v, *where) in zip(own, plain, places, strict=True):
            p.grad, q.grad = dt.distribute_tensor(v / 2, *where), v / 2
        norm = torch.nn.utils.clip_grad_norm_(own, 1.5, norm_type, error_if_nonfinite=True, foreach=foreach)
        expected = torch.nn.utils.clip_grad_norm_(plain, 1.5, norm_type, foreach=foreach)
        torch.testing.assert_close(norm.full_tensor(), expected)
        for p, q in zip(own, plain, strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad)
    number = dt.DTensor.from_local(torch.tensor(float(tp.get_local_rank())), dp, [R])
    with pytest.raises(MeshError, match="values"):
        _ = dt.distribute_tensor(X, named, [S0, S1]) * number


@pytest.mark.gloo
def test_gradient_clipping_over_submeshes_on_processes_equals_plain_torch() -> None:
    run_gloo(_clip_gradients_over_submeshes, 4)


def test_explicit_refuses_the_reduction_of_a_0d_operand_of_another_mesh() -> None:
    x, total = dt.distribute_tensor(X, LINE, [S0]), dt.distribute_tensor(Y, SQUARE, [S0, S1]).sum()
    with dt.explicit(), pytest.raises(ImplicitCommunicationError, match="another mesh"):
        _ = x * total


# --- plain tensors and 0-d DTensors ---------------------------------------------------------------------------------
@pytest.mark.parametrize("options", [{"foreach": True}, {"foreach": False}, {"fused": True}], ids=str)
def test_clip_grad_norm_and_adamw_with_plain_and_distributed_parameters_equal_plain_torch(options: dict[str, bool]) -> None:
    def train(distributed: bool) -> list[torch.Tensor]:
        put = lambda v, *where: dt.distribute_tensor(v, *where) if distributed and where else v.clone()  # noqa: E731
        values: list[tuple[torch.Tensor, ...]] = [(X, LINE, [S0]), (Y,), (X[:3], SQUARE, [S1, S0]), (Y[0],)]
        parameters = [torch.nn.Parameter(put(*each)) for each in values]
        optimizer = torch.optim.AdamW(parameters, lr=0.1, **options)
        for step in range(3):
            for p, (v, *where) in zip(parameters, values, strict=True):
                p.grad = put(v * 0.1 + step, *where)
            torch.nn.utils.clip_grad_norm_(parameters, 1.5, foreach=options.get("foreach"))
            optimizer.step()
        return [p.detach().full_tensor() if isinstance(p, dt.DTensor) else p.detach() for p in parameters]

    for own, expected in zip(train(True), train(False), strict=True):
        torch.testing.assert_close(own, expected)


def test_in_place_operators_of_plain_tensors_accept_0d_dtensors() -> None:
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


def test_in_place_add_of_a_0d_dtensor_with_different_submesh_copies_raises() -> None:
    named = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    equal_copies = dt.DTensor.from_local(dt.per_rank([torch.tensor(float(k % 2)) for k in range(4)]), named["tp"], [Partial()])
    different_copies = dt.DTensor.from_local(dt.per_rank([torch.tensor(float(k)) for k in range(4)]), named["tp"], [Partial()])
    running = torch.tensor(1.0)
    running += equal_copies
    assert running.item() == 2
    with pytest.raises(MeshError, match="values that differ between the submeshes"):
        running += different_copies


@pytest.mark.parametrize("options", [{}, {"fused": True}, {"foreach": True}], ids=str)
def test_optimizer_state_of_another_mesh_raises_and_the_named_redistribute_repairs_it(options: dict[str, bool]) -> None:
    params, optimizers = [], []
    for mesh in (dt.init_device_mesh("cpu", (4,)), dt.init_device_mesh("cpu", (2,))):
        params.append(dt.distribute_tensor(torch.arange(1.0, 7), mesh, [Shard(0)]).requires_grad_())
        optimizers.append(torch.optim.Adam([params[-1]], 0.1, **options))
        params[-1].grad = params[-1].detach() * 2
    optimizers[0].step()
    with torch.no_grad():
        params[1].copy_(params[0].redistribute(params[1].device_mesh, [Shard(0)]))
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))
    with pytest.raises(MeshError, match=r"saved on another mesh.*s\.redistribute\(p\.device_mesh, p\.placements\)"):
        optimizers[1].step()
    optimizers[1].load_state_dict(copy.deepcopy(optimizers[0].state_dict()))  # the failed step has been counted in this state
    for p, state in optimizers[1].state.items():
        redistributed = {key: s.redistribute(p.device_mesh, p.placements) for key, s in state.items() if s.ndim}
        state.update(redistributed)
    for optimizer in optimizers:
        optimizer.step()
    torch.testing.assert_close(params[1].full_tensor(), params[0].full_tensor())
