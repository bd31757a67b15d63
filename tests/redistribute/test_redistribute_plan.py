"""Redistribution plans: chains of the right steps within their bounds. No tensor is redistributed here."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from redistribute_cases import LAST, LAST_DOUBLED, SHAPES, all_layouts, all_pairs, reduce_addends, uneven_sizes

from dtensor.errors import LayoutError
from dtensor.layout.layout import Layout
from dtensor.layout.splits import Split
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Partial, Replicate, Shard
from dtensor.redistribute import AllGather, AllReduce, Exchange, Plan, ReduceScatter, Slice, Spread, estimate, plan
from dtensor.redistribute.partial_algebra import may_commute, may_enter, may_pad
from dtensor.redistribute.send_recv_plan import Box, exchange_route, max_sent_numel

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
NAMES = ("dp", "tp", "pp")
OPS = ("sum", "avg", "max", "min", "product")


def mesh_of(*shape: int) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(math.prod(shape)).reshape(shape), mesh_dim_names=NAMES[: len(shape)])


def planned(mesh: DeviceMesh, a: Any, b: Any, shape: tuple[int, ...] = (60, 60), dtype: torch.dtype = torch.float32) -> Plan:
    return plan(Layout.of(mesh, a, shape, dtype=dtype), Layout.of(mesh, b, shape, dtype=dtype))


def elements(layout: Layout, member: int) -> set[tuple[int, ...]]:
    """Return the global indices of a member's block; only the test enumerates them."""
    coordinate = layout.mesh.coordinates[member]
    spans = zip(layout.local_offset(coordinate), layout.local_shape(coordinate), strict=True)
    return set(itertools.product(*(range(start, start + size) for start, size in spans)))


def check_chain(found: Plan) -> None:
    """Check the properties of all plans."""
    at = found.src
    for step in found.steps:
        assert step.before.has_same_blocks(at)
        assert all(step.before.mesh.shape[i] > 1 for i in step.mesh_dims)
        assert step.communicates == (step.bytes > 0)
        at = step.after
    assert at.has_same_blocks(found.dst)
    assert found.largest_block <= max(found.src.max_local_nbytes, found.dst.max_local_nbytes), str(found)


# --- strategies ---------------------------------------------------------------------------------------------------
@st.composite
def sharded_pairs(draw: st.DrawFn) -> tuple[Layout, Layout]:
    """Draw two all_layouts of one tensor on one mesh, with any nesting and sizes."""
    mesh = mesh_of(*draw(st.sampled_from([(2,), (3,), (2, 3), (3, 2), (2, 1, 2), (2, 2, 2)])))
    shape = tuple(draw(st.lists(st.integers(0, 6), min_size=1, max_size=3)))
    return draw(_sharded(mesh, shape)), draw(_sharded(mesh, shape))


@st.composite
def _sharded(draw: st.DrawFn, mesh: DeviceMesh, shape: tuple[int, ...]) -> Layout:
    order = draw(st.permutations([i for i in range(mesh.ndim) if mesh.shape[i] > 1]))
    dims = [draw(st.integers(-1, len(shape) - 1)) for _ in order]
    splits: list[Split | None] = []
    for dim, size in enumerate(shape):
        mesh_dims = tuple(i for i, d in zip(order, dims, strict=True) if d == dim)
        count = math.prod(mesh.shape[i] for i in mesh_dims)
        cuts = sorted(draw(st.lists(st.integers(0, size), min_size=count - 1, max_size=count - 1)))
        sizes = tuple(b - a for a, b in itertools.pairwise([0, *cuts, size]))
        splits.append(Split(mesh_dims, sizes) if mesh_dims else None)
    return Layout.from_splits(mesh, splits, (None,) * mesh.ndim, shape)


# --- bounds -------------------------------------------------------------------------------------------------------
@settings(max_examples=200)
@given(sharded_pairs())
def test_plan_between_shardings_sends_only_missing_elements_in_one_collective(pair: tuple[Layout, Layout]) -> None:
    found = plan(*pair)
    check_chain(found)
    src, dst = pair
    lacking = max(len(elements(dst, member) - elements(src, member)) for member in src.mesh.members)
    assert found.collectives == (lacking > 0)
    assert found.bytes == lacking * 4


