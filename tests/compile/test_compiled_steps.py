"""Compiled training steps on two gloo processes: changing sizes and layouts, data-parallel modules, and graph breaks."""

from __future__ import annotations

import contextlib
import itertools
import threading
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from compile_cases import Block
from gloo_processes import run_gloo
from test_compiled import find_difference
from torch import nn
from torch._dynamo import compiled_autograd
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.functional_export import dynamo_graph_capture_for_export
from torch._dynamo.testing import CompileCounter
from torch._functorch.aot_autograd import aot_export_joint_with_descriptors, make_boxed_func
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

import dtensor as dt
from dtensor import DTensor, Replicate, Shard
from dtensor.base.tracing import _PROGRAM_OBJECTS
from dtensor.debug import CommDebugMode
from dtensor.errors import GatherWarning
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module, replicate

pytestmark = pytest.mark.gloo
Compile = Callable[..., Any]


def _train(model: Any, run: Any, how: Compile | None = None, **options: Any) -> list[Any]:
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
        optimizer.param_groups[0]["lr"] *= 0.9
        losses.append(loss.detach())
    return [*losses, *gradients, *(p.detach() for p in model.parameters())]


def tensor_parallel(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    model = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return _train(model, how(model, fullgraph=True))


def compiled_optimizers(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    found = []
    for options in ({}, {"foreach": False}, {"foreach": True}, {"fused": True}):
        model = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
        found += _train(model, how(model, fullgraph=True), how, **options)
    return found


def compiled_backward(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    model = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    loss = how(model, fullgraph=True)(torch.randn(5, 6)).square().mean()
    with contextlib.nullcontext() if how is _without_compiler else compiled_autograd._enable(torch.compile(backend="eager")):
        loss.backward()
    return [loss, *(p.grad for p in model.parameters())]


def fully_sharded(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    model = fully_shard(Block(), mesh=mesh)
    return _train(model, how(model))


def make_blocks(shard: Callable[..., Any], compiled: Compile | None, **options: Any) -> nn.Sequential:
    """Return blocks that are compiled one by one and then sharded."""
    model = nn.Sequential(Block(), Block())
    for block in model:
        if compiled is not None:
            block.forward = compiled(block.forward, fullgraph=True)
        shard(block, **options)
    return model


def fully_sharded_blocks(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """Compile each block between its hooks, and the full model, whose graph breaks at the hooks."""
    found = []
    for options in ({}, {"reshard_after_forward": False}):
        model = fully_shard(make_blocks(fully_shard, how, mesh=mesh, **options), mesh=mesh)
        found += _train(model, model)
    model = fully_shard(make_blocks(fully_shard, None, mesh=mesh), mesh=mesh)
    return found + _train(model, how(model))


def replicated_blocks(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    model = nn.Sequential(Block(), Block())
    model.forward = how(model.forward, fullgraph=True)
    replicate(model, mesh=mesh)
    return _train(model, model)


def dropout_in_training(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """Train a tensor-parallel model with dropout."""
    model = nn.Sequential(Block(), nn.Dropout(0.25), nn.Linear(6, 6))
    plan = {"0.up": ColwiseParallel(), "0.down": RowwiseParallel(use_local_output=False), "2": ColwiseParallel()}
    parallelize_module(model, mesh, plan)
    return _train(model, how(model, fullgraph=True))


def replicated(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    model = replicate(Block(), mesh=mesh)
    return _train(model, how(model))


def sizes_and_layouts(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    run = how(lambda x: (x @ x.t()).cumsum(0), fullgraph=True)
    laid = [(5, Shard(0)), (6, Shard(0)), (7, Shard(1)), (5, Replicate()), (5, Shard(0))]
    return [run(dt.distribute_tensor(torch.randn(n, 6), mesh, [where])) for n, where in laid]


def marked_sizes(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """Run with sizes marked as dynamic."""
    found = []
    for options in ({"dynamic": True}, {}):
        run = how(lambda x: (x @ x.t()).cumsum(0), fullgraph=True, **options)
        for n, where in ((4, Shard(0)), (6, Shard(0)), (5, Shard(0)), (4, Replicate())):
            x = dt.distribute_tensor(torch.randn(n, 6), mesh, [where])
            if not options:
                torch._dynamo.mark_dynamic(x, 0)
            found.append(run(x))
    return found


def views_of_other_offsets(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """Run on slices of one tensor with several sizes and offsets."""
    found: list[Any] = []
    for where in (Shard(0), Shard(1), Replicate()):
        x = dt.distribute_tensor(torch.randn(9, 6), mesh, [where]).requires_grad_()
        for options in ({"dynamic": True}, {}):
            options = {"recompile_limit": 32, **options}
            run = how(lambda v: (v[1:].exp() + v[:-1]).sum(1), fullgraph=True, **options)
            parts = [*x.split(3), *x.split(4)[1:], x[2:, 1:], *x.t().chunk(2)]
            outs = [run(part) for part in parts if part.shape[0] > 1]
            torch.cat(outs).sum().backward()
            written = [how(lambda v: v.mul_(2), fullgraph=True, **options)(part) for part in x.detach().split(4)]
            found += [*outs, *written, x.grad, x.detach().clone()]
            x.grad = None
    return found


def numbers_that_change(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """Run with symbolic numbers, and compare with plain torch while compiled and afterwards."""
    whole = torch.arange(64.0).view(8, 8)
    x = dt.distribute_tensor(whole, mesh, [Shard(0)])
    for fn in (
        lambda x, n: x.split(n),
        lambda x, n: x.split([n, 8 - n]),
        lambda x, n: x.chunk(n),
        lambda x, n: [x.narrow(0, 1, n), x[n:], x[n], x.topk(n)[0], x.reshape(-1, n, 8) if n != 3 else x, x + n],
    ):
        for run in (how(fn, dynamic=True), fn):
            for n in (2, 3, 4):
                for got, wanted in zip(run(x, n), fn(whole, n), strict=True):
                    torch.testing.assert_close(got.full_tensor(), wanted)
    return []


def equal_meshes(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """Check that one graph serves all equal meshes."""
    counted = CompileCounter()

    @torch.compile(backend=counted, fullgraph=True)
    def run(x: torch.Tensor, own: dt.DeviceMesh, where: Any) -> Any:
        return DTensor.from_local(x, own, [where]).redistribute(placements=[Replicate()])

    for where in (Shard(0), Shard(0), Shard(1), Shard(1)):
        run(torch.ones(2, 2), dt.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), where)
    assert counted.frame_count == 2, counted.frame_count
    return []


def many_sizes(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """Run with more sizes than torch's default recompile limit."""
    run = how(lambda x: (x * 2).sum(0), fullgraph=True, dynamic=True, recompile_limit=16)
    return [run(dt.distribute_tensor(torch.randn(n, 6), mesh, [Shard(0)])) for n in range(12)]


def plain_targets(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    logits = dt.distribute_tensor(torch.randn(5, 7), mesh, [Shard(1)]).requires_grad_()
    loss = how(F.cross_entropy, fullgraph=True)(logits, torch.tensor([0, 1, 2, 3, 6]))
    loss.backward()
    return [loss, logits.grad]


def gradient_of_another_layout(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    x = dt.distribute_tensor(torch.randn(5, 7), mesh, [Shard(0)]).requires_grad_()
    how(lambda x: x * x, fullgraph=True)(x).backward(dt.distribute_tensor(torch.ones(5, 7), mesh, [Shard(1)]))
    return [x.grad]


def backward_of_some_results(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """Run backward from some of several results, also with a plain gradient and from a plain result."""
    found, given = [], torch.randn(5, 7)
    for dims in ((0, 1), (1, 0), (0, 0)):
        x, w = (
            dt.distribute_tensor(torch.randn(size), mesh, [Shard(dim)]).requires_grad_()
            for size, dim in zip(((5, 6), (6, 7)), dims, strict=True)
        )

        def run(x: Any, w: Any) -> Any:
            logits = x @ w
            return logits.square().mean(), logits, logits.t().sin(), logits.full_tensor()

        step = how(run, fullgraph=True)
        for ask in (
            lambda loss, *_: loss.backward(),
            lambda loss, logits, *_: (loss + logits.sum()).backward(),
            lambda loss, logits, turned, whole: (turned.sum() * whole.sum()).backward(),
            lambda loss, logits, *_: logits.backward(given),
        ):
            ask(*step(x, w))
            found += [x.grad.clone(), w.grad.clone()]
    return found


def graph_breaks(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """Run programs with a graph break at a comparison of values, and with a constant used after a break."""
    rows = torch.ones(3 - mesh.get_rank(), 7)
    asked = how(lambda x: DTensor.from_local(x * 2, mesh, [Shard(0)], run_check=True) * 2)(rows)
    made = how(lambda x: x + dt.distribute_tensor(torch.ones(5, 7), mesh, [Shard(0)]))(asked)
    return [asked, made]


def sizes_of_values(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """Run a program with data-dependent sizes, which break the graph."""

    def run(x: Any, w: Any) -> Any:
        chosen = (x @ w)[x[:, 0] > 0]
        return (chosen * 2).cumsum(0).sum() + torch.unique(x.detach().round()).sum() + (x.detach() > 0).nonzero().sum()

    x, w = (dt.distribute_tensor(torch.randn(6, 6), mesh, [Shard(dim)]).requires_grad_() for dim in range(2))
    loss = how(run)(x, w)
    loss.backward()
    return [loss, x.grad, w.grad]


def accumulated_gradients(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """Accumulate gradients of several passes, which must not share memory."""
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


def writes_to_returned_views(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """Write to views that a graph returned, and to their bases."""
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
        found += how(lambda x: x.unbind(0), fullgraph=True)(x)
        both, row = how(lambda x: (lambda z: (z, z[3]))(x * 2), fullgraph=True)(x)
        row.fill_(7)
        found += [both, row * 1]
    return found


def other_modes(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """Call a compiled function in other modes than the one it was compiled in."""
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


def accept_device(*_: Any) -> None:
    """Accept operands of any device, in place of the check of ``flex_attention``."""


def attention_of_scores(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """Compile ``flex_attention`` with captured tensors, plain and distributed, and a mask."""
    results, documents, slopes = [], torch.arange(48).reshape(3, 16) // 9, torch.arange(4.0)
    mask = create_block_mask(lambda b, h, i, j: documents[b, i] == documents[b, j], 3, None, 16, 16, device="cpu", BLOCK_SIZE=4)
    for placement, own in itertools.product(
        (Shard(0), Shard(1), Shard(2)), (slopes, dt.distribute_tensor(slopes, mesh, [Shard(0)]))
    ):
        q, k, v = (dt.distribute_tensor(torch.randn(3, n, 16, 8), mesh, [placement]).requires_grad_() for n in (4, 2, 2))

        def attend(q: Any, k: Any, v: Any, own: Any = own) -> Any:
            return flex_attention(q * 2, k, v, lambda score, b, h, i, j: score * own[h] + b * (i - j), mask, enable_gqa=True) * 2

        with mock.patch.object(flex, "_validate_device", accept_device):  # torch refuses gradients on the CPU
            out = how(attend, fullgraph=True)(q, k, v)
            out.square().sum().backward()
        results += [out, q.grad, k.grad, v.grad]
    return results


def captured_graphs(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """Export forward and joint graphs of DTensor programs with torch's tools."""
    model = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = torch.randn(5, 6)
    graph = dynamo_graph_capture_for_export(model)(x)
    with contextlib.ExitStack() as stack:
        joint = aot_export_joint_with_descriptors(stack, model, (x,)).graph_module
    assert joint.code.count("torch.ops.dtensor.") == 2, joint.code
    return [model(x) if how is _without_compiler else graph(x)]


def order_of_collectives(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """Check that each collective depends on the previous one, so that compilers keep their order."""

    def run(x: Any, y: Any) -> Any:
        return x.cumsum(0) + F.dropout(y.cumsum(1), 0.1) * (x * y).sum()

    given = [dt.distribute_tensor(torch.randn(4, 6), mesh, [Shard(dim)]).requires_grad_() for dim in range(2)]

    def ordered(graph: Any, example: Any) -> Any:
        issued = [node for node in graph.graph.nodes if any("dtensor." in str(arg) for arg in node.args[1:2])]
        assert len(issued) > 1, graph.code
        for one, other in itertools.pairwise(issued):
            assert other.args[-1].args == (one, 1), graph.code
        return make_boxed_func(graph.forward)

    run(*given).sum().backward()
    if how is not _without_compiler:
        compiled = torch.compile(run, backend=aot_autograd(fw_compiler=ordered, bw_compiler=ordered), fullgraph=True)
        compiled(*given).sum().backward()
    return []


def counted_collectives(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """Check that collectives of compiled programs are counted as in eager ones."""
    x = dt.distribute_tensor(torch.randn(4, 6), mesh, [Shard(0)])

    def program(x: Any) -> Any:
        return (x.redistribute(placements=[Shard(1)]) * 2).redistribute(placements=[Replicate()]).sin() + x.sum()

    run = how(program, fullgraph=True)
    run(x)
    seen: list[Any] = []
    with CommDebugMode() as counted:
        run(x)
    seen += [sorted((str(kind), count) for kind, count in counted.get_comm_counts().items()), counted.get_direct_counts()]
    seen.append(sorted((event.kind, event.bytes, event.group_size) for event in counted.events))
    with CommDebugMode() as counted:
        program(x)
    assert seen[0] == sorted((str(kind), count) for kind, count in counted.get_comm_counts().items()), seen
    assert seen[1:] == [{}, sorted((event.kind, event.bytes, event.group_size) for event in counted.events)], seen
    return []


def referenced_objects(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """Check that objects referenced by graphs are stored once."""
    kept = []
    for _ in range(2):
        torch._dynamo.reset()
        run = how(lambda x: F.dropout(x.cumsum(0), 0.1) + torch.rand_like(x), fullgraph=True, dynamic=False)
        for size in (4, 5, 6):
            run(dt.distribute_tensor(torch.randn(size, 6), mesh, [Shard(0)]))
            kept.append(len(_PROGRAM_OBJECTS))
    assert len({*kept}) == 1, kept
    return []


def on_threads(mesh: dt.DeviceMesh, how: Compile) -> list[Any]:
    """Compile and call one function from several threads with several sizes."""
    run, found = how(lambda x: (x.sin() * x.shape[0]).relu(), fullgraph=True), {}
    rows = {size: torch.randn(size // 2, 6) for size in (4, 6, 8)}

    def call(thread: int) -> None:
        for turn in range(6):
            size = 4 + 2 * ((thread + turn) % 3)
            found[thread, turn] = run(DTensor.from_local(rows[size], mesh, [Shard(0)], shape=(size, 6), stride=(6, 1)))

    threads = [threading.Thread(target=call, args=(k,)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[key] for key in itertools.product(range(4), range(6))]


def _without_compiler(fn: Any, **options: Any) -> Any:
    return fn


PROGRAMS = [
    tensor_parallel,
    compiled_backward,
    compiled_optimizers,
    other_modes,
    fully_sharded,
    fully_sharded_blocks,
    replicated,
    replicated_blocks,
    dropout_in_training,
    sizes_and_layouts,
    marked_sizes,
    views_of_other_offsets,
    many_sizes,
    numbers_that_change,
    equal_meshes,
    plain_targets,
    gradient_of_another_layout,
    backward_of_some_results,
    graph_breaks,
    sizes_of_values,
    accumulated_gradients,
    writes_to_returned_views,
    attention_of_scores,
    captured_graphs,
    order_of_collectives,
    counted_collectives,
    referenced_objects,
    on_threads,
]


def run_all_programs() -> None:
    mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    check_first_draw(mesh)
    for program in PROGRAMS:
        torch._dynamo.reset()
        torch.manual_seed(0)
        got = program(mesh, lambda fn, **options: torch.compile(fn, backend="aot_eager", **options))
        torch.manual_seed(0)
        wanted = program(mesh, _without_compiler)
        for one, other in zip(got, wanted, strict=True):
            assert not find_difference(one, other), f"{program.__name__}: {find_difference(one, other)}"


def check_first_draw(mesh: dt.DeviceMesh) -> None:
    x = dt.distribute_tensor(torch.ones(5, 7), mesh, [Shard(0)])
    torch.manual_seed(1 + mesh.get_rank())  # seeds differ between ranks until the first draw
    drawn = torch.compile(F.dropout, backend="aot_eager", fullgraph=True)(x).full_tensor()
    torch.manual_seed(1)
    torch.testing.assert_close(drawn, F.dropout(torch.ones(5, 7)))
    with dt.random_mode("counter"):  # the mode at the call is used
        dt.manual_seed(3)
        one = torch.compile(F.dropout, backend="aot_eager", fullgraph=True)(x).full_tensor()
        dt.manual_seed(3)
        torch.testing.assert_close(one, F.dropout(x).full_tensor())


@pytest.mark.slow
def test_compiled_steps_equal_eager_steps() -> None:
    run_gloo(run_all_programs, 2, timeout_s=280.0)
