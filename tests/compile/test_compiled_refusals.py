"""Errors of ``fullgraph=True``: errors that name the cause and the remedy, on two gloo processes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from compile_cases import Block
from gloo_processes import run_gloo
from torch import nn
from torch._dynamo import compiled_autograd

import dtensor as dt
from dtensor import DTensor, Shard
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module

pytestmark = pytest.mark.gloo


def refused_writes(mesh: dt.DeviceMesh) -> None:
    x, y = (dt.distribute_tensor(torch.ones(5, 7), mesh, [where]) for where in (Shard(0), Shard(1)))
    double = torch.compile(lambda v: v.mul_(2), backend="aot_eager", fullgraph=True)
    with pytest.raises(Exception, match="pass the base, or write to a clone"):
        double(y.view(35))
    double(x[0])  # a view of elements of one rank: each rank writes its part
    assert x.full_tensor().sum() == 42


def doubled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return x.mul_(2).sum() + y.sum()


def refused_writes_to_shared_memory(mesh: dt.DeviceMesh) -> None:
    """Check arguments that share memory, where a write to one changes the other."""
    torch._dynamo.reset()
    x = dt.distribute_tensor(torch.ones(6, 6), mesh, [Shard(0)])
    part = dt.distribute_tensor(torch.ones(8, 6), mesh, [Shard(1)])[2:]
    few = dt.distribute_tensor(torch.ones(1, 6), mesh, [Shard(0)])  # one rank has no elements, and raises like the others
    pairs = [(x, x.detach()), (x, x.t()), (x, x.to_local()), (part[:4], part[2:]), (x.to_local(), x), (x, x[0])]
    for written, read in (*pairs, (few, few.t()), (few[:, :4], few[:, 2:])):
        for dynamic in (False, True):
            if dynamic and not isinstance(written, DTensor):
                continue  # raises torch's error, as for a plain tensor and its view
            with pytest.raises(Exception, match="aliased inputs that are mutated"):
                torch.compile(doubled, backend="aot_eager", fullgraph=True, dynamic=dynamic)(written, read)
    for written, read in ((x[:3], x[3:]), (x, x), *_side_by_side(mesh)):
        expected = doubled(written.clone(), read.full_tensor()) if read is not written else 4 * x.sum()
        for dynamic in (False, True):
            torch._dynamo.reset()
            found = torch.compile(doubled, backend="aot_eager", fullgraph=True, dynamic=dynamic)(written, read)
            assert found.full_tensor().equal(expected.full_tensor()), (written, read)
            written.div_(2)


def _side_by_side(mesh: dt.DeviceMesh) -> list[tuple[DTensor, DTensor]]:
    """Return pairs of tensors whose local tensors are adjacent in one storage, as in a bucket."""
    bucket = torch.ones(30)
    pieces = [bucket[i : i + 6].view(2, 3) for i in range(0, 30, 6)]
    x, y, z, *_ = (DTensor.from_local(piece, mesh, [Shard(0)], shape=(4, 3)) for piece in pieces)
    return [(x, y), (y, z), (z, x)]


def refused_backward_passes(mesh: dt.DeviceMesh) -> None:
    model = fully_shard(Block(), mesh=mesh)
    with (
        compiled_autograd._enable(torch.compile(backend="eager")),
        pytest.raises(Exception, match="let autograd run its backward pass"),
    ):
        model(torch.randn(5, 6)).sum().backward()


def refused_exports(mesh: dt.DeviceMesh) -> None:
    model = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for strict in (True, False):
        with pytest.raises(Exception, match=r"torch\.export does not support DTensors"):
            torch.export.export(model, (torch.randn(5, 6),), strict=strict)


def inside_mode(mode: Callable[[], AbstractContextManager[None]]) -> Callable[[torch.Tensor], torch.Tensor]:
    def run(x: torch.Tensor) -> torch.Tensor:
        with mode():
            y = x * 2
        return y + 1

    return run


def refused_modes(mesh: dt.DeviceMesh) -> None:
    x = dt.distribute_tensor(torch.ones(5, 7), mesh, [Shard(0)])
    for mode in (dt.implicit_replication, dt.explicit, lambda: dt.remember("nothing")):
        with pytest.raises(Exception, match="enter it around the call"):
            torch.compile(inside_mode(mode), backend="aot_eager", fullgraph=True)(x)
        torch._dynamo.reset()
        assert torch.compile(inside_mode(mode), backend="aot_eager")(x).full_tensor().eq(3).all()


def counts(x: torch.Tensor) -> torch.Tensor:
    return torch.bincount(x.flatten().long(), minlength=9)


def refused_sizes_and_constructors(mesh: dt.DeviceMesh) -> None:
    """Check operators with data-dependent sizes and invalid constructors, which raise under ``fullgraph=True``."""
    torch._dynamo.reset()
    x = dt.distribute_tensor(torch.ones(5, 7), mesh, [Shard(0)])
    for values, name in (
        (lambda v: v[v > 0], "nonzero"),
        (torch.nonzero, "nonzero"),
        (torch.unique, "unique"),
        (counts, "bincount"),
    ):
        with pytest.raises(Exception, match=rf"(?s)aten::\w*{name}\w* .*values decide a size.*fullgraph=False"):
            torch.compile(values, backend="aot_eager", fullgraph=True)(x)
    uneven, linear = torch.ones(3 - mesh.get_rank(), 3), nn.Linear(3, 3)
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="pass shape="):
            torch.compile(lambda a: DTensor.from_local(a, mesh, [Shard(0)]) * 2, backend=backend, fullgraph=True)(uneven)
    for call, match in (
        (lambda a: dt.distribute_tensor(a, mesh, [Shard(0)]), "on rank 1.* pass the same arguments"),
        (lambda a: dt.distribute_tensor(a.sin(), mesh, [Shard(0)]), "takes leaf tensors"),
        (lambda a: (dt.distribute_module(linear, mesh), a.sin())[1], "before the compiled function"),
    ):
        with pytest.raises(Exception, match=match):
            torch.compile(call, backend="aot_eager", fullgraph=True)(uneven.requires_grad_())


def check_all_refusals() -> None:
    mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    for refusals in (
        refused_sizes_and_constructors,
        refused_writes,
        refused_writes_to_shared_memory,
        refused_modes,
        refused_exports,
        refused_backward_passes,
    ):
        refusals(mesh)


@pytest.mark.slow
def test_unsupported_programs_with_fullgraph_raise_with_cause_and_remedy() -> None:
    run_gloo(check_all_refusals, 2, timeout_s=280.0)
