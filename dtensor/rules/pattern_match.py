"""Recipes: which factor every tensor dim of a pattern is, for tensors of these numbers of dims and these picked dims.

Another call of the kind only fills in sizes (``bind_notation.py``).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.caches import remembered
from .notation import EACH, Pattern, Term, argument_of, is_group, is_picked
from .rule import Dims

Picks = tuple[tuple[str, Any], ...]  # argument -> the dims that it picks, as given
NUMBER = -1  # the term of a number, which stands in no pattern


class Misfit(Exception):
    """The tensors of a call do not have as many dims as the pattern says."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The factors of all dims, sizes aside.

    Attributes:
        whole: factors that every rank needs whole.
        summed: factors of operands that some result lacks.
        products: whether some dim is made of several factors.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    whole: frozenset[str]
    summed: tuple[str, ...]
    additive: frozenset[int]
    products: bool


@remembered(4096)
def recipe_of(
    pattern: Pattern,
    names: tuple[str, ...],
    fixed: frozenset[int],
    ndims: tuple[int, ...],
    out_ndims: tuple[int | None, ...],
    picked: Picks,
) -> Recipe | None:
    """The factors of operands (of these arguments, ``fixed`` are numbers) and results of so many dims (None: no tensor); None if
    they do not fit."""
    terms, outs = operand_terms(pattern, names, fixed), result_terms(pattern, out_ndims)
    if terms is None or outs is None:
        return None
    known = [ndim for ndim in out_ndims if ndim is not None]
    try:
        return Binder(pattern, dict(picked)).recipe(
            [(Term(()) if k == NUMBER else pattern.operands[k], ndim) for k, ndim in zip(terms, ndims, strict=True)],
            [(pattern.results[k], ndim) for k, ndim in zip(outs, known, strict=True)],
        )
    except Misfit:
        return None


def operand_terms(pattern: Pattern, names: tuple[str, ...], fixed: frozenset[int]) -> tuple[int, ...] | None:
    """For each operand its term in the pattern; None if it has none."""
    if pattern.operands[0].name == EACH:
        found = [0] * len(names)
    elif pattern.named:
        places = {term.name: i for i, term in enumerate(pattern.operands)}
        found = [places.get(name, len(places)) for name in names]
    else:
        found = list(range(len(names)))
    added = {k for k, term in enumerate(pattern.operands) if term.additive}  # once, as a number too
    found = [NUMBER if i in fixed and k not in added else k for i, k in enumerate(found)]
    return tuple(found) if max(found, default=0) < len(pattern.operands) else None


def result_terms(pattern: Pattern, ndims: Sequence[int | None]) -> tuple[int, ...] | None:
    """For each result tensor its term in the pattern."""
    each = pattern.results[0].name == EACH
    found = tuple([0 if each else i for i, ndim in enumerate(ndims) if ndim is not None])
    return None if found and found[-1] >= len(pattern.results) else found


