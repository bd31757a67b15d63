"""Rules of pointwise operators: broadcasts, scalars, copies, in-place writes, new tensors, and partial operands."""

from __future__ import annotations

import pytest
import torch
from rule_tables import MESHES, RuleCase, check_many_placements, check_placement, make_floats, make_integers
from slow_case_marks import keep_diagonals_fast

import dtensor as dt
from dtensor import Partial, Replicate, Shard

X, Y, ROW, COLUMN, Z = (
    make_floats(5, 7),
    make_floats(5, 7, seed=1),
    make_floats(7, seed=2),
    make_floats(5, 1, seed=3),
    make_integers(5, 7),
)
R, S0, S1 = Replicate(), Shard(0), Shard(1)
ALL = ("sum", "avg", "max", "min", "product")

CASES = {
    "add": RuleCase(lambda x, y: x + y, (X, ROW), ALL),
    "add scaled": RuleCase(lambda x, y: x.add(y, alpha=-2), (X, Y), ALL),
    "subtract from a number": RuleCase(lambda x: 3 - x, (X,), ALL),
    "outer product": RuleCase(lambda x, y: x * y, (COLUMN, ROW), ALL),
    "promotes": RuleCase(lambda x, z: x * z + 1, (X, Z), ALL),
    "integers and numbers": RuleCase(lambda z: (z * 0.5, z // 2, z % 3, z / 2, z**2, 2 ** z.abs()), (Z,), ALL),
    "divide": RuleCase(lambda x, y: x / (y + 5), (X, COLUMN), ALL),
    "round": RuleCase(lambda x: (x.round(decimals=1), x.floor(), x.trunc()), (X,), ALL),
    "where": RuleCase(lambda x, y: torch.where(x > 0, x, y), (X, ROW), ALL),
    "where numbers": RuleCase(lambda x: (torch.where(x > 0, x, 2.0), torch.where(x > 0, 1, 0)), (X,), ALL),
    "masked_fill": RuleCase(lambda x: x.masked_fill(x > 0, -1.0), (X,), ALL),
    "clamp": RuleCase(lambda x, y: (x.clamp(-0.5, 0.5), x.clamp(min=y)), (X, ROW), ALL),
    "lerp": RuleCase(lambda x, y: (x.lerp(y, 0.3), x.lerp(y, y)), (X, Y), ALL),
    "addcmul": RuleCase(lambda x, y, w: x.addcmul(y, w, value=-0.5), (X, Y, ROW), ALL),
    "activations": RuleCase(
        lambda x: torch.nn.functional.gelu(x) + torch.nn.functional.silu(x) + x.relu() + x.tanh(), (X,), ("sum", "max")
    ),
    "prelu": RuleCase(lambda x, w: torch.nn.functional.prelu(x, w), (X, ROW), ("sum",)),
    "glu": RuleCase(lambda x: torch.nn.functional.glu(x, 0), (make_floats(6, 5),), ("sum",)),
    "compare": RuleCase(lambda x, y: (x < y, x == y, (x > 0) & (y > 0), ~(x > 0)), (X, ROW), ALL),
    "complex": RuleCase(lambda x, y: torch.complex(x, y) * 1j, (X, Y), ("sum",)),
    "conj": RuleCase(lambda x, y: torch.complex(x, y).conj().resolve_conj() * 2, (X, Y), ("sum",)),
    "to": RuleCase(lambda x: (x.to(torch.float32), x.to(torch.int64), x.bool(), x.half().double()), (X,), ALL),
    "clone": RuleCase(lambda x: x.t().clone(memory_format=torch.contiguous_format), (X,), ALL),
    "like": RuleCase(lambda x: (torch.zeros_like(x), torch.ones_like(x, dtype=torch.int64), torch.full_like(x, 2.5)), (X,), ALL),
    "new": RuleCase(lambda x: (x.new_zeros(5, 7), x.new_ones(3), x.new_full((2, 2), 7.0)), (X,), ALL),
    "frexp": RuleCase(lambda x: torch.frexp(x), (X,), ("sum",), gradients=False),
    "no dims": RuleCase(lambda x, y: x * y + 1, (make_floats(), make_floats(3)), ALL),
    "no elements": RuleCase(lambda x: x * 2 + x.exp(), (make_floats(0, 3),), ALL),
    "one element": RuleCase(lambda x, y: x + y, (make_floats(1, 1), make_floats(1)), ALL),
    # in place
    "add_": RuleCase(lambda x, y: x.add_(y), (X, ROW), ALL, written=True),
    "copy_": RuleCase(lambda x, y: x.copy_(y), (X, ROW), ALL, written=True),
    "copy_ of integers": RuleCase(lambda x, z: x.copy_(z), (X, Z), ALL, written=True),
    "fill_": RuleCase(lambda x: x.fill_(3), (X,), ALL, written=True),
    "fill_ with a tensor": RuleCase(lambda x, y: x.fill_(y), (X, make_floats()), ALL, written=True, gradients=False),
    "zero_": RuleCase(lambda x: x.zero_(), (X,), ALL, written=True),
    "masked_fill_": RuleCase(lambda x, y: x.masked_fill_(y > 0, 1.0), (X, Y), ALL, written=True),
    "chain": RuleCase(lambda x, y: x.mul_(2).sub_(y).clamp_(min=0).div_(3), (X, Y), ("sum", "avg"), written=True),
    "out": RuleCase(lambda x, y, o: torch.add(x, y, out=o), (X, Y, make_floats(5, 7)), ("sum",), written=True, gradients=False),
}


@pytest.mark.parametrize(("name", "mesh_shape"), keep_diagonals_fast(CASES, MESHES, every=3), ids=str)
def test_pointwise_values_and_gradients_equal_plain_torch(name: str, mesh_shape: tuple[int, ...]) -> None:
    check_many_placements(CASES[name], mesh_shape, 8)


@pytest.mark.parametrize(
    ("fn", "placements", "expected"),
    [
        (lambda x, y: x + y, [[S0, S1], [S0, S1]], [S0, S1]),
        (lambda x, y: x + y, [[S0, S1], [R, R]], [S0, S1]),
        (lambda x, y: x + y, [[Partial(), S0], [R, S0]], [Partial(), S0]),
        (lambda x, y: x * 2 / 3.0, [[Partial(), S0], [R, R]], [Partial(), S0]),
        (lambda x, y: x * (y > 0), [[Partial(), S0], [R, R]], [Partial(), S0]),
        (lambda x, y: x.exp(), [[Partial("max"), R], [R, R]], [Partial("max"), R]),
        (lambda x, y: -x, [[Partial("max"), Partial("max")], [R, R]], [Partial("min"), Partial("min")]),
        (lambda x, y: torch.where(y > 0, x, x * 2), [[Partial(), S1], [R, S1]], [Partial(), S1]),
        (lambda x, y: x.to(torch.complex128), [[Partial(), S0], [R, R]], [Partial(), S0]),
        (lambda x, y: torch.zeros_like(x), [[S0, Partial()], [R, R]], [S0, R]),
        (lambda x, y: x.new_zeros(5, 7), [[S0, S1], [R, R]], [S0, S1]),
    ],
)
def test_pointwise_operators_do_not_communicate(fn, placements, expected) -> None:
    outcome = check_placement(fn, [X, Y], (2, 2), placements)
    assert not outcome.events
    assert outcome.layouts[0].placements == tuple(expected)


def test_casts_of_partial_integers_equal_plain_torch() -> None:
    for z in (Z, Z.to(torch.int8) * 30, Z.bool()):
        for op in ("sum", "max"):
            check_placement(
                lambda z: (z + z, z * 3, z.to(torch.float64), z.to(torch.int64), -z.to(torch.int8)), [z], (3,), [[Partial(op)]]
            )


def test_cached_plan_of_add_is_right_for_alpha_of_both_signs() -> None:
    """Check ``alpha`` of both signs: it is not part of the plan's key, and a negative one turns a maximum into a minimum."""
    for alpha in (1, -1, 2.0, -2.0):
        check_placement(
            lambda x, y, alpha=alpha: (x.add(y, alpha=alpha), x.sub(y, alpha=alpha)), [X, Y], (3,), [[R], [Partial("max")]]
        )


def test_partial_sums_are_reduced_before_a_cast_to_fewer_bits() -> None:
    """Check the order of reduction and cast: addends can be far larger than their sum, and so can their rounding errors."""
    mesh = dt.init_device_mesh("cpu", (2,))
    terms = dt.per_rank([torch.tensor([1000.0]), torch.tensor([-999.999])])
    x = dt.DTensor.from_local(terms, mesh, [Partial()], shape=(1,))
    assert torch.equal(x.bfloat16().full_tensor(), x.full_tensor().bfloat16())
    assert x.double().placements == (Partial(),)
    largest = dt.DTensor.from_local(terms, mesh, [Partial("max")], shape=(1,))
    assert largest.bfloat16().placements == (Partial("max"),)


def test_prims_where_of_replicated_operands_is_replicated() -> None:
    """Check ``prims.where``, which has the rule of ``aten.where`` but other operand names."""
    x = dt.distribute_tensor(X, dt.init_device_mesh("cpu", (2,)), [R])
    assert torch.equal(torch.ops.prims.where(x > 0, x, -x).full_tensor(), X.abs())
