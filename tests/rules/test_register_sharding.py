"""``register_sharding``: valid strategies of user rules are accepted, and others raise an error with the operator, strategy and
remedy."""

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
def restore_registry() -> Iterator[None]:
    """Restore the registry after each test, because other tests use all registered rules."""
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


def assert_equals(found: Any, expected: torch.Tensor) -> None:
    assert [tuple(x.shape) for x in found._local.shards] == [
        found._layout.local_shape(found.device_mesh.coordinates[member]) for member in found.device_mesh.members
    ]
    torch.testing.assert_close(found.full_tensor(), expected)


# --- strategies that raise ----------------------------------------------------------------------------------------------
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
    "outputs without inputs": ([Shard(0)], r"a strategy is a pair, \(\[Shard\(0\)\], \[Shard\(0\), None\]\)"),
    "three lists of placements": (([Shard(0)], [Shard(0)], [Shard(0)]), "a strategy is a pair"),
    "a number": (3, "a strategy is a pair"),
    "shard sizes": (([Shard(0, sizes=(1, 3))], [Shard(0, sizes=(1, 3))]), r"not the shard sizes: write Shard\(0\)"),
    "shard level": (([Shard(0, level=1)], [Shard(0, level=1)]), r"not the shard sizes: write Shard\(0\)"),
    "sharded output of replicated input": (([Shard(0)], [R]), r"every rank computes the full output: write Replicate\(\)"),
    "partial output of replicated input": (([Partial()], [R]), r"every rank computes the full output: write Replicate\(\)"),
    "factor of two sizes": (([Shard(0)], [Shard(1)]), "sizes 3 and 4 together"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_invalid_strategy_raises_with_operator_and_strategy_number(case: str) -> None:
    row, message = REFUSED[case]
    dt.register_sharding(twice())(lambda x: [([Shard(0)], [Shard(0)]), row])
    with pytest.raises(RuleError, match=message) as raised:
        twice()(put(X, Shard(0)))
    assert str(raised.value).startswith("register_sharding for tables.twice.default: strategy 1, ")


@pytest.mark.parametrize("rows", [None, 3, "S(0)", Shard(0)])
def test_function_that_returns_no_strategies_raises(rows: Any) -> None:
    dt.register_sharding(twice())(lambda x: rows)
    with pytest.raises(RuleError, match=r"tables.twice.default: its table returned .*return a list of strategies"):
        twice()(put(X, Shard(0)))


def test_function_with_wrong_arguments_raises() -> None:
    dt.register_sharding(twice())(lambda x, dim: [([Shard(0)], [Shard(0)])])
    with pytest.raises(RuleError, match=r"missing a required argument: 'dim'; the operator is tables::twice\(Tensor x\)"):
        twice()(put(X, Shard(0)))


def test_decorating_a_list_raises() -> None:
    with pytest.raises(RuleError, match="decorates a function"):
        dt.register_sharding(twice())([([Shard(0)], [Shard(0)])])


def test_shard_of_0d_tensor_raises() -> None:
    dt.register_sharding(twice())(lambda x: [([Shard(0)], [Shard(0)])])
    with pytest.raises(RuleError, match="0-d tensor"):
        twice()(put(X.sum(), R))


def test_placement_for_non_tensor_argument_raises() -> None:
    op = define("scaled(Tensor x, int k, Tensor y) -> Tensor", lambda x, k, y: x * k + y)
    dt.register_sharding(op)(lambda x, k, y: [([Shard(0)], [Shard(0), Shard(0)])])
    with pytest.raises(RuleError, match="is given for k, which is not a tensor: write None"):
        op(put(X, Shard(0)), 2, put(X, Shard(0)))


def test_single_placement_for_several_tensors_raises() -> None:
    op = define("scaled(Tensor x, int k, Tensor y) -> Tensor", lambda x, k, y: x * k + y)
    dt.register_sharding(op)(lambda x, k, y: [(Shard(0), Shard(0))])
    with pytest.raises(RuleError, match="is given for 2 tensor inputs"):
        op(put(X, Shard(0)), 2, put(X, Shard(0)))


# --- strategies that are accepted ---------------------------------------------------------------------------------------
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
def test_negative_dims_single_placements_and_tuples_are_accepted(row: Any) -> None:
    dt.register_sharding(twice())(lambda x: iter([row]))
    with dt.explicit():
        found = twice()(put(X, Shard(0)))
    assert found.placements == (Shard(0),)
    assert_equals(found, X * 2)


def test_trailing_non_tensor_arguments_may_be_omitted() -> None:
    op = define("powered(Tensor x, int k=1, float? a=None) -> Tensor", lambda x, k=1, a=None: x**k)
    for inputs in ([Shard(0)], [Shard(0), None], [Shard(0), None, None], Shard(0)):
        dt.register_sharding(op)(lambda x, k, a, inputs=inputs: [(Shard(0), inputs)])
        with dt.explicit():
            assert_equals(op(put(X, Shard(0)), 2), X**2)


def test_strategy_has_none_for_a_number_in_place_of_a_tensor() -> None:
    """Check ``fmod.Scalar``: its number is an operand of the rule, because ``fmod.Tensor`` has a tensor there."""
    dt.register_sharding(torch.ops.aten.fmod.Scalar)(lambda x, k: [([Shard(0)], [Shard(0), None])])
    with dt.explicit():
        assert_equals(torch.fmod(put(X, Shard(0)), 5), torch.fmod(X, 5))


def test_tensor_lists_take_a_list_or_one_placement() -> None:
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
        assert_equals(a, X * 2)
        assert_equals(b, X * 2)
        assert_equals(c, X * 3)
        assert [v.placements for v in (a, b, c)] == [(Shard(0),)] * 3
    dt.register_sharding(op)(lambda xs, y, *, zs, ws: [([Shard(0)] * 3, [[Shard(0)], None, Shard(0), Shard(0)])])
    with pytest.raises(RuleError, match="1 placements for xs, which is a list of 2 tensors"):
        op([x, x], None, zs=[x], ws=[None, x])


def test_given_optional_tensor_needs_a_placement() -> None:
    op = define("biased(Tensor x, Tensor? b=None, int k=1) -> Tensor", lambda x, b=None, k=1: x if b is None else x + b)
    dt.register_sharding(op)(lambda x, b, k: [([Shard(0)], [Shard(0), Shard(0), None])])
    x = put(X, Shard(0))
    with dt.explicit():
        assert_equals(op(x), X)
        assert_equals(op(x, x), X + X)
    dt.register_sharding(op)(lambda x, b, k: [([Shard(0)], [Shard(0)])])
    with pytest.raises(RuleError, match="no placement for the tensor b"):
        op(x, x)


def test_non_tensor_results_take_none_or_nothing() -> None:
    op = define("counted(Tensor x) -> (Tensor, int)", lambda x: (x * 2, x.ndim))
    for outputs in ([Shard(0), None], [Shard(0)], Shard(0)):
        dt.register_sharding(op)(lambda x, outputs=outputs: [(outputs, [Shard(0)])])
        with dt.explicit():
            found, ndim = op(put(X, Shard(0)))
        assert_equals(found, X * 2)
        assert ndim == 2


OUT = "copied(Tensor x, *, Tensor(a!) out) -> Tensor(a!)"


@pytest.mark.parametrize("inputs", [[Shard(0)], [Shard(0), Shard(0)], [Shard(0), None], Shard(0)], ids=str)
def test_out_tensors_have_the_placements_of_the_outputs(inputs: Any) -> None:
    op = define(OUT, lambda x, *, out: out.copy_(x))
    dt.register_sharding(op)(lambda x: [([Shard(0)], inputs)])
    for where in (Shard(0), Shard(1), R):
        out = put(torch.zeros(4, 3), where)
        assert op(put(X, Shard(0)), out=out) is out
        assert_equals(out, X)
        assert out.placements == (where,)


def test_function_may_take_the_out_tensors_as_arguments() -> None:
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
            assert_equals(values, torch.tensor([[0.0], [3.0], [6.0], [9.0]]))
            assert_equals(indices, torch.full((4, 1), 2))
    finally:
        dt.unregister_sharding(minimum)


def test_out_tensor_placement_different_from_output_raises() -> None:
    op = define(OUT, lambda x, *, out: out.copy_(x))
    dt.register_sharding(op)(lambda x: [([Shard(0)], [Shard(0), R])])
    with pytest.raises(RuleError, match="out= tensors are the outputs"):
        op(put(X, Shard(0)), out=put(torch.zeros(4, 3), Shard(0)))


def test_written_keyword_tensor_that_is_not_returned_uses_its_placement() -> None:
    op = define("filled(Tensor x, *, Tensor(a!) to) -> ()", lambda x, *, to: (to.copy_(x), None)[1])
    dt.register_sharding(op)(lambda x, *, to: [([], [Shard(0), Shard(0)])])
    to = put(torch.zeros(4, 3), Shard(0))
    with dt.explicit():
        op(put(X, Shard(0)), to=to)
    assert_equals(to, X)
    to = put(torch.zeros(4, 3), Shard(1))
    op(put(X, R), to=to)
    assert_equals(to, X)


# --- which operators ------------------------------------------------------------------------------------------------------
def test_custom_ops_packets_overloads_and_lists_are_accepted() -> None:
    @torch.library.custom_op("tables::third", mutates_args=())
    def third(x: torch.Tensor) -> torch.Tensor:
        return x / 3

    third.register_fake(lambda x: torch.empty_like(x))
    for op in (third, torch.ops.tables.third, torch.ops.tables.third.default, [third]):
        dt.register_sharding(op)(lambda x: [(Shard(0), Shard(0))])
        with dt.explicit():
            assert_equals(third(put(X, Shard(0))), X / 3)
        unregister("tables::third")


def test_operator_with_pointwise_tag_needs_no_rule() -> None:
    LIBRARY.define("fused(Tensor a, Tensor b, Tensor c) -> Tensor", tags=(torch.Tag.pointwise,))
    for key in ("CompositeExplicitAutograd", "Meta"):
        LIBRARY.impl("fused", lambda a, b, c: a * b + c, key)
    with dt.explicit():
        assert_equals(torch.ops.tables.fused(put(X, Shard(0)), put(X[:1], R), put(X, Shard(0))), X * X[:1] + X)


def test_packet_with_several_overloads_raises_with_their_names() -> None:
    with pytest.raises(RuleError, match=r"several overloads.*torch\.ops\.aten\.sum\.dim_IntList"):
        dt.register_sharding(torch.ops.aten.sum)
    with pytest.raises(RuleError, match="takes an operator overload"):
        dt.register_sharding(torch.sum)


def test_rule_of_default_overload_does_not_apply_to_other_overloads() -> None:
    dt.register_sharding(torch.ops.aten.prod.default)(lambda x, *, dtype: [])
    x = put(X, Shard(1))
    assert_equals(torch.prod(x, 0), X.prod(0))
    with dt.explicit():
        assert torch.prod(x, 0).placements == (Shard(0),)  # placement by the library's rule
    assert_equals(torch.prod(x), X.prod())


def test_rule_applies_to_out_and_in_place_variants() -> None:
    asked: list[str] = []

    @dt.register_sharding(torch.ops.aten.relu.default)
    def _(x: Any) -> Any:
        asked.append("relu")
        return [(Shard(0), Shard(0))]

    x = put(X, Shard(0))
    assert_equals(torch.relu_(x.clone()), X)
    assert_equals(torch.ops.aten.relu.out(x, out=torch.empty_like(x)), X)
    assert len(asked) == 2


# --- meaning of strategies ----------------------------------------------------------------------------------------------
def test_function_may_read_the_value_of_a_number() -> None:
    """Check a strategy that holds for ``k >= 0`` only: ``max(k a, k b) = k max(a, b)``."""
    op = define("stretched(Tensor x, float k) -> Tensor", lambda x, k: x * k)
    dt.register_sharding(op)(lambda x, k: [(Partial("max"), Partial("max"))] if k >= 0 else [])
    terms = dt.per_rank([X, -X])
    x = dt.DTensor.from_local(terms, line(), [Partial("max")])
    whole = torch.maximum(X, -X)
    for k in (2.0, -3.0, 0.5):
        assert_equals(op(x, k), whole * k)


@pytest.mark.parametrize("order", [1, -1])
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_strategies_that_shard_one_dim_in_different_blocks_are_not_combined(shape: tuple[int, ...], order: int) -> None:
    """Check one strategy that shards the result in n blocks of two elements, and one that shards it in 2 n elements."""
    op = define("second(Tensor x, Tensor z) -> Tensor", lambda x, z: z * 2)
    dt.register_sharding(op)(lambda x, z: [(Shard(0), [Shard(0), Shard(0)]), (Shard(0), [R, Shard(0)])][::order])
    mesh = dt.init_device_mesh("cpu", shape)
    options = list(itertools.product([Shard(0), R], repeat=len(shape)))
    for n, of_x, of_z in itertools.product((0, 1, 2, 4), options, options):
        x, z = torch.arange(float(n)), torch.arange(2.0 * n) + 1
        assert_equals(op(put(x, *of_x, mesh=mesh), put(z, *of_z, mesh=mesh)), z * 2)


def test_operands_of_sizes_n_and_2n_in_one_strategy_equal_plain_torch() -> None:
    """Check an operator with two elements of ``z`` for each one of ``x``: a shard of ``z`` must not split a pair."""
    op = define("pairs(Tensor x, Tensor z) -> Tensor", lambda x, z: x.repeat_interleave(2) * z)
    asked = lambda x, z: [(Shard(0), [Shard(0), Shard(0)])]  # noqa: E731
    dt.register_sharding(op)(asked)
    for n, of_x, of_z in itertools.product((1, 3), (Shard(0), R), (Shard(0), R)):
        x, z = torch.arange(float(n)) + 1, torch.arange(2.0 * n) + 1
        assert_equals(op(put(x, of_x), put(z, of_z)), x.repeat_interleave(2) * z)
        # the smaller dim is the unit, in either order of the operands
        swapped = define("swapped(Tensor z, Tensor x) -> Tensor", lambda z, x: x.repeat_interleave(2) * z)
        dt.register_sharding(swapped)(asked)
        assert_equals(swapped(put(z, of_z), put(x, of_x)), x.repeat_interleave(2) * z)


# --- rules in the library's notation ------------------------------------------------------------------------------------
def softened() -> Any:
    """Return a custom operator with an argument, from ``torch.library.custom_op``."""
    if "softened" not in DEFINED_OPERATORS:

        @torch.library.custom_op("tables::softened", mutates_args=())
        def op(x: torch.Tensor, dim: int, temperature: float) -> torch.Tensor:
            return torch.softmax(x / temperature, dim)

        op.register_fake(lambda x, dim, temperature: torch.empty_like(x))
        DEFINED_OPERATORS["softened"] = op
    return DEFINED_OPERATORS["softened"]


DEFINED_OPERATORS: dict[str, Any] = {}
SOFTENED = dt.rules.Fold(
    lambda part, x: (x / part["temperature"]).exp().sum(part.dims, keepdim=True),
    "sum",
    lambda part, x, total: (x / part["temperature"]).exp() / total,
)


def test_custom_operator_with_fold_kernel_passes_verify_rule() -> None:
    op, x = softened(), torch.randn(5, 6)
    samples = [(x, 1, 2.0), (x, 0, 0.5)]
    dt.register_sharding(op, "a* [@dim] b* -> a* [@dim] b*", kernel=SOFTENED, samples=samples)
    report = verify_rule(op, meshes=[(2,), (3,)], limit=40)
    assert report, str(report)
    assert {"S(0) -> S(0)", "S(1) -> S(1)"} <= report.rows.forced
    with dt.explicit():
        for temperature in (2.0, 3.0):  # one plan for both
            assert_equals(op(put(x, Shard(1)), 0, temperature), torch.softmax(x / temperature, 0))


def test_fold_kernel_issues_one_collective() -> None:
    op, x = softened(), torch.randn(5, 6)
    dt.register_sharding(op, "a* [@dim] b* -> a* [@dim] b*", kernel=SOFTENED)
    with dt.debug.CommDebugMode() as mode:
        op(put(x, Shard(1)), 1, 2.0)
    assert mode.get_total_counts() == 1


def test_kernel_function_runs_on_local_tensors() -> None:
    op = define("largest(Tensor x) -> Tensor", lambda x: x.amax())

    def kernel(at: Any, x: Any) -> Any:
        return at.all_reduce(at.map(lambda here, block: block.amax(), x), "max")

    dt.register_sharding(op, "[s*] ->", kernel=kernel)
    assert_equals(op(put(X, Shard(0))), X.amax())


def test_sums_partials_local_args_and_when_options_of_notation_take_effect() -> None:
    op = define("scaled_sum(Tensor x, Tensor w, int dim) -> Tensor", lambda x, w, dim: (x * w).sum(dim))
    dt.register_sharding(op, "each: a* @dim b* -> a* b*", sums="@dim", partials=dt.rules.linear("x", "w"))
    x, w = put(X, Shard(1)), put(X + 1, Shard(1))
    found = op(x, w, 1)
    assert found.placements == (Partial(),)
    assert_equals(found, (X * (X + 1)).sum(1))
    whole = define("filled_up(Tensor x, int[] size) -> Tensor", lambda x, size: x.new_ones(size))
    dt.register_sharding(whole, "s* -> s*", partials=dt.rules.forgets, local_args=lambda call, view: {"size": view.results[0]})
    assert_equals(whole(put(X, Shard(0)), [4, 3]), torch.ones(4, 3))
    first = define("first_of(Tensor x) -> Tensor", lambda x: x[:, :1] * 1)
    dt.register_sharding(first, "n [] -> n []", when=lambda choice: choice.call.mesh.size() < 3)
    assert first(put(X, Shard(0))).placements == (Shard(0),)
    with pytest.warns(UserWarning, match="no sharding rule|gather"):
        assert_equals(first(put(X, Shard(0), mesh=line(3))), X[:, :1])


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
def test_notation_that_does_not_fit_the_operator_raises_at_registration(notation: str, message: str) -> None:
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
def test_notation_that_omits_a_tensor_raises(notation: str, message: str) -> None:
    with pytest.raises(RuleError, match=message):
        dt.register_sharding(weighted(), notation)
    dt.register_sharding(weighted(), "s*, s* -> s*")  # an optional tensor may be left out


INVALID_KEYWORDS: dict[str, tuple[dict[str, Any], str]] = {
    "unknown factor in sums": ({"sums": "q"}, r"sums= names q, which 'b\* d, b\* d -> b\*' does not have"),
    "unknown factor in a mapping of sums": ({"sums": {"d": "sum", "q": "R"}}, "sums= names q, "),
    "unknown factor in kernels": ({"kernels": {"q": None}}, "kernels= names q, "),
    "unknown factor in sizes": ({"sizes": {"q": "x"}}, "sizes= names q, which 'b"),
    "unknown argument in sizes": ({"sizes": {"d": "factor"}}, "sizes= names factor, which the operator does not have"),
    "unknown factor in nonempty": ({"nonempty": "b q"}, "nonempty= names q, "),
    "unknown argument in plain": ({"plain": ("z",)}, "plain= names z, which the operator does not have: tables::weighted"),
    "unknown argument of a partial rule": (
        {"partials": dt.rules.linear("z")},
        "partials= names z, which the operator does not have",
    ),
    "unknown argument of one of several partial rules": (
        {"partials": (dt.rules.monotone, dt.rules.one_of("z"))},
        "partials= names z, ",
    ),
    "unknown reduction": ({"sums": "d", "reduce": "total"}, "'total' is no reduction; use one of sum, avg"),
    "unknown reduction of a factor": ({"sums": {"d": "total"}}, "'total' is no reduction"),
    "partial strategy without an arrow": ({"partials": "sum"}, 'partials= has .sum.: partial strategy .sum. has no "->"'),
    "partial strategy of an unknown reduction": ({"partials": "total,R -> sum"}, "partials= has .*got 'total'"),
    "partial strategy of too few operands": ({"partials": "sum -> sum"}, "but the operator takes 3 tensors and gives 1"),
    "partial strategy of too many results": ({"partials": "sum,R -> sum,sum"}, "but the operator takes 3 tensors and gives 1"),
    "unknown keyword": ({"sumz": "d"}, "unexpected keyword argument 'sumz'; with a notation it takes kernel, kernels, local"),
}


@pytest.mark.parametrize("case", INVALID_KEYWORDS)
def test_invalid_keywords_of_register_sharding_raise(case: str) -> None:
    words, message = INVALID_KEYWORDS[case]
    with pytest.raises(RuleError, match=f"register_sharding for tables.weighted.default: .*{message}"):
        dt.register_sharding(weighted(), "b* d, b* d -> b*", **words)
    assert "tables::weighted" not in rules()


def test_partial_strategies_with_and_without_optional_tensor_are_accepted() -> None:
    dt.register_sharding(weighted(), "s*, s*, s* -> s*", partials=("sum,R -> sum", "sum,R,R -> sum", "max... -> max..."))
    assert "tables::weighted" in rules()


def test_unknown_keywords_and_keywords_without_notation_raise() -> None:
    with pytest.raises(RuleError, match="unexpected keyword argument 'reduction'"):
        dt.register_sharding(twice(), "s* -> s*", reduction="sum")
    with pytest.raises(RuleError, match="takes when with a notation only"):
        dt.register_sharding(twice(), when=lambda choice: True)


def test_verify_rule_fails_for_samples_without_any_strategy() -> None:
    dt.register_sharding(twice(), "m n -> m n", samples=[Sample((torch.randn(5),), gradients=False)])
    report = verify_rule(twice(), meshes=[(2,)], limit=10)
    assert report.cases
    assert not report
    assert "nothing was verified: the rule has no strategy for these samples" in str(report)
    report = verify_rule(twice(), [Sample((torch.randn(5, 6),), gradients=False)], meshes=[(2,)], limit=10)
    assert report, str(report)


def test_unregister_sharding_restores_the_library_rule() -> None:
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
