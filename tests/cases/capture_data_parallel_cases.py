"""Capture data-parallel cases: training steps to capture, with FSDP units, buckets, microbatches and ZeRO, over meshes of four
ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from capture_cases import make_parameter, randn
from capture_step_cases import OPTIMIZERS, Step, compare_steps
from case_lists import CaseList
from torch import nn

import dtensor as dt
from dtensor import Shard
from dtensor.parallel import (
    ColwiseParallel,
    MixedPrecisionPolicy,
    RowwiseParallel,
    ZeroRedundancyOptimizer,
    fully_shard,
    parallelize_module,
    replicate,
)

CASES = CaseList()
case = CASES.case
ADAMW = OPTIMIZERS["adamw_fused"]


def make_line_mesh() -> Any:
    return dt.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))


def make_grid_mesh(*names: str) -> Any:
    return dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=names)


def make_network(normed: bool = False) -> nn.Sequential:
    """Return a network with sizes that four ranks shard unevenly."""
    torch.manual_seed(0)
    between = [nn.BatchNorm1d(9)] if normed else []
    return nn.Sequential(nn.Linear(6, 9), *between, nn.GELU(), nn.Linear(9, 7), nn.GELU(), nn.Linear(7, 3))


def fully_shard_layers(model: Any, mesh: Any, **options: Any) -> Any:
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def make_step(model: Any, mesh: Any, opt: Any, before: Callable[[Any], None] | None = None, *, own: bool = True) -> Step:
    """Return a training step on each rank's local batch, or (not ``own``) on the distributed batch."""

    def loss_of(x: Any) -> Any:
        return model(x.to_local() if own else x).square().mean()

    def step(x: Any) -> Any:
        if before is not None:
            before(lambda scale: loss_of(x * scale).backward())
        loss = loss_of(x)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        opt.zero_grad()
        return loss.detach(), norm

    at = [Shard(0)] * mesh.ndim
    return step, lambda i: (randn(12, 6, on=mesh, at=at),), list(model.parameters()), [getattr(opt, "inner", opt)]


def make_adamw_step(model: Any, mesh: Any, **options: Any) -> Step:
    return make_step(model, mesh, ADAMW(model.parameters()), **options)


@case
def fully_sharded() -> Step:
    return make_adamw_step(fully_shard_layers(make_network(), make_line_mesh()), make_line_mesh())


@case
def fully_sharded_with_a_distributed_batch() -> Step:
    return make_adamw_step(fully_shard_layers(make_network(), make_line_mesh()), make_line_mesh(), own=False)


@case
def resharded_over_pairs_of_ranks_after_forward() -> Step:
    return make_adamw_step(fully_shard_layers(make_network(), make_line_mesh(), reshard_after_forward=2), make_line_mesh())


@case
def hybrid_in_bfloat16() -> Step:
    mesh = make_grid_mesh("copies", "dp")
    return make_adamw_step(
        fully_shard_layers(make_network(), mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32)), mesh
    )


@case
def fully_sharded_over_tensor_parallel() -> Step:
    mesh, model = make_grid_mesh("dp", "tp"), make_network()
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    step, _, *rest = make_adamw_step(fully_shard_layers(model, mesh["dp"]), mesh)

    def parts(i: int) -> Any:
        return (randn(12, 6, on=mesh, at=[Shard(0), dt.Replicate()]),)

    return step, parts, *rest


@case
def replicated_with_statistics() -> Step:
    model = replicate(make_network(normed=True), make_line_mesh(), bucket_cap_mb=1e-4)
    step, arguments, parameters, opts = make_adamw_step(model, make_line_mesh())
    return step, arguments, [*parameters, *model.buffers()], opts


@case
def zero_with_a_schedule() -> Step:
    model = replicate(make_network(), make_line_mesh())
    opt = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1, fused=True)
    schedule = torch.optim.lr_scheduler.ExponentialLR(opt, 0.9)
    step, arguments, *rest = make_step(model, make_line_mesh(), opt)

    def following(i: int) -> Any:
        if i:
            schedule.step()
        return arguments(i)

    return step, following, *rest


