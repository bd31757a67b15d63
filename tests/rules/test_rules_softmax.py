"""Rules of softmax, log_softmax and logsumexp along a sharded dim."""

from __future__ import annotations

import math

import pytest
import torch
from fast_part import diagonals
from rule_tables import MESHES, Case, floats, kinds, received, run, try_all

from dtensor import Partial, Replicate, Shard

X = floats(5, 6, 7)
INF = math.inf
MASKED = torch.tensor([[0.5, -INF, 1.0, -INF, 2.0], [-INF] * 5, [0.0, -INF, -INF, -INF, -INF]], dtype=torch.float64)

CASES = {
    "softmax": Case(lambda x: x.softmax(-1), (X,)),
    "softmax of the first dim": Case(lambda x: x.softmax(0), (X,)),
    "log_softmax": Case(lambda x: x.log_softmax(1), (X,)),
    "softmin": Case(lambda x: torch.nn.functional.softmin(x, 1), (floats(5, 6),)),
    "logsumexp": Case(lambda x: x.logsumexp(-1, keepdim=True), (X,)),
    "masked": Case(lambda x: (x.softmax(1), x.log_softmax(1), x.logsumexp(1)), (MASKED,), ("sum",), gradients=False),
    "masked, infinite": Case(lambda x: (x.softmax(1), x.logsumexp(1)), (MASKED.abs(),), ("sum",), gradients=False),
    "safe": Case(lambda x: torch.ops.aten._safe_softmax(x, 1), (MASKED,), ("sum",), gradients=False),
    "another dtype": Case(lambda x: x.softmax(1, dtype=torch.float64), (floats(5, 6).float(),)),
    "one number": Case(lambda x: x.softmax(0), (floats(),)),
    "half": Case(lambda x: x.softmax(1), (floats(5, 6).half(),)),
    "twice differentiable": Case(
        lambda x: torch.autograd.grad(x.softmax(1).square().sum(), x, create_graph=True)[0], (floats(5, 4),), ()
    ),
}


@pytest.mark.parametrize(("name", "mesh_shape"), diagonals(CASES, MESHES, every=3), ids=str)
def test_softmax_values_and_gradients_equal_plain_torch(name: str, mesh_shape: tuple[int, ...]) -> None:
    try_all(CASES[name], mesh_shape)


@pytest.mark.parametrize("placements", [[Shard(1), Shard(0)], [Replicate(), Shard(1)], [Shard(1), Shard(1)]], ids=str)
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_softmax_along_sharded_dim_needs_one_small_all_reduce(op: str, placements: list[Shard]) -> None:
    x = floats(4, 4096)
    outcome = run(lambda x: getattr(x, op)(1), [x], (2, 2), [placements])
    assert outcome.layouts[0].placements == tuple(placements)
    assert kinds(outcome) == ["all_reduce"]
    assert received(outcome) < x.nbytes // 100


def test_softmax_backward_reduces_one_number_per_row() -> None:
    grad, y = floats(4, 4096), floats(4, 4096, seed=1)
    for op in (torch.ops.aten._softmax_backward_data, torch.ops.aten._log_softmax_backward_data):
        outcome = run(lambda g, y, op=op: op(g, y, 1, torch.float64), [grad, y], (4,), [[Shard(1)]] * 2, gradients=False)
        assert outcome.layouts[0].placements == (Shard(1),)
        assert kinds(outcome) == ["all_reduce"]
        assert received(outcome) < grad.nbytes // 100


def test_softmax_backward_reduces_a_partial_gradient_first() -> None:
    grad, y = floats(5, 6), floats(5, 6, seed=1)
    outcome = run(
        lambda g, y: torch.ops.aten._softmax_backward_data(g, y, 1, torch.float64),
        [grad, y],
        (3,),
        [[Partial()], [Replicate()]],
        gradients=False,
    )
    assert outcome.layouts[0].placements == (Replicate(),)
    assert kinds(outcome) == ["all_reduce"]
