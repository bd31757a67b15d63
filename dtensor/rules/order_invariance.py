"""Order invariance: factors along which blocks may be any slices, as the blocks of a flattened dim are.

See ``tensor/views/flattened_sharded_dims.py``.
"""

from __future__ import annotations

from ..placement import Partial
from .rule import Factors, Rule, candidates


def orderless(rule: Rule, factors: Factors, factor: str) -> bool:
    """Whether nothing asks where blocks along ``factor`` begin: one factor, no kernel that asks which, nothing but a reduction
    over it; or it is said to be so (``Factors.orderless``), as it must be where ``rule.run`` computes blocks."""
    if rule.run is not None or factor in factors.orderless:
        return factor in factors.orderless
    rows = [] if factors.rows else [row for row in candidates(factors, ()) if row.factor == factor]
    monoids = [spec for row in rows for spec in row.results if isinstance(spec, Partial) and not isinstance(spec.reduce_op, str)]
    windowed = any(key[2] == factor for key in factors.windows)
    return bool(rows) and not monoids and not windowed and (rows[0].kernel is None or rows[0].kernel.orderless)
