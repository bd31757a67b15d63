"""A model that nobody has any more is forgotten, with its parameters and their gradients, whatever was done with it."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fast_part import chosen
from torch import nn
from torch.utils.checkpoint import checkpoint

import dtensor as dt
from dtensor import Shard
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module, replicate

SQUARE = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
DP, TP = SQUARE["dp"], SQUARE["tp"]
Made = tuple[nn.Module, Any]


def layers() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))


def local() -> Any:
    return dt.per_rank([torch.randn(2, 4)] * 4)


def units(mesh: dt.DeviceMesh = DP) -> Made:
    model = layers()
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, local()


def over_replicas() -> Made:
    return units(SQUARE)


def copies() -> Made:
    return replicate(layers(), mesh=DP), local()


def styles() -> Made:
    return parallelize_module(layers(), TP, {"0": ColwiseParallel(), "2": RowwiseParallel()}), local()


def units_over_styles() -> Made:
    model, batch = styles()
    fully_shard(model[0], mesh=DP)
    fully_shard(model, mesh=DP)
    return model, batch


def cut() -> Made:
    model = layers()
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


def not_trained(model: Any, x: Any) -> None:
    model(x)


def refused(model: Any, x: Any) -> None:
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


MODELS = [units, over_replicas, copies, styles, units_over_styles, cut]
USES = [step, recomputed, without_reduction, without_gradients, not_trained, refused, remembered, captured, explained]
CASES = [(make, use) for make in MODELS for use in USES if use is not captured or make is cut]


@pytest.mark.parametrize(("make", "use"), chosen(CASES, [(units, step), (units, not_trained), (units, refused), (cut, captured)]))
def test_a_model_is_forgotten(make: Callable[[], Made], use: Callable[[Any, Any], None]) -> None:
    model, x = make()
    use(model, x)
    parameters = list(model.parameters())
    seen = [weakref.ref(value) for value in (model, *parameters, *(p.grad for p in parameters if p.grad is not None))]
    del model, x, parameters
    for _ in range(2):  # what a graph holds goes when the graph has gone
        gc.collect()
    assert not [found for ref in seen if (found := ref()) is not None]
