"""What an operation computes and touches, and how a row divides that. Pure: functions of global facts only.

FLOPs are those of products: a *contraction* sums, over factors that two operands share, products of their elements, so it takes a
multiplication and an addition for each combination of all of their positions. Rules whose factors do not show it say it
themselves (``Rule.flops``). All else is a matter of memory: operands are read once, results written once, views are free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..cost.device import Device
from ..placement import Shard
from .call import Call
from .op_traits import shows_memory
from .rule import Along, Factors, Row, Rule, Spec


@dataclass(frozen=True, slots=True)
class Work:
    """What an operation does as a whole, before it is divided among ranks.

    Attributes:
        flops: of its products; 0 if it is no contraction.
        operands, results: bytes of each tensor that is read or written.
        dtype: in which it computes.
        sizes: size of each factor that the products run over: cutting one of them divides the FLOPs.
        free: it touches nothing, and is no kernel to launch.
    """

    flops: float
    operands: tuple[float, ...]
    results: tuple[float, ...]
    dtype: torch.dtype
    sizes: Mapping[str, int]
    free: bool = False

    @property
    def nbytes(self) -> float:
        """Bytes read and written."""
        return sum(self.operands) + sum(self.results)


def work_of(rule: Rule | None, factors: Factors | None, call: Call) -> Work:
    """The work of a whole call, whatever its operands' layouts; without a rule or its factors what the shapes tell.

    >>> import dtensor as dt
    >>> from dtensor.layout.layout import Layout
    >>> from dtensor.rules.call import Meta
    >>> from dtensor.rules.registry import lookup
    >>> mesh = dt.init_device_mesh("meta", (8,))
    >>> x, w = (Layout.of(mesh, [dt.Replicate()], shape) for shape in ((5, 6), (6, 7)))
    >>> op, made = torch.ops.aten.mm.default, Meta((5, 7), (7, 1), x.dtype)
    >>> call = Call(op, mesh, {"self": x, "mat2": w}, (x, w), ("self", "mat2"), (made,))
    >>> rule = lookup(op)
    >>> work = work_of(rule, rule.factors(call), call)
    >>> work.flops, work.nbytes, sorted(work.sizes)
    (420, 428, ['k', 'm', 'n'])
    """
    operands = tuple([layout.nbytes for layout in call.operands])
    results = tuple(call.result_bytes())
    dtype = call.operands[0].dtype if call.operands else torch.float32
    if shows_memory(call.func) or torch.Tag.inplace_view in call.func.tags:
        return Work(0, operands, results, dtype, {}, free=True)
    if factors is None:
        return Work(0 if rule is None or rule.flops is None else rule.flops(call), operands, results, dtype, {})
    if rule is not None and rule.flops is not None:
        return Work(rule.flops(call), operands, results, dtype, factors.sizes)
    sizes = _multiplied(factors) or {}
    return Work(2 * math.prod(sizes.values()) if sizes else 0, operands, results, dtype, sizes)


def _multiplied(factors: Factors) -> dict[str, int] | None:
    """The factors that the products of a contraction run over, and their sizes; None if it is none."""
    if not factors.reduced or len(factors.operands) < 2:
        return None
    met: dict[str, int] = {}  # factor -> how many operands that are multiplied have it
    for i, dims in enumerate(factors.operands):
        if i not in factors.additive:
            for dim in dims:
                for name in dim:
                    met[name] = met.get(name, 0) + 1
    for name, op in factors.reduced.items():
        if met.get(name, 0) > 1 and "sum" in (op if isinstance(op, tuple) else (op,)):
            return {name: factors.sizes[name] for name in met}
    return None


# --- on one mesh dim ------------------------------------------------------------------------------------------------------
def share(size: int, ranks: int) -> float:
    """Which part of a factor the busiest of ``ranks`` has: of 8 heads among 512 ranks an eighth, not a 512th."""
    return -(-size // ranks) / size if size else 1.0


def elsewhere(work: Work, call: Call, mesh_dim: int) -> Work:
    """What the other mesh dims leave for this one to divide, as far as their operands' layouts tell before they have chosen.

    A mesh dim along which some operand is cut divides all of the work.
    """
    left = 1.0
    for other, ranks in enumerate(call.mesh.shape):
        if other != mesh_dim and ranks > 1 and any(isinstance(layout.placements[other], Shard) for layout in call.operands):
            left /= ranks
    if left == 1.0:
        return work
    operands, results = ([n * left for n in sizes] for sizes in (work.operands, work.results))
    return replace(work, flops=work.flops * left, operands=tuple(operands), results=tuple(results))


def row_seconds(device: Device, work: Work, row: Row, ranks: int, sizes: Mapping[str, int], least: float = 0.0) -> float:
    """Time of one rank's part of ``work`` on a mesh dim of ``ranks`` that follows ``row``.

    A row that cuts a factor divides FLOPs if the products run over it, and bytes of those tensors that have it; a row of terms,
    and one that has everything whole, divides nothing: each rank does all of the work.

    Args:
        work: what :func:`elsewhere` leaves for this mesh dim.
        sizes: those of all factors, ``Factors.sizes``.
        least: the part of what is cut that the busiest rank has in any case, as operands lie.
    """
    if work.free:
        return 0.0
    name = row.factor
    if name is None:
        return device.seconds(work.flops, work.nbytes, work.dtype)
    part = max(least, share(sizes[name], ranks) if name in sizes else 1 / ranks)  # a factor of a user's own row has no size
    nbytes = _divided(work.operands, row.operands, part) + _divided(work.results, row.results, part)
    return device.seconds(work.flops * part if name in work.sizes else work.flops, nbytes, work.dtype)


def _divided(nbytes: Sequence[float], specs: Sequence[Spec], part: float) -> float:
    return sum((size * part if isinstance(spec, Along) else size for size, spec in zip(nbytes, specs, strict=False)), 0.0)
