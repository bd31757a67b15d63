"""Rules by users: every form of a row that makes sense is taken, every other is refused with its operator, row and remedy."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.errors import RuleError
from dtensor.rules import rules, unregister
from dtensor.testing import Sample, verify_rule

LIBRARY = torch.library.Library("tables", "DEF")
R = Replicate()
X = torch.arange(12.0).reshape(4, 3)


@pytest.fixture(autouse=True)
def only_here() -> Iterator[None]:
    """The registry as it was: rules are the library's, and other tests go through all of them."""
    before = rules()
    yield
    for name in rules():
        if rules()[name] is not before.get(name):
            unregister(name)
            if name in before:
                dt.rules.register(name, before[name])
    dt.dispatch.dispatcher.clear_plans()


def define(signature: str, fn: Callable[..., Any]) -> Any:
    name, _, overload = signature.split("(")[0].partition(".")
    packet = getattr(torch.ops.tables, name, None)
    if packet is None or (overload or "default") not in packet.overloads():
        LIBRARY.define(signature)
        for key in ("CompositeExplicitAutograd", "Meta"):
            LIBRARY.impl(signature.split("(")[0], fn, key)
    return getattr(getattr(torch.ops.tables, name), overload or "default")


def twice() -> Any:
    return define("twice(Tensor x) -> Tensor", lambda x: x * 2)


def line(ranks: int = 2) -> dt.DeviceMesh:
    return dt.init_device_mesh("cpu", (ranks,))


def put(x: torch.Tensor, *placements: Any, mesh: dt.DeviceMesh | None = None) -> Any:
    return dt.distribute_tensor(x, mesh or line(), placements)


def equal(found: Any, expected: torch.Tensor) -> None:
    assert [tuple(x.shape) for x in found._local.shards] == [
        found._layout.local_shape(found.device_mesh.coordinates[member]) for member in found.device_mesh.members
    ]
    torch.testing.assert_close(found.full_tensor(), expected)