@settings(max_examples=200)
@given(sharded_pairs())
def test_exchange_delivers_each_element_once_from_an_owner(pair: tuple[Layout, Layout]) -> None:
    for step in plan(*pair).steps:
        if isinstance(step, Exchange):
            for dims in (step.mesh_dims, tuple(range(step.before.mesh.ndim))):
                check_exchange(step.before, step.after, dims)


def check_exchange(before: Layout, after: Layout, mesh_dims: tuple[int, ...]) -> None:
    mesh = before.mesh
    all_routes = [exchange_route(before, after, mesh_dims, member) for member in mesh.members]
    most = 0
    for member in mesh.members:
        group = mesh.members_of(mesh_dims, member)
        origin, new_origin = (layout.local_offset(mesh.coordinates[member]) for layout in (before, after))
        got: list[tuple[int, ...]] = []
        for position, box in enumerate(all_routes[member].receives):
            other = group[position]
            sending = all_routes[other].sends[mesh.members_of(mesh_dims, other).index(member)]
            assert (box is None) == (sending is None)
            if box is not None and sending is not None:
                assert box.size == sending.size
                assert _global(box, new_origin) == _global(sending, before.local_offset(mesh.coordinates[other]))
                assert set(_global(box, new_origin)) <= elements(before, other)
                got += _global(box, new_origin)
        kept = all_routes[member].kept
        if kept is not None:
            assert _global(kept[0], origin) == _global(kept[1], new_origin)
            got += _global(kept[1], new_origin)
        assert len(got) == len(set(got))
        assert set(got) == elements(after, member)
        assert set(got) - elements(before, member) == set(got) - set(_global(kept[1], new_origin) if kept else [])
        most = max(most, sum(math.prod(box.size) for box in all_routes[member].sends if box is not None))
    assert most == max_sent_numel(before, after, mesh_dims)


def _global(box: Box, origin: tuple[int, ...]) -> list[tuple[int, ...]]:
    spans = zip(origin, box.start, box.size, strict=True)
    return list(itertools.product(*(range(o + start, o + start + size) for o, start, size in spans)))


@pytest.mark.parametrize("mesh_shape", [(3,), (2, 3), pytest.param((2, 2, 2), marks=pytest.mark.slow)], ids=str)
def test_all_plans_are_chains_within_their_bounds(mesh_shape: tuple[int, ...]) -> None:
    mesh = mesh_of(*mesh_shape)
    for shape in SHAPES if len(mesh_shape) < 3 else ((5, 7), ()):
        ops = ("sum", "max") if len(mesh_shape) < 3 else ("sum",)
        for src, dst in all_pairs(all_layouts(mesh, shape, torch.float64, ops)):
            found = plan(src, dst)
            check_chain(found)
            reduced = sum(a is not None and a != b for a, b in zip(src.partials, dst.partials, strict=True))
            assert found.collectives <= 1 + 2 * (src.is_partial and reduced > 0) + max(0, reduced - 1), str(found)
            if not src.is_partial and not dst.is_partial:
                assert found.collectives <= 1


def test_plans_of_equal_layouts_are_one_cached_object() -> None:
    mesh = mesh_of(2, 3)
    found = planned(mesh, [S0, P], [S1, S0])
    assert planned(mesh, [S0, P], [S1, S0]) is found
    again = mesh_of(2, 3)
    assert planned(again, [S0, P], [S1, S0]) is found


