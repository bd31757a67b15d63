"""What the parts of a program take, in seconds: moves between layouts, and the work of one rank."""

from __future__ import annotations

from collections.abc import Sequence

from ..base.caches import remembered
from ..cost.link import device_of, link_of
from ..layout.layout import Layout
from ..propagation.row_costs import LOCAL_STEP
from ..redistribute import estimate
from ..rules.call import Call
from ..rules.rule import Row
from ..rules.work import share
from .graph import Node

FREE = 1e-6  # seconds: what moves nothing between ranks may take so long; it is not worth a variable


@remembered(1 << 17)
def move_seconds(source: Layout, target: Layout) -> float:
    """Seconds from one layout to the other; infinite where there is no way."""
    if source.same_data(target):
        return 0.0
    return estimate(source, target) + LOCAL_STEP


def kernel_bytes(call: Call, rows: Sequence[Row]) -> int:
    """Bytes that a rank receives in the collectives of kernels."""
    along = zip(rows, call.mesh.shape, strict=True)
    return sum(row.kernel.nbytes(call) for row, ranks in along if row.kernel is not None and ranks > 1)


def work_seconds(node: Node, rows: Sequence[Row], operands: Sequence[Layout | None], results: Sequence[Layout | None]) -> float:
    """Seconds of local work of a call under these rows, and of its kernel's collectives."""
    assert node.asked is not None
    call, work = node.asked.call, node.asked.work
    mesh, seconds, flops = call.mesh, 0.0, work.flops
    for mesh_dim, (row, ranks) in enumerate(zip(rows, mesh.shape, strict=True)):
        if row.kernel is not None and ranks > 1:
            rate = link_of(mesh, (mesh_dim,)).exchange
            seconds += row.kernel.collectives * rate.seconds(ranks, 0) + row.kernel.nbytes(call) / rate.bandwidth
        if row.factor is not None and row.factor in work.sizes:
            flops *= share(work.sizes[row.factor], ranks)
    if work.free:
        return seconds
    nbytes = sum([x.max_local_nbytes for x in (*operands, *results) if x is not None])
    return seconds + device_of(mesh).seconds(flops, nbytes, work.dtype)
