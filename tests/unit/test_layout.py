"""Layouts: blocks partition the global tensor for each mesh, shard order and shard sizes; equal layouts are one object."""

from __future__ import annotations

import copy
import itertools
import math
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch._dynamo.source import ConstantSource
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

import dtensor as dt
from dtensor.base.memory_order import contiguous_stride, stride_like
from dtensor.base.symbolic_sizes import hashable_size
from dtensor.errors import LayoutError, PlacementError
from dtensor.layout.layout import Layout
from dtensor.layout.splits import Split, chunk_sizes, offsets_of
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Partial, Placement, Replicate, Shard
from dtensor.testing import scatter, strategies

R = Replicate()
MESH_2 = DeviceMesh("cpu", 2)
MESH_22 = DeviceMesh("cpu", [[0, 1], [2, 3]])
MESH_32 = DeviceMesh("cpu", [[0, 1], [2, 3], [4, 5]])


def blocks(layout: Layout) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Return (offset, shape) of the block at each coordinate."""
    return [(layout.local_offset(c), layout.local_shape(c)) for c in layout.mesh.coordinates]


@given(strategies.layouts())
def test_blocks_cover_each_element_once_per_replica(layout: Layout) -> None:
    count = np.zeros(tuple(layout.shape), dtype=int)
    for offset, shape in blocks(layout):
        count[tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))] += 1
    sharded = {mesh_dim for split in layout.splits if split is not None for mesh_dim in split.mesh_dims}
    copies = math.prod(size for mesh_dim, size in enumerate(layout.mesh.shape) if mesh_dim not in sharded)
    assert (count == copies).all()


@given(strategies.layouts())
def test_blocks_are_inside_the_tensor_and_within_max_local_nbytes(layout: Layout) -> None:
    for offset, shape in blocks(layout):
        assert all(start >= 0 and start + size <= total for start, size, total in zip(offset, shape, layout.shape, strict=True))
        assert math.prod(shape) * layout.dtype.itemsize <= layout.max_local_nbytes


@given(strategies.layouts())
def test_canonical_placements_and_splits_give_the_same_layout(layout: Layout) -> None:
    assert Layout.of(layout.mesh, layout.placements, layout.shape, layout.stride, layout.dtype) is layout
    assert Layout.from_splits(
        layout.mesh, layout.splits, layout.partials, layout.shape, layout.stride, layout.dtype
    ).has_same_blocks(layout)


@given(strategies.layouts())
def test_pickle_round_trip_of_a_layout_gives_an_equal_layout(layout: Layout) -> None:
    restored = pickle.loads(pickle.dumps(layout))
    assert restored.placements == layout.placements
    assert restored.mesh == layout.mesh
    assert restored is layout or restored.mesh is not layout.mesh
    assert copy.copy(layout) is layout


@given(strategies.layouts())
def test_local_strides_are_dense(layout: Layout) -> None:
    for coordinate in layout.mesh.coordinates:
        shape, stride = layout.local_shape(coordinate), layout.local_stride(coordinate)
        nontrivial = sorted((step, size) for step, size in zip(stride, shape, strict=True) if size > 1)
        expected = 1
        for step, size in nontrivial:
            assert step == expected
            expected *= size


@pytest.mark.parametrize("stride", [(0, 12, 4, 1), (12, 0, 4, 1), (0, 0, 4, 1), (0, 1, 0, 6), (3, 0, 1, 0)])
def test_stride_like_with_zero_strides_equals_torch_empty_like(stride: tuple[int, ...]) -> None:
    shape = (2, 5, 3, 4)
    like = torch.empty(100).as_strided(shape, stride)
    assert stride_like(shape, stride) == torch.empty_like(like).stride()


@given(strategies.dtensors())
def test_local_tensors_at_their_offsets_rebuild_the_value(pair: tuple[torch.Tensor, torch.Tensor]) -> None:
    distributed, value = pair
    layout = distributed.layout
    if layout.is_partial:
        return
    rebuilt = torch.full_like(value, float("nan"))
    for member, (offset, shape) in enumerate(blocks(layout)):
        index = tuple(slice(start, start + size) for start, size in zip(offset, shape, strict=True))
        rebuilt[index] = distributed._local.shards[member]
    assert torch.equal(rebuilt, value)


# --- torch.chunk ----------------------------------------------------------------------------------------------------
@given(st.integers(0, 40), st.integers(1, 9))
def test_chunk_sizes_equal_those_of_torch_chunk(size: int, ranks: int) -> None:
    chunks = [len(chunk) for chunk in torch.arange(size).chunk(ranks)]
    assert chunk_sizes(size, (ranks,)) == tuple(chunks + [0] * (ranks - len(chunks)))


@given(st.integers(0, 40), st.lists(st.integers(1, 4), min_size=1, max_size=3))
def test_nested_chunk_sizes_chunk_each_chunk(size: int, counts: list[int]) -> None:
    chunks_so_far = [torch.arange(size)]
    for count in counts:
        chunked = [list(chunk.chunk(count)) for chunk in chunks_so_far]
        chunks_so_far = [c for chunks in chunked for c in chunks + [torch.arange(0)] * (count - len(chunks))]
    assert chunk_sizes(size, tuple(counts)) == tuple(len(chunk) for chunk in chunks_so_far)


def test_last_shards_are_smaller_or_empty() -> None:
    layout = Layout.of(DeviceMesh("cpu", 4), [Shard(0)], (5, 3))
    assert [layout.local_shape((k,)) for k in range(4)] == [(2, 3), (2, 3), (1, 3), (0, 3)]
    assert [layout.local_offset((k,)) for k in range(4)] == [(0, 0), (2, 0), (4, 0), (5, 0)]


# --- shard order ----------------------------------------------------------------------------------------------------
def test_shards_on_two_mesh_dims_split_in_mesh_dim_order() -> None:
    layout = Layout.of(MESH_22, [Shard(0), Shard(0)], (7,))
    assert layout.splits == (Split((0, 1), (2, 2, 2, 1)),)
    assert [layout.local_offset(c)[0] for c in MESH_22.coordinates] == [0, 2, 4, 6]


def test_shard_levels_reverse_the_split_order() -> None:
    layout = Layout.of(MESH_32, [Shard(0, level=1), Shard(0, level=0)], (7,))
    assert layout.splits == (Split((1, 0), (2, 2, 0, 1, 1, 1)),)
    assert layout.local_shape((0, 0)) == (2,)
    assert layout.local_offset((2, 1)) == (6,)
    assert layout.placements == (Shard(0, level=1), Shard(0, level=0))


def test_shard_levels_in_mesh_dim_order_are_dropped() -> None:
    assert Layout.of(MESH_22, [Shard(0, level=0), Shard(0, level=1)], (7,)).placements == (Shard(0), Shard(0))


@pytest.mark.parametrize("levels", [(0, 0), (1, 2), (0, None)])
def test_equal_or_incomplete_shard_levels_raise(levels: tuple[int, int | None]) -> None:
    with pytest.raises(PlacementError, match="give each Shard a different level"):
        Layout.of(MESH_22, [Shard(0, level=levels[0]), Shard(0, level=levels[1])], (7,))


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_each_shard_order_of_three_mesh_dims_partitions_the_dim(order: tuple[int, ...]) -> None:
    mesh = DeviceMesh("cpu", np.arange(12).reshape(2, 3, 2))
    layout = Layout.of(mesh, [Shard(0, level=order.index(i)) for i in range(3)], (17,))
    assert layout.splits[0].mesh_dims == order
    assert sorted(layout.local_offset(c)[0] for c in mesh.coordinates if layout.local_shape(c)[0]) == sorted(
        offset for offset, size in zip(offsets_of(layout.splits[0].sizes), layout.splits[0].sizes, strict=True) if size
    )


# --- shard sizes ----------------------------------------------------------------------------------------------------
def test_shard_sizes_are_kept_unless_they_equal_the_default() -> None:
    assert Layout.of(MESH_2, [Shard(0, sizes=(1, 4))], (5,)).placements == (Shard(0, sizes=(1, 4)),)
    assert Layout.of(MESH_2, [Shard(0, sizes=(3, 2))], (5,)).placements == (Shard(0),)
    assert Layout.of(MESH_2, [Shard(0, sizes=(3, 2))], (5,)) is Layout.of(MESH_2, [Shard(0)], (5,))


def test_shard_sizes_of_two_mesh_dims_are_given_at_the_innermost_shard() -> None:
    layout = Layout.of(MESH_22, [Shard(0), Shard(0, sizes=(1, 2, 0, 4))], (7,))
    assert [layout.local_shape(c) for c in MESH_22.coordinates] == [(1,), (2,), (0,), (4,)]
    assert layout.placements == (Shard(0), Shard(0, sizes=(1, 2, 0, 4)))


@pytest.mark.parametrize("sizes", [(1, 2), (5, 1), (2, 2, 1)])
def test_shard_sizes_of_a_wrong_sum_or_count_raise(sizes: tuple[int, ...]) -> None:
    with pytest.raises(PlacementError, match="sizes"):
        Layout.of(MESH_2, [Shard(0, sizes=sizes)], (5,))


def test_a_sharded_dim_of_size_zero_has_empty_shards() -> None:
    layout = Layout.of(MESH_2, [Shard(0)], (0, 3))
    assert [layout.local_shape((k,)) for k in range(2)] == [(0, 3), (0, 3)]


# --- interning ------------------------------------------------------------------------------------------------------
def test_equal_layouts_are_one_object() -> None:
    first = Layout.of(MESH_22, [Shard(0), R], (5, 3))
    assert Layout.of(MESH_22, (Shard(-2), Replicate()), [5, 3], (3, 1)) is first
    assert Layout.of(DeviceMesh("cpu", [[0, 1], [2, 3]]), [Shard(0), R], (5, 3)) is first
    assert Layout.of(MESH_22, [Shard(0), R], (5, 3), dtype=torch.int64) is not first
    assert Layout.of(MESH_22, [Shard(0), R], (5, 3), (1, 5)) is not first


def test_replace_changes_only_the_given_field() -> None:
    layout = Layout.of(MESH_2, [Shard(0)], (5, 3), (1, 5))
    assert layout.replace(placements=[R]).stride == (1, 5)
    assert layout.replace(dtype=torch.bool).dtype == torch.bool
    assert layout.replace(shape=(7, 2)).stride == (2, 1)
    assert layout.replace() is layout


def test_placements_on_mesh_dims_of_size_one_do_not_change_the_blocks() -> None:
    mesh = DeviceMesh("cpu", [[0], [1]])
    for placement in (R, Shard(0), Partial()):
        layout = Layout.of(mesh, [Shard(1), placement], (5, 3))
        assert layout.has_same_blocks(Layout.of(mesh, [Shard(1), R], (5, 3)))
        assert layout.splits == (None, Split((0,), (2, 1)))
        assert layout.partials == (None, None)
        assert layout.placements[1] == placement


def test_is_partial_is_replicated_and_byte_counts_follow_the_placements() -> None:
    assert Layout.of(MESH_2, [Partial()], (3,)).is_partial
    assert not Layout.of(MESH_2, [Partial()], (3,)).is_replicated
    assert Layout.of(MESH_2, [R], (3,)).is_replicated
    assert not Layout.of(MESH_2, [Shard(0)], (3,)).is_replicated
    assert Layout.of(MESH_2, [Shard(0)], (3, 2), dtype=torch.int16).nbytes == 12
    assert Layout.of(MESH_2, [Shard(0)], (3, 2), dtype=torch.int16).max_local_nbytes == 8
    assert Layout.of(MESH_2, [R], ()).local_shape((0,)) == ()


def test_a_layout_equals_torch_strided() -> None:
    assert Layout.of(MESH_2, [R], (3,)) == torch.strided
    assert Layout.of(MESH_2, [R], (3,)) != Layout.of(MESH_2, [Shard(0)], (3,))


def test_repr_of_a_layout_shows_mesh_dims_and_placements() -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    assert repr(Layout.of(mesh, [Shard(0), Partial("avg")], (5, 3))) == "float32[5, 3] on (dp=S(0), tp=P(avg))"


def test_stride_like_keeps_the_dim_order_of_the_given_strides() -> None:
    assert stride_like((2, 3, 4), (1, 100, 10)) == (1, 8, 2)
    assert stride_like((2, 3), (3, 1)) == contiguous_stride((2, 3))
    assert stride_like((2, 0, 3), contiguous_stride((5, 5, 5))) == torch.empty(2, 0, 3).stride()


@pytest.mark.parametrize(
    ("placements", "shape", "message"),
    [
        ([R], (3,), "1 placements for a mesh of 2 dims"),
        ([R, R, R], (3,), "3 placements for a mesh of 2 dims"),
        ([Shard(1), R], (3,), "out of range for a tensor of 1 dims"),
        ([Shard(-2), R], (3,), "out of range"),
        ([Shard(0), R], (), "0-d tensor can only be Replicate"),
        ([0, R], (3,), "is not a placement"),
        ("S0", (3,), "is not a placement"),
    ],
)
def test_invalid_placements_of_a_layout_raise(placements: list[Placement], shape: tuple[int, ...], message: str) -> None:
    with pytest.raises(PlacementError, match=message):
        Layout.of(MESH_22, placements, shape)


def test_scatter_to_a_partial_fills_each_addend() -> None:
    addends = scatter(torch.ones(6, dtype=torch.float64), MESH_2, [Partial()])._local.shards
    assert torch.equal(addends[0] + addends[1], torch.ones(6, dtype=torch.float64))
    assert bool(addends[1].any())


def test_from_splits_refuses_splits_that_do_not_fit_the_shape() -> None:
    """Equal layouts are one object, so a wrong layout would be used by all tensors."""
    with pytest.raises(LayoutError, match="do not fit the shape"):
        Layout.from_splits(DeviceMesh("cpu", 2), (), (None,), (7919,))  # no other test makes a layout of this size
    assert Layout.of(DeviceMesh("cpu", 2), [Replicate()], (7919,)).local_shape((0,)) == (7919,)


def test_factories_accept_the_layout_of_a_dtensor_as_torch_strided() -> None:
    """Code for plain tensors calls factories with ``layout=x.layout``."""
    x = dt.ones(5, 3, dtype=torch.float64, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    like: Any = {"dtype": x.dtype, "device": x.device, "layout": x.layout}
    plain = torch.ones(2)
    for result in (
        torch.zeros((2, 3), **like),
        torch.empty(2, 3, **like).zero_(),
        torch.full((2, 3), 0.0, **like),
        plain.new_zeros((2, 3), **like),
        torch.zeros_like(torch.ones(2, 3), **like),
    ):
        assert type(result) is torch.Tensor
        assert (result.layout, result.dtype) == (torch.strided, torch.float64)
        assert torch.equal(result, torch.zeros(2, 3, dtype=torch.float64))
    for found in (torch.zeros_like(x, layout=x.layout), x.new_zeros((5, 3), layout=x.layout)):
        assert isinstance(found, dt.DTensor)
        assert found.full_tensor().sum() == 0
    with pytest.raises(TypeError, match="layout"):
        torch.zeros(2, layout="strided")


def test_symbolic_block_sizes_become_ints_in_a_cached_layout() -> None:
    """A layout outlives the trace, so it must not keep symbolic sizes."""
    env = ShapeEnv()
    symbol = env.create_symbol(4, ConstantSource("size"), dynamic_dim=DimDynamic.DYNAMIC)
    block = hashable_size(env.create_symintnode(symbol, hint=4))
    layout = Layout.from_splits(DeviceMesh("cpu", 2), [Split((0,), (block, block))], [None], (8,))
    assert [type(size) for size in layout.splits[0].sizes] == [int, int]
    assert layout.local_shape((1,)) == (4,)
