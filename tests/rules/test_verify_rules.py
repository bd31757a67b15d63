"""Verification of all registered rules against plain torch: a random part of the placements in `make test`, all in `make
test-all`."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from slow_case_marks import keep_every_nth_fast

import dtensor as dt
from dtensor.placement import Partial, Shard
from dtensor.rules import register, rules, unregister
from dtensor.rules.declare import einsum, pointwise
from dtensor.testing import Sample, verify_rule
from dtensor.testing.call_variants import operator_exists
from dtensor.testing.missing_strategies import MissingStrategy, is_accepted
from dtensor.testing.samples import ELSEWHERE, rules_without_sample
from dtensor.testing.samples.layers import ATTENTION, CONVOLUTIONS, NORMS
from dtensor.testing.samples.products import FFT, LINALG, PRODUCTS

RULES = sorted(
    name for name in rules() if name.removeprefix("aten::") not in ELSEWHERE and operator_exists(name.replace("::", "."))
)
CASES_PER_RULE = 5
MORE_CASES = {
    name: count
    for names, count in ((NORMS, 50), (CONVOLUTIONS, 30), (FFT, 25), (PRODUCTS, 20), (ATTENTION, 15), (LINALG, 8))
    for name in names
}
SEED = int(os.environ.get("DTENSOR_SEED", "0"))

pytestmark = pytest.mark.filterwarnings("ignore:.*has no sharding rule.*:UserWarning", "ignore:.*resized since.*:UserWarning")


def test_every_rule_has_a_sample() -> None:
    own = [name for name in rules_without_sample() if name in RULES]  # without rules that other tests have registered
    assert own == [], "write samples in dtensor/testing/samples/<family>.py"


@pytest.mark.parametrize("name", keep_every_nth_fast(RULES, every=8))
def test_rule_equals_plain_torch_under_some_placements(name: str) -> None:
    report = verify_rule(name, budget=MORE_CASES.get(name.removeprefix("aten::"), CASES_PER_RULE), seed=SEED, stop_after=1)
    assert not report.wrong, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_rule_equals_plain_torch_under_all_placements(name: str) -> None:
    report = verify_rule(name, budget=400, limit=60, seed=SEED + 1, look_for_missing=["sum"], stop_after=3)
    assert not report.wrong, str(report)
    assert not report.missing, (
        f"{report}\nmake the rule allow it, or accept it with a reason in dtensor/testing/accepted_gaps.txt"
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", RULES)
def test_every_declared_strategy_equals_plain_torch(name: str, coverage: list[tuple[int, int]]) -> None:
    report = verify_rule(name, rows_only=True, meshes=[(2,), (3,), (2, 2)], limit=40, seed=SEED)
    coverage.append((len(report.rows.forced), len(report.rows.declared)))
    assert not report.wrong, str(report)


@pytest.fixture(scope="module")
def coverage(request: pytest.FixtureRequest) -> Iterator[list[tuple[int, int]]]:
    """Collect the numbers of (forced, declared) strategies of each rule, and print their sums at the end."""
    counts: list[tuple[int, int]] = []
    yield counts
    forced, declared = (sum(column) for column in zip(*counts, strict=True))
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        print(f"\n{forced} of {declared} declared rows forced, of {len(counts)} rules")


@pytest.mark.slow
def test_all_declared_strategies_of_neg_cat_and_masked_fill_are_forced() -> None:
    """Check ``neg``, ``cat`` and ``masked_fill``: fixed strategies, strategies computed from the call, and those of a user's
    reduction."""
    rows = {name: verify_rule(name, rows_only=True, meshes=[(3,)], limit=60).rows for name in ("neg", "cat", "masked_fill")}
    for name, found in rows.items():
        assert found.forced == found.declared, (name, found.refused)
        assert found.unmet() == []
    assert {"max -> min", "min -> max", "sum -> sum"} <= rows["neg"].forced
    assert "farthest,farthest -> farthest" in rows["cat"].forced
    assert "max,R,R -> max" in rows["masked_fill"].forced


# --- errors that verify_rule must find ------------------------------------------------------------------------------
def test_wrong_user_rule_is_found_and_reported() -> None:
    """Check a rule with a wrong strategy that shards the sorted dim."""

    @torch.library.custom_op("proof::largest_first", mutates_args=())
    def largest_first(x: torch.Tensor) -> torch.Tensor:
        return x.sort(dim=-1, descending=True).values

    largest_first.register_fake(lambda x: torch.empty_like(x))
    overload = torch.ops.proof.largest_first.default
    samples = [Sample((torch.randn(5, 6),), gradients=False)]
    try:
        dt.register_sharding(overload)(lambda x: [([Shard(d)], [Shard(d)]) for d in range(x.ndim)])
        wrong = verify_rule(overload, samples, meshes=[(2,)])
        dt.register_sharding(overload)(lambda x: [([Shard(d)], [Shard(d)]) for d in range(x.ndim - 1)])
        right = verify_rule(overload, samples, meshes=[(2,), (2, 2)], look_for_missing=True)
    finally:
        unregister("proof::largest_first.default")
        unregister("proof::largest_first")
    assert wrong.wrong
    assert all(any(p.is_shard(1) for p in placed) for case in wrong.wrong for placed in case.placements)
    assert "rank" in str(wrong)
    assert right, str(right)


@pytest.fixture
def op() -> str:
    """Return the name of a custom operator without a rule."""
    if not hasattr(torch.ops.proof, "twice"):
        torch.library.define("proof::twice", "(Tensor x) -> Tensor")
        torch.library.impl("proof::twice", "CompositeExplicitAutograd", lambda x: (x * 2).abs())
        torch.library.register_fake("proof::twice", lambda x: torch.empty_like(x))
    return "proof::twice"


def test_wrong_partial_strategy_is_found(op: str) -> None:
    pointwise(op, partials=("sum -> sum",))  # |a + b| is not |a| + |b|
    dt.dispatch.dispatcher.clear_plans()
    try:
        report = verify_rule(op, [Sample((torch.randn(5, 6),), gradients=False)], meshes=[(2,)])
    finally:
        unregister(op)
        dt.dispatch.dispatcher.clear_plans()
    assert report.wrong
    assert report.wrong[0].placements == ((Partial("sum"),),)
    assert "check(torch.ops.proof.twice" in report.wrong[0].reproduction


def test_reproduction_program_raises_the_mismatch(op: str) -> None:
    pointwise(op, partials=("sum -> sum",))
    dt.dispatch.dispatcher.clear_plans()
    try:
        report = verify_rule(op, [Sample((torch.randn(5, 6),), gradients=False)], meshes=[(2,)])
        with pytest.raises(AssertionError, match="rank 0"):
            exec(report.wrong[0].reproduction, {})
    finally:
        unregister(op)
        dt.dispatch.dispatcher.clear_plans()


def test_rule_that_always_gathers_is_reported_as_missing_strategies(op: str) -> None:
    einsum(op, "[a] [b] -> [a] [b]", linear=False)
    dt.dispatch.dispatcher.clear_plans()
    try:
        report = verify_rule(op, [Sample((torch.randn(5, 6),), gradients=False)], meshes=[(2,)], look_for_missing=True)
    finally:
        unregister(op)
        dt.dispatch.dispatcher.clear_plans()
    assert not report.wrong
    assert {"proof::twice | S(0) -> S(0)", "proof::twice | S(1) -> S(1)"} <= {str(gap) for gap in report.missing}


def test_missing_strategy_without_an_accepted_gap_is_not_accepted() -> None:
    assert not is_accepted(MissingStrategy("aten::no_such_operator", ("S(0)",), ("S(0)",)))


def test_registering_a_rule_twice_raises() -> None:
    with pytest.raises(dt.errors.RuleError, match="has a rule already"):
        register("mm", rules()["aten::mm"])


def test_verify_rule_takes_an_operator_object() -> None:
    report = verify_rule(torch.ops.aten.mm.default, [Sample((torch.ones(5, 6), torch.ones(6, 7)))], meshes=[(2,)], limit=10)
    assert report.name in ("aten::mm", "aten::mm.default")
    assert report
