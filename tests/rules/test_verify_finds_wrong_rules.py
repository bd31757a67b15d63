"""False rows of every kind are caught, named, made small, and shown by a program that fails."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import Any

import pytest
import torch
from fast_part import some

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
class Planted:
    """An operator, a rule that is false in ``rows`` (and in them alone), and arguments."""

    schema: str
    fn: Callable[..., Any]
    declare: Callable[[str], Any]
    rows: set[str]
    args: tuple[Any, ...] = (X,)


def unary(fn: Callable[..., Any], rows: set[str], declare: Callable[[str], Any], *args: Any) -> Planted:
    return Planted("(Tensor x) -> Tensor", fn, declare, rows, args or (X,))


def binary(fn: Callable[..., Any], rows: set[str], declare: Callable[[str], Any], *args: Any) -> Planted:
    return Planted("(Tensor x, Tensor y) -> Tensor", fn, declare, rows, args or (X, Y))


def sums(op: str | None, kernel: Kernel | None = None, **options: Any) -> Callable[[str], Any]:
    def factors(call: Call) -> Factors:
        sizes = {f"d{d}": size for d, size in enumerate(call.shape(0))}
        reduced = {} if op is None else dict.fromkeys(sizes, op)
        kernels = {} if kernel is None else dict.fromkeys(sizes, kernel)
        whole = frozenset(sizes) if op is None and kernel is None else frozenset()
        return Factors((tuple((name,) for name in sizes),), ((),), sizes, whole, reduced, kernels=kernels)

    return lambda name: kernel_rule(name, factors, **options)


def twice(at: KernelContext, x: Any) -> Any:
    return at.map(lambda _, block: 2 * block.sum(), x)


def over_total(at: KernelContext, x: Any) -> Any:
    """Right for one sharded dim; it has no total where two are."""
    whole = at.call.operands[0].numel
    scale = 1.0 if at.total else 2.0
    return at.all_reduce(at.map(lambda _, block: scale * block.sum() / whole, x), "sum")


def below_three(choice: StrategyChoice) -> bool:
    """Too wide: the largest of two sums is not their sum either."""
    return all(len(split.sizes) < 3 for split in choice.splits.values())


def own_table(*rows: Any) -> Callable[[str], Any]:
    def declare(name: str) -> Any:
        overload = getattr(torch.ops.planted, name.partition("::")[2]).default
        return dt.register_sharding(overload)(lambda *args: list(rows))

    return declare


SUM_AS_MAX = {"S(0) -> max", "S(1) -> max"}
PLANTED = {
    "static, not linear": unary(torch.exp, {"sum -> sum"}, lambda n: pointwise(n, partials=("sum -> sum", "max -> max"))),
    "static, not monotone": unary(torch.abs, {"max -> max"}, lambda n: pointwise(n, partials=("max -> max",))),
    "computed": unary(torch.neg, {"min -> min"}, lambda n: pointwise(n, partials=lambda call: ("min -> min",))),
    "computed, one of many": unary(
        torch.neg,
        {"max -> max"},
        lambda n: pointwise(n, partials=lambda call: ("sum -> sum", "avg -> avg", "min -> max", "max -> max")),
    ),
    "a constant that is added once per rank": binary(
        torch.add, {"sum,R -> sum"}, lambda n: pointwise(n, partials=("sum,R -> sum", "sum,sum -> sum"))
    ),
    "cross terms": binary(torch.mul, {"sum,sum -> sum"}, lambda n: pointwise(n, partials=("sum,sum -> sum", "sum,R -> sum"))),
    "factors of a sum": binary(
        torch.add, {"product,product -> product"}, lambda n: pointwise(n, partials=("product... -> product",))
    ),
    "not element by element": unary(lambda x: x.cumsum(0), {"S(0) -> S(0)"}, lambda n: pointwise(n)),
    "the wrong reduction": unary(torch.sum, SUM_AS_MAX, sums("max")),
    "a mean of uneven blocks": unary(
        torch.mean,
        {"S(0) -> avg", "S(1) -> avg"},
        own_table(([Partial("avg")], [Shard(0)]), ([Partial("avg")], [Shard(1)])),
    ),
    "when is too wide": unary(torch.sum, SUM_AS_MAX, sums("max", when=below_three)),
    "a kernel": unary(torch.sum, {"S(0) -> sum", "S(1) -> sum"}, sums(None, Kernel(twice, lacking=Partial("sum")))),
    "a kernel that is not joint": unary(
        torch.mean, {"S(0) -> R & S(1) -> R"}, sums(None, Kernel(over_total, collectives=1, joint=True))
    ),
    "a user's table": unary(
        torch.sum, {"S(0) -> max"}, own_table(([Partial("max")], [Shard(0)]), ([Partial("sum")], [Shard(1)]))
    ),
    "a user's partial row": binary(
        torch.maximum,
        {"min,R -> max"},
        own_table(([Partial("max")], [Partial("min"), Replicate()]), ([Partial("max")], [Partial("max"), Partial("max")])),
    ),
    "an affine product": binary(
        lambda x, y: x @ y + 1,
        {"S(1),S(0) -> sum", "sum,R -> sum", "R,sum -> sum"},
        lambda n: einsum(n, "m k, k n -> m n"),
        X.long(),  # finite whatever its values: rows of products ask for that
        floats(6, 7, seed=2).long(),
    ),
    "a view that is none": unary(
        lambda x: -x,
        {"max -> max", "min -> min", "product -> product"},
        lambda n: view(n, lambda call: Factors(((("a",), ("b",)),), ((("a",), ("b",)),), {"a": 5, "b": 6})),
    ),
    "another result": unary(
        torch.neg, {"sum -> avg"}, lambda n: pointwise(n, partials=(Strategy((Partial("sum"),), (Partial("avg"),)),))
    ),
    "the wrong dim whole": unary(lambda x: x.cumsum(1), {"S(1) -> S(1)"}, lambda n: einsum(n, "[a] b -> [a] b", linear=False)),
}


def planted(plant: Planted) -> Iterator[str]:
    name = f"op{next(numbers)}"
    LIBRARY.define(f"{name}{plant.schema}")
    LIBRARY.impl(name, plant.fn, "CompositeExplicitAutograd")
    torch.library.register_fake(f"planted::{name}", plant.fn, lib=LIBRARY)
    plant.declare(f"planted::{name}")
    yield f"planted::{name}"
    unregister(f"planted::{name}")


def verified(plant: Planted, judge: Callable[[Report], None]) -> None:
    for name in planted(plant):
        judge(verify_rule(name, [Sample(plant.args, gradients=False)], meshes=MESHES, limit=12, stop_after=20))


@pytest.mark.parametrize("kind", some(list(PLANTED), 6))
def test_a_false_row_is_caught_and_named(kind: str) -> None:
    def judge(report: Report) -> None:
        assert {" & ".join(sorted(wrong.rows)) for wrong in report.wrong} == PLANTED[kind].rows, str(report)
        assert len(report.wrong) == len(PLANTED[kind].rows)
        for wrong in report.wrong:
            assert (wrong.operator, wrong.direction) == (report.name, "forward")
            assert wrong.cases >= 1
            with pytest.raises(AssertionError, match=r"got .* expected"):
                exec(wrong.reproduction, {})

    verified(PLANTED[kind], judge)


@pytest.mark.parametrize("rows", [("min -> max", "max -> min", "sum -> sum"), ("avg -> avg",)])
def test_true_rows_pass(rows: tuple[str, ...]) -> None:
    plant = unary(torch.neg, set(), lambda n: pointwise(n, partials=lambda call: rows))

    def judge(report: Report) -> None:
        assert report, str(report)
        assert set(rows) <= report.rows.forced

    verified(plant, judge)


def test_a_pair_is_small_and_its_values_are_small_integers() -> None:
    def judge(report: Report) -> None:
        (wrong,) = report.wrong
        assert wrong.mesh_shape == (2,)
        (x,) = wrong.variant.sample.args
        assert x.shape == (1, 1)
        assert x.item() in (0, 1, 2)
        assert wrong.placements == ((Partial("min"),),)

    verified(PLANTED["computed"], judge)


def test_without_hypothesis_a_fault_stays_as_it_was_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def judge(report: Report) -> None:
        (wrong,) = report.wrong
        assert wrong.variant.sample.args[0].shape == X.shape
        with pytest.raises(AssertionError, match=r"differs by up to"):
            exec(wrong.reproduction, {})

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    verified(PLANTED["computed"], judge)


# --- gradients ----------------------------------------------------------------------------------------------------------
def test_a_fault_in_the_backward_names_its_operator_and_row() -> None:
    """The forward is right; the operator that its gradient is made of has a false row."""
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


# --- what is asked --------------------------------------------------------------------------------------------------------
def test_samples_may_require_grad() -> None:
    sample = Sample((torch.randn(5, 6, requires_grad=True), torch.randn(6, 7, requires_grad=True).double().float()))
    report = verify_rule("mm", [sample], meshes=[(3,)], limit=20)
    assert report, str(report)


def test_arguments_of_check_may_require_grad() -> None:
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
def test_nothing_to_try_is_an_error(name: str, samples: Any, message: str) -> None:
    with pytest.raises(dt.errors.RuleError, match=message):
        verify_rule(name, samples)


def test_special_values_are_planted() -> None:
    """``relu`` keeps infinities and NaN, and rows of terms of a maximum with them."""
    report = verify_rule("relu", meshes=[(3,)], rows_only=True, plant=(0.0, torch.inf, -torch.inf, torch.nan))
    assert report, str(report)
    plant = unary(lambda x: x.nan_to_num(0.0), {"max -> max"}, lambda n: pointwise(n, partials=("max -> max",)))

    def judge(report: Report) -> None:
        assert not report.wrong

    verified(plant, judge)
    for name in planted(plant):
        report = verify_rule(name, [Sample(plant.args, gradients=False)], meshes=[(3,)], plant=(torch.nan,))
        assert [wrong.row for wrong in report.wrong] == ["max -> max"]


@pytest.mark.parametrize(
    ("name", "args", "row"),
    [
        ("isin", (floats(3), floats(4, 6)), "R,S(1) -> max"),
        ("linalg_matrix_exp", (floats(2, 4, 3, 3),), "S(1) -> S(1)"),
    ],
)
def test_a_row_holds_for_blocks_that_are_slices_of_what_is_whole(name: str, args: tuple[Tensor, ...], row: str) -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    check(forced(getattr(torch.ops.aten, name), row), *args, mesh=mesh, placements=[[Replicate()]] * len(args), gradients=False)


def test_an_overload_with_out_follows_the_rule_of_the_one_without() -> None:
    """``max.out`` is ``max.other`` with ``out=``, not the reduction."""
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
