"""Notation of rules: how patterns bind to calls, and which partial strategies its functions give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from ops_page import classify_rule

import dtensor as dt
from dtensor.errors import RuleError
from dtensor.propagation.make_call import make_call
from dtensor.propagation.op_schema import operator_schema_of
from dtensor.rules import rules
from dtensor.rules.bind_pattern import factors_of_pattern
from dtensor.rules.call import Call, Meta
from dtensor.rules.declared_factors import DeclaredFactors, by, fitting
from dtensor.rules.folds import Fold
from dtensor.rules.notation import is_selected, parse_notation
from dtensor.rules.partial_rules import CombinedPartials, copies, forgets, linear, monotone, one_of
from dtensor.rules.partial_rules import combine_partials as rows_of
from dtensor.rules.rule import Kernel, Rule

aten = torch.ops.aten


def call_of(op: Any, results: list[tuple[int, ...]], **arguments: Any) -> Call:
    """Return a call on one mesh dim of two ranks, in which ``torch.Size`` arguments stand for tensors."""
    operator, mesh = operator_schema_of(op), dt.init_device_mesh("cpu", (2,))

    def layout(value: Any) -> Any:
        if isinstance(value, torch.Size):
            return dt.zeros(*value, device_mesh=mesh, placements=[dt.Replicate()])._layout
        return [layout(item) for item in value] if isinstance(value, list) else value

    given = {name: layout(value) for name, value in arguments.items()}
    call, _ = make_call(operator, mesh, operator.defaults | given)
    call.results = tuple(Meta(shape, (1,) * len(shape), torch.float32) for shape in results)
    return call


def size(*shape: int) -> torch.Size:
    return torch.Size(shape)


def bind_to_text(text: str, call: Call, **options: Any) -> str:
    """Bind a notation to a call and return its factors as text."""
    factors = factors_of_pattern(parse_notation(text), call, **options)
    if factors is None:
        return "none"

    def told(tensors: Any) -> str:
        return ", ".join(" ".join("".join(dim) or "1" for dim in dims) or "." for dims in tensors)

    whole = f" whole {' '.join(sorted(factors.unsharded))}" if factors.unsharded else ""
    return f"{told(factors.operands)} -> {told(factors.results)}{whole}"


REDUCTIONS: dict[str, tuple[Any, Any, Any, str]] = {
    "one dim": ((5, 6, 7), {"dim": [1]}, (5, 7), "a.0 dim.0 b.0 -> a.0 b.0"),
    "negative dim": ((5, 6, 7), {"dim": [-1]}, (5, 6), "a.0 a.1 dim.0 -> a.0 a.1"),
    "dims around another dim": ((5, 6, 7), {"dim": [0, 2]}, (6,), "dim.0 b.0 dim.1 -> b.0"),
    "dims in descending order": ((5, 6, 7), {"dim": [2, 0]}, (6,), "dim.1 b.0 dim.0 -> b.0"),
    "keepdim": ((5, 6, 7), {"dim": [0, 2], "keepdim": True}, (1, 6, 1), "dim.0 b.0 dim.1 -> 1 b.0 1"),
    "dim=None": ((5, 6), {"dim": None}, (), "dim.0 dim.1 -> ."),
    "dim=[]": ((5, 6), {"dim": []}, (), "dim.0 dim.1 -> ."),
    "0-d tensor": ((), {"dim": [0]}, (), ". -> ."),
}


@pytest.mark.parametrize("case", REDUCTIONS)
def test_reduced_dims_of_the_call_are_removed_or_have_size_1_in_the_result(case: str) -> None:
    shape, arguments, result, expected = REDUCTIONS[case]
    call = call_of(aten.sum.dim_IntList, [result], self=size(*shape), **arguments)
    assert bind_to_text("a* @dim b* -> each: a* b*", call) == expected


def test_exclamation_mark_makes_an_empty_dim_list_select_no_dim() -> None:
    call = call_of(aten.any.dims, [(5, 6)], self=size(5, 6), dim=[])
    assert bind_to_text("a* @dim! b* -> a* b*", call) == "a.0 a.1 -> a.0 a.1"
    some = call_of(aten.any.dims, [(5, 1)], self=size(5, 6), dim=[1], keepdim=True)
    assert bind_to_text("a* [@dim!] b* -> a* b*", some) == "a.0 dim.0 -> a.0 1 whole dim.0"
    all_of = call_of(aten.any.dims, [()], self=size(5, 6), dim=None)
    assert bind_to_text("a* @dim! b* -> a* b*", all_of) == "dim.0 dim.1 -> ."


def test_selected_dims_in_brackets_must_be_unsharded() -> None:
    call = call_of(aten.flip.default, [(5, 6)], self=size(5, 6), dims=[1])
    assert bind_to_text("a* [@dims!] b* -> a* [@dims!] b*", call) == "a.0 dims.0 -> a.0 dims.0 whole dims.0"


@pytest.mark.parametrize(("shape", "expected"), [((5, 6), "m n -> n m"), ((5,), "s* -> s*"), ((5, 6, 7), "s* -> s*")])
def test_first_pattern_that_fits_the_call_is_chosen(shape: tuple[int, ...], expected: str) -> None:
    chosen = fitting((parse_notation("m n -> n m"), parse_notation("s* -> s*")))(
        call_of(aten.neg.default, [shape[::-1]], self=size(*shape))
    )
    assert chosen.text == expected


PATTERNS = {
    "operator along a dim": (
        "each: a* [@dim] b* -> each: a* [@dim] b*",
        call_of(aten.sort.default, [(5, 6), (5, 6)], self=size(5, 6), dim=-1),
        "a.0 dim.0 -> a.0 dim.0, a.0 dim.0 whole dim.0",
    ),
    "a new dim": (
        "a* b* -> a* @dim b*",
        call_of(aten.unsqueeze.default, [(5, 1, 6)], self=size(5, 6), dim=1),
        "a.0 b.0 -> a.0 1 b.0",
    ),
    "index dim replaces the selected dim": (
        "self: a* [@dim] b*, index: i -> a* i b*",
        call_of(aten.index_select.default, [(5, 3, 7)], self=size(5, 6, 7), dim=1, index=size(3)),
        "a.0 dim.0 b.0, i -> a.0 i b.0 whole dim.0",
    ),
    "list of tensors": (
        "tensors: a* b* -> a* @dim b*",
        call_of(aten.stack.default, [(5, 2, 6)], tensors=[size(5, 6), size(5, 6)], dim=1),
        "a.0 b.0, a.0 b.0 -> a.0 1 b.0",
    ),
    "broadcast operands": (
        "each: s* -> each: s*",
        call_of(aten.mul.Tensor, [(5, 6)], self=size(5, 6), other=size(1, 6)),
        "s.0 s.1, 1 s.1 -> s.0 s.1",
    ),
    "operands by name, without the bias": (
        "input: n (g i), bias: (g o), weight: (g o) i -> n (g o)",
        call_of(aten.linear.default, [(5, 6)], input=size(5, 4), weight=size(6, 2)),
        "n gi, go i -> n go",
    ),
    "empty brackets are dims without a factor": (
        "each: b* [] [] -> each: b* [] []",
        call_of(aten.avg_pool2d.default, [(5, 3, 3)], self=size(5, 7, 7), kernel_size=[2, 2]),
        "b.0 1 1 -> b.0 1 1",
    ),
    "tensor with too few dims": ("m k -> m", call_of(aten.neg.default, [(5,)], self=size(5)), "none"),
    "dim out of range": ("a* @dim b* -> a* b*", call_of(aten.sum.dim_IntList, [()], self=size(5), dim=[3]), "none"),
}


@pytest.mark.parametrize("case", PATTERNS)
def test_pattern_gives_the_factors_of_a_call_or_none_if_it_does_not_fit(case: str) -> None:
    text, call, expected = PATTERNS[case]
    sizes = {"g": lambda call: 2} if "(g" in text else None
    assert bind_to_text(text, call, sizes=sizes) == expected


def test_sizes_of_factors_in_a_product_come_from_arguments_or_division() -> None:
    call = call_of(aten.pixel_shuffle.default, [(5, 6, 8)], self=size(20, 3, 4), upscale_factor=2)
    factors = factors_of_pattern(
        parse_notation("(c r s) h w -> c (h r) (w s)"), call, None, {"r": "upscale_factor", "s": "upscale_factor"}
    )
    assert dict(factors.sizes) == {"h": 3, "w": 4, "r": 2, "s": 2, "c": 5}
    odd = call_of(aten.pixel_shuffle.default, [(5, 6, 8)], self=size(21, 3, 4), upscale_factor=2)
    assert (
        factors_of_pattern(
            parse_notation("(c r s) h w -> c (h r) (w s)"), odd, None, {"r": "upscale_factor", "s": "upscale_factor"}
        )
        is None
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("m k, k n", "has no '->'"),
        ("m -> n", "appear only on the right"),
        ("m ! -> m", "cannot read"),
        ("x: m, k -> m", "names some operands"),
        ("@a s* @b -> s*", "at most one argument"),
    ],
)
def test_invalid_notation_raises(text: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        parse_notation(text)


def test_linear_one_of_and_forgets_give_their_partial_strategies() -> None:
    call = call_of(aten.addmm.default, [(5, 7)], self=size(7), mat1=size(5, 6), mat2=size(6, 7))
    assert linear("mat1")(call) == ("R,sum,R -> sum", "R,avg,R -> avg")
    assert linear("mat1", "mat2")(call)[::2] == ("R,sum,finite -> sum", "R,finite,sum -> sum")
    assert linear()(call) == ("sum,sum,sum -> sum", "avg,avg,avg -> avg")
    assert one_of("self", "mat2")(call)[:2] == ("sum,R,sum -> sum", "avg,R,avg -> avg")
    assert "R,R,max -> max" in one_of("self", "mat2")(call)
    assert "R,R,sum -> sum" not in one_of("self", "mat2")(call)
    assert one_of("other")(call) == ()  # without partial operands the result would be replicated, and copies are not addends
    assert forgets(call)[0] == "sum,R,R -> R"
    assert rows_of(monotone, copies, "sum -> R") == (*monotone, *copies, "sum -> R")
    assert rows_of(linear("mat1"), monotone)(call) == (*linear("mat1")(call), *monotone)


def test_by_selects_a_reduction_by_the_value_of_an_argument() -> None:
    call = call_of(aten.mse_loss.default, [()], self=size(5), target=size(5), reduction=1)
    assert by("reduction", {1: "avg", 2: "sum"})(call) == "avg"
    assert by("reduction", {2: "sum"})(call) is None


def _argument_names_in(word: Any) -> list[set[str]]:
    """Return the argument names that each part of a rule's declaration uses."""
    match word:
        case linear() | one_of():
            return [set(word.given)]
        case CombinedPartials():
            return [names for part in word.parts for names in _argument_names_in(part)]
        case by():
            return [{word.argument}, *(names for part in word.table.values() for names in _argument_names_in(part))]
        case DeclaredFactors():
            several = isinstance(word.pattern, (by, fitting))
            patterns = [*word.pattern.table.values()] if several else [word.pattern]
            terms = [term for pattern in patterns for term in pattern.operands]
            picked = [{dim[0].strip("@!")} for term in terms for dim in term.dims if is_selected(dim)]
            sizes = [{size} for size in word.sizes.values() if isinstance(size, str)]
            named = {term.name for term in terms} - {"", "each"}
            return [
                named,
                *picked,
                *sizes,
                *(names for reduction in word.reductions.values() for names in _argument_names_in(reduction)),
            ]
    return []


