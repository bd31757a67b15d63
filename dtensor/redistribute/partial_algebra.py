"""The algebra of ``Partial``: which reductions commute, and when a value may become a term again.

**The order of reduction.** A tensor that is partial on several mesh dims is a nest of reductions in the order in which its
placements are written, like function composition: ``[Partial("max"), Partial("sum")]`` on ``("dp", "tp")`` is
``max over dp of (sum over tp)``. The last mesh dim reduces first. Neighbouring mesh dims with one same monoid are one fold,
first mesh dim major.

Reductions leave a nest innermost first and enter it outermost first, which is always right; the tables below say when a
reduction may pass another one, so that terms which the destination keeps need not be touched.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ..errors import LayoutError
from ..layout.layout import Layout
from ..placement import Monoid

Op = str | Monoid

LINEAR = frozenset({"sum", "avg"})  # avg = sum / n, so both commute with each other
KEEPING = frozenset({"max", "min", "avg"})  # the reduction of equal terms is the term: a value is its own term everywhere


def commute(a: Op, b: Op) -> bool:
    """Whether nests of these two reductions may change places."""
    if isinstance(a, Monoid) or isinstance(b, Monoid):
        return False  # associative, but not known to be commutative
    return a == b or (a in LINEAR and b in LINEAR)


def may_enter(op: Op, inner: Op) -> bool:
    """Whether a value whose terms are still under ``inner`` may become the terms of an ``op`` outside of it.

    Where every rank keeps the terms, each rank's inner reduction is the value. Otherwise all but the first hold identities of
    ``op``, and the law is: ``inner`` of identities is the identity (a sum of zeros is 0; a sum of ones is not 1).
    """
    if op in KEEPING or op == inner:
        return True
    match op:
        case "sum":
            return not isinstance(inner, Monoid)
        case "product":
            return inner in ("avg", "max", "min")
        case _:
            return False


def may_pad(op: Op, inner: Sequence[Op]) -> bool:
    """Whether a shard may become a term of ``op`` by filling the rest with identities, terms being under ``inner`` still.

    ``avg`` never: the mean of (x, 0) is x / 2. A monoid never: it need not act pointwise along the sharded dim.
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
    """One collective's worth of reducing: ``op`` over ``mesh_dims``; ``finish`` applies a monoid's ``finalize``."""

    op: Op
    mesh_dims: tuple[int, ...]
    averaged: tuple[int, ...] = ()  # a sum merged with averages is divided by the number of ranks on these mesh dims
    finish: bool = False

    def part(self, mesh_dims: tuple[int, ...]) -> Reduction:
        """This reduction over some of its mesh dims only."""
        averaged = tuple(i for i in mesh_dims if i in self.averaged)
        if averaged == mesh_dims:
            return Reduction("avg", mesh_dims)
        return Reduction(self.op, mesh_dims, averaged, self.finish)


class Changes(NamedTuple):
    """What becomes of the partial mesh dims between two layouts."""

    reduced: tuple[Reduction, ...]  # in the order in which they run
    entered: tuple[int, ...]  # mesh dims that become partial afterwards, outermost first


def changes(src: Layout, dst: Layout) -> Changes:
    """The reductions that lead from ``src`` to ``dst``, merged as far as the algebra allows.

    Raises:
        LayoutError: a reduction that the dtype does not have, or terms of a monoid that cannot be made from a value.
    """
    if src.partials == dst.partials:
        return Changes((), ())
    kept = _kept(src, dst)
    leaving = [i for i, op in enumerate(src.partials) if op is not None and i not in kept]
    entering = tuple(i for i, op in enumerate(dst.partials) if op is not None and i not in kept)
    for op in [*(src.partials[i] for i in leaving), *(dst.partials[i] for i in entering)]:
        _check_dtype(op, src, dst)
    _check_monoids(src, dst, kept, entering)
    return Changes(tuple(_merged(src, dst, leaving)), entering)


