"""FLOPs and bytes of an operator, and how a strategy divides them among ranks. Pure: functions of global facts only.

FLOPs are those of products. A *contraction* sums, over factors that two operands share, the products of their elements: a
multiplication and an addition for each combination of all positions. Rules with factors that do not show this state it themselves
(``Rule.flops``). All else is memory traffic: operands are read once, results are written once, views are free.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch

from ..cost.device import Device
from ..placement import Shard
from ..rules.call import Call
from ..rules.op_traits import returns_view
from ..rules.rule import Along, Factors, Rule, Spec, Strategy


@dataclass(frozen=True, slots=True)
class OperatorWork:
    """FLOPs of an operator and bytes of its tensors, before they are divided among ranks.

    Attributes:
        flops: FLOPs of its products, 0 if it is no contraction.
        operands, results: bytes of each tensor that is read or written.
        dtype: the dtype in which it computes.
        sizes: the size of each factor of the products. Sharding one of them divides the FLOPs.
        free: it reads and writes nothing, and launches no kernel.
    """

    flops: float
    operands: tuple[float, ...]
    results: tuple[float, ...]
    dtype: torch.dtype
    sizes: Mapping[str, int]
    free: bool = False

    @property
    def nbytes(self) -> float:
        """Return the bytes read and written."""
        return sum(self.operands) + sum(self.results)


def work_of(rule: Rule | None, factors: Factors | None, call: Call) -> OperatorWork:
    """Return the FLOPs and bytes of a complete call, before it is divided among ranks; layouts do not matter.

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
    if returns_view(call.func) or torch.Tag.inplace_view in call.func.tags:
        return OperatorWork(0, operands, results, dtype, {}, free=True)
    if factors is None:
        return OperatorWork(0 if rule is None or rule.flops is None else rule.flops(call), operands, results, dtype, {})
    if rule is not None and rule.flops is not None:
        return OperatorWork(rule.flops(call), operands, results, dtype, factors.sizes)
    sizes = _contraction_factors(factors) or {}
    return OperatorWork(2 * math.prod(sizes.values()) if sizes else 0, operands, results, dtype, sizes)


def _contraction_factors(factors: Factors) -> dict[str, int] | None:
    """Return the factors of a contraction's products with their sizes, or None if the operator is no contraction."""
    if not factors.reduced or len(factors.operands) < 2:
        return None
    operand_counts: dict[str, int] = {}  # factor -> the number of multiplied operands that have it
    for i, dims in enumerate(factors.operands):
        if i not in factors.additive:
            for dim in dims:
                for name in dim:
                    operand_counts[name] = operand_counts.get(name, 0) + 1
    for name, op in factors.reduced.items():
        if operand_counts.get(name, 0) > 1 and "sum" in (op if isinstance(op, tuple) else (op,)):
            return {name: factors.sizes[name] for name in operand_counts}
    return None


# --- work on one mesh dim -------------------------------------------------------------------------------------------------
def largest_chunk_fraction(size: int, ranks: int) -> float:
    """Return the largest fraction of a factor that one of ``ranks`` ranks has: of 8 heads on 512 ranks an eighth."""
    return -(-size // ranks) / size if size else 1.0


def divide_by_other_mesh_dims(work: OperatorWork, call: Call, mesh_dim: int) -> OperatorWork:
    """Return the work that remains for ``mesh_dim`` after the other mesh dims divide it, estimated from operand layouts.

    A mesh dim that shards some operand divides all of the work.
    """
    fraction = 1.0
    for other, ranks in enumerate(call.mesh.shape):
        if other != mesh_dim and ranks > 1 and any(isinstance(layout.placements[other], Shard) for layout in call.operands):
            fraction /= ranks
    if fraction == 1.0:
        return work
    operands, results = ([n * fraction for n in sizes] for sizes in (work.operands, work.results))
    return replace(work, flops=work.flops * fraction, operands=tuple(operands), results=tuple(results))


def strategy_compute_seconds(
    device: Device, work: OperatorWork, strategy: Strategy, ranks: int, sizes: Mapping[str, int], min_fraction: float = 0.0
) -> float:
    """Return the seconds that one rank computes if ``strategy`` divides ``work`` among the ranks of a mesh dim.

    A strategy that shards a factor divides the FLOPs if the products have the factor, and the bytes of tensors that have it. A
    strategy for partial or replicated operands divides nothing: each rank does all of the work.

    Args:
        work: the work that :func:`divide_by_other_mesh_dims` leaves to this mesh dim.
        sizes: the sizes of all factors, ``Factors.sizes``.
        min_fraction: the fraction of the sharded factor that the fullest rank has at least, from the operands' layouts.
    """
    if work.free:
        return 0.0
    name = strategy.factor
    if name is None:
        return device.seconds(work.flops, work.nbytes, work.dtype)
    fraction = max(
        min_fraction, largest_chunk_fraction(sizes[name], ranks) if name in sizes else 1 / ranks
    )  # a factor of a user's table has no size
    nbytes = _bytes_per_rank(work.operands, strategy.operands, fraction) + _bytes_per_rank(
        work.results, strategy.results, fraction
    )
    return device.seconds(work.flops * fraction if name in work.sizes else work.flops, nbytes, work.dtype)


def _bytes_per_rank(nbytes: Sequence[float], specs: Sequence[Spec], fraction: float) -> float:
    return sum((size * fraction if isinstance(spec, Along) else size for size, spec in zip(nbytes, specs, strict=False)), 0.0)