@pytest.mark.parametrize("name", sorted(rules()))
def test_rule_declarations_name_only_arguments_of_the_operator(name: str) -> None:
    """Check all argument names: a name that the operator lacks has no effect."""
    rule, known = rules()[name], {"dim"}  # a missing "dim" selects all dims: `_is_any_true` has no such argument
    for shared in (other for other, own in rules().items() if own is rule):
        namespace, _, base = shared.partition("::")
        packet = getattr(getattr(torch.ops, namespace), base.partition(".")[0], None)
        for overload in packet.overloads() if packet is not None else ():  # some operators exist in other builds of torch only
            known |= {argument.name for argument in getattr(packet, overload)._schema.arguments}
    if len(known) > 1:
        silent = [
            names
            for names in (*_argument_names_in(rule.factors), *_argument_names_in(rule.partials))
            if names and not names & known
        ]
        assert silent == []


# --- classification of rules --------------------------------------------------------------------------------------------
def test_classify_rule_gives_notation_combinators_functions_or_decompositions() -> None:
    known = {
        "mm": "notation",
        "_softmax": "combinators",
        "cumsum": "combinators",
        "sort": "functions",
        "renorm": "decompositions",
    }
    assert {name: classify_rule(rules()[f"aten::{name}"]) for name in known} == known
    pattern = parse_notation("[s*] -> [s*]")
    assert classify_rule(Rule(DeclaredFactors(pattern))) == "notation"
    assert (
        classify_rule(Rule(DeclaredFactors(pattern, kernel=Fold(lambda part, x: x, "sum").make_kernel(pattern)))) == "combinators"
    )
    for own in (
        Rule(DeclaredFactors(pattern, kernel=Kernel(lambda at, x: x))),
        Rule(DeclaredFactors(pattern, kernel=lambda call: None)),
        Rule(DeclaredFactors(pattern, reductions={"*": lambda call: "sum"})),
        Rule(DeclaredFactors(pattern, sizes={"s": lambda call: 1})),
        Rule(DeclaredFactors(pattern), run=lambda at, x: x),
        Rule(lambda call: None),
    ):
        assert classify_rule(own) == "functions"


def test_at_least_400_rules_are_declared_by_notation_or_combinators() -> None:
    library = [rule for name, rule in rules().items() if name.startswith("aten::")]
    assert sum(classify_rule(rule) in ("notation", "combinators") for rule in library) >= 400
