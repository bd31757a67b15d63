"""Placement forms: the cases here and on four processes, text that round-trips, and forms that are equal."""

from __future__ import annotations

from typing import Any

import placement_form_cases
import pytest
import torch
from case_lists import make_case_tests
from hypothesis import given
from hypothesis import strategies as st

import dtensor as dt
from dtensor import Layout, Monoid, Partial, Partition, Replicate, Shard, partition
from dtensor.errors import LayoutError, PlacementError
from dtensor.placement import REDUCE_OPS, parse_placement
from dtensor.testing import strategies

R = Replicate()
test_case_in_one_process, test_all_cases_on_four_processes = make_case_tests(placement_form_cases)

PLACEMENTS = [
    *(Shard(dim, sizes, level) for dim in (0, 11) for sizes in (None, (3,), (3, 0, 2)) for level in (None, 0, 2)),
    Shard(-1),
    R,
    *map(Partial, REDUCE_OPS),
]


@pytest.mark.parametrize("placement", PLACEMENTS, ids=str)
def test_printed_placement_is_parsed_to_an_equal_placement(placement: dt.Placement) -> None:
    assert parse_placement(str(placement)) == placement
    assert parse_placement(repr(placement)) == placement
    assert parse_placement(f" {placement} ") == placement


def test_text_with_a_library_monoid_is_parsed_and_with_another_monoid_raises() -> None:
    mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = dt.distribute_tensor(torch.randn(4, 3), mesh, "S(0)")
    for order in (2, 3, 0.5):
        layout = torch.linalg.vector_norm(x, order, dim=0).layout
        assert layout.is_partial
        assert Layout.parse(str(layout), mesh) is layout
    largest = Monoid("largest", torch.maximum, lambda like: torch.full_like(like, -torch.inf))
    layout = Layout.of(mesh, {"tp": Partial(largest)}, (3,))
    with pytest.raises(PlacementError, match=r"P\(largest\).*pass the object"):
        Layout.parse(str(layout), mesh)
    same_name = Monoid("norm2", torch.maximum, torch.zeros_like)
    assert Layout.parse(str(layout.replace(placements=[Partial(same_name)])), mesh).placements != (Partial(same_name),)


@pytest.mark.parametrize(
    "text",
    [
        "S(a)",
        "S(0",
        "S0",
        "T(0)",
        "R()",
        "S(0:a)",
        "S(1 2)",
        "S(0:3++2)",
        "S(0:+)",
        "P(sum",
        "S(0@-1)",
        "S(0)S(1)",
        "shard(0)",
        "P()x",
    ],
)
def test_text_that_is_not_a_placement_raises(text: str) -> None:
    with pytest.raises(PlacementError, match=r"is not a placement|not a reduction"):
        parse_placement(text)


@given(strategies.layouts())
def test_text_of_a_layout_round_trips(layout: Layout) -> None:
    assert Layout.parse(str(layout), layout.mesh) is layout
    assert Layout.of(layout.mesh, str(layout), layout.shape, layout.stride, layout.dtype) is layout
    printed = str(layout).partition(" on ")[2].partition(", stride=")[0]
    for text in (printed, printed[1:-1], ", ".join(map(str, layout.placements)), str(layout.placements)):
        assert layout.replace(placements=text) is layout
        assert Layout.of(layout.mesh, text, layout.shape, layout.stride, layout.dtype) is layout


@st.composite
def named_layouts(draw: st.DrawFn) -> Layout:
    return draw(strategies.layouts(draw(strategies.meshes(named=True))))


