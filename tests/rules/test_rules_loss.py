"""Rules of losses with uneven batches and sharded classes: means are over the global count."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from rule_tables import (
    MESHES,
    RuleCase,
    check_many_placements,
    check_placement,
    get_collective_kinds,
    get_received_bytes,
    make_floats,
    make_integers,
)
from slow_case_marks import keep_diagonals_fast
from torch.nn import functional as F

from dtensor import Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dtensor.testing import check, forced

X, Y = make_floats(5, 7), make_floats(5, 7, seed=1)
PROBABILITIES, WEIGHTS = make_floats(5, 7, seed=2, low=0.1, high=0.9), make_floats(7, seed=3, low=0.5, high=2.0)
TARGET = make_integers(5, low=0, high=7)
SOME_IGNORED = torch.tensor([-100, 3, -100, 6, -100])
IMAGES, LABELS = make_floats(3, 5, 2, 4), make_integers(3, 2, 4, low=0, high=5)

ELEMENTWISE = {
    "mse": lambda x, y, r: F.mse_loss(x, y, reduction=r),
    "l1": lambda x, y, r: F.l1_loss(x, y, reduction=r),
    "smooth l1": lambda x, y, r: F.smooth_l1_loss(x, y, reduction=r, beta=0.7),
    "huber": lambda x, y, r: F.huber_loss(x, y, reduction=r, delta=0.7),
    "binary cross entropy": lambda x, y, r: F.binary_cross_entropy(x.sigmoid(), y.sigmoid().detach(), reduction=r),
    "with logits": lambda x, y, r: F.binary_cross_entropy_with_logits(x, y.sigmoid().detach(), reduction=r),
    "kl_div": lambda x, y, r: F.kl_div(x.log_softmax(1), y.softmax(1), reduction=r),
    "soft margin": lambda x, y, r: F.soft_margin_loss(x, y.detach().sign(), reduction=r),
    "poisson": lambda x, y, r: F.poisson_nll_loss(x, y.exp().detach(), reduction=r),
    "gaussian": lambda x, y, r: F.gaussian_nll_loss(x, y.detach(), torch.ones_like(x), reduction=r),
}


@pytest.mark.parametrize(
    ("name", "reduction", "mesh_shape"), keep_diagonals_fast(ELEMENTWISE, ["none", "mean", "sum"], MESHES, every=3), ids=str
)
def test_elementwise_losses_equal_plain_torch(name: str, reduction: str, mesh_shape: tuple[int, ...]) -> None:
    check_many_placements(RuleCase(lambda x, y: ELEMENTWISE[name](x, y, reduction), (X, Y)), mesh_shape, 4)


CLASSES = {
    "cross entropy": RuleCase(lambda x, t: F.cross_entropy(x, t), (X, TARGET)),
    "some targets ignored": RuleCase(lambda x, t: F.cross_entropy(x, t), (X, SOME_IGNORED)),
    "ignore_index of a class": RuleCase(lambda x, t: F.cross_entropy(x, t, ignore_index=3), (X, SOME_IGNORED.abs() % 7)),
    "all ignored": RuleCase(lambda x, t: F.cross_entropy(x, t), (X, torch.full((5,), -100))),
    "all ignored, sum": RuleCase(lambda x, t: F.cross_entropy(x, t, reduction="sum"), (X, torch.full((5,), -100))),
    "weighted": RuleCase(lambda x, t, w: F.cross_entropy(x, t, w.detach()), (X, SOME_IGNORED, WEIGHTS)),
    "weighted sum": RuleCase(lambda x, t, w: F.cross_entropy(x, t, w.detach(), reduction="sum"), (X, TARGET, WEIGHTS)),
    "weighted, not reduced": RuleCase(
        lambda x, t, w: F.cross_entropy(x, t, w.detach(), reduction="none"), (X, SOME_IGNORED, WEIGHTS)
    ),
    "label_smoothing": RuleCase(lambda x, t: F.cross_entropy(x, t, label_smoothing=0.2), (X, SOME_IGNORED)),
    "label_smoothing, weighted": RuleCase(
        lambda x, t, w: F.cross_entropy(x, t, w.detach(), label_smoothing=0.2), (X, TARGET, WEIGHTS)
    ),
    "probabilities": RuleCase(lambda x, p: F.cross_entropy(x, p.softmax(1).detach()), (X, PROBABILITIES)),
    "images": RuleCase(lambda x, t: F.cross_entropy(x, t), (IMAGES, LABELS)),
    "images, sum": RuleCase(lambda x, t: F.cross_entropy(x, t, reduction="sum"), (IMAGES, LABELS)),
    "sequences": RuleCase(lambda x, t: F.cross_entropy(x, t), (make_floats(2, 5, 3), make_integers(2, 3, low=0, high=5))),
    "one row": RuleCase(lambda x, t: F.cross_entropy(x, t), (make_floats(7), torch.tensor(4))),
    "nll": RuleCase(lambda x, t: F.nll_loss(x, t), (X, TARGET)),
    "uint8 labels": RuleCase(lambda x, t: F.cross_entropy(x, t), (X, TARGET.to(torch.uint8))),
    "half precision": RuleCase(lambda x, t: F.cross_entropy(x, t), (X.half(), TARGET)),
    "target out of range": RuleCase(lambda x, t: F.cross_entropy(x, t), (X, torch.tensor([0, 1, 7, 2, 3]))),
    "empty batch": RuleCase(lambda x, t: F.cross_entropy(x, t, reduction="sum"), (make_floats(0, 7), make_integers(0))),
}


@pytest.mark.parametrize(("name", "mesh_shape"), keep_diagonals_fast(CLASSES, MESHES, every=3), ids=str)
def test_classification_losses_equal_plain_torch(name: str, mesh_shape: tuple[int, ...]) -> None:
    check_many_placements(CLASSES[name], mesh_shape, 6)


@pytest.mark.parametrize(
    ("mesh_shape", "scores", "target", "collectives"),
    [
        ((4,), [Shard(1)], [Replicate()], ["all_reduce"]),  # log_softmax
        (
            (2, 2),
            [Shard(0), Shard(1)],
            [Shard(0), Replicate()],
            ["all_reduce", "all_reduce"],
        ),  # and the number of targets that count
        ((4,), [Shard(0)], [Shard(0)], ["all_reduce"]),
    ],
)
def test_cross_entropy_communicates_no_logits(mesh_shape, scores, target, collectives) -> None:
    x, t = make_floats(6, 1000), make_integers(6, low=0, high=1000)
    outcome = check_placement(lambda x, t: F.cross_entropy(x, t), [x, t], mesh_shape, [scores, target])
    assert outcome.layouts[0].placements == tuple(Partial() if isinstance(p, Shard) else p for p in scores)
    assert get_collective_kinds(outcome) == collectives
    assert get_received_bytes(outcome) <= 300


def test_mse_loss_mean_of_half_precision_does_not_overflow() -> None:
    x, y = torch.full((5, 40), 200.0).half(), torch.zeros(5, 40).half()
    check_placement(F.mse_loss, [x, y], (3,), [[Shard(0)]] * 2)


def test_cross_entropy_gradient_has_the_placements_of_the_logits() -> None:
    mesh = init_device_mesh("cpu", (2, 2))
    x = distribute_tensor(make_floats(6, 1000), mesh, [Shard(0), Shard(1)]).requires_grad_()
    F.cross_entropy(x, distribute_tensor(make_integers(6, low=0, high=1000), mesh, [Shard(0), Replicate()])).backward()
    assert x.grad.placements == x.placements


def test_cross_entropy_is_nan_only_if_all_targets_are_ignored() -> None:
    mesh = init_device_mesh("cpu", (3,))
    x = distribute_tensor(X, mesh, [Shard(0)])
    targets = [torch.tensor([1, 2, -100, -100, -100]), torch.full((5,), -100)]
    values = [F.cross_entropy(x, distribute_tensor(t, mesh, [Shard(0)])).item() for t in targets]
    assert math.isfinite(values[0])
    assert math.isnan(values[1])
    assert math.isclose(values[0], F.cross_entropy(X, targets[0]).item())


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_margin_losses_with_empty_shards_equal_plain_torch(reduction: str) -> None:
    """Check margin losses, which leave their result uninitialized for an empty shard; that would be an addend of the sum."""
    mesh, filled = init_device_mesh("cpu", (4,)), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)  # fills uninitialized memory with NaN
    try:
        for fn, labels in (
            (F.multi_margin_loss, TARGET % 3),
            (F.multilabel_margin_loss, make_integers(5, 7, low=-1, high=7)),
        ):
            check(fn, X, labels, mesh=mesh, placements=[[Shard(0)], [Replicate()]], kwargs={"reduction": reduction})
    finally:
        torch.use_deterministic_algorithms(filled)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("fn", [F.soft_margin_loss, F.huber_loss, F.mse_loss, F.smooth_l1_loss, F.l1_loss])
def test_losses_of_mixed_dtypes_have_the_dtype_of_torch(fn: Any, reduction: str) -> None:
    mesh = init_device_mesh("cpu", (3,))
    for x, y in ((X.float(), Y), (X, Y.float()), (X.half(), Y)):
        for where in (Shard(0), Replicate()):
            check(fn, x, y, mesh=mesh, placements=[[where]] * 2, kwargs={"reduction": reduction}, gradients=False)


def test_nll_loss_ignores_targets_with_infinite_weight() -> None:
    weight = torch.tensor([float("inf"), 2.0, 3.0, 1.0, 1.0], dtype=torch.float64)
    for scores, target in ((make_floats(4, 5), torch.tensor([-100, 1, -100, 2])), (make_floats(5), torch.tensor(-100))):
        for where in [Replicate(), *(Shard(d) for d in range(scores.ndim))]:
            for reduction in ("mean", "sum"):
                check(
                    lambda x, t, w, how=reduction: F.nll_loss(x, t, w, reduction=how),
                    scores,
                    target,
                    weight,
                    mesh=init_device_mesh("cpu", (3,)),
                    placements=[[where], [Replicate()], [Replicate()]],
                    gradients=False,
                )


@pytest.mark.parametrize("op", [torch.ops.aten.mean, torch.ops.aten.mse_loss], ids=["mean", "mse_loss"])
def test_mean_of_empty_tensor_in_uneven_shards_is_nan(op: Any) -> None:
    operands = [torch.empty(0, 1, dtype=torch.float64)] * (1 if op is torch.ops.aten.mean else 2)
    row = f"{','.join(['S(0)'] * len(operands))} -> sum"
    check(
        forced(op, row), *operands, mesh=init_device_mesh("cpu", (2,)), placements=[[Shard(1)]] * len(operands), gradients=False
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(
    "targets", [torch.tensor([[1, 2, 4], [3, 3, 1], [2, 4, 4]]), torch.tensor([1, 2, 4, 3, 2])], ids=["rows", "joined"]
)
def test_ctc_loss_takes_plain_targets_and_lengths(targets: torch.Tensor, reduction: str) -> None:
    x = (torch.arange(7 * 3 * 5.0, dtype=torch.float64) % 11).view(7, 3, 5).requires_grad_()
    inputs, lengths = torch.tensor([7, 6, 7]), torch.tensor([3, 1, 1])
    whole = F.ctc_loss(x.log_softmax(-1), targets, inputs, lengths, reduction=reduction)
    (wanted,) = torch.autograd.grad(whole.sum(), x)
    for where in (Shard(1), Replicate(), Shard(0), Shard(1, sizes=(0, 3))):
        y = distribute_tensor(x.detach(), init_device_mesh("cpu", (2,)), [where]).requires_grad_()
        loss = F.ctc_loss(y.log_softmax(-1), targets, inputs, lengths, reduction=reduction)
        (found,) = torch.autograd.grad(loss.sum(), y)
        torch.testing.assert_close(loss.full_tensor(), whole)
        torch.testing.assert_close(found.full_tensor(), wanted)


@pytest.mark.parametrize("where", [Replicate(), Shard(0), Shard(1)], ids=str)
def test_ctc_loss_of_one_sequence_takes_scalar_lengths(where: Any) -> None:
    check(
        lambda x: F.ctc_loss(x.log_softmax(-1), torch.tensor([1, 2, 2]), torch.tensor(7), torch.tensor(3)),
        (torch.arange(7 * 5.0, dtype=torch.float64) % 11).view(7, 5),
        mesh=init_device_mesh("cpu", (2,)),
        placements=[[where]],
    )


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("where", [Replicate(), Shard(0)], ids=str)
def test_binary_cross_entropy_with_float64_weight_equals_plain_torch(reduction: str, where: Any) -> None:
    x, weight = torch.rand(4), torch.rand(4, dtype=torch.float64)
    operands = x, x.flip(0), weight
    check(
        lambda x, y, w: F.binary_cross_entropy(x, y, w, reduction=reduction),
        *operands,
        mesh=init_device_mesh("cpu", (2,)),
        placements=[[where]] * 3,
        gradients=False,
    )
