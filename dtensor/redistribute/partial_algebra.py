"""Partial algebra: which reductions commute, and when a value may become partial again.

[Note: Order of reduction]
A tensor that is partial on several mesh dims is a nest of reductions in the order of its placements, like function composition:
``[Partial("max"), Partial("sum")]`` on ``("dp", "tp")`` is ``max over dp of (sum over tp)``. The last mesh dim reduces first.
Adjacent mesh dims with the same monoid are one reduction, first mesh dim major.

Reductions leave a nest innermost first and enter it outermost first, which is always correct. The tables below say when a
reduction may pass another one, so that addends that stay in the destination are not touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import LayoutError
from ..layout.layout import Layout
from ..placement import Monoid

ReduceOp = str | Monoid

LINEAR_OPS = frozenset({"sum", "avg"})  # avg = sum / n, so both commute with each other
IDEMPOTENT_OPS = frozenset({"max", "min", "avg"})  # the reduction of equal addends is the addend


def may_commute(a: ReduceOp, b: ReduceOp) -> bool:
    """Return True if two nested reductions, over different mesh dims, may run in either order."""
    if isinstance(a, Monoid) or isinstance(b, Monoid):
        return False  # associative, but not known to be commutative
    return a == b or (a in LINEAR_OPS and b in LINEAR_OPS)


def may_enter(op: ReduceOp, inner: ReduceOp) -> bool:
    """Return True if a value that is still partial under ``inner`` may become partial under an ``op`` outside of it.

    If every rank keeps the value as its addend, each rank's inner reduction is the value. Otherwise all but the first rank have
    identities of ``op``. Then ``inner`` of identities must be the identity: a sum of zeros is 0, but a sum of ones is not 1.
    """
    if op in IDEMPOTENT_OPS or op == inner:
        return True
    match op:
        case "sum":
            return not isinstance(inner, Monoid)
        case "product":
            return inner in ("avg", "max", "min")
        case _:
            return False


def may_pad(op: ReduceOp, inner: Sequence[ReduceOp]) -> bool:
    """Return True if a shard may become an addend of ``op`` by padding with identities, while it is partial under ``inner``.

    Never for ``avg``: the mean of (x, 0) is x / 2. Never for a monoid: it need not act elementwise along the sharded dim.
    """
    match op:
        case "sum" | "product":
            return all(may_enter(op, other) for other in inner)
        case "max" | "min":
            return all(other in ("max", "min") for other in inner)  # identities are infinite: other ops make NaN of them
        case _:
            return False


@dataclass(frozen=True, slots=True)
class Reduction:
    """Reduction by one collective: ``op`` over ``mesh_dims``. ``finish`` applies the ``finalize`` of a monoid."""

    op: ReduceOp
    mesh_dims: tuple[int, ...]
    averaged: tuple[int, ...] = ()  # a sum merged with averages is divided by the number of ranks on these mesh dims
    finish: bool = False

    def over(self, mesh_dims: tuple[int, ...]) -> Reduction:
        """Return this reduction over only some of its mesh dims."""
        averaged = tuple(i for i in mesh_dims if i in self.averaged)
        if averaged == mesh_dims:
            return Reduction("avg", mesh_dims)
        return Reduction(self.op, mesh_dims, averaged, self.finish)


class PartialChanges(NamedTuple):
    """Changes of the partial mesh dims between two layouts."""

    reduced: tuple[Reduction, ...]  # in the order in which they run
    entered: tuple[int, ...]  # mesh dims that become partial afterwards, outermost first


def partial_changes(src: Layout, dst: Layout) -> PartialChanges:
    """Return the reductions from ``src`` to ``dst``, merged as far as allowed, and the mesh dims that become partial after them.

    Raises:
        LayoutError: the dtype lacks a reduction, or a value would have to become partial under a monoid that cannot be undone.
    """
    if src.partials == dst.partials:
        return PartialChanges((), ())
    kept = _kept_mesh_dims(src, dst)
    leaving = [i for i, op in enumerate(src.partials) if op is not None and i not in kept]
    entering = tuple(i for i, op in enumerate(dst.partials) if op is not None and i not in kept)
    for op in [*(src.partials[i] for i in leaving), *(dst.partials[i] for i in entering)]:
        _check_dtype(op, src, dst)
    _check_monoids(src, dst, kept, entering)
    return PartialChanges(tuple(_merge_reductions(src, dst, leaving)), entering)


def _kept_mesh_dims(src: Layout, dst: Layout) -> set[int]:
    """Return the mesh dims that stay partial: their op is equal on both sides, and no other reduction has to pass them."""
    kept = {i for i, (a, b) in enumerate(zip(src.partials, dst.partials, strict=True)) if a is not None and a == b}
    while True:
        leaving = [(i, op) for i, op in enumerate(src.partials) if op is not None and i not in kept]
        entering = [(i, op) for i, op in enumerate(dst.partials) if op is not None and i not in kept]
        blocked = {j for j in kept if _is_blocked(leaving, entering, j, _op_of(src, j))}
        if not blocked:
            return kept
        kept -= blocked


def _is_blocked(
    leaving: list[tuple[int, ReduceOp]], entering: list[tuple[int, ReduceOp]], mesh_dim: int, inner: ReduceOp
) -> bool:
    """Return True if a reduction further out, leaving or entering, would have to pass ``inner`` on ``mesh_dim`` and may not."""
    return any(i < mesh_dim and not may_commute(op, inner) for i, op in leaving) or any(
        i < mesh_dim and not may_enter(op, inner) for i, op in entering
    )


def _merge_reductions(src: Layout, dst: Layout, leaving: list[int]) -> list[Reduction]:
    """Return the reductions, innermost first; one joins an earlier one if it commutes with all that run in between."""
    merged: list[list[int]] = []
    for i in reversed(leaving):
        for k in range(len(merged) - 1, -1, -1):
            if _may_join(src, i, merged[k]):
                merged[k].append(i)
                break
            if not all(may_commute(_op_of(src, i), _op_of(src, j)) for j in merged[k]):
                merged.append([i])
                break
        else:
            merged.append([i])
    return [_make_reduction(src, dst, tuple(sorted(mesh_dims))) for mesh_dims in merged]


def _may_join(src: Layout, i: int, group: list[int]) -> bool:
    """Return True if partial mesh dim ``i`` may be reduced in one collective with the partial mesh dims of ``group``."""
    op = _op_of(src, i)
    if isinstance(op, Monoid):
        return all(src.partials[j] in (None, op) for j in range(i, max(group) + 1))
    return all(may_commute(op, _op_of(src, j)) for j in group)


def _op_of(layout: Layout, mesh_dim: int) -> ReduceOp:
    """Return the reduce operation of ``layout`` on a mesh dim that is known to be partial."""
    op = layout.partials[mesh_dim]
    assert op is not None
    return op


def _make_reduction(src: Layout, dst: Layout, mesh_dims: tuple[int, ...]) -> Reduction:
    """Return the reduction over ``mesh_dims`` by one collective, with the average or finalization that it needs."""
    ops = {_op_of(src, i) for i in mesh_dims}
    op = "sum" if len(ops) > 1 else next(iter(ops))
    if isinstance(op, Monoid):
        run = _monoid_run(src, mesh_dims[0])
        moved = _is_only_op(src, op) and _is_only_op(dst, op) and op in dst.partials
        return Reduction(op, mesh_dims, finish=op.finalize is not None and mesh_dims == run and not moved)
    averaged = tuple(i for i in mesh_dims if src.partials[i] == "avg") if len(ops) > 1 else ()
    return Reduction(op, mesh_dims, averaged)


def _monoid_run(layout: Layout, mesh_dim: int) -> tuple[int, ...]:
    """Return the adjacent mesh dims that are partial under the same monoid and reduced together with ``mesh_dim``."""
    run, current = [], []
    for i, op in enumerate(layout.partials):
        if op == layout.partials[mesh_dim]:
            current.append(i)
        elif op is not None:
            current = []
        if mesh_dim in current:
            run = list(current)
    return tuple(run)


def _is_only_op(layout: Layout, op: ReduceOp) -> bool:
    return set(layout.partials) <= {None, op}


# --- checks: they depend on layouts only, so all ranks raise together -----------------------------------------------
def _check_dtype(op: ReduceOp | None, src: Layout, dst: Layout) -> None:
    """Raise if ``op`` is not defined for the dtype: an average of integers, or a maximum of complex numbers."""
    if op == "avg" and not (src.dtype.is_floating_point or src.dtype.is_complex):
        raise LayoutError(
            f"{src!r} -> {dst!r}: the average of {src.dtype} values is not defined as {src.dtype}; use "
            "Partial('sum'), or .to(torch.float64)"
        )
    if op in ("max", "min") and src.dtype.is_complex:
        raise LayoutError(
            f"{src!r} -> {dst!r}: complex numbers are not ordered; reduce torch.view_as_real(x), or use Partial('sum')"
        )


def _check_monoids(src: Layout, dst: Layout, kept: set[int], entering: tuple[int, ...]) -> None:
    """Raise if a redistribution would apply ``finalize`` of a monoid to a value twice."""
    for i, op in enumerate(dst.partials):
        if (
            not isinstance(op, Monoid)
            or op.finalize is None
            or (op in src.partials and _is_only_op(src, op) and _is_only_op(dst, op))
        ):
            continue  # without finalize every addend is a value; if it is the only op, addends are moved unfinished
        if i in entering or (i in kept and kept.intersection(_monoid_run(src, i)) != kept.intersection(_monoid_run(dst, i))):
            raise LayoutError(
                f"{src!r} -> {dst!r}: a reduced value cannot become Partial({op.name!r}) again, because "
                "finalize() would run twice. Redistribute to Replicate(), or leave finalize out of the Monoid "
                "and apply it afterwards"
            )
