"""Compiled programs equal eager ones on two gloo processes: values, gradients and placements."""

from __future__ import annotations

import functools
import traceback
from dataclasses import replace
from typing import Any

import pytest
import torch
from compile_cases import ALL, LINES, Case
from gloo_processes import run_gloo
from random_programs import random_case
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn import functional as F

import dtensor as dt
from dtensor import DTensor
from dtensor.comm.processes import torch_backends

pytestmark = pytest.mark.gloo
SAMPLE = dict(map(random_case, range(3)))
ALL.update(SAMPLE)
FEW = [
    *LINES,
    *SAMPLE,
    "distribute_tensor_from_one_rank",
    "from_local",
    "from_local_of_replicas",
    "two layers",
    "cumsum",
    "std",
    "dropout",
    "activation checkpointing",
    "columns and rows",
]


def outcome(make: Case, mesh: dt.DeviceMesh, backend: str | None) -> list[Any]:
    """Return the results of two calls, the gradients, and the arguments after the calls."""
    torch.manual_seed(7)
    run, args = make(mesh)
    if isinstance(run, nn.Module):
        leaves = list(run.parameters())
    else:
        args = tuple(arg.detach().clone() for arg in args)
        leaves = [arg for arg in args if arg.is_floating_point() and getattr(run, "__name__", "") != "in_place_of_an_argument"]
        for leaf in leaves:
            leaf.requires_grad_()
    call = run if backend is None else torch.compile(run, backend=backend, fullgraph=True)
    outs = []
    for _ in range(2):
        outs.append(call(*args))
        if outs[-1].requires_grad:
            outs[-1].sin().sum().backward()
        for leaf in leaves:  # gradients of two leaves can share memory, to which the second call would add twice
            leaf.grad = None if leaf.grad is None else leaf.grad.clone()
    return [*outs, *(leaf.grad for leaf in leaves), *args]


def find_difference(one: Any, other: Any) -> str:
    """Return the difference of two results, or ""."""
    if one is None or other is None:
        return "" if one is other else f"{one} against {other}"
    if type(one) is not type(other):
        return f"{type(one)} against {type(other)}"
    if isinstance(one, DTensor) and one.layout != other.layout:
        return f"{one.layout} against {other.layout}"
    whole = [x.full_tensor().detach() if isinstance(x, DTensor) else x.detach() for x in (one, other)]
    try:
        torch.testing.assert_close(*whole, rtol=1e-5, atol=1e-5)
    except AssertionError as error:
        return str(error)
    return ""


def compare_cases(names: list[str], backend: str) -> dict[str, str]:
    """Return the error of each case. Compiled programs run first, to check that plans made while tracing are right afterwards."""
    mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    found = {}
    for name in names:
        torch._dynamo.reset()
        try:
            got, wanted = outcome(ALL[name], mesh, backend), outcome(ALL[name], mesh, None)
            found[name] = "\n".join(filter(None, map(find_difference, got, wanted)))
        except Exception:
            found[name] = traceback.format_exc()
    return found


@functools.cache
def results(backend: str, names: tuple[str, ...]) -> list[dict[str, str]]:
    return run_gloo(compare_cases, 2, list(names), backend, timeout_s=280.0)


@pytest.mark.parametrize("name", FEW)
def test_some_programs_compiled_by_aot_eager_equal_eager(name: str) -> None:
    for rank in results("aot_eager", tuple(FEW)):
        assert not rank[name], rank[name]


def compare_random_programs(seeds: range) -> dict[str, str]:
    made = dict(map(random_case, seeds))
    ALL.update(made)
    return {name: wrong for name, wrong in compare_cases(list(made), "aot_eager").items() if wrong}


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 240, 60))
def test_random_programs_compiled_by_aot_eager_equal_eager(first: int) -> None:
    for rank in run_gloo(compare_random_programs, 2, range(first, first + 60), timeout_s=280.0):
        assert not rank, "\n".join(f"{name}\n{wrong}" for name, wrong in rank.items())


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ALL if name not in FEW])
def test_other_programs_compiled_by_aot_eager_equal_eager(name: str) -> None:
    for rank in results("aot_eager", tuple(name for name in ALL if name not in FEW)):
        assert not rank[name], rank[name]


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_programs_compiled_by_eager_backend_equal_eager(name: str) -> None:
    for rank in results("eager", tuple(FEW)):
        assert not rank[name], rank[name]


