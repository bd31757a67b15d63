"""Garbage collection of models: a model without references is freed with its parameters and gradients after every kind of use."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from slow_case_marks import keep_chosen_fast
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtensor as dt
from dtensor import Shard
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module, replicate

MESH = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
DP, TP = MESH["dp"], MESH["tp"]
ModelAndBatch = tuple[nn.Module, Any]


def make_layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def local_batch() -> Any:
    return dt.per_rank([torch.randn(2, 4)] * 4)


def units(mesh: dt.DeviceMesh = DP) -> ModelAndBatch:
    model = make_layers()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, local_batch()


def units_over_replicas() -> ModelAndBatch:
    return units(MESH)


def replicas() -> ModelAndBatch:
    return replicate(make_layers(), mesh=DP), local_batch()


def styles() -> ModelAndBatch:
    return parallelize_module(make_layers(), TP, {"0": ColwiseParallel(), "2": RowwiseParallel()}), local_batch()


def units_over_styles() -> ModelAndBatch:
    model, batch = styles()
    fully_shard(model[0], mesh=DP)
    fully_shard(model, mesh=DP)
    return model, batch


def sharded_parameters() -> ModelAndBatch:
    model = make_layers()
    for module in model.modules():
        for name, p in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, nn.Parameter(dt.distribute_tensor(p, DP, [Shard(0)])))
    return model, dt.distribute_tensor(torch.randn(4, 4), DP, [Shard(0)])


def step(model: Any, x: Any) -> None:
    optimizer = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        optimizer.zero_grad()
        model(x).relu().sum().backward()
        optimizer.step()


def recomputed(model: Any, x: Any) -> None:
    checkpoint(model, x, use_reentrant=False).sum().backward()


def without_reduction(model: Any, x: Any) -> None:
    if hasattr(model, "set_requires_gradient_sync"):
        model.set_requires_gradient_sync(False)
    model(x).sum().backward()


def without_gradients(model: Any, x: Any) -> None:
    with torch.no_grad():
        model(x)


def forward_only(model: Any, x: Any) -> None:
    model(x)


def failed_forward(model: Any, x: Any) -> None:
    with contextlib.suppress(RuntimeError):
        model(torch.cat([x, x], 1))


def remembered(model: Any, x: Any) -> None:
    with dt.remember("parameters"):
        model(x).sum().backward()


def captured(model: Any, x: Any) -> None:
    forward = dt.capture(lambda x: model(x).relu().sum())
    for _ in range(2):
        forward(x).backward()


def explained(model: Any, x: Any) -> None:
    str(dt.explain(lambda: model(x).sum().backward()))


MODELS = [units, units_over_replicas, replicas, styles, units_over_styles, sharded_parameters]
USES = [step, recomputed, without_reduction, without_gradients, forward_only, failed_forward, remembered, captured, explained]
CASES = [(make, use) for make in MODELS for use in USES if use is not captured or make is sharded_parameters]


@pytest.mark.parametrize(
    ("make", "use"),
    keep_chosen_fast(CASES, [(units, step), (units, forward_only), (units, failed_forward), (sharded_parameters, captured)]),
)
def test_unreferenced_model_is_garbage_collected(make: Callable[[], ModelAndBatch], use: Callable[[Any, Any], None]) -> None:
    model, x = make()
    use(model, x)
    parameters = list(model.parameters())
    seen = [weakref.ref(value) for value in (model, *parameters, *(p.grad for p in parameters if p.grad is not None))]
    del model, x, parameters
    for _ in range(2):  # objects that a graph references are freed after the graph
        gc.collect()
    assert not [found for ref in seen if (found := ref()) is not None]
