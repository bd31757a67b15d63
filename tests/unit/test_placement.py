"""Placements: equality, copies, predicates, repr, validation and user-defined reductions."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.errors import PlacementError
from dtensor.placement import Monoid, Partial, Placement, Replicate, Shard, normalize_placements

PLACEMENTS = [Shard(0), Shard(-1), Shard(1, sizes=(2, 3)), Shard(0, level=1), Replicate(), Partial(), Partial("max")]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_copies_of_a_placement_are_equal_with_equal_hash(placement: Placement) -> None:
    for other in (copy.copy(placement), copy.deepcopy(placement), pickle.loads(pickle.dumps(placement))):
        assert other == placement
        assert hash(other) == hash(placement)


def test_different_placements_are_unequal() -> None:
    assert len(set(PLACEMENTS)) == len(PLACEMENTS)


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_placements_are_immutable(placement: Placement) -> None:
    with pytest.raises((AttributeError, TypeError)):
        placement.dim = 3


def test_is_shard_is_replicate_and_is_partial_compare_kind_and_argument() -> None:
    assert Shard(1).is_shard()
    assert Shard(1).is_shard(1)
    assert Shard(1).is_shard(dim=1)
    assert not Shard(1).is_shard(0)
    assert Shard(1, level=0).is_shard(1)
    assert not Shard(1, level=1).is_shard()  # programs that split in mesh dim order must not take it for a plain Shard
    assert not Shard(1).is_replicate()
    assert Replicate().is_replicate()
    assert not Replicate().is_partial()
    assert Partial("avg").is_partial()
    assert Partial("avg").is_partial("avg")
    assert not Partial("avg").is_partial("sum")


@pytest.mark.parametrize(
    ("placement", "long", "short"),
    [
        (Shard(1), "Shard(dim=1)", "S(1)"),
        (Shard(0, sizes=(2, 3)), "Shard(dim=0, sizes=(2, 3))", "S(0:2+3)"),
        (Shard(0, level=1), "Shard(dim=0, level=1)", "S(0@1)"),
        (Replicate(), "Replicate()", "R"),
        (Partial(), "Partial(sum)", "P(sum)"),
    ],
)
def test_repr_and_str_of_placements_show_dim_sizes_level_and_reduction(placement: Placement, long: str, short: str) -> None:
    assert repr(placement) == long
    assert str(placement) == short


def test_partial_reduces_by_sum_by_default() -> None:
    assert Partial() == Partial("sum")
    assert Partial().reduce_op == "sum"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Partial("median"), "Partial takes one of"),
        (lambda: Shard("0"), "Shard\\(dim\\) takes an int"),
        (lambda: Shard(0.0), "Shard\\(dim\\) takes an int"),
        (lambda: Shard(True), "Shard\\(dim\\) takes an int"),
        (lambda: Shard(0, sizes=(1, -1)), "non-negative"),
        (lambda: Shard(0, level="0"), "takes an int"),
        (lambda: Shard(0, level=1.5), "takes an int"),
        (lambda: Shard(0, level=-1), "count from 0"),
    ],
)
def test_invalid_placement_arguments_raise(make: object, message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        make()


def test_partial_lists_all_reductions_and_the_linear_ones() -> None:
    assert [Partial(op).is_partial(op) for op in Partial.ALL_REDUCE_OPS] == [True] * 5
    assert set(Partial.LINEAR_REDUCE_OPS) < set(Partial.ALL_REDUCE_OPS)


def test_a_placement_subclass_with_new_methods_raises() -> None:
    with pytest.raises(PlacementError, match="Monoid"):
        type("Scaled", (Partial,), {"_reduce_value": lambda self, value, mesh, dim: value / 2, "__module__": __name__})
    named: Any = type("Experts", (Shard,), {"__module__": __name__, "__slots__": ()})
    x = dt.distribute_tensor(torch.arange(6.0), dt.init_device_mesh("cpu", (2,)), [named(0)])
    assert torch.equal((x + x).full_tensor(), torch.arange(6.0) * 2)


def test_placement_error_is_a_value_error_and_a_runtime_error() -> None:
    with pytest.raises(ValueError):
        Partial("median")
    with pytest.raises(RuntimeError):
        Partial("median")


def test_normalize_placements_fills_defaults_and_resolves_negative_dims() -> None:
    assert normalize_placements(None, 2, 3) == (Replicate(), Replicate())
    assert normalize_placements(Shard(-1), 1, 3) == (Shard(2),)
    assert normalize_placements([Shard(-3), Partial()], 2, 3) == (Shard(0), Partial())
    assert normalize_placements([Shard(-1, sizes=(1, 2))], 1, 2) == (Shard(1, sizes=(1, 2)),)


def test_partial_of_a_monoid_compares_and_prints_by_the_monoid() -> None:
    keep_first = Monoid("first", lambda a, b: a, torch.zeros_like)
    assert Partial(keep_first) == Partial(keep_first)
    assert str(Partial(keep_first)) == "P(first)"
    assert Partial(keep_first) != Partial(Monoid("first", lambda a, b: b, torch.zeros_like))
