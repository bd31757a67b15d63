"""``torch.compile`` of programs with DTensors: the graph breaks at them, and values and gradients are those of one device."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from compare_with_one_device import full_value
from gloo_processes import run_gloo
from torch import nn

import dtensor as dt
from dtensor import DTensor, Replicate, Shard
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module
from dtensor.tensor import compile_protocol
from dtensor.testing.placements import get_or_make_mesh

LINE, SQUARE = get_or_make_mesh((4,)), get_or_make_mesh((2, 2))
X, W = torch.arange(30.0).reshape(5, 6) / 16, torch.arange(42.0).reshape(6, 7) / 64
pytestmark = pytest.mark.filterwarnings("ignore")  # Dynamo tells where the graph breaks

compiled = torch.compile(backend="eager")


def leaf(x: torch.Tensor, *where: Any) -> DTensor:
    mesh = LINE if len(where) == 1 else SQUARE
    return dt.distribute_tensor(x, mesh, where).requires_grad_()


@pytest.mark.parametrize("where", [(Shard(0),), (Shard(1),), (Replicate(),), (Shard(0), Shard(0))], ids=str)
def test_compiled_function_values_and_gradients_equal_plain_torch(where: tuple[Any, ...]) -> None:
    def fn(x: Any, w: Any) -> Any:
        return ((x @ w).relu()[:, 1:] * 2).sum()

    x, w, p, q = leaf(X, *where), leaf(W, *where), X.clone().requires_grad_(), W.clone().requires_grad_()
    out, like = compiled(fn)(x, w), fn(p, q)
    out.backward()
    like.backward()
    torch.testing.assert_close(full_value(out.detach()), like.detach())
    for own, wanted in ((x, p), (w, q)):
        assert own.grad is not None
        assert wanted.grad is not None
        torch.testing.assert_close(full_value(own.grad), wanted.grad)


def test_compiled_to_local_and_from_local_gradients_equal_plain_torch() -> None:
    def fn(x: Any) -> Any:
        y = x.redistribute(placements=[Replicate()]).to_local() * 2
        return DTensor.from_local(y.sin(), LINE, [Replicate()]).redistribute(placements=[Shard(0)]).sum()

    x, p = leaf(X, Shard(1)), X.clone().requires_grad_()
    compiled(fn)(x).backward()
    (p * 2).sin().sum().backward()
    assert p.grad is not None
    torch.testing.assert_close(full_value(x.grad), p.grad)


def _augmented(x: Any, y: Any) -> Any:
    x += y
    x -= 2
    x *= y
    x /= 3
    x **= 2
    x[0] += y[1]
    x[:, 1:] *= 2
    return x


def _operators(x: Any, y: Any) -> Any:
    mask = (x > y) & ~(x == 0) | (y != x) ^ (x <= 1)
    mask &= y < 2
    mask |= x > 1
    return abs(-x) @ y.T + (2**y)[:, :5] % 3 + (1 - x)[:, :5] // 2 + mask[:, :5] + float(x.sum()) + len(x) + (1 / (y + 3))[:, :5]


@pytest.mark.parametrize("fn", [_augmented, _operators])
def test_compiled_in_place_and_binary_operators_equal_plain_torch(fn: Any) -> None:
    for where in ((Shard(0),), (Replicate(),), (Shard(1), Shard(0))):
        x, y = leaf(X, *where).detach(), leaf(X * X, *where).detach()
        torch.testing.assert_close(full_value(compiled(fn)(x, y)), fn(X.clone(), X * X))
    local = leaf(X, Replicate()).detach().to_local()
    torch.testing.assert_close(compiled(fn)(local, local * local).shards[1], fn(X.clone(), X * X))


def test_compile_in_one_process_warns_once_and_fullgraph_raises() -> None:
    compile_protocol._warn_all_ranks_once.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for fn in (lambda x: x * 2, lambda x: x.redistribute(placements=[Replicate()]).to_local()):
            compiled(fn)(leaf(X, Shard(0)))
            torch._dynamo.reset()
            with pytest.raises(Exception, match=r"with all ranks in this process.*Start the program with torchrun"):
                torch.compile(fn, backend="eager", fullgraph=True)(leaf(X, Shard(0)))
    assert sum("with all ranks in this process" in str(w.message) for w in said) == 1


class Perceptron(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())


@pytest.mark.parametrize("how", ["columns and rows", "fully_shard"])
def test_compiled_parallel_modules_equal_plain_module(how: str) -> None:
    torch.manual_seed(0)
    model = Perceptron()
    own = copy.deepcopy(model)
    if how == "fully_shard":
        fully_shard(own.up, mesh=LINE)
        fully_shard(own, mesh=LINE)
    else:
        parallelize_module(own, LINE, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    run = torch.compile(own, backend="eager")
    for _ in range(2):
        out = run(dt.per_rank([X] * 4))
        torch.testing.assert_close(out.shards[3], model(X))
        out.square().sum().backward()
        model(X).square().sum().backward()
    for mine, like in zip(own.parameters(), model.parameters(), strict=True):
        assert mine.grad is not None
        assert like.grad is not None
        torch.testing.assert_close(full_value(mine.grad), like.grad)


def on_processes() -> list[float]:
    """Compare compiled programs with plain torch: a module, to_local and from_local, and uses of a mesh."""
    torch._dynamo.reset()
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = Perceptron()
    own = parallelize_module(copy.deepcopy(model), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    run = torch.compile(own, backend="eager")
    for _ in range(2):
        run(X).square().sum().backward()
        model(X).square().sum().backward()
    for mine, like in zip(own.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(full_value(mine.grad), like.grad)

    def fn(x: Any) -> Any:
        y = x.redistribute(placements=[Replicate(), Replicate()]).to_local() * mesh["dp"].size() * mesh.ndim
        return DTensor.from_local(y.sin(), mesh, [Replicate(), Replicate()]).redistribute(placements=[Shard(0), Shard(1)]).sum()

    x, p = dt.distribute_tensor(X, mesh, [Shard(0), Shard(0)]).requires_grad_(), X.clone().requires_grad_()
    compiled(fn)(x).backward()
    (p * 4).sin().sum().backward()
    assert p.grad is not None
    torch.testing.assert_close(full_value(x.grad), p.grad)
    return [float(compiled(lambda a: a * mesh["tp"].size() * mesh.get_coordinate()[0])(torch.ones(())))]


@pytest.mark.gloo
def test_compiled_programs_equal_plain_torch_on_four_processes() -> None:
    assert run_gloo(on_processes, 4, timeout_s=200.0) == [[0.0], [0.0], [2.0], [2.0]]
