"""Bounds of redistribution plans between sharded and replicated layouts: all pairs of placements, on meshes of up to 64 ranks.
The bound on bytes is counted here block by block: a rank must receive the elements that its new block has and its old one lacks.
"""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from redistribute_cases import make_addends, reduce_addends, slice_local, wrong_members
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor.comm import events, per_rank
from dtensor.layout.layout import Layout
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Partial, Replicate, Shard
from dtensor.redistribute import Exchange, execute, plan

MESHES = ((2, 2), (2, 4), (4, 4), (2, 2, 2), (4, 4, 4))
SHAPES = ((64, 64), (61, 67), (3, 130))  # even; uneven; blocks that are empty
PLACEMENTS = (Replicate(), Shard(0), Shard(1))


def mesh_of(shape: tuple[int, ...]) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(math.prod(shape)).reshape(shape))


def pairs_on(mesh_shape: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype) -> Iterator[tuple[Layout, Layout]]:
    mesh = mesh_of(mesh_shape)
    found = [Layout.of(mesh, placements, shape, dtype=dtype) for placements in itertools.product(PLACEMENTS, repeat=mesh.ndim)]
    return itertools.product(found, repeat=2)


Block = list[tuple[int, int]]


def blocks_of(layout: Layout) -> list[Block]:
    """Return the bounds of each member's block, for each tensor dim."""
    coordinates = layout.mesh.coordinates
    return [
        [(start, start + size) for start, size in zip(layout.local_offset(c), layout.local_shape(c), strict=True)]
        for c in coordinates
    ]


def max_missing_elements(old: list[Block], new: list[Block]) -> int:
    """Return the largest number of elements that a member must receive."""
    most = 0
    for before, after in zip(old, new, strict=True):
        needed, held = 1, 1
        for (a, b), (c, d) in zip(before, after, strict=True):
            needed *= d - c
            held *= max(0, min(b, d) - max(a, c))
        most = max(most, needed - held)
    return most


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_all_plans_keep_the_bounds_of_bytes_collectives_and_memory(mesh_shape: tuple[int, ...], shape: tuple[int, ...]) -> None:
    pairs = list(pairs_on(mesh_shape, shape, torch.float32))
    blocks = {layout: blocks_of(layout) for layout, _ in pairs}
    for src, dst in pairs if len(mesh_shape) < 3 or shape == SHAPES[1] else random.Random(0).sample(pairs, 150):
        found = plan(src, dst)
        bound = 4 * max_missing_elements(blocks[src], blocks[dst])
        assert found.bytes <= 1.05 * bound, str(found)  # the bound is exact, so nothing is sent if it is 0
        assert found.collectives <= min(2, bound), str(found)
        larger = max(src.max_local_nbytes, dst.max_local_nbytes)
        assert found.largest_block <= larger, str(found)
        buffer = bound + src.max_local_nbytes * any(isinstance(step, Exchange) for step in found.steps)
        assert found.peak_bytes <= src.max_local_nbytes + dst.max_local_nbytes + buffer, str(found)
        assert found.cost <= 1.0001 * via_replicate(src, dst), str(found)


def via_replicate(src: Layout, dst: Layout) -> float:
    whole = Layout.replicated(src.mesh, src.shape, src.stride, src.dtype)
    return plan(src, whole).cost + plan(whole, dst).cost


def check_run(pairs: list[tuple[Layout, Layout]]) -> None:
    """Check that each rank gets its block by the collectives of the plan."""
    seen: list[events.Event] = []
    with events.listening(seen.append):
        for seed, (src, dst) in enumerate(pairs):
            terms, found = make_addends(src, seed), plan(src, dst)
            local = per_rank([slice_local(src, terms, member) for member in src.mesh.members])
            seen.clear()
            moved = execute(found, local)
            assert not (wrong := wrong_members(dst, reduce_addends(src, terms), moved.shards)), "\n".join([str(found), *wrong])
            issued = [(event.mesh_dims, event.bytes) for event in seen]
            assert issued == [(step.mesh_dims, step.bytes) for step in found.steps if step.communicates], str(found)


@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_sampled_plans_give_each_rank_its_block_by_the_planned_collectives(mesh_shape: tuple[int, ...]) -> None:
    pairs = list(pairs_on(mesh_shape, (5, 7), torch.int64))
    count = 200 // math.prod(mesh_shape)
    check_run(random.Random(1).sample(pairs, min(count, len(pairs))))


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(8, 8), (9, 11)], ids=str)
@pytest.mark.parametrize("mesh_shape", MESHES, ids=str)
def test_all_plans_give_each_rank_its_block_by_the_planned_collectives(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...]
) -> None:
    check_run(list(pairs_on(mesh_shape, shape, torch.int64)))


# --- partial layouts ----------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("mesh_shape", [(4,), (2, 4), (2, 2, 2)], ids=str)
def test_all_reduce_receives_the_bytes_of_a_ring(mesh_shape: tuple[int, ...]) -> None:
    """Check 2 (n - 1) / n of the tensor for an all-reduce, and (n - 1) / n for an even reduce-scatter, on all meshes."""
    mesh, n, shape = mesh_of(mesh_shape), math.prod(mesh_shape), (64, 64)
    src = Layout.of(mesh, [Partial()] * mesh.ndim, shape)
    assert plan(src, src.replace(placements=[Replicate()] * mesh.ndim)).bytes == 2 * (n - 1) * src.max_local_nbytes // n
    for placements in itertools.product((Shard(0), Shard(1)), repeat=mesh.ndim):
        assert plan(src, src.replace(placements=placements)).bytes == (n - 1) * src.max_local_nbytes // n


@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 4), (2, 2, 2)], ids=str)
def test_no_plan_costs_more_than_redistributing_through_replicate(mesh_shape: tuple[int, ...]) -> None:
    mesh = mesh_of(mesh_shape)
    for shape in ((8, 8), (600, 500)):
        choices = [*PLACEMENTS, Partial(), Partial("max")]
        found = [Layout.of(mesh, placements, shape) for placements in itertools.product(choices, repeat=mesh.ndim)]
        for src, dst in random.Random(0).sample(list(itertools.product(found, repeat=2)), 300):
            assert plan(src, dst).cost <= 1.0001 * via_replicate(src, dst), f"{plan(src, dst)}\n{via_replicate(src, dst)}"


# --- plans of different ranks -------------------------------------------------------------------------------------------
def plans_as(rank: int) -> list[str]:
    """Return plans on a mesh of 64 processes, made as rank ``rank``."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=64)
    try:
        mesh = DeviceMesh("cpu", torch.arange(64).reshape(4, 4, 4))
        draw, choices = random.Random(5), [*PLACEMENTS, Partial(), Partial("max"), Partial("avg")]
        layouts = [Layout.of(mesh, draw.choices(choices, k=3), (61, 67)) for _ in range(60)]
        return [str(plan(src, dst)) for src, dst in itertools.pairwise(layouts)]
    finally:
        dist.destroy_process_group()


def test_all_ranks_make_equal_plans() -> None:
    first, *others = (plans_as(rank) for rank in (0, 21, 63))
    assert all(other == first for other in others)