# --- rows that are refused ------------------------------------------------------------------------------------------------
REFUSED: dict[str, tuple[Any, str]] = {
    "a dim too large": (([Shard(5)], [Shard(5)]), r"out of range for a tensor of 2 dims; use a dim in \[-2, 1\]"),
    "a dim too small": (([Shard(-3)], [Shard(-3)]), "out of range"),
    "too many inputs": (
        ([Shard(0)], [Shard(0), Shard(0)]),
        r"2 inputs, but the operator has 1 arguments: tables::twice\(Tensor x\)",
    ),
    "too many outputs": (([Shard(0), Shard(0)], [Shard(0)]), "2 outputs, but the operator has 1"),
    "no outputs": (([], [Shard(0)]), "0 outputs, but the operator has 1"),
    "no inputs": (([R], []), r"no placement for the tensor x: write Replicate\(\)"),
    "None for a tensor": (([Shard(0)], [None]), r"no placement for the tensor x: write Replicate\(\)"),
    "None for a result": (([None], [Shard(0)]), "None is not a placement|0 outputs"),
    "a class": (([Shard], [Shard]), r"is not a placement; use Shard\(dim\)"),
    "a bare class": ((Shard, Shard), r"is not a placement; use Shard\(dim\)"),
    "a placement in quotes": ((["S(0)"], ["S(0)"]), r"is not a placement; use Shard\(dim\)"),
    "a list for a tensor": (([Shard(0)], [[Shard(0)]]), "not a placement"),
    "no pair": ([Shard(0)], r"a strategy is a pair, \(\[Shard\(0\)\], \[Shard\(0\), None\]\)"),
    "three sides": (([Shard(0)], [Shard(0)], [Shard(0)]), "a strategy is a pair"),
    "a number": (3, "a strategy is a pair"),
    "sizes": (([Shard(0, sizes=(1, 3))], [Shard(0, sizes=(1, 3))]), r"not the shard sizes: write Shard\(0\)"),
    "a level": (([Shard(0, level=1)], [Shard(0, level=1)]), r"not the shard sizes: write Shard\(0\)"),
    "a shard from nowhere": (([Shard(0)], [R]), r"every rank computes the full output: write Replicate\(\)"),
    "a sum from nowhere": (([Partial()], [R]), r"every rank computes the full output: write Replicate\(\)"),
    "sizes that do not divide": (([Shard(0)], [Shard(1)]), "sizes 3 and 4 together"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_row_that_does_not_fit_is_refused_with_its_operator_and_its_number(what: str) -> None:
    row, message = REFUSED[what]
    dt.register_sharding(twice())(lambda x: [([Shard(0)], [Shard(0)]), row])
    with pytest.raises(RuleError, match=message) as raised:
        twice()(put(X, Shard(0)))
    assert str(raised.value).startswith("register_sharding for tables.twice.default: strategy 1, ")


@pytest.mark.parametrize("rows", [None, 3, "S(0)", Shard(0)])
def test_a_table_that_returns_no_rows_is_refused(rows: Any) -> None:
    dt.register_sharding(twice())(lambda x: rows)
    with pytest.raises(RuleError, match=r"tables.twice.default: its table returned .*return a list of strategies"):
        twice()(put(X, Shard(0)))


def test_a_table_with_other_arguments_than_the_operators_is_refused() -> None:
    dt.register_sharding(twice())(lambda x, dim: [([Shard(0)], [Shard(0)])])
    with pytest.raises(RuleError, match=r"missing a required argument: 'dim'; the operator is tables::twice\(Tensor x\)"):
        twice()(put(X, Shard(0)))


def test_what_is_no_table_is_refused() -> None:
    with pytest.raises(RuleError, match="decorates a function"):
        dt.register_sharding(twice())([([Shard(0)], [Shard(0)])])


def test_a_0d_tensor_cannot_be_sharded() -> None:
    dt.register_sharding(twice())(lambda x: [([Shard(0)], [Shard(0)])])
    with pytest.raises(RuleError, match="0-d tensor"):
        twice()(put(X.sum(), R))


def test_a_placement_for_what_is_no_tensor_is_refused() -> None:
    op = define("scaled(Tensor x, int k, Tensor y) -> Tensor", lambda x, k, y: x * k + y)
    dt.register_sharding(op)(lambda x, k, y: [([Shard(0)], [Shard(0), Shard(0)])])
    with pytest.raises(RuleError, match="is given for k, which is not a tensor: write None"):
        op(put(X, Shard(0)), 2, put(X, Shard(0)))


def test_a_bare_placement_for_several_tensors_is_refused() -> None:
    op = define("scaled(Tensor x, int k, Tensor y) -> Tensor", lambda x, k, y: x * k + y)
    dt.register_sharding(op)(lambda x, k, y: [(Shard(0), Shard(0))])
    with pytest.raises(RuleError, match="is given for 2 tensor inputs"):
        op(put(X, Shard(0)), 2, put(X, Shard(0)))


# --- rows that are taken --------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "row",
    [
        ([Shard(-2)], [Shard(-2)]),
        (Shard(0), Shard(0)),
        ([Shard(0)], Shard(0)),
        ((Shard(0),), (Shard(0),)),
        [[Shard(0)], [Shard(0)]],
    ],
    ids=lambda row: str(row),
)
def test_negative_dims_bare_placements_and_tuples(row: Any) -> None:
    dt.register_sharding(twice())(lambda x: iter([row]))
    with dt.explicit():
        found = twice()(put(X, Shard(0)))
    assert found.placements == (Shard(0),)
    equal(found, X * 2)


def test_trailing_arguments_that_are_no_tensors_may_be_left_out() -> None:
    op = define("powered(Tensor x, int k=1, float? a=None) -> Tensor", lambda x, k=1, a=None: x**k)
    for inputs in ([Shard(0)], [Shard(0), None], [Shard(0), None, None], Shard(0)):
        dt.register_sharding(op)(lambda x, k, a, inputs=inputs: [(Shard(0), inputs)])
        with dt.explicit():
            equal(op(put(X, Shard(0)), 2), X**2)


def test_a_number_in_a_tensors_place_takes_none() -> None:
    """``fmod.Scalar``'s number is an operand of the rule, since ``fmod.Tensor`` has a tensor there."""
    dt.register_sharding(torch.ops.aten.fmod.Scalar)(lambda x, k: [([Shard(0)], [Shard(0), None])])
    with dt.explicit():
        equal(torch.fmod(put(X, Shard(0)), 5), torch.fmod(X, 5))


def test_lists_of_tensors_take_lists_or_one_placement_for_all() -> None:
    op = define(
        "each(Tensor[] xs, Tensor? y=None, *, Tensor[] zs, Tensor?[] ws) -> (Tensor[], Tensor)",
        lambda xs, y=None, *, zs, ws: ([x * 2 for x in xs], zs[0] * 3),
    )
    x = put(X, Shard(0))
    sides = itertools.product(
        ([[Shard(0), Shard(0)], Shard(0)], [Shard(0), Shard(0), Shard(0)], [Shard(0), Shard(0)]),
        ([[Shard(0), Shard(0)], None, [Shard(0)], [None, Shard(0)]], [Shard(0), R, Shard(0), Shard(0)]),
    )
    for outputs, inputs in sides:
        dt.register_sharding(op)(lambda xs, y, *, zs, ws, row=(outputs, inputs): [row])
        with dt.explicit():
            (a, b), c = op([x, x], None, zs=[x], ws=[None, x])
        equal(a, X * 2)
        equal(b, X * 2)
        equal(c, X * 3)
        assert [v.placements for v in (a, b, c)] == [(Shard(0),)] * 3
    dt.register_sharding(op)(lambda xs, y, *, zs, ws: [([Shard(0)] * 3, [[Shard(0)], None, Shard(0), Shard(0)])])
    with pytest.raises(RuleError, match="1 placements for xs, which is a list of 2 tensors"):
        op([x, x], None, zs=[x], ws=[None, x])


def test_an_optional_tensor_that_is_given_needs_its_placement() -> None:
    op = define("biased(Tensor x, Tensor? b=None, int k=1) -> Tensor", lambda x, b=None, k=1: x if b is None else x + b)
    dt.register_sharding(op)(lambda x, b, k: [([Shard(0)], [Shard(0), Shard(0), None])])
    x = put(X, Shard(0))
    with dt.explicit():
        equal(op(x), X)
        equal(op(x, x), X + X)
    dt.register_sharding(op)(lambda x, b, k: [([Shard(0)], [Shard(0)])])
    with pytest.raises(RuleError, match="no placement for the tensor b"):
        op(x, x)


def test_results_that_are_no_tensors_take_none_or_nothing() -> None:
    op = define("counted(Tensor x) -> (Tensor, int)", lambda x: (x * 2, x.ndim))
    for outputs in ([Shard(0), None], [Shard(0)], Shard(0)):
        dt.register_sharding(op)(lambda x, outputs=outputs: [(outputs, [Shard(0)])])
        with dt.explicit():
            found, ndim = op(put(X, Shard(0)))
        equal(found, X * 2)
        assert ndim == 2


OUT = "copied(Tensor x, *, Tensor(a!) out) -> Tensor(a!)"


@pytest.mark.parametrize("inputs", [[Shard(0)], [Shard(0), Shard(0)], [Shard(0), None], Shard(0)], ids=str)
def test_out_tensors_are_the_outputs(inputs: Any) -> None:
    op = define(OUT, lambda x, *, out: out.copy_(x))
    dt.register_sharding(op)(lambda x: [([Shard(0)], inputs)])
    for where in (Shard(0), Shard(1), R):
        out = put(torch.zeros(4, 3), where)
        assert op(put(X, Shard(0)), out=out) is out
        equal(out, X)
        assert out.placements == (where,)


def test_a_table_may_name_what_its_operator_writes_to() -> None:
    minimum = torch.ops.aten.min.dim_min

    @dt.register_sharding(minimum)
    def _(x: Any, dim: int, keepdim: bool, min: Any, min_indices: Any) -> list[Any]:
        assert tuple(min.shape) == tuple(min_indices.shape) == (x.shape[0], 1)
        return [([Shard(0), Shard(0)], [Shard(0), None, None, Shard(0), Shard(0)])]

    try:
        x = put(torch.arange(12.0).reshape(4, 3).flip(1), Shard(0))
        out = put(torch.zeros(4, 1), Shard(0)), put(torch.zeros(4, 1, dtype=torch.int64), Shard(0))
        assert torch.min(x, dim=1, keepdim=True, out=out).values is out[0]
        for values, indices in (out, torch.min(x, dim=1, keepdim=True)):
            equal(values, torch.tensor([[0.0], [3.0], [6.0], [9.0]]))
            equal(indices, torch.full((4, 1), 2))
    finally:
        dt.unregister_sharding(minimum)


def test_out_tensors_placed_otherwise_than_the_outputs_are_refused() -> None:
    op = define(OUT, lambda x, *, out: out.copy_(x))
    dt.register_sharding(op)(lambda x: [([Shard(0)], [Shard(0), R])])
    with pytest.raises(RuleError, match="out= tensors are the outputs"):
        op(put(X, Shard(0)), out=put(torch.zeros(4, 3), Shard(0)))


def test_a_keyword_tensor_that_is_written_and_not_returned_follows_its_row() -> None:
    op = define("filled(Tensor x, *, Tensor(a!) to) -> ()", lambda x, *, to: (to.copy_(x), None)[1])
    dt.register_sharding(op)(lambda x, *, to: [([], [Shard(0), Shard(0)])])
    to = put(torch.zeros(4, 3), Shard(0))
    with dt.explicit():
        op(put(X, Shard(0)), to=to)
    equal(to, X)
    to = put(torch.zeros(4, 3), Shard(1))
    op(put(X, R), to=to)
    equal(to, X)


# --- which operators ------------------------------------------------------------------------------------------------------
def test_what_custom_op_returned_and_packets_are_operators() -> None:
    @torch.library.custom_op("tables::third", mutates_args=())
    def third(x: torch.Tensor) -> torch.Tensor:
        return x / 3

    third.register_fake(lambda x: torch.empty_like(x))
    for op in (third, torch.ops.tables.third, torch.ops.tables.third.default, [third]):
        dt.register_sharding(op)(lambda x: [(Shard(0), Shard(0))])
        with dt.explicit():
            equal(third(put(X, Shard(0))), X / 3)
        unregister("tables::third")


def test_one_that_says_that_it_is_pointwise_needs_no_rule() -> None:
    LIBRARY.define("fused(Tensor a, Tensor b, Tensor c) -> Tensor", tags=(torch.Tag.pointwise,))
    for key in ("CompositeExplicitAutograd", "Meta"):
        LIBRARY.impl("fused", lambda a, b, c: a * b + c, key)
    with dt.explicit():
        equal(torch.ops.tables.fused(put(X, Shard(0)), put(X[:1], R), put(X, Shard(0))), X * X[:1] + X)


def test_an_operator_of_several_signatures_is_refused_with_their_names() -> None:
    with pytest.raises(RuleError, match=r"several overloads.*torch\.ops\.aten\.sum\.dim_IntList"):
        dt.register_sharding(torch.ops.aten.sum)
    with pytest.raises(RuleError, match="takes an operator overload"):
        dt.register_sharding(torch.sum)


def test_a_rule_of_the_default_overload_is_not_asked_for_the_others() -> None:
    dt.register_sharding(torch.ops.aten.prod.default)(lambda x, *, dtype: [])
    x = put(X, Shard(1))
    equal(torch.prod(x, 0), X.prod(0))
    with dt.explicit():
        assert torch.prod(x, 0).placements == (Shard(0),)  # by the library's rule
    equal(torch.prod(x), X.prod())


def test_a_rule_serves_the_out_form_and_the_form_in_place() -> None:
    asked: list[str] = []

    @dt.register_sharding(torch.ops.aten.relu.default)
    def _(x: Any) -> Any:
        asked.append("relu")
        return [(Shard(0), Shard(0))]

    x = put(X, Shard(0))
    equal(torch.relu_(x.clone()), X)
    equal(torch.ops.aten.relu.out(x, out=torch.empty_like(x)), X)
    assert len(asked) == 2


# --- what rows mean -------------------------------------------------------------------------------------------------------
def test_a_table_may_ask_the_value_of_a_number() -> None:
    """``max(k a, k b) = k max(a, b)`` for ``k >= 0`` only."""
    op = define("stretched(Tensor x, float k) -> Tensor", lambda x, k: x * k)
    dt.register_sharding(op)(lambda x, k: [(Partial("max"), Partial("max"))] if k >= 0 else [])
    terms = dt.per_rank([X, -X])
    x = dt.DTensor.from_local(terms, line(), [Partial("max")])
    whole = torch.maximum(X, -X)
    for k in (2.0, -3.0, 0.5):
        equal(op(x, k), whole * k)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_rows_that_read_one_dim_in_several_ways_stay_apart(shape: tuple[int, ...], order: int) -> None:
    """With ``x`` the result's dim is n blocks of two, without it 2 n: the blocks of one are none of the other."""
    op = define("second(Tensor x, Tensor z) -> Tensor", lambda x, z: z * 2)
    dt.register_sharding(op)(lambda x, z: [(Shard(0), [Shard(0), Shard(0)]), (Shard(0), [R, Shard(0)])][::order])
    mesh = dt.init_device_mesh("cpu", shape)
    options = list(itertools.product([Shard(0), R], repeat=len(shape)))
    for n, of_x, of_z in itertools.product((0, 1, 2, 4), options, options):
        x, z = torch.arange(float(n)), torch.arange(2.0 * n) + 1
        equal(op(put(x, *of_x, mesh=mesh), put(z, *of_z, mesh=mesh)), z * 2)


def test_what_is_inside_a_block_is_no_row() -> None:
    """Two of ``z`` to each of ``x``: ``z`` cannot be cut alone, though it could within a block."""
    op = define("pairs(Tensor x, Tensor z) -> Tensor", lambda x, z: x.repeat_interleave(2) * z)
    asked = lambda x, z: [(Shard(0), [Shard(0), Shard(0)])]  # noqa: E731
    dt.register_sharding(op)(asked)
    for n, of_x, of_z in itertools.product((1, 3), (Shard(0), R), (Shard(0), R)):
        x, z = torch.arange(float(n)) + 1, torch.arange(2.0 * n) + 1
        equal(op(put(x, of_x), put(z, of_z)), x.repeat_interleave(2) * z)
        # the smaller dim is the unit whichever stands first
        swapped = define("swapped(Tensor z, Tensor x) -> Tensor", lambda z, x: x.repeat_interleave(2) * z)
        dt.register_sharding(swapped)(asked)
        equal(swapped(put(z, of_z), put(x, of_x)), x.repeat_interleave(2) * z)


# --- in the library's words -----------------------------------------------------------------------------------------------
def softened() -> Any:
    """A custom operator with an argument, from ``torch.library.custom_op``."""
    if "softened" not in DEFINED:

        @torch.library.custom_op("tables::softened", mutates_args=())
        def op(x: torch.Tensor, dim: int, temperature: float) -> torch.Tensor:
            return torch.softmax(x / temperature, dim)

        op.register_fake(lambda x, dim, temperature: torch.empty_like(x))
        DEFINED["softened"] = op
    return DEFINED["softened"]


DEFINED: dict[str, Any] = {}
SOFTENED = dt.rules.Fold(
    lambda part, x: (x / part["temperature"]).exp().sum(part.dims, keepdim=True),
    "sum",
    lambda part, x, total: (x / part["temperature"]).exp() / total,
)


def test_a_custom_operator_with_a_kernel_takes_one_call_and_verifies() -> None:
    op, x = softened(), torch.randn(5, 6)
    samples = [(x, 1, 2.0), (x, 0, 0.5)]
    dt.register_sharding(op, "a* [@dim] b* -> a* [@dim] b*", kernel=SOFTENED, samples=samples)
    report = verify_rule(op, meshes=[(2,), (3,)], limit=40)
    assert report, str(report)
    assert {"S(0) -> S(0)", "S(1) -> S(1)"} <= report.rows.forced
    with dt.explicit():
        for temperature in (2.0, 3.0):  # one plan for both
            equal(op(put(x, Shard(1)), 0, temperature), torch.softmax(x / temperature, 0))


def test_a_fold_costs_what_its_state_takes() -> None:
    op, x = softened(), torch.randn(5, 6)
    dt.register_sharding(op, "a* [@dim] b* -> a* [@dim] b*", kernel=SOFTENED)
    with dt.debug.CommDebugMode() as mode:
        op(put(x, Shard(1)), 1, 2.0)
    assert mode.get_total_counts() == 1


def test_a_kernel_is_a_function_of_locals() -> None:
    op = define("largest(Tensor x) -> Tensor", lambda x: x.amax())

    def kernel(at: Any, x: Any) -> Any:
        return at.all_reduce(at.map(lambda here, block: block.amax(), x), "max")

    dt.register_sharding(op, "[s*] ->", kernel=kernel)
    equal(op(put(X, Shard(0))), X.amax())


def test_words_of_all_kinds() -> None:
    op = define("scaled_sum(Tensor x, Tensor w, int dim) -> Tensor", lambda x, w, dim: (x * w).sum(dim))
    dt.register_sharding(op, "each: a* @dim b* -> a* b*", sums="@dim", partials=dt.rules.linear("x", "w"))
    x, w = put(X, Shard(1)), put(X + 1, Shard(1))
    found = op(x, w, 1)
    assert found.placements == (Partial(),)
    equal(found, (X * (X + 1)).sum(1))
    whole = define("filled_up(Tensor x, int[] size) -> Tensor", lambda x, size: x.new_ones(size))
    dt.register_sharding(whole, "s* -> s*", partials=dt.rules.forgets, local_args=lambda call, view: {"size": view.results[0]})
    equal(whole(put(X, Shard(0)), [4, 3]), torch.ones(4, 3))
    first = define("first_of(Tensor x) -> Tensor", lambda x: x[:, :1] * 1)
    dt.register_sharding(first, "n [] -> n []", when=lambda choice: choice.call.mesh.size() < 3)
    assert first(put(X, Shard(0))).placements == (Shard(0),)
    with pytest.warns(UserWarning, match="no sharding rule|gather"):
        equal(first(put(X, Shard(0), mesh=line(3))), X[:, :1])


@pytest.mark.parametrize(
    ("notation", "message"),
    [
        ("s*", "has no '->'"),
        ("a* @axis b* -> a* b*", "names axis, which the operator does not have"),
        ("y: s* -> s*", "names y, which the operator does not have"),
        ("s*, s* -> s*", "has 2 operands, but the operator takes 1 tensors"),
        ("s* -> s*, s*", "has 2 results, but the operator gives 1"),
    ],
)
def test_a_notation_that_does_not_fit_is_refused_at_once(notation: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        dt.register_sharding(twice(), notation)


def weighted() -> Any:
    return define("weighted(Tensor x, Tensor w, Tensor? bias=None) -> Tensor", lambda x, w, bias=None: x * w)


@pytest.mark.parametrize(
    ("notation", "message"),
    [
        ("b* [d] -> b* [d]", r"has 1 operands, but the operator takes 2 tensors: x, w: tables::weighted"),
        ("x: b* d -> b* d", "leaves out w: name all tensors of the operator"),
    ],
)
def test_a_notation_that_leaves_out_a_tensor_is_refused(notation: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        dt.register_sharding(weighted(), notation)
    dt.register_sharding(weighted(), "s*, s* -> s*")  # an optional tensor may be left out


WRONG_WORDS: dict[str, tuple[dict[str, Any], str]] = {
    "a letter of sums": ({"sums": "q"}, r"sums= names q, which 'b\* d, b\* d -> b\*' does not have"),
    "a letter of a mapping of sums": ({"sums": {"d": "sum", "q": "R"}}, "sums= names q, "),
    "a letter of kernels": ({"kernels": {"q": None}}, "kernels= names q, "),
    "a letter of sizes": ({"sizes": {"q": "x"}}, "sizes= names q, which 'b"),
    "an argument of sizes": ({"sizes": {"d": "factor"}}, "sizes= names factor, which the operator does not have"),
    "a letter of nonempty": ({"nonempty": "b q"}, "nonempty= names q, "),
    "a plain argument": ({"plain": ("z",)}, "plain= names z, which the operator does not have: tables::weighted"),
    "an argument of a word": ({"partials": dt.rules.linear("z")}, "partials= names z, which the operator does not have"),
    "an argument of one of several words": ({"partials": (dt.rules.monotone, dt.rules.one_of("z"))}, "partials= names z, "),
    "a reduction": ({"sums": "d", "reduce": "total"}, "'total' is no reduction; use one of sum, avg"),
    "a reduction of a letter": ({"sums": {"d": "total"}}, "'total' is no reduction"),
    "a partial row without an arrow": ({"partials": "sum"}, 'partials= has .sum.: partial strategy .sum. has no "->"'),
    "a partial row of an unknown reduction": ({"partials": "total,R -> sum"}, "partials= has .*got 'total'"),
    "a partial row of too few operands": ({"partials": "sum -> sum"}, "but the operator takes 3 tensors and gives 1"),
    "a partial row of too many results": ({"partials": "sum,R -> sum,sum"}, "but the operator takes 3 tensors and gives 1"),
    "an unknown keyword": ({"sumz": "d"}, "unexpected keyword argument 'sumz'; with a notation it takes kernel, kernels, local"),
}


@pytest.mark.parametrize("what", WRONG_WORDS)
def test_keywords_that_do_not_fit_the_notation_or_the_operator_are_refused(what: str) -> None:
    words, message = WRONG_WORDS[what]
    with pytest.raises(RuleError, match=f"register_sharding for tables.weighted.default: .*{message}"):
        dt.register_sharding(weighted(), "b* d, b* d -> b*", **words)
    assert "tables::weighted" not in rules()


def test_rows_for_a_call_with_and_without_an_optional_tensor_are_accepted() -> None:
    dt.register_sharding(weighted(), "s*, s*, s* -> s*", partials=("sum,R -> sum", "sum,R,R -> sum", "max... -> max..."))
    assert "tables::weighted" in rules()


def test_unknown_words_and_words_without_a_notation_are_refused() -> None:
    with pytest.raises(RuleError, match="unexpected keyword argument 'reduction'"):
        dt.register_sharding(twice(), "s* -> s*", reduction="sum")
    with pytest.raises(RuleError, match="takes when with a notation only"):
        dt.register_sharding(twice(), when=lambda choice: True)


def test_a_rule_that_declares_nothing_for_its_samples_is_not_verified() -> None:
    dt.register_sharding(twice(), "m n -> m n", samples=[Sample((torch.randn(5),), gradients=False)])
    report = verify_rule(twice(), meshes=[(2,)], limit=10)
    assert report.cases
    assert not report
    assert "nothing was verified: the rule has no strategy for these samples" in str(report)
    report = verify_rule(twice(), [Sample((torch.randn(5, 6),), gradients=False)], meshes=[(2,)], limit=10)
    assert report, str(report)


def test_unregistering_brings_the_librarys_rule_back() -> None:
    relu, x = torch.ops.aten.relu.default, put(X, Shard(0))
    own = rules()["aten::relu"]
    dt.register_sharding(relu, "[s*] -> [s*]")
    dt.register_sharding(relu)(lambda x: [])
    dt.unregister_sharding(relu)
    assert rules()["aten::relu"] is own
    assert torch.relu(x).placements == (Shard(0),)
    dt.register_sharding(twice(), "s* -> s*")
    dt.unregister_sharding(twice())
    assert "tables::twice" not in rules()
    with pytest.raises(RuleError, match="nothing was registered for tables::twice"):
        dt.unregister_sharding(twice())