class Binder:
    """Finds how many dims each group has, then names them."""

    def __init__(self, pattern: Pattern, picked: Mapping[str, Any]) -> None:
        self.pattern, self.picked = pattern, picked
        self.lengths: dict[str, int] = {}
        self.whole = {word.strip("@!*.") for word in pattern.whole}

    def recipe(self, operands: Sequence[tuple[Term, int]], results: Sequence[tuple[Term, int]]) -> Recipe:
        for term, ndim in sorted((*operands, *results), key=lambda item: not any(map(is_picked, item[0].dims))):
            self.measure(term, ndim)
        left = tuple([self.named(term, ndim, ()) for term, ndim in operands])
        held = frozenset(name for dims in left for dim in dims for name in dim)
        right = tuple([self.kept(self.named(*self.reducible(term, ndim, operands)), held) for term, ndim in results])
        summed = lacking(left, right)
        whole = frozenset(name for name in held if label_of(name) in self.whole)
        additive = frozenset(i for i, (term, _) in enumerate(operands) if term.additive)
        products = any(len(dim) > 1 for dims in (*left, *right) for dim in dims)
        return Recipe(left, right, whole, summed, additive, products)

    def places(self, name: str, ndim: int) -> tuple[int, ...]:
        """The dims that an argument picks of a tensor of ``ndim`` dims; None or an empty list: all."""
        value = self.picked[name]
        if value is None or value == ():
            return () if value == () and name[-1] == "!" else tuple(range(ndim))
        found = tuple(v + ndim if v < 0 else v for v in ((value,) if isinstance(value, int) else value)) if ndim else ()
        if any(not 0 <= v < ndim for v in found):
            raise Misfit
        return tuple(dict.fromkeys(found))

    def measure(self, term: Term, ndim: int) -> None:
        """The lengths of a term's groups, where it tells them."""
        groups = [k for k, dim in enumerate(term.dims) if is_group(dim)]
        picking = next((k for k, dim in enumerate(term.dims) if is_picked(dim)), None)
        if picking is not None:
            start, stop, picked = self.region(term, picking, ndim)
            rest, first = stop - start - len(picked), min(picked, default=stop)
            before = sum(p not in picked for p in range(start, first)) if picking + 1 in groups else rest
            for k, own in ((picking - 1, before), (picking + 1, rest - before if picking - 1 in groups else rest)):
                if k in groups and self.lengths.setdefault(term.dims[k][0], own) != own:
                    raise Misfit
        elif len(unknown := [k for k in groups if len(groups) == 1 or term.dims[k][0] not in self.lengths]) == 1:
            known = sum(self.lengths[term.dims[k][0]] for k in groups if k not in unknown)
            own, name = ndim - (len(term.dims) - len(groups)) - known, term.dims[unknown[0]][0]
            if own >= 0 and not term.additive:
                self.lengths[name] = max(own, self.lengths.get(name, 0))

    def region(self, term: Term, picking: int, ndim: int) -> tuple[int, int, tuple[int, ...]]:
        """The dims that picked ones share with the groups beside them, and which of these are picked."""
        start = picking - (picking > 0 and is_group(term.dims[picking - 1]))
        after = picking + 1 + (picking + 1 < len(term.dims) and is_group(term.dims[picking + 1]))
        stop = ndim - (len(term.dims) - after)
        picked = self.places(argument_of(term.dims[picking]), ndim)
        if any(not start <= p < stop for p in picked):
            raise Misfit
        return start, stop, picked

    def reducible(self, term: Term, ndim: int, operands: Sequence[tuple[Term, int]]) -> tuple[Term, int, tuple[int, ...]]:
        """A result, and where it keeps dims of size one in the place of reduced ones."""
        picked: tuple[int, ...] = ()
        if not any(map(is_picked, term.dims)) and not term.additive:
            own = next(((t, n) for t, n in operands if any(map(is_picked, t.dims))), None)
            if own is not None:
                found = self.places(next(argument_of(dim) for dim in own[0].dims if is_picked(dim)), own[1])
                own_ndim = sum(self.lengths.get(dim[0], 0) if is_group(dim) else 1 for dim in term.dims)
                if found and own_ndim + len(found) == ndim:
                    picked = found
        return term, ndim, picked

    def named(self, term: Term, ndim: int, kept: tuple[int, ...]) -> Dims:
        """The factors of one tensor's dims. ``kept``: dims of size one in the place of reduced ones."""
        dims = term.dims
        if term.additive and not any(map(is_group, dims)):
            dims = dims[-ndim:] if 0 < ndim < len(dims) else () if not ndim else dims
        picking = next((k for k, dim in enumerate(dims) if is_picked(dim)), None)
        names = list(self.around(term, picking, ndim) if picking is not None else self.in_order(dims, ndim - len(kept)))
        for place in sorted(kept):
            names.insert(place, ())
        if len(names) != ndim:
            raise Misfit
        return tuple(names)

    def in_order(self, dims: Sequence[tuple[str, ...]], ndim: int) -> Iterator[tuple[str, ...]]:
        groups = [dim for dim in dims if is_group(dim)]
        for dim in dims:
            if is_group(dim):
                full = self.lengths.get(dim[0], 0)
                own = ndim - len(dims) + 1 if len(groups) == 1 else full
                yield from self.members(dim, full, own)
            else:
                yield dim

    def members(self, dim: tuple[str, ...], full: int, own: int) -> Iterator[tuple[str, ...]]:
        """The factors of a group, right-aligned."""
        label = dim[0].rstrip("*.")
        return ((f"{label}.{full - own + i}",) for i in range(own))

    def around(self, term: Term, picking: int, ndim: int) -> Iterator[tuple[str, ...]]:
        """The dims of a term with picked ones among those of the groups beside them."""
        start, stop, picked = self.region(term, picking, ndim)
        label = argument_of(term.dims[picking]).rstrip("!")
        others = iter(
            [name for dim in term.dims if is_group(dim) for name in self.members(dim, *(self.lengths.get(dim[0], 0),) * 2)]
        )
        head, tail = iter(term.dims[:start]), iter(term.dims[len(term.dims) - (ndim - stop) :])
        for place in range(ndim):
            if place in picked:
                yield (f"{label}.{picked.index(place)}",)
            else:
                found = next(head if place < start else others if place < stop else tail, None)
                if found is None:
                    raise Misfit
                yield found

    def kept(self, dims: Dims, held: frozenset[str]) -> Dims:
        """Dims of a result that no operand has are new, and no factors."""
        return tuple(dim if held.issuperset(dim) else () for dim in dims)


def lacking(operands: Sequence[Dims], results: Sequence[Dims]) -> tuple[str, ...]:
    """The factors of operands that some result lacks."""
    letters = dict.fromkeys(name for dims in operands for dim in dims for name in dim)
    return tuple([name for name in letters if not results or any(all(name not in dim for dim in dims) for dims in results)])


def label_of(factor: str) -> str:
    """How the notation writes a factor: ``m``, ``s*`` for one of a group, ``@dim`` for a picked one (``s`` and ``dim`` here)."""
    return factor.partition(".")[0]
