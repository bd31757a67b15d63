"""Rules of softmax, log_softmax and logsumexp along a sharded dim."""

from __future__ import annotations

import math

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
)
from slow_case_marks import keep_diagonals_fast

from dtensor import Partial, Replicate, Shard

X = make_floats(5, 6, 7)
INF = math.inf
MASKED = torch.tensor([[0.5, -INF, 1.0, -INF, 2.0], [-INF] * 5, [0.0, -INF, -INF, -INF, -INF]], dtype=torch.float64)

CASES = {
    "softmax": RuleCase(lambda x: x.softmax(-1), (X,)),
    "softmax of the first dim": RuleCase(lambda x: x.softmax(0), (X,)),
    "log_softmax": RuleCase(lambda x: x.log_softmax(1), (X,)),
    "softmin": RuleCase(lambda x: torch.nn.functional.softmin(x, 1), (make_floats(5, 6),)),
    "logsumexp": RuleCase(lambda x: x.logsumexp(-1, keepdim=True), (X,)),
    "masked": RuleCase(lambda x: (x.softmax(1), x.log_softmax(1), x.logsumexp(1)), (MASKED,), ("sum",), gradients=False),
    "masked, infinite": RuleCase(lambda x: (x.softmax(1), x.logsumexp(1)), (MASKED.abs(),), ("sum",), gradients=False),
    "_safe_softmax": RuleCase(lambda x: torch.ops.aten._safe_softmax(x, 1), (MASKED,), ("sum",), gradients=False),
    "another dtype": RuleCase(lambda x: x.softmax(1, dtype=torch.float64), (make_floats(5, 6).float(),)),
    "0-d tensor": RuleCase(lambda x: x.softmax(0), (make_floats(),)),
    "half": RuleCase(lambda x: x.softmax(1), (make_floats(5, 6).half(),)),
    "twice differentiable": RuleCase(
        lambda x: torch.autograd.grad(x.softmax(1).square().sum(), x, create_graph=True)[0], (make_floats(5, 4),), ()
    ),
}


@pytest.mark.parametrize(("name", "mesh_shape"), keep_diagonals_fast(CASES, MESHES, every=3), ids=str)
def test_softmax_values_and_gradients_equal_plain_torch(name: str, mesh_shape: tuple[int, ...]) -> None:
    check_many_placements(CASES[name], mesh_shape)


@pytest.mark.parametrize("placements", [[Shard(1), Shard(0)], [Replicate(), Shard(1)], [Shard(1), Shard(1)]], ids=str)
@pytest.mark.parametrize("op", ["softmax", "log_softmax"])
def test_softmax_along_sharded_dim_needs_one_small_all_reduce(op: str, placements: list[Shard]) -> None:
    x = make_floats(4, 4096)
    outcome = check_placement(lambda x: getattr(x, op)(1), [x], (2, 2), [placements])
    assert outcome.layouts[0].placements == tuple(placements)
    assert get_collective_kinds(outcome) == ["all_reduce"]
    assert get_received_bytes(outcome) < x.nbytes // 100


def test_softmax_backward_reduces_one_number_per_row() -> None:
    grad, y = make_floats(4, 4096), make_floats(4, 4096, seed=1)
    for op in (torch.ops.aten._softmax_backward_data, torch.ops.aten._log_softmax_backward_data):
        outcome = check_placement(
            lambda g, y, op=op: op(g, y, 1, torch.float64), [grad, y], (4,), [[Shard(1)]] * 2, gradients=False
        )
        assert outcome.layouts[0].placements == (Shard(1),)
        assert get_collective_kinds(outcome) == ["all_reduce"]
        assert get_received_bytes(outcome) < grad.nbytes // 100


def test_softmax_backward_reduces_a_partial_gradient_first() -> None:
    grad, y = make_floats(5, 6), make_floats(5, 6, seed=1)
    outcome = check_placement(
        lambda g, y: torch.ops.aten._softmax_backward_data(g, y, 1, torch.float64),
        [grad, y],
        (3,),
        [[Partial()], [Replicate()]],
        gradients=False,
    )
    assert outcome.layouts[0].placements == (Replicate(),)
    assert get_collective_kinds(outcome) == ["all_reduce"]
