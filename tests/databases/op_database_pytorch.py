"""Operator database on PyTorch DTensor (``torch.distributed.tensor``), with ranks simulated in one process by
``LocalTensorMode``. The draws are those of :mod:`op_database`. Placements that PyTorch DTensor lacks are replaced by the nearest
ones (user-given shard sizes and orders become ``torch.chunk`` shards, partial products become sums). Values, dtypes and shapes of
full results and gradients are compared, but not local tensors and strides, so this asks less than the test of dtensor.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache
from typing import Any

import op_database as db
import torch
from torch import distributed
from torch.distributed import tensor as peer
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

import dtensor as dt
from dtensor.base.tensor_tree import fill_tensors, iter_tree_leaves, tensor_leaves
from dtensor.layout.layout import Layout
from dtensor.placement import Partial, Placement, Shard
from dtensor.testing.compare import is_close
from dtensor.testing.scatter import addend_at, local_block, make_addends

REFUSALS = ("sharding strategy", "not supported", "not support", "unsupported", "not yet implemented", "got mixed")


@cache
def mode() -> LocalTensorMode:
    distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    return LocalTensorMode(4)


@cache
def mesh_of(shape: tuple[int, ...]) -> Any:
    return distributed.init_device_mesh("cpu", shape)


def nearest_placements(where: tuple[Placement, ...]) -> tuple[Placement, ...]:
    """Return the nearest placements that both libraries have: PyTorch DTensor takes one reduction for all mesh dims, and no
    products."""
    kinds = [p.reduce_op for p in where if isinstance(p, Partial)]
    kind = kinds[0] if kinds and kinds[0] != "product" else "sum"
    return tuple(Shard(p.dim) if isinstance(p, Shard) else Partial(kind) if isinstance(p, Partial) else p for p in where)


def distribute(x: torch.Tensor, where: tuple[Placement, ...], shape: tuple[int, ...], seed: int) -> Any:
    """Return a PyTorch DTensor of ``x`` with the shards and addends that dtensor's test uses."""
    words = nearest_placements(where)
    layout = Layout.of(dt.init_device_mesh("meta", shape), words, x.shape, x.stride(), x.dtype)
    terms = make_addends(x, layout, seed)
    local = LocalTensor({rank: local_block(addend_at(terms, layout, rank), layout, rank) for rank in range(4)})
    return peer.DTensor.from_local(
        local, mesh_of(shape), [to_pytorch_placement(p) for p in words], run_check=False, shape=x.shape, stride=x.stride()
    ).detach()


def to_pytorch_placement(p: Placement) -> Any:
    if isinstance(p, Shard):
        return peer.Shard(p.dim)
    return peer.Partial(p.reduce_op) if isinstance(p, Partial) else peer.Replicate()


def full_value(x: Any) -> Any:
    x = x.full_tensor() if isinstance(x, peer.DTensor) else x
    return x.reconcile() if isinstance(x, LocalTensor) else x


def cases_of(entry: Any, setting: db.Setting) -> Iterator[db.Case]:
    """Yield the cases of an entry."""
    return db.cases_of(entry, setting, run_case)


def run_case(name: str, setting: db.Setting, position: int, sample: db.Sample) -> db.Case:
    case = db.Case(name, setting, position)
    with db.quiet():
        case.status, case.problem = run(name, setting, position, sample, case)
    return case


def run(name: str, setting: db.Setting, position: int, sample: db.Sample, case: db.Case) -> tuple[str, str]:
    """Return (status, problem) of one sample."""
    given = tensor_leaves(sample.given)
    if any(x.layout is not torch.strided or x.is_quantized for x in given):
        return "void", "sparse or quantized arguments"
    rng = db.rng_of(name, setting, position)
    drawn = [db.draw_placements(x, setting, rng) for x in given]
    given = [db.exact(x, where) for x, where in zip(given, drawn, strict=True)]
    case.shapes = tuple(tuple(x.shape) for x in given)
    case.placements = tuple(str(nearest_placements(where)) for where in drawn)
    try:
        expected = outcome([x.clone() for x in given], sample, setting)
    except Exception as error:  # plain torch raises by itself
        return "void", str(error)[:100]
    try:
        with mode():
            made = [
                distribute(x, where, setting.mesh, setting.seed + 7 * i)
                for i, (x, where) in enumerate(zip(given, drawn, strict=True))
            ]
            got = outcome(made, sample, setting)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip()[:200]}"
        refused = isinstance(error, NotImplementedError) or any(word in text for word in REFUSALS)
        return "refused" if refused else "error", text
    return compared(got, expected, sample, given)


def outcome(made: list[Any], sample: db.Sample, setting: db.Setting) -> tuple[list[Any], list[Any]]:
    """Return the full results and the full gradients of the arguments."""
    differentiable = [x.requires_grad_(sample.gradients and (x.dtype.is_floating_point or x.dtype.is_complex)) for x in made]
    args, kwargs = fill_tensors(sample.given, [x.clone() for x in differentiable] if sample.writes else differentiable)
    torch.manual_seed(setting.seed)
    results = list(iter_tree_leaves(sample.fn(*args, **kwargs)))
    if sample.invariant is not None and len(results) == 1 and not isinstance(results[0], torch.Tensor):
        results = list(iter_tree_leaves(sample.invariant(results[0])))
    outputs = [x for x in results if isinstance(x, torch.Tensor) and x.requires_grad]
    if outputs:
        random.seed(setting.seed)
        torch.autograd.backward([x.abs().sum() if x.dtype.is_complex else x.sum() for x in outputs])
    return [full_value(x.detach()) if isinstance(x, torch.Tensor) else x for x in results], [
        full_value(x.grad) for x in differentiable
    ]


def compared(got: Any, expected: Any, sample: db.Sample, given: list[torch.Tensor]) -> tuple[str, str]:
    tolerance = db.coarsest(given)
    for kind, ours, plain in (("result", got[0], expected[0]), ("gradient", got[1], expected[1])):
        if len(ours) != len(plain):
            return "wrong", f"{len(ours)} {kind}s, not {len(plain)}"
        for i, (x, y) in enumerate(zip(ours, plain, strict=True)):
            if isinstance(y, torch.Tensor) != isinstance(x, torch.Tensor):
                return "wrong", f"{kind} {i}: {type(x).__name__}, not {type(y).__name__}"
            if not isinstance(y, torch.Tensor):
                continue
            if x.shape != y.shape or x.dtype != y.dtype:
                return "wrong", f"{kind} {i}: {x.dtype}{tuple(x.shape)}, not {y.dtype}{tuple(y.shape)}"
            if sample.values and not is_close(x.detach(), y.detach(), tolerance):
                return "wrong", f"{kind} {i} differs"
    return "pass", ""
