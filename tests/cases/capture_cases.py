"""Capture cases: programs to capture; each takes a mesh and returns a function, its arguments at each call and its parameters."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from case_lists import CaseList
from torch import nn
from torch.nn import functional as F
from torch.utils import _pytree as pytree

import dtensor as dt
from dtensor import DTensor, Replicate, Shard
from dtensor.capture import Captured, capture
from dtensor.debug import CommDebugMode

WHOLE = (Replicate(),)
Program = tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]], list[Any]]
Build = Callable[[], Program]
CASES = CaseList()
case = CASES.case


def mesh_of(*shape: int) -> dt.DeviceMesh:
    return dt.init_device_mesh("cpu", shape, ("dp", "tp")[-len(shape) :])


def shard_last_mesh_dim(mesh: Any, at: Any) -> list[Any]:
    """Return placements with ``at`` on the last mesh dim; on a 2-D mesh the first mesh dim shards tensor dim 0."""
    return [*([Shard(0)] * (mesh.ndim - 1)), at]


def make_parameter(mesh: Any, *size: int, at: Any) -> DTensor:
    """Return a random parameter with placement ``at`` on the last mesh dim, replicated on the others."""
    return randn(*size, on=mesh, at=[*([Replicate()] * (mesh.ndim - 1)), at], grad=True)


def randn(*size: int, on: Any, at: Any = WHOLE, grad: bool = False, dtype: Any = None) -> DTensor:
    x = dt.randn(*size, device_mesh=on, placements=list(at), dtype=dtype)
    return x.requires_grad_() if grad else x


def _get_value_type(x: Any) -> type:
    """Return the type of a value, treating remote views, which are computed when read, as ordinary tensors."""
    return DTensor if isinstance(x, DTensor) else type(x)


def assert_bitwise_equal(a: Any, b: Any) -> None:
    """Assert that two values are equal bit for bit on every rank, with equal types and layouts."""
    a_leaves, a_tree = pytree.tree_flatten(a)
    b_leaves, b_tree = pytree.tree_flatten(b)
    assert a_tree == b_tree
    for x, y in zip(a_leaves, b_leaves, strict=True):
        assert _get_value_type(x) is _get_value_type(y), (type(x), type(y))
        if isinstance(x, DTensor):
            assert x._layout is y._layout
            assert x.requires_grad == y.requires_grad
            x, y = x._local, y._local
        if isinstance(x, torch.Tensor):
            for mine, its in zip(getattr(x, "shards", (x,)), getattr(y, "shards", (y,)), strict=True):
                assert mine.shape == its.shape
                assert mine.stride() == its.stride() or mine.numel() < 2
                assert mine.dtype == its.dtype
                assert torch.equal(torch.isnan(mine), torch.isnan(its))
                assert torch.equal(torch.nan_to_num(mine.detach()), torch.nan_to_num(its.detach()))
        else:
            assert x == y


def compare_with_captured(
    build: Build, calls: int = 3, *, backward: bool = True, step: bool = True, around: Any = nullcontext
) -> Captured[Any, Any]:
    """Train a program twice, captured and not, and assert equal results. ``build`` returns a function, its arguments at each
    call, and its parameters.
    """
    torch.manual_seed(0)
    fn, arguments, parameters = build()
    torch.manual_seed(0)
    same_fn, same_arguments, same_parameters = build()
    captured = capture(same_fn)
    state = torch.get_rng_state()
    for i in range(calls):
        trails = []
        states = []
        for run, args_of, params in ((fn, arguments, parameters), (captured, same_arguments, same_parameters)):
            torch.set_rng_state(state)
            args = args_of(i)
            with CommDebugMode() as comm:
                with around():
                    out = run(*args)
                results = [x for x in pytree.tree_leaves(out) if isinstance(x, torch.Tensor) and x.requires_grad]
                if backward and results:
                    sum((x * x).sum() for x in results).backward()
            inputs = [x for x in pytree.tree_leaves(args) if isinstance(x, torch.Tensor)]
            trails.append((out, [x.grad for x in params], inputs, [x.grad for x in inputs if x.is_leaf], list(params)))
            states.append((torch.get_rng_state(), comm))
        assert_bitwise_equal(trails[0], trails[1])
        assert torch.equal(states[0][0], states[1][0]), "the generator"
        assert states[1][1].get_total_counts() <= states[0][1].get_total_counts()
        assert sum(states[1][1].get_comm_bytes().values()) <= sum(states[0][1].get_comm_bytes().values())
        state = states[0][0]
        if step:
            with torch.no_grad():
                for params in (parameters, same_parameters):
                    for x in params:
                        if x.grad is not None:
                            x.sub_(x.grad, alpha=0.01)
                            x.grad = None
    assert captured.cache_info().replayed >= calls - 2, captured.cache_info()
    return captured


# --- programs ----------------------------------------------------------------------------------------------------------
@case
def mlp(mesh: Any) -> Program:
    w1, w2 = make_parameter(mesh, 6, 8, at=Shard(1)), make_parameter(mesh, 8, 6, at=Shard(0))
    return (
        (lambda x: F.gelu(x @ w1) @ w2),
        (lambda i: (randn(5, 6, on=mesh, at=shard_last_mesh_dim(mesh, Replicate())),)),
        [w1, w2],
    )


@case
def uneven_and_empty_shards(mesh: Any) -> Program:
    w = make_parameter(mesh, 7, 5, at=Shard(0))
    at = [Shard(0)] * mesh.ndim
    return (lambda x: torch.softmax(x @ w, -1).cumsum(0)), (lambda i: (randn(3, 7, on=mesh, at=at),)), [w]


@case
def losses_over_a_sharded_vocabulary(mesh: Any) -> Program:
    head = make_parameter(mesh, 6, 11, at=Shard(1))

    def arguments(i: int) -> Any:
        labels = dt.distribute_tensor(torch.randint(0, 11, (5,)), mesh, shard_last_mesh_dim(mesh, Replicate()))
        return randn(5, 6, on=mesh, at=shard_last_mesh_dim(mesh, Replicate()), grad=True), labels

    return (lambda x, labels: F.cross_entropy(x @ head, labels)), arguments, [head]


class Block(nn.Module):
    """A transformer block with attention and RMS norms."""

    def __init__(self, size: int, heads: int, mesh: Any, p: float = 0.0) -> None:
        super().__init__()
        self.heads, self.p = heads, p
        self.norms = nn.ParameterList([nn.Parameter(torch.ones(size)) for _ in range(2)])
        self.qkv, self.out = nn.Linear(size, 3 * size, bias=False), nn.Linear(size, size, bias=False)
        self.up, self.down = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        for name, at in {"qkv": Shard(0), "out": Shard(1), "up": Shard(0), "down": Shard(1)}.items():
            linear = getattr(self, name)
            for key, parameter in list(linear.named_parameters()):
                linear.register_parameter(
                    key, self._placed(parameter, mesh, at if key == "weight" or at.dim == 0 else Replicate())
                )
        for i, norm in enumerate(self.norms):
            self.norms[i] = self._placed(norm, mesh, Replicate())

    @staticmethod
    def _placed(parameter: Any, mesh: Any, at: Any) -> nn.Parameter:
        return nn.Parameter(dt.distribute_tensor(parameter.detach(), mesh, [Replicate()] * (mesh.ndim - 1) + [at]))

    def forward(self, x: Any) -> Any:
        batch, length, size = x.shape
        h = F.rms_norm(x, (size,), self.norms[0])
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(h).view(batch, length, 3, size).unbind(2)
        )
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(batch, length, size)
        x = x + F.dropout(self.out(h), self.p, self.training)
        return x + self.down(F.silu(self.up(F.rms_norm(x, (size,), self.norms[1]))))


@case
def transformer_block(mesh: Any) -> Program:
    block = Block(8, 2, mesh, p=0.1)
    head = make_parameter(mesh, 8, 11, at=Shard(1))

    def loss(x: Any, labels: Any) -> Any:
        return F.cross_entropy((block(x) @ head).flatten(0, 1), labels.flatten())

    def arguments(i: int) -> Any:
        labels = dt.distribute_tensor(torch.randint(0, 11, (2, 5)), mesh, shard_last_mesh_dim(mesh, Replicate()))
        return randn(2, 5, 8, on=mesh, at=shard_last_mesh_dim(mesh, Replicate()), grad=True), labels

    return loss, arguments, [*block.parameters(), head]


@case
def parameters_gathered_where_they_are_used(mesh: Any) -> Program:
    ws = [randn(6, 6, on=mesh, at=[Shard(0)] * mesh.ndim, grad=True) for _ in range(2)]

    def fn(x: Any) -> Any:
        for w in ws:
            x = torch.tanh(x @ w.redistribute(placements=[Replicate()] * mesh.ndim))
        return x

    return fn, (lambda i: (randn(4, 6, on=mesh, at=[Shard(0)] * mesh.ndim),)), ws


@case
def dropout_rand_like_and_bernoulli(mesh: Any) -> Program:
    w = make_parameter(mesh, 6, 6, at=Shard(0))

    def fn(x: Any) -> Any:
        x = F.dropout(x @ w, 0.4) + torch.rand_like(x)
        return x * torch.bernoulli(torch.sigmoid(x.detach()))

    return fn, (lambda i: (randn(4, 6, on=mesh, at=shard_last_mesh_dim(mesh, Shard(1))),)), [w]


@case
def batch_norm(mesh: Any) -> Program:
    norm = dt.distribute_module(nn.BatchNorm1d(6), mesh)
    return norm, (lambda i: (randn(5, 6, on=mesh, at=[Shard(0)] * mesh.ndim),)), [*norm.parameters(), *norm.buffers()]


@case
def gradients_of_inputs_that_are_not_leaves(mesh: Any) -> Program:
    w = make_parameter(mesh, 6, 6, at=Shard(1))
    return (
        (lambda x: (x @ w, x * 2)),
        (lambda i: (randn(4, 6, on=mesh, at=shard_last_mesh_dim(mesh, Replicate()), grad=True) * 3,)),
        [w],
    )


@case
def nested_containers_and_keywords(mesh: Any) -> Program:
    w = make_parameter(mesh, 6, 6, at=Shard(1))

    def fn(batch: Any, *, scale: float, flags: Any = ()) -> Any:
        y = batch["x"] @ w
        return {"y": y, "parts": [y * scale, (y.detach(), 3)], "none": None, "x": batch["x"]}

    def arguments(i: int) -> Any:
        return ({"x": randn(4, 6, on=mesh, at=shard_last_mesh_dim(mesh, Replicate())), "more": [1]},)

    return (lambda batch: fn(batch, scale=2.0, flags=("a",))), arguments, [w]


@case
def asynchronous_redistribution(mesh: Any) -> Program:
    w = make_parameter(mesh, 6, 6, at=Shard(1))

    def fn(x: Any) -> Any:
        a = x.redistribute(placements=[Replicate()] * mesh.ndim, async_op=True)
        return a + 1, torch.tanh(x) @ w

    return fn, (lambda i: (randn(5, 6, on=mesh, at=shard_last_mesh_dim(mesh, Shard(0))),)), [w]


@case
def local_tensors_without_a_global_shape(mesh: Any) -> Program:
    w = make_parameter(mesh, 6, 6, at=Shard(1))

    def fn(x: Any) -> Any:
        return (
            DTensor.from_local(x.to_local() * 2, mesh, shard_last_mesh_dim(mesh, Replicate()) if mesh.ndim > 1 else [Shard(0)])
            @ w
        )

    return (
        fn,
        (lambda i: (randn(5, 6, on=mesh, at=shard_last_mesh_dim(mesh, Replicate()) if mesh.ndim > 1 else [Shard(0)]),)),
        [w],
    )


def main() -> list[str]:
    """Run every case on a 1-D and on a 2-D mesh of the processes."""
    for mesh in (mesh_of(4), mesh_of(2, 2)):
        for build in CASES.values():
            compare_with_captured(lambda build=build, mesh=mesh: build(mesh))
    return list(CASES)
