"""``verify_rule`` on wrong rules: each wrong strategy is found, named, minimized, and reproduced by a program."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
from slow_case_marks import keep_every_nth_fast

import dtensor as dt
from dtensor.placement import Partial, Replicate, Shard
from dtensor.rules import rules, unregister
from dtensor.rules.call import Call
from dtensor.rules.declare import einsum, kernel_rule, pointwise, view
from dtensor.rules.kernel_context import KernelContext
from dtensor.rules.registry import lookup
from dtensor.rules.rule import Factors, Kernel, Strategy, StrategyChoice
from dtensor.testing import Report, Sample, check, forced, verify_rule

Tensor = torch.Tensor
MESHES = ((3,), (2,), (2, 2))
LIBRARY = torch.library.Library("planted", "DEF")
numbers = count()


def floats(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(-3, 4, shape, generator=torch.Generator().manual_seed(seed)).double() / 2


X, Y = floats(5, 6), floats(5, 6, seed=1)


@dataclass(frozen=True)
class WrongRule:
    """Operator with a rule whose strategies ``rows`` are wrong, and its arguments."""

    schema: str
    fn: Callable[..., Any]
    declare: Callable[[str], Any]
    rows: set[str]
    args: tuple[Any, ...] = (X,)


def unary(fn: Callable[..., Any], rows: set[str], declare: Callable[[str], Any], *args: Any) -> WrongRule:
    return WrongRule("(Tensor x) -> Tensor", fn, declare, rows, args or (X,))


def binary(fn: Callable[..., Any], rows: set[str], declare: Callable[[str], Any], *args: Any) -> WrongRule:
    return WrongRule("(Tensor x, Tensor y) -> Tensor", fn, declare, rows, args or (X, Y))


def sums(op: str | None, kernel: Kernel | None = None, **options: Any) -> Callable[[str], Any]:
    def factors(call: Call) -> Factors:
        sizes = {f"d{d}": size for d, size in enumerate(call.shape(0))}
        reduced = {} if op is None else dict.fromkeys(sizes, op)
        kernels = {} if kernel is None else dict.fromkeys(sizes, kernel)
        whole = frozenset(sizes) if op is None and kernel is None else frozenset()
        return Factors((tuple((name,) for name in sizes),), ((),), sizes, whole, reduced, kernels=kernels)

    return lambda name: kernel_rule(name, factors, **options)


def doubled_sum_kernel(at: KernelContext, x: Any) -> Any:
    return at.map(lambda _, block: 2 * block.sum(), x)


def wrong_joint_mean_kernel(at: KernelContext, x: Any) -> Any:
    """Compute a mean that is right for one sharded dim and wrong for two."""
    whole = at.call.operands[0].numel
    scale = 1.0 if at.total else 2.0
    return at.all_reduce(at.map(lambda _, block: scale * block.sum() / whole, x), "sum")


def fewer_than_three_ranks(choice: StrategyChoice) -> bool:
    """Accept fewer than three ranks, which is wrong: the maximum of two sums is not their sum."""
    return all(len(split.sizes) < 3 for split in choice.splits.values())


def user_strategies(*rows: Any) -> Callable[[str], Any]:
    def declare(name: str) -> Any:
        overload = getattr(torch.ops.planted, name.partition("::")[2]).default
        return dt.register_sharding(overload)(lambda *args: list(rows))

    return declare


SUM_AS_MAX = {"S(0) -> max", "S(1) -> max"}
WRONG_RULES = {
    "partial sum of a nonlinear operator": unary(
        torch.exp, {"sum -> sum"}, lambda n: pointwise(n, partials=("sum -> sum", "max -> max"))
    ),
    "partial max of an operator that is not monotone": unary(
        torch.abs, {"max -> max"}, lambda n: pointwise(n, partials=("max -> max",))
    ),
    "computed strategy": unary(torch.neg, {"min -> min"}, lambda n: pointwise(n, partials=lambda call: ("min -> min",))),
    "one wrong of several computed strategies": unary(
        torch.neg,
        {"max -> max"},
        lambda n: pointwise(n, partials=lambda call: ("sum -> sum", "avg -> avg", "min -> max", "max -> max")),
    ),
    "addition of a replicated tensor to partial sums": binary(
        torch.add, {"sum,R -> sum"}, lambda n: pointwise(n, partials=("sum,R -> sum", "sum,sum -> sum"))
    ),
    "product of two partial sums": binary(
        torch.mul, {"sum,sum -> sum"}, lambda n: pointwise(n, partials=("sum,sum -> sum", "sum,R -> sum"))
    ),
    "sum of partial products": binary(
        torch.add, {"product,product -> product"}, lambda n: pointwise(n, partials=("product... -> product",))
    ),
    "pointwise rule of cumsum": unary(lambda x: x.cumsum(0), {"S(0) -> S(0)"}, lambda n: pointwise(n)),
    "max in place of sum": unary(torch.sum, SUM_AS_MAX, sums("max")),
    "a mean of uneven blocks": unary(
        torch.mean,
        {"S(0) -> avg", "S(1) -> avg"},
        user_strategies(([Partial("avg")], [Shard(0)]), ([Partial("avg")], [Shard(1)])),
    ),
    "when that accepts too much": unary(torch.sum, SUM_AS_MAX, sums("max", when=fewer_than_three_ranks)),
    "wrong kernel": unary(
        torch.sum, {"S(0) -> sum", "S(1) -> sum"}, sums(None, Kernel(doubled_sum_kernel, lacking=Partial("sum")))
    ),
    "kernel that is wrong for two sharded dims": unary(
        torch.mean, {"S(0) -> R & S(1) -> R"}, sums(None, Kernel(wrong_joint_mean_kernel, collectives=1, joint=True))
    ),
    "user strategy with a wrong reduction": unary(
        torch.sum, {"S(0) -> max"}, user_strategies(([Partial("max")], [Shard(0)]), ([Partial("sum")], [Shard(1)]))
    ),
    "user strategy with a wrong partial": binary(
        torch.maximum,
        {"min,R -> max"},
        user_strategies(([Partial("max")], [Partial("min"), Replicate()]), ([Partial("max")], [Partial("max"), Partial("max")])),
    ),
    "an affine product": binary(
        lambda x, y: x @ y + 1,
        {"S(1),S(0) -> sum", "sum,R -> sum", "R,sum -> sum"},
        lambda n: einsum(n, "m k, k n -> m n"),
        X.long(),  # integers, because strategies of products need finite values
        floats(6, 7, seed=2).long(),
    ),
    "view rule of neg": unary(
        lambda x: -x,
        {"max -> max", "min -> min", "product -> product"},
        lambda n: view(n, lambda call: Factors(((("a",), ("b",)),), ((("a",), ("b",)),), {"a": 5, "b": 6})),
    ),
    "wrong partial result": unary(
        torch.neg, {"sum -> avg"}, lambda n: pointwise(n, partials=(Strategy((Partial("sum"),), (Partial("avg"),)),))
    ),
    "wrong unsharded dim": unary(lambda x: x.cumsum(1), {"S(1) -> S(1)"}, lambda n: einsum(n, "[a] b -> [a] b", linear=False)),
}


def register_wrong_rule(plant: WrongRule) -> Iterator[str]:
    name = f"op{next(numbers)}"
    LIBRARY.define(f"{name}{plant.schema}")
    LIBRARY.impl(name, plant.fn, "CompositeExplicitAutograd")
    torch.library.register_fake(f"planted::{name}", plant.fn, lib=LIBRARY)
    plant.declare(f"planted::{name}")
    yield f"planted::{name}"
    unregister(f"planted::{name}")


def verify_and_judge(plant: WrongRule, judge: Callable[[Report], None]) -> None:
    for name in register_wrong_rule(plant):
        judge(verify_rule(name, [Sample(plant.args, gradients=False)], meshes=MESHES, limit=12, stop_after=20))


@pytest.mark.parametrize("kind", keep_every_nth_fast(list(WRONG_RULES), 6))
def test_verify_rule_finds_names_and_reproduces_each_wrong_strategy(kind: str) -> None:
    def judge(report: Report) -> None:
        assert {" & ".join(sorted(wrong.rows)) for wrong in report.wrong} == WRONG_RULES[kind].rows, str(report)
        assert len(report.wrong) == len(WRONG_RULES[kind].rows)
        for wrong in report.wrong:
            assert (wrong.operator, wrong.direction) == (report.name, "forward")
            assert wrong.cases >= 1
            with pytest.raises(AssertionError, match=r"got .* expected"):
                exec(wrong.reproduction, {})

    verify_and_judge(WRONG_RULES[kind], judge)


@pytest.mark.parametrize("rows", [("min -> max", "max -> min", "sum -> sum"), ("avg -> avg",)])
def test_correct_partial_strategies_pass(rows: tuple[str, ...]) -> None:
    plant = unary(torch.neg, set(), lambda n: pointwise(n, partials=lambda call: rows))

    def judge(report: Report) -> None:
        assert report, str(report)
        assert set(rows) <= report.rows.forced

    verify_and_judge(plant, judge)


def test_minimized_failure_has_one_element_and_small_integers() -> None:
    def judge(report: Report) -> None:
        (wrong,) = report.wrong
        assert wrong.mesh_shape == (2,)
        (x,) = wrong.variant.sample.args
        assert x.shape == (1, 1)
        assert x.item() in (0, 1, 2)
        assert wrong.placements == ((Partial("min"),),)

    verify_and_judge(WRONG_RULES["computed strategy"], judge)


def test_failure_without_hypothesis_has_a_reproduction_but_is_not_minimized(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(report: Report) -> None:
        (wrong,) = report.wrong
        assert wrong.variant.sample.args[0].shape == X.shape
        with pytest.raises(AssertionError, match=r"differs by up to"):
            exec(wrong.reproduction, {})

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    verify_and_judge(WRONG_RULES["computed strategy"], judge)


# --- gradients ----------------------------------------------------------------------------------------------------------
def test_wrong_strategy_of_backward_operator_is_named() -> None:
    """Check an operator with a correct forward rule, whose backward operator has a wrong strategy."""
    if not hasattr(torch.ops.planted, "slope"):
        LIBRARY.define("slope(Tensor g, Tensor x) -> Tensor")
        LIBRARY.impl("slope", lambda g, x: g * x.sign() + 0, "CompositeExplicitAutograd")
        torch.library.register_fake("planted::slope", lambda g, x: torch.empty_like(g), lib=LIBRARY)
        LIBRARY.define("size(Tensor x) -> Tensor")
        LIBRARY.impl("size", torch.abs, "CompositeExplicitAutograd")
        torch.library.register_fake("planted::size", lambda x: torch.empty_like(x), lib=LIBRARY)
        torch.library.register_autograd(
            "planted::size",
            lambda ctx, g: torch.ops.planted.slope(g, *ctx.saved_tensors),
            setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs),
            lib=LIBRARY,
        )
    pointwise("planted::size")
    pointwise("planted::slope", partials=lambda call: ("sum,R -> sum", "max,R -> max"))
    dt.dispatch.dispatcher.clear_plans()
    try:
        report = verify_rule("planted::size", [Sample((X.clone().requires_grad_(),))], meshes=[(2,), (3,)])
        (wrong,) = report.wrong
        assert (wrong.operator, wrong.row, wrong.direction) == ("planted::slope", "max,R -> max", "backward of planted::size")
        with pytest.raises(AssertionError, match="gradient 0"):
            exec(wrong.reproduction, {})
    finally:
        unregister("planted::size")
        unregister("planted::slope")


# --- samples and arguments ----------------------------------------------------------------------------------------------
def test_verify_rule_accepts_samples_that_require_grad() -> None:
    sample = Sample((torch.randn(5, 6, requires_grad=True), torch.randn(6, 7, requires_grad=True).double().float()))
    report = verify_rule("mm", [sample], meshes=[(3,)], limit=20)
    assert report, str(report)


def test_check_accepts_arguments_that_require_grad() -> None:
    x = torch.randn(5, 6, requires_grad=True)
    check(torch.sin, x * 2, mesh=dt.init_device_mesh("cpu", (3,)), placements=[[Shard(0)]])
    assert x.grad is None


@pytest.mark.parametrize(
    ("name", "samples", "message"),
    [
        ("mm", [], "has no samples"),
        ("aten::linear_backward", None, "has no samples"),
        ("planted::nothing_of_the_kind", None, "no operator"),
        ("mm", [Sample((torch.ones(5, 6), torch.ones(5, 6)))], "raises for every sample"),
    ],
)
def test_verify_rule_without_samples_raises(name: str, samples: Any, message: str) -> None:
    with pytest.raises(dt.errors.RuleError, match=message):
        verify_rule(name, samples)


def test_verify_rule_with_planted_nan_finds_strategies_wrong_for_nan() -> None:
    """Check ``relu``, whose partial max strategy is right with infinities and NaN, and an operator whose strategy is wrong with
    NaN."""
    report = verify_rule("relu", meshes=[(3,)], rows_only=True, plant=(0.0, torch.inf, -torch.inf, torch.nan))
    assert report, str(report)
    plant = unary(lambda x: x.nan_to_num(0.0), {"max -> max"}, lambda n: pointwise(n, partials=("max -> max",)))

    def judge(report: Report) -> None:
        assert not report.wrong

    verify_and_judge(plant, judge)
    for name in register_wrong_rule(plant):
        report = verify_rule(name, [Sample(plant.args, gradients=False)], meshes=[(3,)], plant=(torch.nan,))
        assert [wrong.row for wrong in report.wrong] == ["max -> max"]


@pytest.mark.parametrize(
    ("name", "args", "row"),
    [
        ("isin", (floats(3), floats(4, 6)), "R,S(1) -> max"),
        ("linalg_matrix_exp", (floats(2, 4, 3, 3),), "S(1) -> S(1)"),
    ],
)
def test_forced_strategies_of_isin_and_matrix_exp_equal_plain_torch(name: str, args: tuple[Tensor, ...], row: str) -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    check(forced(getattr(torch.ops.aten, name), row), *args, mesh=mesh, placements=[[Replicate()]] * len(args), gradients=False)


def test_out_overload_has_the_rule_of_its_plain_overload() -> None:
    """Check that overloads such as ``max.out`` use the rule of the overload with the same operands (``max.other``)."""
    strayed = []
    named = {name.removeprefix("aten::").split(".")[0] for name in rules() if name.startswith("aten::")}
    for packet in [getattr(torch.ops.aten, name) for name in sorted(named) if hasattr(torch.ops.aten, name)]:
        overloads = [getattr(packet, overload) for overload in packet.overloads()]
        outs = [o for o in overloads if any(a.is_out for a in o._schema.arguments)]
        for written in outs:
            taken = [str(a.type) for a in written._schema.arguments if not a.is_out]
            same = [o for o in overloads if o not in outs and [str(a.type) for a in o._schema.arguments] == taken]
            strayed += [str(written) for plain in same if lookup(plain) is not lookup(written)]
    assert strayed == []
