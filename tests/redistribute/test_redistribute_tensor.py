"""``DTensor.redistribute``: random layouts and back, announced and issued collectives, gradients, async results and memory."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_processes import run_gloo
from hypothesis import given, settings
from hypothesis import strategies as st
from redistribute_cases import make_addends, reduce_addends, slice_local, uneven_sizes

import dtensor as dt
from dtensor import DeviceMesh, DTensor, Partial, Replicate, Shard
from dtensor.comm.processes import torch_backends
from dtensor.debug import CommDebugMode
from dtensor.errors import DTensorError
from dtensor.layout.layout import Layout
from dtensor.redistribute import AllGather, AllReduce, Exchange, Plan, ReduceScatter
from dtensor.testing import strategies
from dtensor.testing.scatter import scatter

R, S0, S1, P = Replicate(), Shard(0), Shard(1), Partial()
KINDS = {AllGather: "all_gather", AllReduce: "all_reduce", Exchange: "all_to_all", ReduceScatter: "reduce_scatter"}


def announced_collectives(found: Any) -> list[tuple[str, tuple[int, ...]]]:
    """Return the collectives that a plan announces."""
    assert isinstance(found, Plan)
    return [(KINDS[type(step)], step.mesh_dims) for step in found.steps if step.communicates]


def issued_collectives(comm: CommDebugMode) -> list[tuple[str, tuple[int, ...]]]:
    return [(event.kind, event.mesh_dims) for event in comm.events]


@st.composite
def redistributions(draw: st.DrawFn) -> tuple[DTensor, torch.Tensor, tuple[Any, ...]]:
    """Draw a DTensor, its value, and other placements."""
    mesh, shape = draw(strategies.meshes(max_ndim=3, max_ranks=12)), draw(strategies.shapes(max_ndim=2))
    x, value = draw(strategies.dtensors(mesh, shape))
    return x, value, draw(strategies.placements(mesh, shape))


@settings(max_examples=150)
@given(redistributions())
def test_redistribute_issues_the_explained_collectives_and_keeps_the_value(
    case: tuple[DTensor, torch.Tensor, tuple[Any, ...]],
) -> None:
    x, value, placements = case
    at = x
    for target in (placements, x.placements, [R] * x.device_mesh.ndim):
        announced = at.explain_redistribute(target)
        with CommDebugMode() as comm:
            at = at.redistribute(placements=target)
        assert issued_collectives(comm) == announced_collectives(announced), str(announced)
        assert sum(event.bytes for event in comm.events) <= announced.bytes  # the plan counts the largest rank in each step
        shards = at.to_local().shards
        for coordinate, shard in zip(at.device_mesh.coordinates, shards, strict=True):
            assert tuple(shard.shape) == at.layout.local_shape(coordinate)
    for shard in at.to_local().shards:
        torch.testing.assert_close(shard, value, rtol=1e-12, atol=1e-12)  # means over three ranks have rounding errors


@settings(max_examples=60)
@given(redistributions())
def test_redistribute_has_the_gradient_of_the_identity(case: tuple[DTensor, torch.Tensor, tuple[Any, ...]]) -> None:
    x, value, placements = case
    leaf = x.detach().requires_grad_()
    weight = torch.arange(1.0, value.numel() + 1, dtype=value.dtype).view(value.shape)
    mesh = x.device_mesh
    y = leaf.redistribute(placements=placements)
    y.backward(scatter(weight, mesh, [R if isinstance(p, Partial) else p for p in placements]))
    assert leaf.grad.placements == tuple(R if isinstance(p, Partial) else p for p in leaf.placements)
    assert torch.equal(leaf.grad.full_tensor(), weight)


# --- memory -----------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("placements", [(S0, R), (S1, S0), (P, R), (Partial("max"), S0), (R, Partial("avg"))], ids=str)
def test_redistribute_result_does_not_share_memory_with_the_source(placements: Any) -> None:
    value, mesh = torch.arange(35.0).view(5, 7), dt.init_device_mesh("cpu", (2, 2))
    x = dt.distribute_tensor(value, mesh, [R, R])
    y = x.redistribute(placements=placements)
    y.mul_(2)
    assert torch.equal(x.full_tensor(), value)
    if "max" not in str(placements):
        assert torch.equal(y.full_tensor(), value * 2)
    one = dt.init_device_mesh("cpu", (1,))
    (source,) = (z := dt.distribute_tensor(value, one, [R])).to_local().shards
    (same,) = z.redistribute(placements=[S0]).to_local().shards
    assert same.untyped_storage().data_ptr() != source.untyped_storage().data_ptr()


def test_explained_peak_bytes_count_source_result_and_receive_buffer() -> None:
    mesh = dt.init_device_mesh("cpu", (4,))
    x = dt.zeros(16, 16, device_mesh=mesh, placements=[S0])
    block, whole = 256, 1024
    for placements, peak in (([S1], 3 * block + 192), ([R], block + whole + 768), ([S0], block), ([P], block + whole)):
        assert x.explain_redistribute(placements).peak_bytes == peak
    assert x.redistribute(placements=[R]).explain_redistribute([S1]).peak_bytes == whole + block


# --- async ------------------------------------------------------------------------------------------------------------------
def test_write_to_the_source_of_a_tensor_in_flight_raises_at_use_of_the_result() -> None:
    value, mesh = torch.arange(35.0).view(5, 7), dt.init_device_mesh("cpu", (2, 2))
    x = dt.distribute_tensor(value.clone(), mesh, [S0, S1])
    y = x.redistribute(placements=[S1, S0], async_op=True)
    x[1].zero_()
    for _ in range(2):
        with pytest.raises(DTensorError, match="use the result before writing"):
            y + 1
    (many,) = dt.redistribute_many([x], [R, R], async_op=True)
    other = x.redistribute(DeviceMesh("cpu", [0, 1]), [S0], async_op=True)
    x.to_local().add_(1)
    for z in (many, other):
        with pytest.raises(DTensorError, match="use the result before writing"):
            z.sum()
    z = x.redistribute(placements=[R, R], async_op=True)
    total = z.sum().item()
    x.zero_()
    assert z.sum().item() == total


# --- processes ----------------------------------------------------------------------------------------------------------------
PAIRS: tuple[tuple[Any, Any], ...] = (([S0], [S1]), ([S0], [R]), ([P], [S0]), ([P], [R]), ([S0], [Shard(0, sizes=(1, 9, 0, 30))]))


def _issue_on_first_rank_first(direct: bool) -> None:
    """Issue all redistributions on the first rank before other ranks begin, which works only if issuing does not wait."""
    if direct:
        traits = torch_backends._TRAITS["gloo"]
        torch_backends._TRAITS["gloo"] = dataclasses.replace(traits, direct_bytes=0, one_round_bytes=-1)
    mesh, rank = dt.init_device_mesh("cpu", (4,)), dist.get_rank()
    other = DeviceMesh("cpu", [2, 3, 0])
    value, aside, flag = torch.arange(1600.0).view(40, 40), dist.new_group(), torch.zeros(1)
    xs = [scatter(value, mesh, src) for src, _ in PAIRS]
    targets = [(mesh, placements) for _, placements in PAIRS] + [(other, [S1])]
    xs.append(xs[0])

    def issue() -> list[DTensor]:
        started = [x.redistribute(on, placements, async_op=True) for x, (on, placements) in zip(xs, targets, strict=True)]
        return started + dt.redistribute_many([xs[0], xs[1]], [R], async_op=True)

    for x in issue():  # the first run connects processes, which does wait
        x.to_local()
    if rank == 0:
        started = issue()
        for peer in (1, 2, 3):
            dist.send(flag, peer, group=aside)
    else:
        dist.recv(flag, 0, group=aside)
        started = issue()
    for x in started:
        if x.device_mesh.get_coordinate() is not None:
            coordinate, layout = x.device_mesh.get_coordinate(), x.layout
            start, size = layout.local_offset(coordinate), layout.local_shape(coordinate)
            want = value[start[0] : start[0] + size[0], start[1] : start[1] + size[1]]
            assert torch.equal(x.to_local(), want), str(x.layout)


@pytest.mark.gloo
@pytest.mark.parametrize("direct", [False, True])
def test_async_redistribute_does_not_wait_for_other_ranks(direct: bool) -> None:
    run_gloo(_issue_on_first_rank_first, 4, direct, timeout_s=40.0)


DTYPES = (torch.bool, torch.bfloat16, torch.complex64, torch.float8_e4m3fn, torch.float16, torch.uint16, torch.float64)


def _run_random_redistributions(direct: bool) -> list[Any]:
    """Check random redistributions of all dtypes on process groups against their plans, and return the plans."""
    if direct:
        traits = torch_backends._TRAITS["gloo"]
        torch_backends._TRAITS["gloo"] = dataclasses.replace(traits, direct_bytes=0, one_round_bytes=-1, exchanged_bytes=-1)
    draw, plans = random.Random(7), []
    for ranks in (torch.arange(4), torch.arange(4).reshape(2, 2), torch.tensor([[3, 1], [0, 2]])):
        mesh = DeviceMesh("cpu", ranks)
        for seed in range(70):
            dtype, shape = draw.choice(DTYPES), draw.choice([(5, 7), (4, 3, 2), (6,), (1, 9)])
            src, dst = (Layout.of(mesh, _placements(draw, mesh, shape, dtype), shape, dtype=dtype) for _ in range(2))
            value = scatter_value(src, seed)
            local = slice_local(src, value, mesh.current_member() or 0)
            x = DTensor.from_local(_vary_strides(local, seed), mesh, src.placements, shape=shape)
            announced = x.explain_redistribute(dst.placements)
            plans.append(str(announced))
            with CommDebugMode() as comm:
                y = x.redistribute(placements=dst.placements, async_op=seed % 2 == 1)
                y.to_local()
            assert issued_collectives(comm) == announced_collectives(announced), str(announced)
            assert sum(event.bytes for event in comm.events) <= announced.bytes, str(announced)
            # sums of bools are *or*, which equals their integer sum converted to bool
            got, want = y.full_tensor(), reduce_addends(src, value).to(dtype)
            assert torch.equal(_comparable(got), _comparable(want)), f"{announced}\n{got}\n{want}"
    return plans


def scatter_value(layout: Layout, seed: int) -> torch.Tensor:
    wide = Layout.of(layout.mesh, layout.placements, layout.shape, dtype=torch.float64)
    terms = make_addends(wide, seed) if layout.dtype is not torch.bool else (make_addends(wide, seed) > 3).double()
    return (terms.abs() if layout.dtype in (torch.uint16, torch.float8_e4m3fn) else terms).to(layout.dtype)


def _placements(draw: random.Random, mesh: DeviceMesh, shape: tuple[int, ...], dtype: torch.dtype) -> list[Any]:
    computes = dtype not in (torch.float8_e4m3fn, torch.uint16)
    ops = [P] if dtype is torch.complex64 else [P, Partial("max"), Partial("min")] if computes else []
    found = [draw.choice([R, *map(Shard, range(len(shape))), *ops]) for _ in range(mesh.ndim)]
    shards = [i for i, p in enumerate(found) if isinstance(p, Shard)]
    if len(shards) == 1 and draw.random() < 0.5:
        i = shards[0]
        found[i] = Shard(found[i].dim, sizes=uneven_sizes(shape[found[i].dim], mesh.shape[i]))
    elif len(shards) == 2 and found[0] == found[1] and draw.random() < 0.5:
        found = [Shard(found[0].dim, level=1), Shard(found[0].dim, level=0)]
    return found


def _vary_strides(x: torch.Tensor, seed: int) -> torch.Tensor:
    """Return equal values, non-contiguous for even seeds."""
    return x if seed % 2 else x.transpose(0, -1).clone(memory_format=torch.contiguous_format).transpose(0, -1)


def _comparable(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.float64) if x.dtype in (torch.float8_e4m3fn, torch.uint16) else x


@pytest.mark.gloo
@pytest.mark.parametrize("direct", [False, True])
def test_random_redistributions_on_process_groups_run_as_planned(direct: bool) -> None:
    first, *others = run_gloo(_run_random_redistributions, 4, direct, timeout_s=100.0)
    assert all(other == first for other in others)


@pytest.mark.parametrize(
    ("size", "dims", "before", "after", "elements"),
    [
        ((5, 8, 6), (0,), S1, S1, 0),
        ((5, 8, 6), (0,), S1, R, 6 * 6),
        ((5, 8, 6), (0,), P, R, 2 * 3 * 8 * 6 // 4),
        ((5, 8, 6), (0,), S1, Shard(2), 6 * 2),
        ((5, 8, 6), (0,), S1, S0, 6 * 6),  # all ranks have all elements and use a part
        ((5, 8, 6), (0, 1), S1, R, 0),  # no block is empty: each rank has the repeated elements
        ((5, 3, 6), (0, 1), S1, R, 3 * 6),  # one block is empty
        ((5, 8, 6), (1,), S0, R, 5 * 6),
    ],
)
def test_expanded_elements_are_sent_once(size: Any, dims: Any, before: Any, after: Any, elements: int) -> None:
    value = torch.randn([1 if d in dims else n for d, n in enumerate(size)], dtype=torch.float64)
    mesh = dt.init_device_mesh("cpu", (4,))
    x = dt.distribute_tensor(value, mesh, [R]).expand(size)
    x = x.redistribute(placements=[before])
    assert x.stride() == value.expand(size).stride()
    with CommDebugMode() as seen:
        y = x.redistribute(placements=[after])
    assert y.stride() == x.stride()
    assert torch.equal(y.full_tensor(), value.expand(size))
    assert [shard.shape for shard in y.to_local().shards] == [y.layout.shape_of(member) for member in range(4)]
    assert sum(event.bytes for event in seen.events) == elements * 8


def test_gradients_that_autograd_expands_are_contiguous_and_writable() -> None:
    mesh = dt.init_device_mesh("cpu", (4,))
    x = dt.distribute_tensor(torch.randn(5, 6), mesh, [P]).requires_grad_()
    y = dt.distribute_tensor(torch.randn(5, 6), mesh, [S0]).requires_grad_()
    (x.sum() + y.redistribute(placements=[S1]).sum(0).sum()).backward()
    for leaf in (x, y):
        assert leaf.grad.stride() == (6, 1)
        leaf.grad.mul_(2)
        assert torch.equal(leaf.grad.full_tensor(), torch.full((5, 6), 2.0))