def compare_with_backend_collectives(names: list[str]) -> dict[str, str]:
    """Compare with a backend whose own reductions and gathers are used."""
    torch_backends._TRAITS["gloo"] = replace(torch_backends._TRAITS["gloo"], reduces=True)
    return compare_cases(names, "aot_eager")


@pytest.mark.slow
def test_compiled_programs_with_backend_collectives_equal_eager() -> None:
    names = [*FEW, "sequence parallel", "R to P", "P to S0", "S0 to R", "std", "argmax", "cross_entropy over the vocabulary"]
    for rank in run_gloo(compare_with_backend_collectives, 2, names, timeout_s=280.0):
        assert not any(rank.values()), rank


GENERATED = [*FEW, "from_local_of_equal_shards", "sequence parallel", "loss_parallel", "attention"]


@pytest.mark.slow
@pytest.mark.parametrize("name", GENERATED)
def test_programs_compiled_by_inductor_equal_eager(name: str) -> None:
    for rank in results("inductor", tuple(GENERATED)):
        assert not rank[name], rank[name]


def losses_without_classes(backend: str) -> list[str]:
    """Return the errors of losses in which one rank has no classes."""
    mesh = dt.init_device_mesh("cpu", (2,))
    found = []
    for options in ({}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1}):

        def run(x: Any, y: Any, options: Any = options) -> Any:
            return F.cross_entropy(x, y, **options) + F.nll_loss(x, y, reduction="sum")

        def of(call: Any) -> list[Any]:
            x = dt.distribute_tensor(torch.arange(12.0).view(4, 3).sin(), mesh, [dt.Shard(1, sizes=(3, 0))]).requires_grad_()
            y = dt.distribute_tensor(torch.tensor([2, -100, 0, 1]), mesh, [dt.Replicate()])
            loss = call(x, y)
            loss.sum().backward()
            return [loss, x.grad]

        found += filter(None, map(find_difference, of(torch.compile(run, backend=backend, fullgraph=True)), of(run)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager_decomp_partition", "inductor"])  # the former decomposes as generated code does
def test_compiled_losses_on_a_rank_without_classes_equal_eager(backend: str) -> None:
    assert run_gloo(losses_without_classes, 2, backend, timeout_s=280.0) == [[], []]


def count_graphs_of_tensors_in_flight() -> None:
    """Check that tensors in flight need two graphs (with and without requires_grad), and a plain DTensor one more."""
    mesh = dt.init_device_mesh("cpu", (2,))

    def scaled(x: Any) -> Any:
        return x * 2

    def detached(x: Any) -> Any:
        return x.detach() * 2

    def after_a_break(x: Any) -> Any:
        y = x * 1
        torch._dynamo.graph_break()
        return y + x

    for backend in ("eager", "aot_eager"):
        for function, parts in ((scaled, 1), (detached, 1), (after_a_break, 2)):
            torch._dynamo.reset()
            counter = CompileCounterWithBackend(backend)
            compiled = torch.compile(function, backend=counter)
            for step in range(10):
                source = dt.distribute_tensor(torch.arange(15.0).view(5, 3) + step, mesh, [dt.Shard(0)])
                source.requires_grad_(step % 3 == 0)
                x = source.redistribute(placements=[dt.Replicate()], async_op=step < 9)
                assert isinstance(x, dt.AsyncCollectiveTensor) == (step < 9)
                out = compiled(x)
                assert torch.equal(out.full_tensor(), (source * 2).full_tensor())
                if out.requires_grad:
                    out.sum().backward()
                    assert torch.equal(source.grad.full_tensor(), torch.full((5, 3), 2.0))
                if step < 9:
                    x.wait()
                assert type(x) is DTensor
                assert counter.frame_count == parts * (min(step + 1, 2) if step < 9 else 3), (function, backend, step)


def test_compiled_functions_of_tensors_in_flight_share_graphs() -> None:
    run_gloo(count_graphs_of_tensors_in_flight, 2, timeout_s=280.0)
