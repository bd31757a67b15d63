"""Redistribution between meshes: each rank gets its block, each element from one sender, for all overlaps of the meshes."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo
from hypothesis import given, settings
from hypothesis import strategies as st
from redistribute_cases import all_layouts, make_addends, reduce_addends, slice_local, wrong_members

import dtensor as dt
from dtensor.comm import PerRank, per_rank
from dtensor.comm.processes import torch_backends
from dtensor.debug import CommDebugMode
from dtensor.errors import MeshError
from dtensor.layout.layout import Layout
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.redistribute import move_between, plan_between

R, S0, S1, P = dt.Replicate(), dt.Shard(0), dt.Shard(1), dt.Partial()

RANKS: dict[str, tuple[Any, Any]] = {
    "disjoint": ([0, 1], [2, 3]),
    "overlapping": ([0, 1, 2], [3, 2, 1]),
    "reshaped": ([0, 1, 2, 3], [[0, 1], [2, 3]]),
    "transposed": ([[0, 1], [2, 3]], [[0, 2], [1, 3]]),
    "subset": ([[0, 1], [2, 3]], [2, 1]),
    "superset": ([1], [0, 1, 2, 3]),
}


def pairs_between(a: DeviceMesh, b: DeviceMesh, count: int) -> list[tuple[Layout, Layout]]:
    found: list[tuple[Layout, Layout]] = []
    for shape, dtype in (((5, 7), torch.float64), ((6, 1), torch.int64), ((), torch.float64), ((0, 4), torch.int64)):
        found += itertools.product(*(all_layouts(mesh, shape, dtype, ("sum", "max")) for mesh in (a, b)))
    return random.Random(0).sample(found, min(count, len(found)))


def check(src: Layout, dst: Layout, seed: int = 0) -> None:
    terms = make_addends(src, seed)
    local = per_rank([slice_local(src, terms, member) for member in src.mesh.members])
    result = move_between(local, src, dst).wait()
    wrong = wrong_members(dst, reduce_addends(src, terms), result.shards)
    assert not wrong, "\n".join([str(plan_between(src, dst)), *wrong])


@pytest.mark.parametrize("name", RANKS)
def test_redistribute_between_meshes_gives_each_rank_its_block(name: str) -> None:
    a, b = (DeviceMesh("cpu", ranks) for ranks in RANKS[name])
    for seed, (src, dst) in enumerate(pairs_between(a, b, 300)):
        check(src, dst, seed)


@st.composite
def two_layouts(draw: st.DrawFn) -> tuple[Layout, Layout]:
    shape = tuple(draw(st.lists(st.integers(0, 7), min_size=1, max_size=2)))
    found = []
    for _ in range(2):
        dims = draw(st.sampled_from([(1,), (3,), (4,), (2, 2), (2, 3), (1, 2), (2, 1, 2)]))
        count = torch.Size(dims).numel()
        ranks = draw(st.permutations(range(8)))[:count]
        found.append(
            draw(st.sampled_from(all_layouts(DeviceMesh("cpu", torch.tensor(ranks).reshape(dims)), shape, torch.int64, ())))
        )
    return found[0], found[1]


@given(two_layouts())
@settings(max_examples=150)
def test_each_element_is_sent_once_between_meshes(pair: tuple[Layout, Layout]) -> None:
    src, dst = pair
    check(src, dst)
    crossing = plan_between(src, dst).crossing
    for position, rank in enumerate(crossing.ranks):
        route = crossing.route_of(position)
        parts = [box for box in (*route.receives, None if route.kept is None else route.kept[1]) if box is not None]
        holds = torch.Size(route.new).numel() if rank in dst.mesh.ranks else 0
        assert sum(box.numel for box in parts) == holds  # each element once, and own elements are not sent
        if rank in src.mesh.ranks and rank in dst.mesh.ranks and src.is_replicated:
            assert not any(route.receives)


def test_replicas_share_the_sending_between_meshes() -> None:
    a, b = DeviceMesh("cpu", [0, 1, 2, 3]), DeviceMesh("cpu", [4, 5, 6, 7])
    crossing = plan_between(Layout.of(a, [R], (8, 3)), Layout.of(b, [S0], (8, 3))).crossing
    assert crossing.sent == (24, 24, 24, 24, 0, 0, 0, 0)


def test_redistribute_between_meshes_returns_gradients_to_the_source_mesh() -> None:
    a, b = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [[1, 2], [3, 4]])
    x = dt.distribute_tensor(torch.arange(15.0).reshape(5, 3), a, [S0]).requires_grad_()
    y = x.redistribute(b, [S1, S0])
    assert y.device_mesh is b
    (y * y).sum().backward()
    assert x.grad.device_mesh == a
    assert x.grad.placements == (S0,)
    assert torch.equal(x.grad.full_tensor(), 2 * torch.arange(15.0).reshape(5, 3))
    p = dt.DTensor.from_local(per_rank([torch.ones(3, 2), torch.ones(3, 2)]), a, [P], shape=(3, 2)).requires_grad_()
    assert torch.equal(p.redistribute(b, [R, R]).full_tensor(), torch.full((3, 2), 2.0))


def test_redistribute_from_submesh_to_its_root_does_not_communicate() -> None:
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    x = dt.distribute_tensor(torch.arange(10.0), mesh["tp"], [S0])
    with CommDebugMode() as comm:
        y = x.redistribute(mesh, [R, S0])
    assert comm.get_total_counts() == 0  # every rank has its shard
    assert torch.equal(y.full_tensor(), torch.arange(10.0))
    assert isinstance(y.redistribute(mesh["dp"], [S0])._local_tensor, PerRank)


def test_redistribution_between_meshes_is_counted_and_explained() -> None:
    a, b = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])
    x = dt.distribute_tensor(torch.ones(5, 2), a, [S0])
    with CommDebugMode() as comm:
        x.redistribute(b, [S0])
        x.redistribute(DeviceMesh("cpu", [0, 1, 2]), [S0])
    assert dict(comm.get_comm_counts()) == {"send_recv": 1, "all_to_all": 1}
    assert dict(comm.get_comm_bytes()) == {"send_recv": 24, "all_to_all": 8}
    assert "exchange among 4 ranks" in str(x.explain_redistribute([S0], device_mesh=b))


def test_redistribute_from_a_cpu_mesh_to_a_meta_mesh_raises() -> None:
    x = dt.distribute_tensor(torch.ones(4), DeviceMesh("cpu", 2), [S0])
    with pytest.raises(MeshError, match="kind differs"):
        x.redistribute(DeviceMesh("meta", 2), [S0])


# --- processes -------------------------------------------------------------------------------------------------------------
def _redistribute_between_meshes_on_gloo(message_by_message: bool) -> list[list[torch.Tensor]]:
    if message_by_message:
        torch_backends._TRAITS["gloo"] = torch_backends.BackendTraits(False, False, direct_bytes=0, one_round_bytes=-1)
    results = []
    for name, (first, second) in RANKS.items():
        a, b = DeviceMesh("cpu", first), DeviceMesh("cpu", second)
        member, mine = a.current_member(), []
        for seed, (src, dst) in enumerate(pairs_between(a, b, 25)):
            empty = torch.empty(src.local_shape(None), dtype=src.dtype)
            local = empty if member is None else slice_local(src, make_addends(src, seed), member)
            mine.append(move_between(local, src, dst).wait().clone())
        results.append(mine)
        x = dt.distribute_tensor(torch.arange(15.0).reshape(5, 3), a, [S0, *[R] * (a.ndim - 1)]).requires_grad_()
        (x.redistribute(b, [S1, *[R] * (b.ndim - 1)]) * 3).sum().backward()
        assert x.grad is not None, name
        if member is not None:
            assert torch.equal(x.grad.full_tensor(), torch.full((5, 3), 3.0)), name
    return results


@pytest.mark.gloo
@pytest.mark.parametrize("message_by_message", [False, True])
def test_redistribute_between_meshes_on_processes_gives_each_rank_its_block(message_by_message: bool) -> None:
    results = run_gloo(_redistribute_between_meshes_on_gloo, 4, message_by_message, timeout_s=60.0)
    for at, (first, second) in enumerate(RANKS.values()):
        a, b = DeviceMesh("cpu", first), DeviceMesh("cpu", second)
        for seed, (src, dst) in enumerate(pairs_between(a, b, 25)):
            wrong = wrong_members(
                dst, reduce_addends(src, make_addends(src, seed)), [results[rank][at][seed] for rank in b.ranks]
            )
            assert not wrong, "\n".join([str(plan_between(src, dst)), *wrong])
            outside = set(range(4)) - set(b.ranks)
            for nothing in (results[rank][at][seed] for rank in outside):  # an empty block, or a zero scalar
                assert nothing.shape == dst.local_shape(None)
                assert not nothing.any()
