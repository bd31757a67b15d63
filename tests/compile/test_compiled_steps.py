"""Compiled training steps, changing sizes and layouts, data parallel modules, and what breaks a graph. On two gloo processes."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compile_cases import Block
from gloo import run_gloo
from test_compiled import differing
from torch import nn

import dtensor as dt
from dtensor import DTensor, Replicate, Shard
from dtensor.errors import GatherWarning
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module, replicate

pytestmark = pytest.mark.gloo
Compile = Callable[..., Any]


def _trained(model: Any, run: Any, how: Compile | None = None, **options: Any) -> list[Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, **options)
    x, losses, gradients = torch.randn(5, 6), [], []

    def update() -> None:
        optimizer.step()

    step = update if how is None else how(update)
    for _ in range(3):
        loss = run(x).square().mean()
        loss.backward()
        gradients += [p.grad.detach().clone() for p in model.parameters()]
        with warnings.catch_warnings():
            warnings.simplefilter("error", GatherWarning)
            step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [*losses, *gradients, *(p.detach() for p in model.parameters())]


def tensor_parallel(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    model = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return _trained(model, how(model, fullgraph=True))


def compiled_optimizers(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    found = []
    for options in ({}, {"foreach": False}, {"fused": True}):
        model = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        found += _trained(model, how(model, fullgraph=True), how, **options)
    return found


def fully_sharded(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    model = fully_shard(Block(), mesh=mesh)
    return _trained(model, how(model))


def of_blocks(shard: Callable[..., Any], compiled: Compile | None, **options: Any) -> nn.Sequential:
    """Blocks that are compiled each by itself, then sharded, and all together."""
    model = nn.Sequential(Block(), Block())
    for block in model:
        if compiled is not None:
            block.forward = compiled(block.forward, fullgraph=True)
        shard(block, **options)
    return model


def fully_sharded_blocks(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """One graph for each block, between the hooks; and the whole model, whose graph breaks at them."""
    found = []
    for options in ({}, {"reshard_after_forward": False}):
        model = fully_shard(of_blocks(fully_shard, how, mesh=mesh, **options), mesh=mesh)
        found += _trained(model, model)
    model = fully_shard(of_blocks(fully_shard, None, mesh=mesh), mesh=mesh)
    return found + _trained(model, how(model))


def replicated_blocks(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    model = nn.Sequential(Block(), Block())
    model.forward = how(model.forward, fullgraph=True)  # type: ignore[method-assign]
    replicate(model, mesh=mesh)
    return _trained(model, model)


def dropout_in_training(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """The common case under tensor parallelism: what is dropped are those of one device, also where columns are cut."""
    model = nn.Sequential(Block(), nn.Dropout(0.25), nn.Linear(6, 6))
    plan = {"0.up": ColwiseParallel(), "0.down": RowwiseParallel(use_local_output=False), "2": ColwiseParallel()}
    parallelize_module(model, mesh, plan)
    return _trained(model, how(model, fullgraph=True))


def replicated(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    model = replicate(Block(), mesh=mesh)
    return _trained(model, how(model))


def sizes_and_layouts(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    run = how(lambda x: (x @ x.t()).cumsum(0), fullgraph=True)
    laid = [(5, Shard(0)), (6, Shard(0)), (7, Shard(1)), (5, Replicate()), (5, Shard(0))]
    return [run(dt.distribute_tensor(torch.randn(n, 6), mesh, [where])) for n, where in laid]


def marked_sizes(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """Sizes that are said to change."""
    found = []
    for options in ({"dynamic": True}, {}):
        run = how(lambda x: (x @ x.t()).cumsum(0), fullgraph=True, **options)
        for n, where in ((4, Shard(0)), (6, Shard(0)), (5, Shard(0)), (4, Replicate())):
            x = dt.distribute_tensor(torch.randn(n, 6), mesh, [where])
            if not options:
                torch._dynamo.mark_dynamic(x, 0)
            found.append(run(x))
    return found


def many_sizes(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """More sizes than torch has graphs of one function, unless it is told how many there are."""
    run = how(lambda x: (x * 2).sum(0), fullgraph=True, dynamic=True, recompile_limit=16)
    return [run(dt.distribute_tensor(torch.randn(n, 6), mesh, [Shard(0)])) for n in range(12)]


def plain_targets(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    logits = dt.distribute_tensor(torch.randn(5, 7), mesh, [Shard(1)]).requires_grad_()
    loss = how(F.cross_entropy, fullgraph=True)(logits, torch.tensor([0, 1, 2, 3, 6]))
    loss.backward()
    return [loss, logits.grad]


def a_gradient_laid_otherwise(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    x = dt.distribute_tensor(torch.randn(5, 7), mesh, [Shard(0)]).requires_grad_()
    how(lambda x: x * x, fullgraph=True)(x).backward(dt.distribute_tensor(torch.ones(5, 7), mesh, [Shard(1)]))
    return [x.grad]


def breaks(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """Where values are compared, and where a constant made in the graph goes on after it broke."""
    rows = torch.ones(3 - mesh.get_rank(), 7)
    asked = how(lambda x: DTensor.from_local(x * 2, mesh, [Shard(0)], run_check=True) * 2)(rows)
    made = how(lambda x: x + dt.distribute_tensor(torch.ones(5, 7), mesh, [Shard(0)]))(asked)
    return [asked, made]


def accumulated(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """Gradients of several passes add up: no two of them, and none that was given, have the same memory."""
    found = []
    for run in (
        lambda x, y: x + y,
        lambda x, y: (x + y).view(24).view(4, 6) * 1,
        lambda x, y: x.to_local().sum() + y.full_tensor().sum(),
    ):
        x, y = (dt.distribute_tensor(torch.zeros(4, 6), mesh, [Shard(0)]).requires_grad_() for _ in range(2))
        given = dt.distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)])
        compiled = how(run, fullgraph=True)
        for _ in range(3):
            out = compiled(x, y)
            out.backward(given if isinstance(out, DTensor) else None)
        found += [x.grad, y.grad, given]
    return found


def views_that_are_gathered(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """What is written to a view that came out of a graph reaches its base; what is written there is seen."""
    found: list[Any] = []
    for view, where in (
        (lambda x: x[1], Shard(0)),
        (lambda x: (x[2], x.flatten())[1], Shard(1)),
        (lambda x: x.t()[:, 3], Shard(0)),
    ):
        x = dt.distribute_tensor(torch.randn(5, 6), mesh, [where])
        out = how(view, fullgraph=True)(x)
        out.mul_(3)
        found.append(x.clone())
        x.add_(1)
        found.append(out.clone())
        found += [x.clone(), out.clone(), how(lambda v: v.sin() + v, fullgraph=True)(view(x))]
        both, row = how(lambda x: (lambda z: (z, z[3]))(x * 2), fullgraph=True)(x)
        row.fill_(7)
        found += [both, row * 1]
    return found


def in_modes(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """A function that was compiled in one mode, called in another."""
    x = dt.distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
    product = how(lambda x: x @ x, fullgraph=True)
    shifted = how(lambda x, t: x + t, fullgraph=True)
    placed = how(lambda t: DTensor.from_local(t, mesh, [Replicate()]) + t)
    found, t = [product(x)], torch.randn(4, 4)
    with dt.explicit(), pytest.raises(Exception, match=r"would communicate under explicit\(\)"):
        product(x)
    for _ in range(2):
        with dt.implicit_replication():
            found += [shifted(x, t), placed(t)]
        for mixes, given in ((shifted, (x, t)), (placed, (t,))):
            with pytest.raises(Exception, match="mixes DTensors with a plain tensor"):
                mixes(*given)
    return found


PROGRAMS = [
    tensor_parallel,
    compiled_optimizers,
    in_modes,
    fully_sharded,
    fully_sharded_blocks,
    replicated,
    replicated_blocks,
    dropout_in_training,
    sizes_and_layouts,
    marked_sizes,
    many_sizes,
    plain_targets,
    a_gradient_laid_otherwise,
    breaks,
    accumulated,
    views_that_are_gathered,
]


def on_processes() -> None:
    mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    drawn_first(mesh)
    for program in PROGRAMS:
        torch._dynamo.reset()
        torch.manual_seed(0)
        got = program(mesh, lambda fn, **options: torch.compile(fn, backend="aot_eager", **options))
        torch.manual_seed(0)
        wanted = program(mesh, lambda fn, **options: fn)
        for one, other in zip(got, wanted, strict=True):
            assert not differing(one, other), f"{program.__name__}: {differing(one, other)}"
    refused(mesh)
    refused_writes(mesh)
    refused_exports(mesh)


def refused_writes(mesh: dt.DeviceMesh) -> None:
    x = dt.distribute_tensor(torch.ones(5, 7), mesh, [Shard(0)])
    with pytest.raises(Exception, match="give it the base, or write to a clone"):
        torch.compile(lambda v: v.mul_(2), backend="aot_eager", fullgraph=True)(x[0])


def refused_exports(mesh: dt.DeviceMesh) -> None:
    model = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    for strict in (True, False):
        with pytest.raises(Exception, match=r"torch\.export of a model of DTensors"):
            torch.export.export(model, (torch.randn(5, 6),), strict=strict)


def drawn_first(mesh: dt.DeviceMesh) -> None:
    x = dt.distribute_tensor(torch.ones(5, 7), mesh, [Shard(0)])
    torch.manual_seed(1 + mesh.get_rank())  # not yet the same on all ranks: the first draw takes over the first one's
    drawn = torch.compile(F.dropout, backend="aot_eager", fullgraph=True)(x).full_tensor()
    torch.manual_seed(1)
    torch.testing.assert_close(drawn, F.dropout(torch.ones(5, 7)))
    with dt.random_mode("counter"):  # the mode is that of the call
        dt.manual_seed(3)
        one = torch.compile(F.dropout, backend="aot_eager", fullgraph=True)(x).full_tensor()
        dt.manual_seed(3)
        torch.testing.assert_close(one, F.dropout(x).full_tensor())


def refused(mesh: dt.DeviceMesh) -> None:
    """As one graph these are refused, and the cause is named."""
    torch._dynamo.reset()
    uneven, linear = torch.ones(3 - mesh.get_rank(), 3), nn.Linear(3, 3)
    for backend in ("eager", "aot_eager"):
        torch._dynamo.reset()
        with pytest.raises(Exception, match="give shape="):
            torch.compile(lambda a: DTensor.from_local(a, mesh, [Shard(0)]) * 2, backend=backend, fullgraph=True)(uneven)
    for call, match in (
        (lambda a: dt.distribute_tensor(a, mesh, [Shard(0)]), "rank 1 holds .* give the same arguments"),
        (lambda a: dt.distribute_tensor(a.sin(), mesh, [Shard(0)]), "takes leaf tensors"),
        (lambda a: (dt.distribute_module(linear, mesh), a.sin())[1], "before the compiled function"),
    ):
        with pytest.raises(Exception, match=match):
            torch.compile(call, backend="aot_eager", fullgraph=True)(uneven.requires_grad_())


@pytest.mark.slow
def test_programs_on_processes() -> None:
    run_gloo(on_processes, 2, timeout_s=280.0)