@case
def microbatches_reduced_once() -> Step:
    model = fully_shard_layers(make_network(), make_line_mesh())

    def before(backward: Callable[[float], None]) -> None:
        model.set_requires_gradient_sync(False)
        backward(2.0)
        backward(3.0)
        model.set_requires_gradient_sync(True)

    return make_adamw_step(model, make_line_mesh(), before=before)


@case
def microbatches_all_reduced_once_over_replicas() -> Step:
    mesh = make_grid_mesh("copies", "dp")
    model = fully_shard_layers(make_network(), mesh)

    def before(backward: Callable[[float], None]) -> None:
        model.set_requires_all_reduce(False)
        backward(2.0)
        model.set_requires_all_reduce(True)

    return make_adamw_step(model, mesh, before=before)


@case
def microbatches_of_replicas() -> Step:
    model = replicate(make_network(), make_line_mesh())

    def before(backward: Callable[[float], None]) -> None:
        with model.no_sync():
            backward(2.0)

    return make_adamw_step(model, make_line_mesh(), before=before)


@case
def unused_parameters() -> Step:
    model = make_network()
    model.append(nn.Linear(3, 2))
    model.forward = lambda x: model[4](model[3](model[2](model[1](model[0](x)))))
    return make_adamw_step(replicate(model, make_line_mesh()), make_line_mesh())


@case
def gradients_of_several_calls() -> Step:
    model = fully_shard_layers(make_network(), make_line_mesh())
    opt = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Any) -> Any:
        loss = model(x.to_local()).square().mean()
        loss.backward()
        return loss.detach()

    def arguments(i: int) -> Any:
        if i % 2 == 0 and i:
            opt.step()
            opt.zero_grad()
        return (randn(12, 6, on=make_line_mesh(), at=[Shard(0)]),)

    return step, arguments, list(model.parameters()), [opt]


@case
def stages_on_separate_meshes() -> Step:
    make_grid_mesh("pp", "tp")
    first, second = (dt.DeviceMesh("cpu", ranks, mesh_dim_names=("tp",)) for ranks in ([0, 1], [2, 3]))
    one, other = make_parameter(first, 6, 8, at=Shard(1)), make_parameter(second, 8, 3, at=Shard(0))
    opt = ADAMW([one, other])

    def step(x: Any) -> Any:
        hidden = torch.relu(x @ one).redistribute(second, [dt.Replicate()])
        loss = (hidden @ other).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return loss

    return step, lambda i: (randn(5, 6, on=first),), [one, other], [opt]


@case
def adversarial_networks() -> Step:
    """Update a generator and a discriminator in one step."""
    torch.manual_seed(0)
    making, telling = (
        fully_shard_layers(nn.Sequential(nn.Linear(a, 7), nn.GELU(), nn.Linear(7, b)), make_line_mesh())
        for a, b in ((6, 5), (5, 1))
    )
    maker, teller = ADAMW(making.parameters()), ADAMW(telling.parameters())

    def step(x: Any, z: Any) -> Any:
        made = making(z.to_local()).detach()
        told = nn.functional.softplus(telling(made)).mean() + nn.functional.softplus(-telling(x.to_local())).mean()
        told.backward()
        teller.step()
        believed = nn.functional.softplus(-telling(making(z.to_local()))).mean()
        believed.backward()
        maker.step()
        maker.zero_grad()
        teller.zero_grad()
        return told.detach(), believed.detach()

    def arguments(i: int) -> tuple[Any, ...]:
        return tuple(randn(12, width, on=make_line_mesh(), at=[Shard(0)]) for width in (5, 6))

    return step, arguments, [*making.parameters(), *telling.parameters()], [maker, teller]


def main() -> list[str]:
    for build in CASES.values():
        compare_steps(build)
    return list(CASES)
