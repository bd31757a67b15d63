"""What the parts of a program take, in seconds: moves between layouts, and the work of one rank."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..base.caches import remembered
from ..cost.link import link_of
from ..layout.layout import Layout
from ..propagation.row_costs import LOCAL_STEP
from ..redistribute import estimate
from ..rules.rule import Factors, Row
from .graph import Node

FREE = 1e-6  # seconds: what moves nothing between ranks may take so long; it is not worth a variable
_PEAK = {"cpu": 5e10, "meta": 4e14, "cuda": 4e14}


@remembered(1 << 17)
def move_seconds(source: Layout, target: Layout) -> float:
    """Seconds from one layout to the other; infinite where there is no way."""
    if source.same_data(target):
        return 0.0
    return estimate(source, target) + LOCAL_STEP


def work_seconds(node: Node, rows: Sequence[Row], operands: Sequence[Layout | None], results: Sequence[Layout | None]) -> float:
    """Seconds of local work of a call under these rows, and of its kernel's collectives."""
    assert node.asked is not None
    call = node.asked.call
    mesh, seconds = call.mesh, 0.0
    share = math.prod(n for row, n in zip(rows, mesh.shape, strict=True) if row.factor is not None)
    for mesh_dim, (row, ranks) in enumerate(zip(rows, mesh.shape, strict=True)):
        if row.kernel is not None and ranks > 1:
            rate = link_of(mesh, (mesh_dim,)).exchange
            seconds += row.kernel.collectives * rate.seconds(ranks, 0) + row.kernel.nbytes(call) / rate.bandwidth
    if node.view:
        return seconds
    nbytes = sum(x.max_local_nbytes for x in (*operands, *results) if x is not None)
    return seconds + flops_of(node.asked.factors) / share / _PEAK.get(mesh.device_type, 4e14) + nbytes / link_of(mesh).memory


def flops_of(factors: Factors) -> float:
    """Floating-point operations of the whole call: a multiplication and an addition for each combination of factors where some
    are summed over that two operands share; elsewhere the work is reading and writing."""
    standing = [{name for dim in dims for name in dim} for dims in (*factors.operands, *factors.results)]
    operands, results = standing[: len(factors.operands)], set().union(*standing[len(factors.operands) :])
    summed = {name for name in set().union(*operands) - results if sum(name in own for own in operands) > 1}
    if not summed:
        return 0.0
    return 2.0 * math.prod(size for name, size in factors.sizes.items() if name[0] != "@")
