"""What the parts of a program take, in seconds: moves between layouts, and the work of one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..base.caches import remembered
from ..comm.events import Event, listening
from ..cost.link import collective_seconds, device_of
from ..dispatch.dispatcher import run_chosen
from ..dispatch.wrap import wrap_local
from ..errors import DTensorError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh, init_device_mesh
from ..propagation.select_strategy import realized
from ..propagation.strategy_cost import LOCAL_STEP
from ..propagation.strategy_cost import kernel_seconds as kernel_seconds_of
from ..redistribute import Step, estimate
from ..rules.flops import share
from ..rules.rule import Row
from .disjoint_partial import marks_of
from .graph import Asked, Node

FREE = 1e-6  # seconds: what moves nothing between ranks may take so long; it is not worth a variable


@remembered(1 << 17)
def move_seconds(source: Layout, target: Layout) -> float:
    """Seconds from one layout to the other; infinite where there is no way: rows are parted where they are made, or never."""
    if marks_of(target) - marks_of(source):
        return math.inf
    if source.same_data(target):
        return 0.0
    return estimate(source, target) + LOCAL_STEP


def work_seconds(node: Node, rows: Sequence[Row], operands: Sequence[Layout | None], results: Sequence[Layout | None]) -> float:
    """Seconds of a call under these rows: of its kernel's collectives, and of local work."""
    return kernel_seconds(node, rows) + local_seconds(node, rows, operands, results)


def kernel_seconds(node: Node, rows: Sequence[Row]) -> float:
    """Seconds of the collectives of a call's kernels."""
    assert node.asked is not None
    call = node.asked.call
    return sum(kernel_seconds_of(row, call, mesh_dim) for mesh_dim, row in enumerate(rows))


def local_seconds(node: Node, rows: Sequence[Row], operands: Sequence[Layout | None], results: Sequence[Layout | None]) -> float:
    """Seconds of local work of a call."""
    assert node.asked is not None
    mesh, work = node.asked.call.mesh, node.asked.work
    if work.free:
        return 0.0
    flops = work.flops
    for row, ranks in zip(rows, mesh.shape, strict=True):
        if row.factor is not None and row.factor in work.sizes:
            flops *= share(work.sizes[row.factor], ranks)
    nbytes = sum([x.max_local_nbytes for x in (*operands, *results) if x is not None])
    return device_of(mesh).seconds(flops, nbytes, work.dtype)


def heard_seconds(event: Event, steps: Sequence[Step], mesh: DeviceMesh) -> float:
    """Seconds of a collective that was issued, and of the copying in the steps of redistributions that it was issued for."""

    def wire(kind: str, nbytes: int) -> float:
        return collective_seconds(event.mesh or mesh, event.mesh_dims, kind, nbytes)

    return wire(event.kind, event.bytes) + sum(step.seconds - wire(step.verb, step.bytes) for step in steps) + LOCAL_STEP


def kernel_bytes(asked: Asked, rows: Sequence[Row], operands: Sequence[Layout | None]) -> int:
    """Bytes that a rank receives in the collectives of a call's kernels: what a dry run of it issues; where numbers decide, or
    are drawn, what the kernels say."""
    call, along = asked.call, zip(rows, asked.call.mesh.shape, strict=True)
    kernels = [row.kernel for row, ranks in along if row.kernel is not None and row.kernel.collectives and ranks > 1]
    if not kernels:
        return 0
    events: list[Event] = []
    dry = init_device_mesh("meta", tuple(call.mesh.shape))
    given = [_stand_in(own if own is not None else there, dry) for own, there in zip(operands, call.operands, strict=True)]
    arguments = {name: _with_operands(value, call.operands_of(name), given) for name, value in call.arguments.items()}
    try:
        if torch.Tag.nondeterministic_seeded not in call.func.tags:
            with torch.no_grad(), listening(events.append):
                run_chosen(
                    call.func, (), arguments, lambda rule, factors, at, kept: realized(rule, tuple(rows), factors, at, kept)
                )
            return sum(event.bytes for event in events)
    except (DTensorError, RuntimeError):
        pass
    return sum(kernel.nbytes(call) for kernel in kernels)


def _stand_in(layout: Layout, dry: DeviceMesh) -> Any:
    """A tensor without data that lies so."""
    there = Layout.from_splits(dry, layout.splits, layout.partials, layout.shape, layout.stride, layout.dtype)
    local = torch.empty_strided(
        there.local_shape((0,) * dry.ndim), there.local_stride((0,) * dry.ndim), dtype=there.dtype, device="meta"
    )
    return wrap_local(local, there)


def _with_operands(value: Any, places: Sequence[int], given: Sequence[Any]) -> Any:
    """An argument, tensors in it for their layouts."""
    left = iter(places)
    if isinstance(value, (list, tuple)):
        return [given[next(left)] if isinstance(item, Layout) else item for item in value]
    return given[next(left)] if isinstance(value, Layout) else value
