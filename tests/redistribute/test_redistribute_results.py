"""Results of redistribution: each rank has exactly its block, in one process and on process groups."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo
from redistribute_cases import (
    COUNTED,
    LAST,
    LAST_DOUBLED,
    MATMUL,
    SHAPES,
    all_layouts,
    all_pairs,
    make_addends,
    reduce_addends,
    slice_local,
    wrong_members,
)
from slow_case_marks import keep_diagonals_fast, keep_every_nth_fast

from dtensor.comm import events, per_rank
from dtensor.comm.processes import torch_backends
from dtensor.errors import LayoutError
from dtensor.layout.layout import Layout
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Partial, Replicate, Shard
from dtensor.redistribute import execute, plan, redistribute_local, start

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
ALL_OPS = ("sum", "avg", "max", "min", "product", LAST)


def mesh_of(*shape: int) -> DeviceMesh:
    return DeviceMesh("cpu", torch.arange(math.prod(shape)).reshape(shape))


def check(src: Layout, dst: Layout, seed: int = 0, async_op: bool = False) -> None:
    terms = make_addends(src, seed)
    local = per_rank([slice_local(src, terms, member) for member in src.mesh.members])
    before = [shard.clone() for shard in local.shards]
    result = (start if async_op else execute)(plan(src, dst), local)
    if async_op:
        pending, result = result, result.wait()
        assert pending.wait() is result
    wrong = wrong_members(dst, reduce_addends(src, terms), result.shards)
    assert not wrong, "\n".join([str(plan(src, dst)), *wrong])
    assert all(map(torch.equal, before, local.shards)), f"the source was modified by\n{plan(src, dst)}"


def check_some(pairs: list[tuple[Layout, Layout]], count: int) -> None:
    for seed, (src, dst) in enumerate(pairs if len(pairs) <= count else random.Random(0).sample(pairs, count)):
        check(src, dst, seed)


@pytest.mark.parametrize(
    ("mesh_shape", "shape", "dtype"), keep_diagonals_fast([(2,), (3,)], SHAPES, [torch.float64, torch.int64]), ids=str
)
def test_redistribute_between_all_layouts_on_1d_meshes_equals_reference(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    ops = ALL_OPS if dtype.is_floating_point else ("sum", "max", "min", "product", LAST)
    for src, dst in all_pairs(all_layouts(mesh_of(*mesh_shape), shape, dtype, ops)):
        check(src, dst)


@pytest.mark.slow
@pytest.mark.parametrize("mesh_shape", [(2, 2), (2, 3)], ids=str)
def test_redistribute_between_all_layouts_on_2d_meshes_equals_reference(mesh_shape: tuple[int, ...]) -> None:
    for src, dst in all_pairs(all_layouts(mesh_of(*mesh_shape), (5, 7), torch.int64)):
        check(src, dst)


@pytest.mark.parametrize(
    ("mesh_shape", "shape", "dtype"),
    keep_every_nth_fast(
        list(itertools.product([(2, 2), (2, 3), (3, 1), (2, 2, 2), (2, 1, 3)], SHAPES, [torch.float64, torch.int64])), every=5
    ),
    ids=str,
)
def test_redistribute_between_random_layouts_on_2d_and_3d_meshes_equals_reference(
    mesh_shape: tuple[int, ...], shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    check_some(all_pairs(all_layouts(mesh_of(*mesh_shape), shape, dtype)), 30)


@pytest.mark.parametrize("mesh_shape", [(2, 3), pytest.param((2, 2, 2), marks=pytest.mark.slow)], ids=str)
def test_redistribute_between_random_partial_layouts_equals_reference(mesh_shape: tuple[int, ...]) -> None:
    """Check six reductions on all mesh dims, where only one order of reduction gives the value."""
    check_some(all_pairs(all_layouts(mesh_of(*mesh_shape), (4, 3), torch.float64, ALL_OPS)), 300)


def test_redistribute_of_monoid_whose_identity_is_not_zero_equals_reference() -> None:
    for src, dst in all_pairs(all_layouts(mesh_of(2, 2), (4,), torch.float64, ("sum", COUNTED))):
        check(src, dst)


@pytest.mark.parametrize("mesh_shape", [(2, 2), pytest.param((2, 3), marks=pytest.mark.slow)], ids=str)
def test_redistribute_of_monoid_that_is_not_elementwise_equals_reference(mesh_shape: tuple[int, ...]) -> None:
    """Check a monoid of matrix products, which cannot be reduced block by block."""
    mesh = mesh_of(*mesh_shape)
    found = all_layouts(mesh, (3, 3), torch.int64, ("sum", MATMUL))
    for src in found:
        for dst in found:
            if all(MATMUL not in x.partials or all(split is None for split in x.splits) for x in (src, dst)):
                check(src, dst)


@pytest.mark.slow
def test_redistribute_finalizes_a_monoid_once() -> None:
    pairs = all_pairs(all_layouts(mesh_of(2, 2), (4, 3), torch.float64, ("sum", LAST_DOUBLED)))
    checked = 0
    for src, dst in pairs:
        try:
            plan(src, dst)
        except LayoutError:
            assert LAST_DOUBLED in dst.partials
            continue
        check(src, dst)
        checked += LAST_DOUBLED in src.partials
    assert checked > 200


@pytest.mark.parametrize("placements", [([S0, P], [S1, R]), ([P, S0], [R, S0]), ([S0, R], [R, R]), ([R, R], [S0, P])], ids=str)
def test_asynchronous_execution_gives_equal_results(placements: tuple[Any, Any]) -> None:
    src, dst = (Layout.of(mesh_of(2, 3), p, (5, 7), dtype=torch.float64) for p in placements)
    check(src, dst, async_op=True)


def test_redistribute_on_submeshes_equals_reference() -> None:
    whole = DeviceMesh("cpu", [[0, 1, 2], [3, 4, 5]], mesh_dim_names=("dp", "tp"))
    for mesh in (whole["tp"], whole["dp"], whole["tp", "dp"], whole.flatten()):
        for src, dst in all_pairs(all_layouts(mesh, (5, 4), torch.int64))[::7]:
            check(src, dst)


@pytest.mark.parametrize("dtype", keep_every_nth_fast([torch.bool, torch.bfloat16, torch.complex64, torch.uint8], 4), ids=str)
def test_redistribute_and_back_keeps_bool_bfloat16_complex_and_uint8_values(dtype: torch.dtype) -> None:
    mesh = mesh_of(2, 3)
    value = (torch.arange(35).reshape(5, 7) % 3).to(dtype)
    ops = {torch.bool: ("max", "min"), torch.complex64: ("sum", "product")}.get(dtype, ("sum", "max", "min", "product"))
    whole = Layout.of(mesh, [R, R], (5, 7), dtype=dtype)
    for src, dst in all_pairs(all_layouts(mesh, (5, 7), dtype, ops))[::11]:
        replicated = per_rank([value.clone() for _ in mesh.members])
        there = redistribute_local(redistribute_local(replicated, whole, src), src, dst)
        back = redistribute_local(there, dst, whole)
        assert all(torch.equal(shard, value) for shard in back.shards), (
            f"{plan(whole, src)}\n{plan(src, dst)}\n{plan(dst, whole)}"
        )


def test_redistribute_of_non_contiguous_local_tensors_equals_reference() -> None:
    mesh = mesh_of(2, 2)
    terms = torch.arange(70, dtype=torch.float64).reshape(7, 2, 5)
    for src, dst in all_pairs(all_layouts(mesh, (5, 2, 7), torch.float64, ()))[::5]:
        local = per_rank(
            [slice_local(src, terms.permute(2, 1, 0), m).permute(2, 1, 0).contiguous().permute(2, 1, 0) for m in mesh.members]
        )
        assert not wrong_members(dst, terms.permute(2, 1, 0), redistribute_local(local, src, dst).shards)


def test_redistribute_with_communication_does_not_alias_the_source() -> None:
    mesh = mesh_of(2, 3)
    for src, dst in all_pairs(all_layouts(mesh, (5, 7), torch.float64))[::3]:
        terms = make_addends(src, 0)
        local = per_rank([slice_local(src, terms, member) for member in mesh.members])
        result = redistribute_local(local, src, dst)
        if plan(src, dst).communicates and not any(
            step.before.has_same_blocks(src) for step in plan(src, dst).steps[:1] if not step.communicates
        ):
            for a, b in zip(local.shards, result.shards, strict=True):
                assert a.numel() == 0 or a.untyped_storage().data_ptr() != b.untyped_storage().data_ptr()


def test_each_planned_collective_issues_one_event() -> None:
    mesh = mesh_of(2, 3)
    seen: list[Any] = []
    with events.listening(seen.append):
        for src, dst in all_pairs(all_layouts(mesh, (5, 7), torch.float64))[::3]:
            seen.clear()
            check(src, dst)
            steps = [step for step in plan(src, dst).steps if step.communicates]
            assert [event.mesh_dims for event in seen] == [step.mesh_dims for step in steps]
            assert sum(event.bytes for event in seen) <= plan(src, dst).bytes


# --- process groups --------------------------------------------------------------------------------------------------
def gloo_cases(mesh: DeviceMesh) -> list[tuple[Layout, Layout]]:
    found: list[tuple[Layout, Layout]] = []
    for shape, dtype in (((5, 7), torch.float64), ((6, 1), torch.int64), ((), torch.float64), ((0, 4), torch.int64)):
        ops = ("sum", "avg", "max", LAST) if dtype.is_floating_point else ("sum", "max")
        pairs = all_pairs(all_layouts(mesh, shape, dtype, ops))
        found += pairs if len(pairs) <= 80 else random.Random(0).sample(pairs, 80)
    return found


MESHES = (torch.arange(4), torch.arange(4).reshape(2, 2), torch.tensor([2, 0, 1]))


def _redistribute_on_gloo(message_by_message: bool) -> list[list[torch.Tensor]]:
    results = []
    if message_by_message:  # as for large tensors
        traits = torch_backends._TRAITS["gloo"]
        torch_backends._TRAITS["gloo"] = dataclasses.replace(traits, direct_bytes=0, one_round_bytes=-1, exchanged_bytes=-1)
    for ranks in MESHES:
        mesh = DeviceMesh("cpu", ranks)
        member = mesh.current_member()
        mine = []
        for seed, (src, dst) in enumerate(gloo_cases(mesh)):
            local = torch.empty(0) if member is None else slice_local(src, make_addends(src, seed), member)
            moved = (start if seed % 2 == 0 else execute)(plan(src, dst), local)
            mine.append((moved.wait() if seed % 2 == 0 else moved).clone())
        results.append(mine)
    return results


@pytest.mark.gloo
@pytest.mark.parametrize("message_by_message", [False, True])
def test_redistribute_on_process_groups_gives_each_rank_its_block(message_by_message: bool) -> None:
    results = run_gloo(_redistribute_on_gloo, 4, message_by_message, timeout_s=30.0)
    for at, ranks in enumerate(MESHES):
        mesh = DeviceMesh("cpu", ranks)
        for seed, (src, dst) in enumerate(gloo_cases(mesh)):
            locals_ = [results[rank][at][seed] for rank in mesh.ranks]
            wrong = wrong_members(dst, reduce_addends(src, make_addends(src, seed)), locals_)
            assert not wrong, "\n".join([str(plan(src, dst)), *wrong])
    assert all(result.numel() == 0 for result in results[3][2])
