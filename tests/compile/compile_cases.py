"""Compile cases: programs for ``torch.compile(fullgraph=True)`` that are compared with their eager results. A case gives a
function (or a module) and its arguments, made anew for each run on two gloo processes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtensor as dt
from dtensor import DeviceMesh, DTensor, Partial, Placement, Replicate, Shard
from dtensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

Made = tuple[Callable[..., Any], tuple[Any, ...]]
Case = Callable[[DeviceMesh], Made]
CASES: dict[str, Case] = {}
Where = Sequence[Placement]
S0, S1, R, P = [Shard(0)], [Shard(1)], [Replicate()], [Partial()]


def case(fn: Case) -> Case:
    CASES[fn.__name__] = fn
    return fn


def function_case(fn: Callable[..., Any], *given: tuple[tuple[int, ...] | torch.Tensor, Where]) -> Case:
    """Return a case that calls ``fn`` on random or given tensors with these placements."""

    def make(mesh: DeviceMesh) -> Made:
        values = [value if isinstance(value, torch.Tensor) else torch.randn(value) for value, _ in given]
        laid = [dt.distribute_tensor(x, mesh, where) for x, (_, where) in zip(values, given, strict=True)]
        return fn, tuple(laid)

    return make


# --- short programs -----------------------------------------------------------------------------------------------------
LINES: dict[str, Case] = {
    "matmul": function_case(lambda x, w: x @ w, ((5, 6), S0), ((6, 7), S1)),
    "shape": function_case(lambda x: x * x.shape[0] + len(x), ((5, 6), S0)),
    "placements": function_case(
        lambda x: x * 2 if x.placements == (Shard(0),) and (x * 2).placements[0].is_shard(0) else x, ((5, 6), S0)
    ),
    "redistribute by name": function_case(lambda x: (x * 2).redistribute({"tp": Replicate()}) + 1, ((5, 6), S0)),
    "redistribute by text": function_case(
        lambda x: (x * 2).redistribute("tp=S(1)").redistribute(placements="R") + 1, ((5, 6), S0)
    ),
    "redistribute by partition": function_case(lambda x: (x * 2).redistribute(dt.partition(None, "tp")).sin(), ((5, 6), S0)),
    "redistribute by list": function_case(lambda x: (x * 2).redistribute([Shard(1)]).sin(), ((5, 6), S0)),
    "mesh facts": function_case(
        lambda x: (
            x * x.device_mesh.size() * (x + 1).device_mesh.shape[0] * (x.device_mesh.get_local_rank() < 9) + x.device_mesh.ndim
        ),
        ((5, 6), S0),
    ),
    "redistribute": function_case(lambda x: x.redistribute(placements=[Shard(1)]), ((5, 6), S0)),
    "redistribute later": function_case(lambda x: (x * 2).redistribute(placements=R, async_op=True) * 2, ((5, 6), S0)),
    "to_local": function_case(lambda x: x.to_local().sin(), ((5, 6), S0)),
    "full_tensor": function_case(lambda x: x.full_tensor().sin(), ((5, 6), S0)),
    "sum of all": function_case(lambda x: x.sum(), ((5, 6), S0)),
    "number of a value": function_case(lambda x: x * x.detach().sum().item() + float(x.detach().amax()), ((5, 6), S0)),
    "plain number": function_case(lambda x: x * torch.tensor(3.0), ((5, 6), S0)),
}


@case
def captured_mesh(mesh: DeviceMesh) -> Made:
    part = mesh["tp"]
    return function_case(lambda x: (x * mesh.size() * part.size()).redistribute(part, [Replicate()]), ((5, 6), S0))(mesh)


@case
def from_local(mesh: DeviceMesh) -> Made:
    rows = 3 if mesh.get_local_rank() == 0 else 2
    return (lambda a: DTensor.from_local(a * 2, mesh, [Shard(0)], shape=(5, 6)).sum(0), (torch.randn(5, 6)[:rows],))


@case
def from_local_of_replicas(mesh: DeviceMesh) -> Made:
    return (lambda a: DTensor.from_local(a * 2, mesh, [Replicate()]).redistribute(placements=S1).sin(), (torch.randn(5, 6),))


@case
def from_local_of_equal_shards(mesh: DeviceMesh) -> Made:
    return (lambda a: DTensor.from_local((a * 2).t(), mesh, [Shard(0)]).sum(0), (torch.randn(3, 6),))


@case
def to_local_and_from_local(mesh: DeviceMesh) -> Made:
    return function_case(lambda x: DTensor.from_local(x.to_local().sin(), x.device_mesh, x.placements) * 2, ((4, 6), S0))(mesh)


@case
def from_local_by_name(mesh: DeviceMesh) -> Made:
    rows = 3 if mesh.get_local_rank() == 0 else 2

    def run(a: Any) -> Any:
        named = DTensor.from_local(a * 2, mesh, {"tp": Shard(0)}, shape=(5, 6))
        as_text = DTensor.from_local(a, mesh, "tp=S(0)", shape=(5, 6))
        made = dt.ones(5, 6, device_mesh=mesh, placements=dt.partition("tp"))
        laid = [dt.distribute_tensor(made.full_tensor().detach(), mesh, form) for form in ({"tp": Shard(0)}, "R", dt.partition())]
        return named + as_text + made + laid[0] + laid[1] + laid[2]

    return run, (torch.randn(5, 6)[:rows],)


@case
def from_local_by_name_without_shape(mesh: DeviceMesh) -> Made:
    return (lambda a: DTensor.from_local(a * 2, mesh, {"tp": Shard(0)}).sum(0), (torch.randn(3, 6),))


@case
def local_map_by_name(mesh: DeviceMesh) -> Made:
    def run(x: Any) -> Any:
        y = dt.local_map(torch.sin, {"tp": Shard(0)}, ({"tp": Shard(0)},), device_mesh=mesh)(x)
        z = dt.local_map(torch.sin, "tp=S(0)", ("tp=S(0)",), device_mesh=mesh)(y)
        return dt.local_map(torch.sin, dt.partition("tp"), (dt.partition("tp"),), device_mesh=mesh)(z)

    return function_case(run, ((4, 6), S0))(mesh)


@case
def groups_of_a_mesh(mesh: DeviceMesh) -> Made:
    def run(x: Any) -> Any:
        mine, named = x.device_mesh.get_group(), mesh["tp"].get_group("tp")
        reduced = funcol.all_reduce(x._local_tensor * 1.0, "sum", mesh.get_group(0))
        return x * (mine.size() + torch.distributed.get_world_size(named)) + reduced.sum() + len(mesh.get_all_groups())

    return function_case(run, ((4, 6), S0))(mesh)


@case
def functional_collectives_with_mesh(mesh: DeviceMesh) -> Made:
    def run(x: Any) -> Any:
        piece, own = x.detach().to_local() * 1.0, (x * 1.0).device_mesh
        summed = funcol.all_reduce(piece, "sum", mesh) + funcol.all_reduce(piece, "max", (own, 0))
        parts = funcol.reduce_scatter_single(funcol.all_gather_single(piece, 0, mesh["tp"]), "sum", 0, (x.device_mesh, 0))
        mine = summed + parts + funcol.all_to_all_single(piece, [1, 1], [1, 1], own)
        return x * funcol.all_reduce(mine, "sum", mesh).sum()  # a plain scalar next to a DTensor is equal on all ranks

    return function_case(run, ((4, 6), S0))(mesh)


@case
def attributes_of_meshes_and_specs(mesh: DeviceMesh) -> Made:
    def run(x: Any, where: DeviceMesh) -> Any:
        facts = where.mesh[1] + mesh.mesh.sum() + x.device_mesh.mesh.numel() + (x * 2).device_mesh.mesh[0] + len(mesh["tp"].shape)
        given, made = x._spec.tensor_meta, (x * 2)._spec.tensor_meta
        sizes = given.shape[0] + given.stride[0] + made.shape[1] + made.dtype.itemsize + x._spec.device_mesh.size("tp")
        return x * facts * sizes * (mesh.get_coordinate() + (3,))[-1]

    make = function_case(run, ((4, 6), S0))
    return lambda x: run(x, mesh), make(mesh)[1]


@case
def factories(mesh: DeviceMesh) -> Made:
    def run(x: Any) -> Any:
        options: dict[str, Any] = {"device_mesh": mesh, "placements": S0}
        drawn = dt.rand(5, 6, **options) + dt.randn((5, 6), **options)
        drawn = drawn + dt.linspace(0, 1, 5, **options).unsqueeze(1)
        return x * dt.ones(5, 6, **options) + dt.zeros(5, 6, **options) + dt.full((5, 6), 2.0, **options) + drawn

    return function_case(run, ((5, 6), S0))(mesh)


@case
def distribute_tensor_of_equal_values(mesh: DeviceMesh) -> Made:
    return (lambda a: dt.distribute_tensor(a.detach() * 2, mesh, S0, src_data_rank=None).sum(0), (torch.randn(5, 6),))


@case
def distribute_tensor_from_one_rank(mesh: DeviceMesh) -> Made:
    mine = torch.randn(5, 6) + mesh.get_local_rank()  # values of other ranks are ignored
    cut = [[Shard(0)], [Shard(1)], [Replicate()], [Partial()], [Shard(0, sizes=(5, 0))]]

    def run(a: torch.Tensor) -> Any:
        laid = [dt.distribute_tensor(a.detach() * k, mesh, placements) for k, placements in enumerate(cut, 1)]
        return sum(x.redistribute(placements=R) for x in laid) + dt.distribute_tensor(a.detach(), mesh, S0, src_data_rank=1)

    return run, (mine,)


@case
def distribute_tensor_that_requires_grad(mesh: DeviceMesh) -> Made:
    """Check that the result is a leaf: no gradient flows to the source tensor."""

    def run(a: torch.Tensor, x: Any) -> Any:
        with torch.no_grad():
            first = dt.distribute_tensor(a, mesh, S0)
        made = dt.distribute_tensor(a, mesh, S0)
        return made * x * (first.requires_grad + made.requires_grad)

    return run, (torch.randn(5, 6), dt.distribute_tensor(torch.randn(5, 6), mesh, S0))


@case
def local_map_(mesh: DeviceMesh) -> Made:
    return function_case(lambda x: dt.local_map(torch.sin, S0, (S0,), device_mesh=mesh)(x) * 2, ((4, 6), S0))(mesh)


# --- mathematics ----------------------------------------------------------------------------------------------------------
def in_place(x: Any, y: Any) -> Any:
    z = x * 1
    z += y
    z.mul_(2)
    z[0] += y[1]
    z[:, 1:] *= 2
    z.t_()
    return z


def in_place_of_an_argument(x: Any, y: Any) -> Any:
    x += y
    x.mul_(2)
    return x * 1


def under_autocast(x: Any, w: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return (x @ w).float().sum(0)


def checkpointed(x: Any, w: Any) -> Any:
    return checkpoint(lambda x, w: torch.sin(x @ w), x, w, use_reentrant=False).sum()


def loss_in_parallel(x: Any, t: Any) -> Any:
    with loss_parallel():
        return F.cross_entropy(x, t)


TARGETS = torch.tensor([0, 3, 6, 1, 2])
HEADS = ((2, 4, 5, 8), S1)
MATHS: dict[str, Case] = {
    "two layers": function_case(lambda x, w, b: ((x @ w + b).relu()[:, 1:] * 2).sum(), ((5, 6), S0), ((6, 7), S1), ((7,), S0)),
    "contraction": function_case(lambda x, w: (x @ w).softmax(-1).sum(), ((5, 6), S1), ((6, 7), S0)),
    "softmax over a sharded dim": function_case(lambda x: (x.softmax(1) * x).sum(1), ((5, 6), S1)),
    "layer_norm over a sharded dim": function_case(lambda x: F.layer_norm(x, (6,)), ((5, 6), S1)),
    "cross_entropy over the vocabulary": function_case(F.cross_entropy, ((5, 7), S1), (TARGETS, R)),
    "cross_entropy of a batch": function_case(F.cross_entropy, ((5, 7), S0), (TARGETS, S0)),
    "loss_parallel": function_case(loss_in_parallel, ((5, 7), S1), (TARGETS, R)),
    "embedding": function_case(lambda t, w: F.embedding(t, w).sum(), (TARGETS, R), ((7, 4), S0)),
    "attention": function_case(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True), HEADS, HEADS, HEADS),
    "cumsum": function_case(lambda x: x.cumsum(0), ((5, 6), S0)),  # the first rank does not use the values that it receives
    "interpolation": function_case(
        lambda x: F.interpolate(F.softshrink(x), scale_factor=2.0, mode="bilinear"), ((2, 3, 4, 5), S1)
    ),
    "std": function_case(lambda x: x.std(0) + x.mean(), ((5, 6), S0)),  # ranks can save different values for backward
    "sort": function_case(lambda x: x.sort(0)[0] * 2, ((5, 6), S0)),
    "argmax": function_case(lambda x: x.argmax(0) + (x > 0).sum(0), ((5, 6), S0)),
    "where": function_case(lambda x: torch.where(x > 0, x, x.mean(0)).masked_fill(x > 1, 0), ((5, 6), S0)),
    "made in the graph": function_case(
        lambda x: x * torch.ones_like(x) + torch.zeros_like(x).fill_(3) + x.new_full((5, 6), 2.0), ((5, 6), S0)
    ),
    "empty shards": function_case(lambda x: (x * 2).cumsum(0).sum(0) + x.amax(0), ((1, 6), S0)),
    "no elements": function_case(lambda x: (x * 2).sum(0), ((0, 6), S0)),
    "views": function_case(lambda x: (x.reshape(-1)[3:].view(9, 3).t() @ x[:3].flatten()[:9].view(9, 1)).sum(1), ((5, 6), S0)),
    "a reshape that gathers": function_case(lambda x: (x * 2).flatten().clone(), ((5, 6), S1)),
    "views as results": function_case(lambda x: ((x * 2)[1].sin(), (x * 3).t()[:, 4])[1], ((5, 6), S0)),
    "a reshape as a result": function_case(lambda x: (x * 2).flatten(), ((5, 6), S1)),
    "a row of an argument": function_case(lambda x: x[1], ((5, 6), S0)),
    "a view after a write to its base": function_case(lambda x: (lambda z: (z[1], z.mul_(3))[0])(x * 2), ((5, 6), S0)),
    "matmul of 3-d rows": function_case(lambda x, w: (x * 2) @ w, ((3, 4, 6), S1), ((6, 7), R)),
    "views of columns": function_case(lambda x: x.t().flip(0).unfold(1, 2, 1).sum(-1).chunk(2)[1], ((5, 6), S1)),
    "in place": function_case(in_place, ((5, 6), S0), ((5, 6), S0)),
    "in place of an argument": function_case(in_place_of_an_argument, ((5, 6), S0), ((5, 6), S0)),
    "autocast": function_case(under_autocast, ((5, 6), S0), ((6, 7), S1)),
    "activation checkpointing": function_case(checkpointed, ((5, 6), S1), ((6, 7), S0)),
    "large reductions": function_case(lambda x: (x @ x.t()).sum(), ((800, 600), S1)),
}


# --- random numbers: equal to those of eager programs -------------------------------------------------------------------
def dropped_in_a_checkpoint(x: Any, w: Any) -> Any:
    return checkpoint(lambda x, w: F.dropout(x @ w, 0.3).sin(), x, w, use_reentrant=False)


RANDOM: dict[str, Case] = {
    "dropout": function_case(lambda x: F.dropout(F.dropout(x, 0.5), 0.1), ((5, 6), S0)),
    "dropout in a checkpoint": function_case(dropped_in_a_checkpoint, ((5, 6), S1), ((6, 7), S0)),
    "dropout of channels": function_case(lambda x: F.dropout2d(x, 0.5) * F.alpha_dropout(x, 0.5, True), ((2, 4, 5, 5), S1)),
    "dropout in attention": function_case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3), HEADS, HEADS, HEADS
    ),
    "drawn like a tensor": function_case(lambda x: x * torch.rand_like(x) + torch.empty_like(x).normal_(), ((5, 6), S0)),
    "drawn by values": function_case(lambda x: torch.bernoulli(x.sigmoid()) * torch.normal(x.detach(), 1.0) * x, ((5, 6), S1)),
    "drawn categories": function_case(lambda x: x * torch.multinomial(x.detach().abs() + 1, 6, replacement=True), ((5, 6), S0)),
    "rrelu": function_case(lambda x: F.rrelu(x, training=True), ((5, 6), S0)),
}


# --- redistributions ----------------------------------------------------------------------------------------------------
LAYOUTS: dict[str, Where] = {
    "S0": S0,
    "S1": S1,
    "R": R,
    "P": P,
    "ragged": [Shard(0, sizes=(5, 0))],
    "max": [Partial("max")],
}


def redistribute_case(source: Where, target: Where) -> Case:
    given = R if isinstance(source[0], Partial) else source
    return function_case(lambda x: x.redistribute(placements=source).redistribute(placements=target) * 1, ((5, 6), given))


MOVES = {f"{a} to {b}": redistribute_case(LAYOUTS[a], LAYOUTS[b]) for a in LAYOUTS for b in LAYOUTS if b != "max"}


# --- modules -----------------------------------------------------------------------------------------------------------------
class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(6), nn.Linear(6, 10), nn.Linear(10, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))


def parallelized_block(plan: Callable[[], dict[str, Any]], *shape: int) -> Case:
    def make(mesh: DeviceMesh) -> Made:
        model = Block()
        parallelize_module(model, mesh, plan())
        return model, (torch.randn(shape),)

    return make


MODULES = {
    "columns and rows": parallelized_block(lambda: {"up": ColwiseParallel(), "down": RowwiseParallel()}, 5, 6),
    "sequence parallel": parallelized_block(
        lambda: {
            "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts=Shard(1)),
            "down": RowwiseParallel(output_layouts=Shard(1)),
        },
        2,
        3,
        6,
    ),
    "sequence parallel by name": parallelized_block(
        lambda: {
            "": PrepareModuleInput(input_layouts="R", desired_input_layouts="tp=S(1)"),
            "norm": SequenceParallel(),
            "up": ColwiseParallel(input_layouts={"tp": Shard(1)}),
            "down": RowwiseParallel(output_layouts=dt.partition(None, "tp")),
        },
        2,
        3,
        6,
    ),
}
ALL: dict[str, Case] = {**LINES, **CASES, **MATHS, **RANDOM, **MODULES, **MOVES}
