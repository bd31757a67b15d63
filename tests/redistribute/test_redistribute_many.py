"""``redistribute_many``: results of separate redistributions, with one collective for each kind."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo
from redistribute_cases import LAST, all_layouts, all_pairs, make_addends, reduce_addends, slice_local, wrong_members

import dtensor as dt
from dtensor.comm import PerRank, per_rank
from dtensor.debug import CommDebugMode
from dtensor.errors import LayoutError
from dtensor.layout.layout import Layout
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.redistribute import execute_many, plan

R, S0, S1, P = dt.Replicate(), dt.Shard(0), dt.Shard(1), dt.Partial()


def some_pairs(mesh: DeviceMesh, count: int) -> list[tuple[Layout, Layout]]:
    dtypes = (torch.float64, torch.int32, torch.bfloat16, torch.int8)
    pairs = [pair for dtype in dtypes for pair in all_pairs(all_layouts(mesh, (5, 7), dtype, ("sum", "max")))]
    pairs += all_pairs(all_layouts(mesh, (4, 3), torch.float64, ("avg", LAST)))
    return random.Random(1).sample(pairs, count)


@pytest.mark.parametrize("shape", [(2, 3), (4,)], ids=str)
def test_execute_many_gives_each_rank_its_blocks(shape: tuple[int, ...]) -> None:
    mesh = DeviceMesh("cpu", torch.arange(torch.Size(shape).numel()).reshape(shape))
    pairs = some_pairs(mesh, 60)
    terms = [make_addends(src, seed) for seed, (src, _) in enumerate(pairs)]
    given = [per_rank([slice_local(src, t, m) for m in mesh.members]) for (src, _), t in zip(pairs, terms, strict=True)]
    results = execute_many([plan(*pair) for pair in pairs], given).wait()
    for (src, dst), t, result in zip(pairs, terms, results, strict=True):
        wrong = wrong_members(dst, reduce_addends(src, t), result.shards)
        assert not wrong, "\n".join([str(plan(src, dst)), *wrong])


def _execute_many_on_gloo() -> list[torch.Tensor]:
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    pairs, member = some_pairs(mesh, 60), mesh.current_member()
    assert member is not None
    given = [slice_local(src, make_addends(src, seed), member) for seed, (src, _) in enumerate(pairs)]
    results: list[torch.Tensor] = execute_many([plan(*pair) for pair in pairs], given).wait()
    return results


@pytest.mark.gloo
def test_execute_many_on_process_groups_gives_each_rank_its_blocks() -> None:
    results = run_gloo(_execute_many_on_gloo, 4)
    mesh = DeviceMesh("cpu", torch.arange(4).reshape(2, 2))
    for seed, (src, dst) in enumerate(some_pairs(mesh, 60)):
        wrong = wrong_members(dst, reduce_addends(src, make_addends(src, seed)), [ranks[seed] for ranks in results])
        assert not wrong, "\n".join([str(plan(src, dst)), *wrong])


def tensors(mesh: DeviceMesh, placements: Any, count: int = 5) -> list[dt.DTensor]:
    return [
        dt.distribute_tensor(torch.arange(float((5 + k) * 3)).reshape(5 + k, 3), mesh, placements).requires_grad_()
        for k in range(count)
    ]


@pytest.mark.parametrize(
    ("src", "dst", "kind"),
    [(S0, R, "all_gather"), (S0, S1, "all_to_all"), (P, R, "all_reduce"), (P, S0, "reduce_scatter")],
    ids=str,
)
def test_redistribute_many_issues_one_collective_in_forward_and_one_in_backward(src: Any, dst: Any, kind: str) -> None:
    mesh = DeviceMesh("cpu", 2)
    xs = tensors(mesh, [src])
    with CommDebugMode() as comm:
        ys = dt.redistribute_many(xs, [dst])
    assert dict(comm.get_comm_counts()) == {kind: 1}
    assert all(torch.equal(x.full_tensor(), y.full_tensor()) for x, y in zip(xs, ys, strict=True))
    assert all(y.placements == (dst,) for y in ys)
    with CommDebugMode() as comm:
        grads = torch.autograd.grad(ys[:3], xs, [torch.ones_like(y) for y in ys[:3]], allow_unused=True)
    assert comm.get_total_counts() <= 1
    assert [None if g is None else g.full_tensor().sum().item() for g in grads] == [x.numel() for x in xs[:3]] + [None, None]
    assert all(g.placements == ((R if src is P else src),) for g in grads[:3])


def test_redistribute_many_returns_inputs_that_already_have_the_layout() -> None:
    xs = tensors(DeviceMesh("cpu", 2), [S0])
    ys = dt.redistribute_many(xs, [[S0], [R], [S0], [S1], [R]])
    assert [y is x for x, y in zip(xs, ys, strict=True)] == [True, False, True, False, False]
    assert dt.redistribute_many([], []) == []


def test_async_redistribute_many_gives_equal_values() -> None:
    mesh = DeviceMesh("cpu", 2)
    xs = tensors(mesh, [S0])
    ys = dt.redistribute_many(xs, [R], async_op=True)
    assert torch.equal((ys[3] * 2).full_tensor(), xs[3].full_tensor() * 2)
    assert isinstance(ys[0]._local_tensor, PerRank)


def test_redistribute_many_of_two_meshes_issues_one_collective_each() -> None:
    xs = [*tensors(DeviceMesh("cpu", 2), [S0], 2), *tensors(DeviceMesh("cpu", 3), [S0], 2)]
    with CommDebugMode() as comm:
        ys = dt.redistribute_many(xs, [R])
    assert comm.get_total_counts() == 2
    assert all(torch.equal(x.full_tensor(), y.full_tensor()) for x, y in zip(xs, ys, strict=True))


def test_redistribute_many_with_wrong_number_of_placements_raises() -> None:
    with pytest.raises(LayoutError, match="3 placements for 2 tensors"):
        dt.redistribute_many(tensors(DeviceMesh("cpu", 2), [S0], 2), [[R], [R], [R]])


def test_foreach_operands_are_redistributed_in_one_collective() -> None:
    mesh = DeviceMesh("cpu", 2)
    xs, ys = tensors(mesh, [S0]), tensors(mesh, [S1])
    expected = [x.full_tensor() + y.full_tensor() for x, y in zip(xs, ys, strict=True)]
    with torch.no_grad(), CommDebugMode() as comm:
        zs = torch._foreach_add(xs, ys)
    assert comm.get_total_counts() == 1
    assert all(torch.equal(z.full_tensor(), want) for z, want in zip(zs, expected, strict=True))
