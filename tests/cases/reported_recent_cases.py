"""Issues of 2025 and 2026 about DTensors and libraries built on them, each as a small program of the expected behaviour."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from case_lists import S0, S1, CaseList, R, assert_full_value, distribute_values, get_line_mesh, make_values
from torch import nn

import dtensor as dt
from dtensor import DTensor, Partial

CASES = CaseList()
report = CASES.report
X = make_values(5, 6) / 4
_LIBRARY = torch.library.Library("reported", "DEF")  # lives as long as its operators


# --- plain and distributed parameters side by side ----------------------------------------------------------------------
def _train_layer(make: Callable[[torch.Tensor], torch.Tensor], **options: Any) -> list[torch.Tensor]:
    """Train two parameters with AdamW and clipped gradients for two steps and return them; ``make`` distributes the first."""
    parameters = [nn.Parameter(make(make_values(5, 6).float())), nn.Parameter(make_values(7, seed=1).float())]
    optimizer = torch.optim.AdamW(parameters, lr=0.1, **options)
    for seed in (2, 3):
        for p, wrap in zip(parameters, (make, torch.clone), strict=True):
            p.grad = wrap(make_values(*p.shape, seed=seed).float())
        nn.utils.clip_grad_norm_(parameters, 0.5)
        optimizer.step()
    return [p.detach() for p in parameters]


@report("transformers48208")
def adamw_with_distributed_and_plain_parameters() -> None:
    for options in ({}, {"foreach": True}, {"fused": True}, {"foreach": False}):
        wanted = _train_layer(torch.clone, **options)
        own = _train_layer(lambda x: distribute_values(x, S0), **options)
        whole = own[0].full_tensor()
        for piece in whole.shards if isinstance(whole, dt.PerRank) else (whole,):
            assert torch.allclose(piece, wanted[0], atol=1e-6)
        assert not isinstance(own[1], DTensor)
        assert torch.allclose(own[1], wanted[1], atol=1e-6)


@report("accelerate4219")
def a_partial_loss_is_added_in_place_to_a_plain_tensor() -> None:
    running = torch.zeros(())
    for where in (S0, S1, R):
        running += distribute_values(X, where).square().sum()
    assert torch.allclose(running.double(), 3 * X.square().sum())


# --- users' operators ---------------------------------------------------------------------------------------------------
def _define_operator(signature: str, fn: Callable[..., Any]) -> Any:
    name = signature.split("(")[0]
    if not hasattr(torch.ops.reported, name):
        _LIBRARY.define(signature)
        for key in ("CompositeExplicitAutograd", "Meta"):
            _LIBRARY.impl(name, fn, key)
    return getattr(torch.ops.reported, name).default


@report(167977)
def a_custom_operator_with_keyword_tensors() -> None:
    def run(x: Any, *, by: Any, bias: Any = None) -> Any:
        return x * by + (0 if bias is None else bias)

    op = _define_operator("scale(Tensor x, *, Tensor by, Tensor? bias=None) -> Tensor", run)

    @dt.register_sharding(op)
    def table(x: Any, *, by: Any, bias: Any = None) -> Any:
        extra = [] if bias is None else [S0]
        return [([R], [R, R, *([] if bias is None else [R])]), ([S0], [S0, S0, *extra])]

    for where in (S0, S1, R):
        assert_full_value(op(distribute_values(X, where), by=distribute_values(X, S0)), X * X)
        assert_full_value(
            op(distribute_values(X, where), by=distribute_values(X, S0), bias=distribute_values(X, where)), X * X + X
        )
    assert op(distribute_values(X, S0), by=distribute_values(X, S0)).placements == (S0,)


@report(167219)
def a_custom_operator_that_writes_in_place_and_returns_nothing() -> None:
    def run(x: Any, y: Any, index: Any, scale: Any = None) -> None:
        if not y.is_meta:
            y.index_add_(0, index, x if scale is None else x * scale)

    op = _define_operator("add_rows(Tensor x, Tensor(a!) y, Tensor index, Tensor? scale=None) -> ()", run)

    @dt.register_sharding(op)
    def table(x: Any, y: Any, index: Any, scale: Any = None) -> Any:
        return [([], [where, where, R, None if scale is None else R]) for where in (R, S1)]

    index = torch.tensor([0, 1, 2, 3, 0])
    for where in (S0, S1, R):
        y = distribute_values(make_values(4, 6), where)
        op(distribute_values(X, where), y, distribute_values(index, R))
        op(distribute_values(X, where), y, distribute_values(index, R), distribute_values(torch.tensor([2.0]).double(), R))
        assert_full_value(y, make_values(4, 6).index_add(0, index, X * 3))


@report(163692)
def local_map_of_a_module_with_distributed_parameters() -> None:
    layer = dt.distribute_module(nn.Linear(6, 4).double(), get_line_mesh())
    x = distribute_values(X, S0)
    run = dt.local_map(
        lambda module, x: module(x),
        [S0],
        in_placements=([R], [S0]),
        in_grad_placements=([Partial()], [S0]),
        device_mesh=get_line_mesh(),
    )
    run(layer, x).square().sum().backward()
    own = [p.grad for p in layer.parameters()]
    layer.zero_grad()
    layer(x).square().sum().backward()
    for grad, p in zip(own, layer.parameters(), strict=True):
        assert isinstance(p, DTensor)
        assert isinstance(p.grad, DTensor)
        whole = p.grad.full_tensor()
        assert_full_value(grad, whole.shards[0] if isinstance(whole, dt.PerRank) else whole)


# --- meshes -------------------------------------------------------------------------------------------------------------
@report(159482)
def one_mesh_unflattened_in_two_ways() -> None:
    world = dt.init_device_mesh("cpu", (4,), mesh_dim_names=("world",))
    dense = world._unflatten(0, (2, 2), ("dp", "tp"))
    sparse = world._unflatten(0, (1, 4), ("rest", "ep"))
    for mesh, where in ((dense, [S0, S1]), (dense["dp", "tp"].flatten(), [S0]), (sparse, [R, S1]), (sparse["ep"], [S0])):
        x = dt.distribute_tensor(X, mesh, where)
        assert_full_value(x * 2, X * 2)
        assert_full_value(x.redistribute(world, [S0]) if mesh.size() == 4 else x, X)