# --- steps ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("src", "dst", "steps"),
    [
        ([R, R], [R, R], []),
        ([R, R], [S0, S1], [Slice]),
        ([S0, R], [S0, S0], [Slice]),
        ([R, R], [P, R], [Spread]),
        ([R, R], [P, Partial("max")], [Spread, Spread]),
        ([S0, R], [P, R], [Spread]),
        ([S0, S0], [P, P], [Spread]),
        ([S0, S0], [R, R], [AllGather]),
        ([S0, S1], [R, R], [AllGather]),
        ([S0, S0], [S0, R], [AllGather]),
        ([R, S0], [S1, R], [Slice, AllGather]),
        ([S0, S1], [S1, S0], [Exchange]),
        ([S0, R], [S1, R], [Exchange]),
        ([R, S0], [S0, S0], [Exchange]),
        ([P, P], [R, R], [AllReduce]),
        ([P, Partial("avg")], [R, R], [AllReduce]),
        ([P, Partial("max")], [R, R], [AllReduce, AllReduce]),
        ([P, R], [S1, R], [ReduceScatter]),
        ([P, P], [S0, S1], [ReduceScatter]),
        ([S0, P], [S0, S0], [ReduceScatter]),
        ([P, S0], [S0, S0], [AllReduce, Exchange]),
        ([R, P], [S0, R], [Slice, AllReduce]),
        ([P, S0], [P, R], [AllGather]),
        ([P, Partial("max")], [P, R], [AllReduce]),
        ([P, R], [Partial("max"), R], [ReduceScatter, Spread]),
        ([P, R], [Partial("avg"), R], [AllReduce, Spread]),
        ([R, P], [P, P], [Spread]),
    ],
    ids=str,
)
def test_plan_between_two_placements_has_the_expected_steps(src: Any, dst: Any, steps: list[type]) -> None:
    found = planned(mesh_of(2, 3), src, dst)
    assert [type(step) for step in found.steps] == steps, str(found)


def test_plans_of_large_partial_tensors_use_reduce_scatter() -> None:
    mesh, shape = mesh_of(2, 3), (600, 600)
    found = planned(mesh, [P, S0], [S0, S0], shape)
    assert [type(step) for step in found.steps] == [ReduceScatter, Exchange]
    found = planned(mesh, [P, Partial("max")], [R, R], shape)
    assert [type(step) for step in found.steps] == [ReduceScatter, ReduceScatter, AllGather]


def test_plans_ignore_mesh_dims_of_size_1() -> None:
    mesh = mesh_of(1, 3)
    assert not planned(mesh, [P, S0], [S1, S0]).steps
    assert all(step.mesh_dims in ((), (1,)) for step in planned(mesh, [Partial("max"), P], [S0, R]).steps)


def test_plans_of_empty_tensors_do_not_communicate() -> None:
    for src, dst in all_pairs(all_layouts(mesh_of(2, 2), (0, 4), torch.float32)):
        assert not plan(src, dst).communicates


def test_plans_run_different_reductions_from_the_last_mesh_dim_to_the_first() -> None:
    first, second = planned(mesh_of(2, 3), [P, Partial("max")], [R, R]).steps
    assert (first.mesh_dims, second.mesh_dims) == ((1,), (0,))
    # inner addends cannot stay partial while outer ones are reduced
    assert [step.mesh_dims for step in planned(mesh_of(2, 3), [P, Partial("max")], [R, Partial("max")]).steps][:2] == [(1,), (0,)]


def test_replicas_share_the_sending_of_an_exchange() -> None:
    """Check that replicas divide the sending: eight ranks need a quarter that two ranks of each of four rows have."""
    mesh = mesh_of(4, 8)
    src, dst = (Layout.of(mesh, placements, (1024, 1024)) for placements in ([R, S0], [S0, R]))
    (step,) = plan(src, dst).steps
    assert step.mesh_dims == (0, 1)
    assert max_sent_numel(src, dst, (0, 1)) <= 256 * 1024
    assert max_sent_numel(src, dst, (1,)) == 7 * 128 * 1024
    check = plan(src.replace(shape=(32, 1)), dst.replace(shape=(32, 1)))
    check_exchange(check.src, check.dst, (0, 1))


def test_reduce_scatter_uses_the_shard_sizes_of_the_destination() -> None:
    sizes = uneven_sizes(60, 3)
    (step,) = planned(mesh_of(3), [P], [Shard(0, sizes=sizes)]).steps
    assert isinstance(step, ReduceScatter)
    assert step.bytes == 2 * max(sizes) * 60 * 4


# --- algebra of reductions, by enumeration ----------------------------------------------------------------------------
@pytest.mark.parametrize(("outer", "inner"), list(itertools.product(OPS, OPS)))
def test_may_commute_of_two_reductions_equals_brute_force(outer: str, inner: str) -> None:
    mesh = mesh_of(2, 3)
    nest = Layout.of(mesh, [Partial(outer), Partial(inner)], (50,), dtype=torch.float64)
    swapped = Layout.of(mesh_of(3, 2), [Partial(inner), Partial(outer)], (50,), dtype=torch.float64)
    terms = torch.randint(-9, 10, (2, 3, 50), generator=torch.Generator().manual_seed(0)).double()
    same = torch.allclose(reduce_addends(nest, terms), reduce_addends(swapped, terms.transpose(0, 1)))
    assert may_commute(outer, inner) == same


