"""Rules of normalization: global statistics under all placements, gradients, running statistics, and bytes communicated."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from slow_case_marks import keep_diagonals_fast

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.testing import check, scatter
from dtensor.testing.force_strategy import declared_strategies

R, S0, S1, S2, SUM = Replicate(), Shard(0), Shard(1), Shard(2), Partial()
MESHES = {shape: dt.init_device_mesh("cpu", shape) for shape in ((2,), (3,), (2, 2))}


def x(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def layer_norm(a: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(a, w.shape, w, b)


def rms_norm(a: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.rms_norm(a, w.shape, w)


def group_norm(a: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.group_norm(a, 2, w, b)


def batch_norm(a: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.batch_norm(a, None, None, w, b, training=True)


# name, function, shapes, placements on one mesh dim, placements of the result, collectives of the forward pass, of the gradients
COSTS: list[tuple[str, Any, list[tuple[int, ...]], list[Any], Any, int]] = [
    ("layer norm of rows", layer_norm, [(5, 3, 7), (7,), (7,)], [S0, R, R], S0, 0),
    ("layer norm of a sharded sequence", layer_norm, [(2, 5, 7), (7,), (7,)], [S1, R, R], S1, 0),
    ("layer norm of a sharded hidden dim", layer_norm, [(2, 5, 7), (7,), (7,)], [S2, S0, S0], S2, 1),
    ("RMS norm of rows", rms_norm, [(5, 3, 7), (7,)], [S0, R], S0, 0),
    ("group norm of samples", group_norm, [(5, 6, 3), (6,), (6,)], [S0, R, R], S0, 0),
    ("group norm of groups", group_norm, [(5, 6, 3), (6,), (6,)], [S1, S0, S0], S1, 0),
    ("group norm of sharded positions", group_norm, [(2, 6, 7), (6,), (6,)], [S2, R, R], S2, 1),
    ("batch norm of a sharded batch", batch_norm, [(5, 6, 3), (6,), (6,)], [S0, R, R], S0, 1),
    ("batch norm of channels", batch_norm, [(5, 6, 3), (6,), (6,)], [S1, S0, S0], S1, 0),
]


@pytest.mark.parametrize(("name", "fn", "shapes", "placements", "result", "collectives"), COSTS, ids=[case[0] for case in COSTS])
def test_norms_communicate_only_statistics(
    name: str, fn: Any, shapes: Any, placements: Any, result: Any, collectives: int
) -> None:
    tensors = [x(*shape, seed=i) for i, shape in enumerate(shapes)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*has no sharding rule.*")
        outcome = check(fn, *tensors, mesh=MESHES[2,], placements=[[p] for p in placements])
    assert outcome.layouts[0].placements == (result,)
    assert len(outcome.events) == collectives
    assert all(event.bytes < 8 * tensors[0].numel() for event in outcome.events)  # statistics, not values


COMPOSITES: list[tuple[str, Any, list[tuple[int, ...]]]] = [
    ("layer_norm", layer_norm, [(5, 3, 7), (3, 7), (3, 7)]),
    ("rms_norm", rms_norm, [(5, 3, 7), (7,)]),
    ("group_norm", group_norm, [(5, 6, 3), (6,), (6,)]),
    ("batch_norm", batch_norm, [(5, 6, 3), (6,), (6,)]),
    ("instance_norm", lambda a, w, b: F.instance_norm(a, weight=w, bias=b), [(5, 6, 3), (6,), (6,)]),
    ("local_response_norm", lambda a: F.local_response_norm(a, 3), [(5, 6, 7)]),
    ("normalize", lambda a: F.normalize(a, dim=1), [(5, 6, 7)]),
    ("weight_norm", lambda v, g: torch._weight_norm(v, g, 0), [(5, 6), (5, 1)]),
]


def fit_placements(ndim: int, *placements: Any) -> list[Any]:
    """Return the placements, with Replicate() where a parameter of ``ndim`` dims cannot be sharded so."""
    return [R if isinstance(p, Shard) and (p.sizes or not -ndim <= p.dim < ndim) else p for p in placements]


@pytest.mark.parametrize(("name", "shape"), keep_diagonals_fast([case[0] for case in COMPOSITES], MESHES, every=3), ids=str)
def test_norm_values_and_gradients_equal_plain_torch(name: str, shape: tuple[int, ...]) -> None:
    fn, shapes = next(case[1:] for case in COMPOSITES if case[0] == name)
    tensors = [x(*own, seed=i) for i, own in enumerate(shapes)]
    for first, second in ((S0, Shard(-1)), (S1, S0), (Shard(-1), Shard(-1)), (SUM, S0), (Shard(0, sizes=(1, 4)), R)):
        ragged = isinstance(first, Shard) and first.sizes is not None
        if ragged and shape[0] != 2:
            continue
        own = [[first, second][: len(shape)], *(fit_placements(t.ndim, first, second)[: len(shape)] for t in tensors[1:])]
        check(fn, *tensors, mesh=MESHES[shape], placements=own)


@pytest.mark.parametrize("placements", [[S0], [S1], [R], [S2]], ids=str)
@pytest.mark.parametrize("stats", [R, S0, SUM], ids=str)
def test_batch_norm_running_statistics_are_those_of_the_global_batch(placements: Any, stats: Any) -> None:
    mesh = MESHES[3,]
    a, mean, var = x(5, 4, 7), x(4, seed=1), x(4, seed=2).abs() + 1
    expected_mean, expected_var = mean.clone(), var.clone()
    expected = F.batch_norm(a, expected_mean, expected_var, training=True, momentum=0.3)
    own = dt.distribute_tensor(a, mesh, placements)
    kept = [dt.distribute_tensor(t, mesh, [R]).redistribute(placements=[stats]) for t in (mean, var)]
    out = F.batch_norm(own, *kept, training=True, momentum=0.3)
    assert torch.allclose(out.full_tensor(), expected)
    for statistic, wanted in zip(kept, (expected_mean, expected_var), strict=True):
        assert statistic.placements == (stats,)
        assert torch.allclose(statistic.full_tensor(), wanted)


def test_batch_norm_module_trains_and_evaluates_like_plain_torch() -> None:
    mesh, plain = MESHES[2, 2], torch.nn.BatchNorm1d(4, dtype=torch.float64)
    module = dt.distribute_module(torch.nn.BatchNorm1d(4, dtype=torch.float64), mesh)
    for step in range(3):
        batch = x(5, 4, 3, seed=step) * (step + 1)
        got = module(dt.distribute_tensor(batch, mesh, [S0, S1]))
        wanted = plain(batch)
        assert torch.allclose(got.full_tensor(), wanted)
        got.square().mean().backward()
        wanted.square().mean().backward()
    assert torch.allclose(module.weight.grad.full_tensor(), plain.weight.grad)
    plain.eval(), module.eval()
    batch = x(5, 4, 3, seed=9)
    assert torch.allclose(module(dt.distribute_tensor(batch, mesh, [S0, S0])).full_tensor(), plain(batch))


def test_batch_norm_with_plain_running_statistics_raises() -> None:
    own = dt.distribute_tensor(x(5, 4), MESHES[2,], [S0])
    with dt.implicit_replication(), pytest.raises(dt.errors.MixedTensorError, match="running statistics"):
        F.batch_norm(own, torch.zeros(4).double(), torch.ones(4).double(), training=True)


def test_layer_norm_of_sharded_hidden_dim_with_large_mean_is_accurate() -> None:
    a = x(4, 64, dtype=torch.float32) * 0.01 + 100
    got = F.layer_norm(dt.distribute_tensor(a, MESHES[2,], [S1]), (64,)).full_tensor()
    assert torch.allclose(got, F.layer_norm(a.double(), (64,)).float(), atol=2e-2)


@pytest.mark.parametrize("placement", [R, S0, S1, S2], ids=str)
@pytest.mark.parametrize("wanted", [[True, True], [True, False]], ids=str)
def test_fused_rms_norm_backward_equals_that_of_the_composite(placement: Any, wanted: list[bool]) -> None:
    mesh, a, w, grad = MESHES[3,], x(2, 5, 7), x(7, seed=1), x(2, 5, 7, seed=2)
    leaf, weight = a.clone().requires_grad_(), w.clone().requires_grad_()
    F.rms_norm(leaf, (7,), weight, 1e-5).backward(grad)
    rstd = torch.ops.aten._fused_rms_norm(a, [7], w, 1e-5)[1]
    own = [dt.distribute_tensor(t, mesh, [placement]) for t in (grad, a)]
    small = dt.distribute_tensor(rstd, mesh, [R if placement == S2 else placement])
    got = torch.ops.aten._fused_rms_norm_backward(
        *own, [7], small, dt.distribute_tensor(w, mesh, [S0 if placement == S2 else R]), wanted
    )
    assert got[0].placements == (placement,)
    assert torch.allclose(got[0].full_tensor(), leaf.grad)
    assert not wanted[1] or torch.allclose(got[1].full_tensor(), weight.grad)


def test_layer_norm_backward_with_non_contiguous_statistics_equals_torch() -> None:
    """Check statistics with non-contiguous shards: the CPU kernel of the gradients assumes that they are contiguous."""
    a, w, b = x(3, 5, 4, 7), x(7, seed=1), x(7, seed=2)
    _, mean, rstd = torch.native_layer_norm(a, (7,), w, b, 1e-5)
    grad = x(3, 5, 4, 7, seed=3)
    expected = torch.ops.aten.native_layer_norm_backward(grad, a, (7,), mean, rstd, w, b, [True] * 3)
    mesh = MESHES[2, 2]
    place = [(grad, [S0, SUM]), (a, [S0, S2]), (mean, [S0, R]), (rstd, [S0, R]), (w, [R, R]), (b, [R, R])]
    g, own, m, r, v, c = (dt.distribute_tensor(t, mesh, placements) for t, placements in place)
    for got, wanted in zip(
        torch.ops.aten.native_layer_norm_backward(g, own, (7,), m, r, v, c, [True] * 3), expected, strict=True
    ):
        assert torch.allclose(got.full_tensor(), wanted)


@pytest.mark.parametrize(("groups", "inside"), [(1, True), (2, False)])
def test_group_norm_with_several_groups_does_not_shard_channels_in_a_group(groups: int, inside: bool) -> None:
    given = [scatter(x(*shape), MESHES[2, 2], [R, R]) for shape in ((5, 6, 3), (6,), (6,))]
    rows = declared_strategies(torch.ops.aten.native_group_norm.default, (*given, 5, 6, 3, groups, 1e-5), {})
    assert ("S(1),S(0),S(0) -> S(1),R,R" in rows.targets) is inside
    own = dict.fromkeys(("S(0),R,R -> S(0),S(0),S(0)", "S(2),R,R -> S(2),R,R"))
    assert own.keys() <= rows.targets.keys()


@pytest.mark.parametrize("name", ["batch", "group"])
def test_norm_backward_gives_float32_gradients_of_float32_weights(name: str) -> None:
    """Check the dtype of the bias gradient: the operators get no bias, so it is that of the weight."""
    a, w, mesh = x(4, 6, 5, dtype=torch.bfloat16), x(6, seed=1, dtype=torch.float32), MESHES[2,]
    aten = torch.ops.aten
    if name == "batch":
        _, mean, rstd = aten._native_batch_norm_legit.no_stats(a, w, w, True, 0.1, 1e-5)
        operands: Any = (a, a, w, None, None, mean, rstd)
        run = lambda *xs: aten.native_batch_norm_backward(*xs, True, 1e-5, [True] * 3)  # noqa: E731
        place: Any = S0
    else:
        _, mean, rstd = aten.native_group_norm(a, w, w, 4, 6, 5, 2, 1e-5)
        operands = (a, a, mean, rstd, w)
        run = lambda *xs: aten.native_group_norm_backward(*xs, 4, 6, 5, 2, [True] * 3)  # noqa: E731
        place = S2
    given = [None if t is None else dt.distribute_tensor(t, mesh, [place if t is a else R]) for t in operands]
    for found, expected in zip(run(*given), run(*operands), strict=True):
        assert found.dtype == expected.dtype == found.to_local().dtype
        torch.testing.assert_close(found.full_tensor(), expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("place", [S0, S1, S2], ids=str)
def test_group_norm_of_bfloat16_with_float32_weights_has_dtypes_of_torch(place: Any) -> None:
    a, w, mesh = x(4, 6, 5, dtype=torch.bfloat16), x(6, seed=1, dtype=torch.float32), MESHES[2,]
    given = [dt.distribute_tensor(t, mesh, [p]) for t, p in ((a, place), (w, R), (w, R))]
    for found, expected in zip(
        torch.native_group_norm(*given, 4, 6, 5, 2, 1e-5), torch.native_group_norm(a, w, w, 4, 6, 5, 2, 1e-5), strict=True
    ):
        assert found.dtype == expected.dtype == found.to_local().dtype


@pytest.mark.parametrize("shape", [(1, 1, 1), (1, 3, 1), (1, 3, 4)])
def test_native_batch_norm_updates_running_statistics_of_any_placement(shape: tuple[int, ...]) -> None:
    """Check in-place updates also if the statistics are gathered: one value per channel."""

    def program(x: torch.Tensor, mean: torch.Tensor, var: torch.Tensor) -> object:
        return torch.native_batch_norm(x, None, None, mean, var, True, 0.3, 1e-5)[0], mean

    given = torch.arange(1.0, math.prod(shape) + 1, dtype=torch.float64).reshape(shape)
    mean, var = torch.full(shape[1:2], 4.5, dtype=torch.float64), torch.full(shape[1:2], 2.0, dtype=torch.float64)
    for where in ([Replicate()], [Shard(0)], [Shard(1)], [Shard(2)]):
        for stats in ([Shard(0)], [Replicate()], [Partial()]):
            placements = [where, stats, [Replicate()]]
            check(program, given, mean, var, mesh=dt.init_device_mesh("cpu", (2,)), placements=placements, cloned=True)


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_group_norm_with_weight_of_another_dtype_raises(place: Any) -> None:
    x, weight = torch.ones(4, 6, 5, dtype=torch.float64), torch.ones(6)
    with pytest.raises(RuntimeError, match="mixed dtype"):
        F.group_norm(x, 1, weight)
    mesh = MESHES[2,]
    with pytest.raises(RuntimeError, match="float32"):
        F.group_norm(dt.distribute_tensor(x, mesh, [place]), 1, dt.distribute_tensor(weight, mesh, [Replicate()]))


@pytest.mark.parametrize("place", [Replicate(), Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("odd", range(4))
def test_batch_norm_with_mixed_parameter_dtypes_raises(odd: int, place: Any) -> None:
    given = [torch.ones(6, dtype=torch.float32 if k == odd else torch.float64) for k in range(4)]
    x, mesh = torch.ones(4, 6, 5, dtype=torch.float64), MESHES[2,]
    for training in (True, False):
        with pytest.raises(RuntimeError):
            F.batch_norm(x, *given, training=training)
        with pytest.raises(RuntimeError, match="float32"):
            F.batch_norm(
                dt.distribute_tensor(x, mesh, [place]),
                *[dt.distribute_tensor(each, mesh, [Replicate()]) for each in given],
                training=training,
            )
