"""Compiled programs with dynamic sizes on gloo processes: few graphs, and values, gradients and placements of eager programs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from compile_cases import Block
from gloo_processes import run_gloo
from random_programs import STEPS
from test_compiled import find_difference
from torch import nn

import dtensor as dt
from dtensor import DTensor, Partial, Replicate, Shard
from dtensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, loss_parallel, parallelize_module

pytestmark = pytest.mark.gloo
Made = tuple[Any, Callable[[int], torch.Tensor]]
Program = Callable[[dt.DeviceMesh], Made]
FEW = (4, 8, 6, 5)
SIZES = (4, 6, 8, 10, 12, 14, 18, 20, 22, 24, 26, 28, 5, 7, 9, 11, 13, 15, 2, 3, 1, 0)


def random_values(size: int, *others: int) -> torch.Tensor:
    torch.manual_seed(size)
    return torch.randn(size, *others)


def sharded_leaf(mesh: dt.DeviceMesh, size: int, *others: int, dim: int = 0) -> DTensor:
    return dt.distribute_tensor(random_values(size, *others), mesh, [Shard(dim)] * mesh.ndim).requires_grad_()


def plain_leaf(size: int, *others: int) -> torch.Tensor:
    return random_values(size, *others).requires_grad_()


def tensor_parallel(mesh: dt.DeviceMesh) -> Made:
    model = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model, lambda size: plain_leaf(size, 6)


def sequence_parallel(mesh: dt.DeviceMesh) -> Made:
    model = nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
    into = ColwiseParallel(input_layouts=Shard(1))
    parallelize_module(model, mesh, {"0": SequenceParallel(), "1": into, "3": RowwiseParallel(output_layouts=Shard(1))})
    return model, lambda size: sharded_leaf(mesh, size, 2 * size, 6, dim=1)


def batch_size_equal_to_features(mesh: dt.DeviceMesh) -> Made:
    """Return a program whose batch size can equal the number of features."""
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6))
    down = RowwiseParallel(output_layouts=Shard(0), use_local_output=False)
    parallelize_module(model, mesh, {"0": ColwiseParallel(input_layouts=Shard(0)), "2": down})
    return model, lambda size: sharded_leaf(mesh, size, 6)


def batch(mesh: dt.DeviceMesh) -> Made:
    weight = dt.distribute_tensor(torch.arange(42.0).view(6, 7).sin(), mesh, [Replicate()] * mesh.ndim)
    return lambda x: F.relu(x @ weight).softmax(1).sum(0), lambda size: sharded_leaf(mesh, size, 6)


def attention(mesh: dt.DeviceMesh) -> Made:
    def run(x: DTensor) -> DTensor:
        heads = x.view(x.shape[0], x.shape[1], 4, 2).transpose(1, 2)
        return F.scaled_dot_product_attention(heads, heads, heads).transpose(1, 2).reshape(x.shape)

    return run, lambda size: sharded_leaf(mesh, size, size + 3, 8, dim=2)


def loss_over_the_vocabulary(mesh: dt.DeviceMesh) -> Made:
    def run(x: DTensor) -> torch.Tensor:
        targets = dt.ones(x.shape[0], device_mesh=mesh, placements=[Replicate()], dtype=torch.int64)
        with loss_parallel():
            return F.cross_entropy(x * 2, targets)

    return run, lambda size: sharded_leaf(mesh, max(size, 1), 7, dim=1)  # the loss of an empty batch is NaN


def quantiles(mesh: dt.DeviceMesh) -> Made:
    return lambda x: x.quantile(0.3, dim=0), lambda size: sharded_leaf(mesh, max(size, 2), 6)


def argmax_positions(mesh: dt.DeviceMesh) -> Made:
    """Return a program with argmax, whose result depends on the offset of each shard."""
    return lambda x: x * x.detach().argmax() + x.argmin(0) + x.min(0)[1], lambda size: sharded_leaf(mesh, max(size, 1), 6)


def plain_targets(mesh: dt.DeviceMesh) -> Made:
    def run(x: DTensor) -> torch.Tensor:
        targets = torch.ones(x.shape[0], 2, dtype=torch.int64).flatten()
        with loss_parallel():
            return F.cross_entropy((x * 2).flatten(0, 1), targets)

    return run, lambda size: sharded_leaf(mesh, max(size, 1), 2, 7, dim=2)


def norms_of_scattered_rows(mesh: dt.DeviceMesh) -> Made:
    """Return a program in which a symbolic size can equal a size of the weight."""
    weight = dt.distribute_tensor(torch.arange(64.0).view(8, 8).sin(), mesh, [Shard(0)] * mesh.ndim)

    def run(x: DTensor) -> DTensor:
        y = (x @ weight).redistribute(placements=[Shard(1)])
        return F.layer_norm(y * 1, (8,)).redistribute(placements=[Replicate()])

    return run, lambda size: dt.distribute_tensor(random_values(size, 8).unsqueeze(0), mesh, [Shard(2)]).requires_grad_()


def redistributed(mesh: dt.DeviceMesh) -> Made:
    def run(x: DTensor) -> DTensor:
        there = (x * 2).redistribute(placements=[Shard(1)]).sin().redistribute(placements=[Replicate()])
        return there.cos().redistribute(placements=[Partial()]).redistribute(placements=[Shard(0)])

    return run, lambda size: sharded_leaf(mesh, size, 6)


def from_local(mesh: dt.DeviceMesh) -> Made:
    weight = dt.distribute_tensor(torch.arange(42.0).view(6, 7).sin(), mesh, [Shard(1)])
    return lambda x: (DTensor.from_local(x, mesh, [Shard(0)]) @ weight).to_local(), lambda size: plain_leaf(size, 6)


def flattened(mesh: dt.DeviceMesh) -> Made:
    return lambda x: x.reshape(x.shape[0] * 2, 3).view(-1) * x.shape[0], lambda size: sharded_leaf(mesh, 2 * size, 6)


def drawn(mesh: dt.DeviceMesh) -> Made:
    return lambda x: F.dropout(x, 0.5) + torch.rand_like(x) * torch.bernoulli(x.sigmoid()), lambda size: sharded_leaf(
        mesh, size, 6
    )


def distributed_plain_tensor(mesh: dt.DeviceMesh) -> Made:
    return lambda x: dt.distribute_tensor(x.detach() * 2, mesh, [Shard(0)]).sum(1) + x.sum(1).mean(), lambda size: plain_leaf(
        size, 6
    )


PROGRAMS: dict[Program, int] = {  # and the largest number of graphs: for even and odd sizes, and for 3, 2, 1 and 0
    tensor_parallel: 7,
    sequence_parallel: 6,
    batch_size_equal_to_features: 7,
    batch: 6,
    attention: 4,
    redistributed: 6,
    from_local: 5,
    flattened: 4,
    drawn: 6,
    distributed_plain_tensor: 6,
    loss_over_the_vocabulary: 5,
    plain_targets: 5,
    quantiles: 7,
    argmax_positions: 9,
    norms_of_scattered_rows: 7,
}


def data_and_tensor_parallel(mesh: dt.DeviceMesh) -> Made:
    torch.manual_seed(3)
    placed = [(6, 8, [Replicate(), Shard(1)]), (8, 6, [Replicate(), Shard(0)])]
    up, down = [dt.distribute_tensor(random_values(a, b), mesh, where).requires_grad_() for a, b, where in placed]

    def run(x: DTensor) -> DTensor:
        return F.dropout(F.gelu(x @ up) @ down, 0.2).redistribute(placements=[Shard(0), Replicate()]).softmax(1)

    def make(size: int) -> DTensor:
        return dt.distribute_tensor(random_values(size, 6), mesh, [Shard(0), Replicate()]).requires_grad_()

    return run, make


def sharded_on_both_mesh_dims(mesh: dt.DeviceMesh) -> Made:
    run = lambda x: (x.sin() @ x.t()).redistribute(placements=[Shard(1), Shard(0)]).sum(1)  # noqa: E731
    return run, lambda size: sharded_leaf(mesh, size, 6)


def outcomes(run: Any, make: Callable[[int], torch.Tensor], parameters: list[Any], sizes: Sequence[int]) -> list[Any]:
    found = []
    for size in sizes:
        x = make(size)
        out = run(x)
        out.sin().sum().backward()
        found += [out, x.grad, *(p.grad for p in parameters)]
        for p in parameters:
            p.grad = None
    return found


def counting(backend: str) -> tuple[list[None], Callable[[Any, Any], Any]]:
    graphs: list[None] = []

    def counted(graph: Any, example: Any) -> Any:
        graphs.append(None)
        return graph if backend == "eager" else torch._dynamo.lookup_backend(backend)(graph, example)

    return graphs, counted


def find_error(program: Program, mesh: dt.DeviceMesh, most: int, dynamic: bool | None, backend: str, sizes: Sequence[int]) -> str:
    torch._dynamo.reset()
    torch.manual_seed(0)
    run, make = program(mesh)
    parameters = list(run.parameters()) if isinstance(run, nn.Module) else []
    graphs, counted = counting(backend)
    got = outcomes(
        torch.compile(run, backend=counted, fullgraph=True, dynamic=dynamic, recompile_limit=16), make, parameters, sizes
    )
    wanted = outcomes(run, make, parameters, sizes)
    differ = "; ".join(filter(None, map(find_difference, got, wanted)))
    if differ or len(graphs) > most + (dynamic is None):
        return f"{program.__name__}: {len(graphs)} graphs; {differ[:300]}"
    return ""


def compare_programs(
    programs: dict[Program, int], shape: tuple[int, ...], dynamic: bool | None, backend: str, sizes: Any
) -> list[str]:
    mesh = dt.init_device_mesh("cpu", shape)
    return [wrong for program, most in programs.items() if (wrong := find_error(program, mesh, most, dynamic, backend, sizes))]


def test_four_sizes_compile_to_two_to_four_graphs_that_equal_eager() -> None:
    few: dict[Program, int] = {batch_size_equal_to_features: 3, batch: 2, drawn: 2, tensor_parallel: 4}
    assert run_gloo(compare_programs, 2, few, (2,), True, "aot_eager", FEW, timeout_s=120.0) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("dynamic", [True, None])
def test_many_sizes_compile_to_few_graphs_that_equal_eager(dynamic: bool | None) -> None:
    assert run_gloo(compare_programs, 2, PROGRAMS, (2,), dynamic, "aot_eager", SIZES, timeout_s=280.0) == [[], []]


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_four_sizes_compiled_by_eager_backend_and_inductor_equal_eager(backend: str) -> None:
    few: dict[Program, int] = dict.fromkeys((batch_size_equal_to_features, batch, drawn, flattened, redistributed), 4)
    assert run_gloo(compare_programs, 2, few, (2,), True, backend, FEW, timeout_s=280.0) == [[], []]


@pytest.mark.slow
def test_many_sizes_compile_to_few_graphs_that_equal_eager_on_a_2d_mesh() -> None:
    both: dict[Program, int] = {data_and_tensor_parallel: 13, sharded_on_both_mesh_dims: 14}
    assert run_gloo(compare_programs, 4, both, (2, 2), True, "aot_eager", SIZES, timeout_s=280.0) == [[]] * 4


@pytest.mark.slow
def test_dynamic_sizes_compile_to_few_graphs_on_three_processes() -> None:
    few: dict[Program, int] = dict.fromkeys((batch, redistributed, drawn, batch_size_equal_to_features), 7)
    assert run_gloo(compare_programs, 3, few, (3,), True, "aot_eager", (6, 9, 12, 7, 8, 4, 2), timeout_s=280.0) == [[]] * 3


def compare_inductor(names: Sequence[str], sizes: Sequence[int], records: bool) -> list[str]:
    """Return the errors of a random program compiled by inductor for any size."""
    mesh = dt.init_device_mesh("cpu", (2,))

    def run(x: Any, y: Any) -> Any:
        for name in names:
            x, y = STEPS[name](x, y), x
        return x

    def of(call: Any) -> list[Any]:
        found = []
        for size in sizes:
            given = [sharded_leaf(mesh, size, 6, dim=dim) for dim in (1, 0)]
            with torch.set_grad_enabled(records):
                found.append(call(*given))
            if records:
                found.pop().sin().sum().backward()
                found += [x.grad for x in given]
        return found

    compiled = torch.compile(run, backend="inductor", fullgraph=True, dynamic=True)
    return list(filter(None, map(find_difference, of(compiled), of(run))))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("names", "sizes", "records"),
    [
        (("clamped", "minus mean", "cumsum of rows", "norms"), (8, 5), True),
        (("transpose in place", "shift down by pad"), (5,), False),
    ],
)
def test_programs_of_uneven_shards_compiled_by_inductor_equal_eager(
    names: Sequence[str], sizes: Sequence[int], records: bool
) -> None:
    """Check collectives of buffers whose strides the compiler chooses."""
    assert run_gloo(compare_inductor, 2, names, sizes, records, timeout_s=280.0) == [[], []]


def compare_written_arguments(backend: str, sizes: Sequence[int]) -> list[str]:
    """Return the errors of programs that write to arguments that require grad."""
    mesh = dt.init_device_mesh("cpu", (2,))

    def both(x: Any, y: Any) -> Any:
        x.t()[1:].mul_(0.5)
        y[:1].add_(x.detach()[1:2])
        return (x * x.full_tensor().mean().detach()) @ (y.t() @ x).sin()

    def one(x: Any, y: Any) -> Any:  # sizes of the other argument stay symbolic
        x.mul_(2)
        return (x @ y.t()).tanh() @ y

    def of(call: Any) -> list[Any]:
        found = []
        for size in sizes:
            leaves = [sharded_leaf(mesh, size, 6, dim=dim) for dim in (1, 0)]
            given = [x * 1 for x in leaves]
            call(*given).sin().sum().backward()
            found += [x.grad for x in leaves] + given
        return found

    found = []
    for run in (both, one):
        compiled = torch.compile(run, backend=backend, fullgraph=True, dynamic=None if run is both else True)
        found += filter(None, map(find_difference, of(compiled), of(run)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_writes_to_arguments_of_dynamic_sizes_equal_eager(backend: str) -> None:
    assert run_gloo(compare_written_arguments, 2, backend, (4, 6, 5, 7), timeout_s=280.0) == [[], []]
