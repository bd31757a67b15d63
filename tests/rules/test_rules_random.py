"""Rules of random operators: under all placements they give the values of plain torch with the same seed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from rule_tables import MESHES, RuleCase, check_many_placements, check_placement, get_collective_kinds, make_floats
from slow_case_marks import keep_diagonals_fast
from torch.nn import functional as F

import dtensor as dt
from dtensor import Partial, Replicate, Shard

X = make_floats(5, 7, low=0.1, high=0.9)

NEW = {
    "rand_like": torch.rand_like,
    "randn_like": lambda x: torch.randn_like(x, dtype=torch.float32),
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "dropout": lambda x: F.dropout(x, 0.3),
    "dropout in eval mode": lambda x: F.dropout(x, 0.3, training=False),
    "native_dropout": lambda x: torch.native_dropout(x, 0.3, True),
    "native_dropout with p=1": lambda x: torch.native_dropout(x, 1.0, True),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.3),
    "dropout1d": lambda x: F.dropout1d(x, 0.4),
    "feature_alpha_dropout": lambda x: F.feature_alpha_dropout(x, 0.3),
    "bernoulli": lambda x: torch.bernoulli(x, 0.3),
    "bernoulli of probabilities": lambda x: torch.bernoulli(x.detach()),
    "bernoulli of expanded probabilities": lambda x: torch.bernoulli(x.detach()[:, None].expand(-1, 2, -1)),
    "multinomial": lambda x: torch.multinomial(x.detach(), 3),
    "multinomial of transposed weights": lambda x: torch.multinomial(x.detach().t(), 3),
    "normal around": lambda x: torch.normal(x.detach(), 0.1),
    "normal around expanded": lambda x: torch.normal(x.detach().expand(2, *x.shape), x.detach()[:1].abs()),
    "normal around windows": lambda x: torch.normal(1.0, x.detach().unfold(0, 2, 1).abs()),
    "poisson": lambda x: torch.poisson(x.detach()),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=1),
    "several draws": lambda x: torch.rand_like(x) - torch.rand_like(x.t()).t() + torch.bernoulli(x.detach()) + torch.rand_like(x),
}

IN_PLACE: dict[str, Callable[[Any], Any]] = {
    "normal_": lambda x: x.normal_(1.0, 2.0),
    "uniform_": lambda x: x.uniform_(-1, 1),
    "exponential_": lambda x: x.exponential_(),
    "random_": lambda x: x.random_(),
    "random_ from to": lambda x: x.random_(3, 9),
    "cauchy_": lambda x: x.cauchy_(),
    "log_normal_": lambda x: x.log_normal_(),
    "geometric_": lambda x: x.geometric_(0.3),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli_ of probabilities": lambda x: x.bernoulli_(x.detach().clone()),
    "of a transposed view": lambda x: x.t().normal_(),
    "own generator": lambda x: x.normal_(generator=torch.Generator().manual_seed(3)),
    "kaiming": lambda x: torch.nn.init.kaiming_uniform_(x),
    "truncated": lambda x: torch.nn.init.trunc_normal_(x),
}


@pytest.mark.parametrize(("name", "mesh_shape"), keep_diagonals_fast(NEW, MESHES, every=3), ids=str)
def test_random_operators_equal_plain_torch(name: str, mesh_shape: tuple[int, ...]) -> None:
    check_many_placements(RuleCase(NEW[name], (X,)), mesh_shape, 5)


@pytest.mark.parametrize(("name", "mesh_shape"), keep_diagonals_fast(IN_PLACE, MESHES, every=3), ids=str)
def test_in_place_random_operators_equal_plain_torch(name: str, mesh_shape: tuple[int, ...]) -> None:
    check_many_placements(
        RuleCase(IN_PLACE[name], (make_floats(6, 20, low=0.1, high=0.9),), written=True, gradients=False), mesh_shape, 5
    )


@pytest.mark.parametrize("name", ["rand_like", "dropout", "native_dropout", "bernoulli", "dropout1d"])
def test_random_operators_do_not_communicate(name: str) -> None:
    outcome = check_placement(NEW[name], [X], (2, 2), [[Shard(0), Shard(1)]])
    assert not outcome.events
    assert all(layout.placements == (Shard(0), Shard(1)) for layout in outcome.layouts)


def test_native_dropout_keeps_partial_placement() -> None:
    outcome = check_placement(lambda x: torch.native_dropout(x, 0.3, True)[0], [X], (3,), [[Partial()]])
    assert outcome.layouts[0].placements == (Partial(),)
    assert not outcome.events


@pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")  # bernoulli with a tensor of probabilities gathers
def test_generator_advances_as_with_plain_torch() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2))
    x = dt.distribute_tensor(X, mesh, [Shard(0), Replicate()])
    torch.manual_seed(3)
    torch.rand_like(X), torch.bernoulli(X), F.dropout(X)
    expected = torch.rand(3)
    torch.manual_seed(3)
    torch.rand_like(x), torch.bernoulli(x), F.dropout(x)
    assert torch.equal(torch.rand(3), expected)


def test_multinomial_of_sharded_rows_does_not_communicate() -> None:
    outcome = check_placement(NEW["multinomial"], [X], (2,), [[Shard(0)]])
    assert get_collective_kinds(outcome) == []
    assert outcome.layouts[0].placements == (Shard(0),)