def _kept(src: Layout, dst: Layout) -> set[int]:
    """Mesh dims whose terms stay: same op on both sides, and nothing has to pass them that cannot."""
    kept = {i for i, (a, b) in enumerate(zip(src.partials, dst.partials, strict=True)) if a is not None and a == b}
    while True:
        leaving = [(i, op) for i, op in enumerate(src.partials) if op is not None and i not in kept]
        entering = [(i, op) for i, op in enumerate(dst.partials) if op is not None and i not in kept]
        blocked = {j for j in kept if _must_pass(leaving, entering, j, _op(src, j))}
        if not blocked:
            return kept
        kept -= blocked


def _must_pass(leaving: list[tuple[int, Op]], entering: list[tuple[int, Op]], mesh_dim: int, inner: Op) -> bool:
    """Whether a reduction further out would have to pass ``inner`` on ``mesh_dim`` and cannot."""
    return any(i < mesh_dim and not commute(op, inner) for i, op in leaving) or any(
        i < mesh_dim and not may_enter(op, inner) for i, op in entering
    )


def _merged(src: Layout, dst: Layout, leaving: list[int]) -> list[Reduction]:
    """Innermost first; a reduction joins an earlier one if it commutes with all that run in between."""
    merged: list[list[int]] = []
    for i in reversed(leaving):
        for at in range(len(merged) - 1, -1, -1):
            if _joins(src, i, merged[at]):
                merged[at].append(i)
                break
            if not all(commute(_op(src, i), _op(src, j)) for j in merged[at]):
                merged.append([i])
                break
        else:
            merged.append([i])
    return [_reduction(src, dst, tuple(sorted(mesh_dims))) for mesh_dims in merged]


def _joins(src: Layout, i: int, group: list[int]) -> bool:
    op = _op(src, i)
    if isinstance(op, Monoid):
        return all(src.partials[j] in (None, op) for j in range(i, max(group) + 1))
    return all(commute(op, _op(src, j)) for j in group)


def _op(layout: Layout, mesh_dim: int) -> Op:
    op = layout.partials[mesh_dim]
    assert op is not None
    return op


def _reduction(src: Layout, dst: Layout, mesh_dims: tuple[int, ...]) -> Reduction:
    ops = {_op(src, i) for i in mesh_dims}
    op = "sum" if len(ops) > 1 else next(iter(ops))
    if isinstance(op, Monoid):
        run = _run(src, mesh_dims[0])
        moved = _only(src, op) and _only(dst, op) and op in dst.partials
        return Reduction(op, mesh_dims, finish=op.finalize is not None and mesh_dims == run and not moved)
    averaged = tuple(i for i in mesh_dims if src.partials[i] == "avg") if len(ops) > 1 else ()
    return Reduction(op, mesh_dims, averaged)


def _run(layout: Layout, mesh_dim: int) -> tuple[int, ...]:
    """The neighbouring partial mesh dims that are one fold with ``mesh_dim``."""
    run, current = [], []
    for i, op in enumerate(layout.partials):
        if op == layout.partials[mesh_dim]:
            current.append(i)
        elif op is not None:
            current = []
        if mesh_dim in current:
            run = list(current)
    return tuple(run)


def _only(layout: Layout, op: Op) -> bool:
    return set(layout.partials) <= {None, op}


# --- what is refused, on every rank alike ---------------------------------------------------------------------------
def _check_dtype(op: Op | None, src: Layout, dst: Layout) -> None:
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
    for i, op in enumerate(dst.partials):
        if not isinstance(op, Monoid) or op.finalize is None or (op in src.partials and _only(src, op) and _only(dst, op)):
            continue  # without finalize every term is a value; alone, terms move about unfinished
        if i in entering or (i in kept and kept.intersection(_run(src, i)) != kept.intersection(_run(dst, i))):
            raise LayoutError(
                f"{src!r} -> {dst!r}: a reduced value cannot become Partial({op.name!r}) again, because "
                "finalize() would run twice. Redistribute to Replicate(), or leave finalize out of the Monoid "
                "and apply it afterwards"
            )