@given(named_layouts(), st.randoms(use_true_random=False))
def test_placements_by_mesh_dim_equal_the_list(layout: Layout, rng: Any) -> None:
    keys = list(layout.mesh.named(range(layout.mesh.ndim)))
    pairs = list(zip(keys, layout.placements, strict=True))
    rng.shuffle(pairs)
    everything = dict(pairs)
    without_replicated = {key: placement for key, placement in pairs if placement != R}
    for form in (everything, without_replicated):
        assert Layout.of(layout.mesh, form, layout.shape, layout.stride, layout.dtype) is layout
    assert layout.to_replicated().replace(placements=without_replicated) is layout
    some = dict(pairs[: len(pairs) // 2])
    assert layout.replace(placements=some) is layout  # the others keep their placements


@given(named_layouts(), st.randoms(use_true_random=False))
def test_mesh_dims_that_are_left_out_stay_sharded_and_partial(layout: Layout, rng: Any) -> None:
    keys = list(layout.mesh.named(range(layout.mesh.ndim)))
    gathered = rng.sample(range(len(keys)), rng.randint(0, len(keys)))
    result = layout.replace(placements={keys[i]: R for i in gathered})
    for i, (before, after) in enumerate(zip(layout.placements, result.placements, strict=True)):
        if i in gathered:
            assert after == R
        elif isinstance(before, Shard):
            assert isinstance(after, Shard)
            assert after.dim == before.dim
        else:
            assert after == before
    for before, after in zip(layout.splits, result.splits, strict=True):
        if before is None or set(before.mesh_dims) <= set(gathered):
            assert after is None
            continue
        kept = tuple(i for i in before.mesh_dims if i not in gathered)
        assert after.mesh_dims == kept
        if kept == before.mesh_dims[: len(kept)]:  # boundaries between the blocks that stay are boundaries of before
            assert {*after.offsets} <= {*before.offsets}


@st.composite
def partitions(draw: st.DrawFn) -> tuple[dt.DeviceMesh, tuple[int, ...], list[list[int]], list[int]]:
    """Draw a mesh with names, a shape, and for each tensor dim the mesh dims that shard it, and unreduced mesh dims."""
    mesh, shape = draw(strategies.meshes(named=True)), draw(strategies.shapes())
    mesh_dims = draw(st.permutations(range(mesh.ndim)))
    owners = [draw(st.integers(-2, len(shape) - 1)) for _ in mesh_dims]
    by_dim = [[i for i, owner in zip(mesh_dims, owners, strict=True) if owner == dim] for dim in range(len(shape))]
    return mesh, shape, by_dim, [i for i, owner in zip(mesh_dims, owners, strict=True) if owner == -2]


@given(partitions())
def test_partition_equals_the_list(drawn: tuple[dt.DeviceMesh, tuple[int, ...], list[list[int]], list[int]]) -> None:
    mesh, shape, by_dim, unreduced = drawn
    listed: list[dt.Placement] = [Partial() if i in unreduced else R for i in range(mesh.ndim)]
    for dim, mesh_dims in enumerate(by_dim):
        for level, i in enumerate(mesh_dims):
            listed[i] = Shard(dim, level=level)
    names = [tuple(mesh.mesh_dim_names[i] for i in mesh_dims) for mesh_dims in by_dim]
    given_names = [own if len(own) > 1 else own[0] if own else None for own in names]
    form = partition(*given_names, unreduced=[mesh.mesh_dim_names[i] for i in unreduced])
    layout = Layout.of(mesh, listed, shape)
    assert Layout.of(mesh, form, shape) is layout
    while given_names and given_names[-1] is None:
        given_names.pop()
    assert Layout.of(mesh, partition(*given_names, unreduced=form.unreduced), shape) is layout
    assert eval(repr(form), {"partition": partition}) == form
    for split, mesh_dims in zip(layout.splits, by_dim, strict=True):
        assert (() if split is None else split.mesh_dims) == tuple(i for i in mesh_dims if mesh.shape[i] > 1)


def test_partition_equality_hash_and_repr_and_repeated_mesh_dims_raise() -> None:
    assert partition("dp", ("tp",), None) == partition(("dp",), ["tp"], ()) == Partition((("dp",), ("tp",), ()))
    assert hash(partition("dp")) == hash(partition(("dp",)))
    assert partition("dp") != partition("tp")
    assert repr(partition("dp", None, ("tp", "cp"))) == "partition('dp', None, ('tp', 'cp'))"
    assert repr(partition(unreduced={"tp"})) == "partition(unreduced=('tp',))"
    assert partition(unreduced=["tp", "cp"]) == partition(unreduced={"cp", "tp"})
    for wrong in (lambda: partition("dp", "dp"), lambda: partition(("dp", "dp")), lambda: partition("dp", unreduced="dp")):
        with pytest.raises(PlacementError, match="mesh dim 'dp' twice"):
            wrong()
    with pytest.raises(PlacementError, match="the name of a mesh dim"):
        partition(0)  # type: ignore[arg-type]


def test_text_for_a_mesh_without_names_takes_numbers_of_mesh_dims_only() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2))
    layout = Layout.of(mesh, "0=S(0), 1=R", (4, 4))
    assert layout is Layout.of(mesh, [Shard(0), R], (4, 4))
    for form in ({"dp": R}, "dp=R", partition("dp"), {0: R}):
        with pytest.raises(PlacementError, match=r"no mesh dim .*; it has no names: pass mesh_dim_names="):
            Layout.of(mesh, form, (4, 4))
    for form in ({0: R}, "0=R, 1=R"):
        with pytest.raises(PlacementError, match="its mesh dims are 'dp', 'tp'"):
            Layout.of(placement_form_cases.get_named_square_mesh(), form, (4, 4))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("S(0), R", "is not a layout"),
        ("float33[4] on (S(0), R)", "no dtype 'float33'"),
        ("float32[4] on S(0)", "is not a layout"),
    ],
)
def test_text_that_is_not_a_layout_raises(text: str, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        Layout.parse(text, placement_form_cases.get_named_square_mesh())


def test_redistribute_with_equal_placement_forms_gives_the_same_layout_object() -> None:
    mesh = placement_form_cases.get_named_square_mesh()
    x = dt.zeros(4, 6, device_mesh=mesh, placements="dp=S(0), tp=S(1)")
    for form in ("dp=S(0), tp=S(1)", partition("dp", "tp"), {"dp": Shard(0), "tp": Shard(1)}):
        assert x.redistribute(form).layout is x.layout
    with pytest.raises(PlacementError, match="not the layout of a tensor with 2 dims"):
        x.redistribute("float32[4] on (dp=S(0), tp=R)")
    x.redistribute({"tp": x.placements[1]})


def test_layout_text_has_the_strides_only_if_they_are_not_contiguous() -> None:
    mesh = placement_form_cases.get_named_square_mesh()
    layout = Layout.of(mesh, "dp=S(0)", (4, 6), (1, 4))
    assert str(layout) == "float32[4, 6] on (dp=S(0), tp=R), stride=(1, 4)"
    assert str(layout.replace(stride=(6, 1))) == "float32[4, 6] on (dp=S(0), tp=R)"