@pytest.mark.parametrize(("op", "inner"), list(itertools.product(OPS, OPS)))
def test_may_pad_and_may_enter_of_two_reductions_agree_with_brute_force(op: str, inner: str) -> None:
    identity = {"sum": 0.0, "avg": None, "max": -math.inf, "min": math.inf, "product": 1.0}[op]
    if identity is None:  # the mean has no identity
        assert not may_pad(op, [])
        assert may_enter(op, inner)
        return
    fold = Layout.of(mesh_of(3), [Partial(inner)], (1,), dtype=torch.float64)
    holds = reduce_addends(fold, torch.full((3, 1), identity, dtype=torch.float64)).item() == identity
    assert holds or not may_pad(op, [inner])
    if op in ("sum", "product"):
        assert may_enter(op, inner) == holds


# --- errors ------------------------------------------------------------------------------------------------------------
def test_partial_avg_of_integers_raises_with_a_remedy() -> None:
    mesh = mesh_of(2)
    with pytest.raises(LayoutError, match=r"use Partial\('sum'\)"):
        planned(mesh, [Partial("avg")], [R], dtype=torch.int64)
    with pytest.raises(LayoutError, match="int64"):
        planned(mesh, [R], [Partial("avg")], dtype=torch.int64)
    assert not planned(mesh, [Partial("avg")], [Partial("avg")], dtype=torch.int64).steps
    bad = Layout.of(mesh, [Partial("avg")], (4,), dtype=torch.int64)
    assert estimate(bad, bad.replace(placements=[R])) == math.inf


def test_partial_max_of_complex_numbers_raises() -> None:
    with pytest.raises(LayoutError, match="not ordered"):
        planned(mesh_of(2), [Partial("max")], [R], dtype=torch.complex64)


def test_plan_between_different_shapes_dtypes_or_meshes_raises() -> None:
    a = Layout.of(mesh_of(2), [S0], (4,))
    for other in (a.replace(shape=(5,)), a.replace(dtype=torch.float64), Layout.of(mesh_of(3), [S0], (4,))):
        with pytest.raises(LayoutError, match="must be the same"):
            plan(a, other)


def test_plan_to_partial_of_monoid_with_finalize_raises() -> None:
    mesh = mesh_of(2, 3)
    with pytest.raises(LayoutError, match="finalize"):
        planned(mesh, [R, R], [Partial(LAST_DOUBLED), R])
    with pytest.raises(LayoutError, match="finalize"):
        planned(mesh, [Partial(LAST_DOUBLED), P], [P, Partial(LAST_DOUBLED)])
    assert planned(mesh, [Partial(LAST_DOUBLED), R], [R, Partial(LAST_DOUBLED)]).communicates
    assert planned(mesh, [R, R], [Partial(LAST), R]).collectives == 0


def test_plans_of_monoids_use_all_reduce_instead_of_reduce_scatter() -> None:
    found = planned(mesh_of(2, 3), [Partial(LAST), R], [S0, R])
    assert [type(step) for step in found.steps] == [AllReduce, Slice]


# --- text ---------------------------------------------------------------------------------------------------------------
def test_plan_text_has_one_line_per_step() -> None:
    text = str(planned(mesh_of(2, 3), [P, S0], [S0, S0], shape=(600, 500)))
    head, *lines = text.splitlines()
    assert head.startswith("float32[600, 500] (dp=P(sum), tp=S(0)) -> (dp=S(0), tp=S(0)): 2 collectives, ")
    assert "391 KiB received per rank, peak" in head
    assert lines[0].startswith("  1. reduce_scatter(sum) over dp: (dp=P(sum), tp=S(0)) -> (dp=S(0@1), tp=S(0@0)), 195 KiB/rank, ")
    assert lines[1].startswith("  2. exchange over dp, tp: ")
    assert str(planned(mesh_of(2), [R], [R])).endswith("nothing to do")
    assert str(planned(mesh_of(2), [R], [P])).splitlines()[1] == "  1. spread(sum): (dp=R) -> (dp=P(sum)), local"
