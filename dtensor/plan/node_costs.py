"""Costs of the parts of a program in estimated seconds: redistributions, and the work of one rank in a call."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..base.caches import memoize
from ..base.tensor_tree import map_leaves
from ..comm.events import Event, listening
from ..cost.link import collective_seconds, get_device
from ..dispatch import run_with_strategies
from ..errors import DTensorError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh, init_device_mesh
from ..propagation.flops import largest_chunk_fraction
from ..propagation.select_strategy import realize_selection
from ..propagation.strategy_cost import LOCAL_STEP
from ..propagation.strategy_cost import kernel_seconds as kernel_seconds_of
from ..propagation.strategy_table import StrategySelection
from ..redistribute import Step, estimate
from ..rules.call import Call
from ..rules.rule import Factors, Rule, Strategy
from ..state.wrap import wrap_local
from .disjoint_placements import disjoint_placements
from .graph import Node, RuleQuery

NEGLIGIBLE_SECONDS = 1e-6  # a redistribution without communication takes less; it needs no variable in the solver


@memoize(1 << 17)
def redistribute_seconds(source: Layout, target: Layout) -> float:
    """Return the estimated seconds of a redistribution; infinity if only ``target`` is disjoint partial."""
    if disjoint_placements(target) - disjoint_placements(source):
        return math.inf
    if source.has_same_blocks(target):
        return 0.0
    return estimate(source, target) + LOCAL_STEP


def work_seconds(
    node: Node, strategies: Sequence[Strategy], operands: Sequence[Layout | None], results: Sequence[Layout | None]
) -> float:
    """Return the estimated seconds of a call under one strategy per mesh dim: kernel collectives plus local work."""
    return node_kernel_seconds(node, strategies) + node_local_seconds(node, strategies, operands, results)


def node_kernel_seconds(node: Node, strategies: Sequence[Strategy]) -> float:
    """Return the estimated seconds of the collectives in the kernels of a call's strategies."""
    assert node.query is not None
    call = node.query.call
    return sum(kernel_seconds_of(strategy, call, mesh_dim) for mesh_dim, strategy in enumerate(strategies))


def node_local_seconds(
    node: Node, strategies: Sequence[Strategy], operands: Sequence[Layout | None], results: Sequence[Layout | None]
) -> float:
    """Return the estimated seconds of a call's local computation, from its FLOP and bytes on one rank."""
    assert node.query is not None
    mesh, work = node.query.call.mesh, node.query.work
    if work.free:
        return 0.0
    flops = work.flops
    for strategy, ranks in zip(strategies, mesh.shape, strict=True):
        if strategy.factor is not None and strategy.factor in work.sizes:
            flops *= largest_chunk_fraction(work.sizes[strategy.factor], ranks)
    nbytes = sum([x.max_local_nbytes for x in (*operands, *results) if x is not None])
    return get_device(mesh).seconds(flops, nbytes, work.dtype)


def recorded_collective_seconds(event: Event, steps: Sequence[Step], mesh: DeviceMesh) -> float:
    """Return the estimated seconds of a recorded collective, with the copies of its redistribution steps."""

    def wire_seconds(kind: str, nbytes: int) -> float:
        return collective_seconds(event.mesh or mesh, event.mesh_dims, kind, nbytes)

    copies = sum(step.seconds - wire_seconds(step.verb, step.bytes) for step in steps)
    return wire_seconds(event.kind, event.bytes) + copies + LOCAL_STEP


def kernel_bytes(query: RuleQuery, strategies: Sequence[Strategy], operands: Sequence[Layout | None]) -> int:
    """Return the bytes that a rank receives in the kernel collectives of a call, measured on a dry run of the call.

    They are measured by a dry run of the call. If that is impossible, because the call is random or needs values, the kernels
    estimate them.
    """
    call, pairs = query.call, zip(strategies, query.call.mesh.shape, strict=True)
    kernels = [row.kernel for row, ranks in pairs if row.kernel is not None and row.kernel.collectives and ranks > 1]
    if not kernels:
        return 0
    events: list[Event] = []
    dry = init_device_mesh("meta", tuple(call.mesh.shape))
    tensors = [
        _make_meta_tensor(layout if layout is not None else recorded, dry)
        for layout, recorded in zip(operands, call.operands, strict=True)
    ]
    arguments = {name: _with_tensors(value, call.operands_of(name), tensors) for name, value in call.arguments.items()}

    def select_given(rule: Rule, factors: Factors, at: Call, inplace_results: Mapping[int, int]) -> StrategySelection | None:
        return realize_selection(rule, tuple(strategies), factors, at, inplace_results)

    try:
        if torch.Tag.nondeterministic_seeded not in call.func.tags:
            with torch.no_grad(), listening(events.append):
                run_with_strategies(call.func, (), arguments, select_given)
            return sum(event.bytes for event in events)
    except (DTensorError, RuntimeError):
        pass
    return sum(kernel.nbytes(call) for kernel in kernels)


def _make_meta_tensor(layout: Layout, dry: DeviceMesh) -> Any:
    """Return a meta DTensor on the mesh ``dry`` with the splits, partials, shape and strides of ``layout``."""
    target = Layout.from_splits(dry, layout.splits, layout.partials, layout.shape, layout.stride, layout.dtype)
    first = (0,) * dry.ndim
    local = torch.empty_strided(target.local_shape(first), target.local_stride(first), dtype=target.dtype, device="meta")
    return wrap_local(local, target)


def _with_tensors(value: Any, places: Sequence[int], tensors: Sequence[Any]) -> Any:
    """Return a call's argument with tensors in place of its layouts; ``places``: the indices into ``tensors``."""
    numbers = iter(places)
    return map_leaves(lambda item: tensors[next(numbers)] if isinstance(item, Layout) else item, value)
