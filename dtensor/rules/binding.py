"""A notation bound to a call: which factor every tensor dim is. Once a pattern was bound for tensors of these numbers of dims
(and these picked dims), another call of the kind only fills in sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.caches import remembered
from ..placement import Monoid
from .call import Call, Meta
from .notation import EACH, Pattern, Term, is_group, is_picked
from .rule import Dims, Factors, Shapes, Word

Reduction = str | Monoid
Picks = tuple[tuple[str, Any], ...]  # argument -> the dims that it picks, as given
NUMBER = -1  # the term of a number, which stands in no pattern
Sizes = Mapping[str, str | Callable[[Call], int]]  # letter -> the argument that is its size, or what computes it


class _Misfit(Exception):
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


def bind(pattern: Pattern, call: Call, reduce_op: Any = "sum", sizes: Sizes | None = None) -> Factors | None:
    """The factors of a call under a pattern; None if the number of dims does not fit."""
    made = [meta for meta in call.results if meta is not None]
    terms = operand_terms(pattern, call)
    outs = result_terms(pattern, call.results)
    if terms is None or outs is None:
        return None
    shapes = [tuple(layout.shape) for layout in call.operands]
    recipe = recipe_of(
        pattern, terms, tuple(map(len, shapes)), outs, tuple([len(meta.shape) for meta in made]), picks(pattern, call)
    )
    if recipe is None:
        return None
    known = sizes_of(recipe, shapes, call, sizes or {})
    if known is None:
        return None
    operands = tuple([_fitted(dims, shape, known) for dims, shape in zip(recipe.operands, shapes, strict=True)])
    results = tuple([_fitted(dims, meta.shape, known) for dims, meta in zip(recipe.results, made, strict=True)])
    summed = recipe.summed if results == recipe.results else _lacking(operands, results)
    reduced = {} if reduce_op is None else dict.fromkeys(summed, reduce_op)
    return Factors(operands, results, known, recipe.whole, reduced, recipe.additive)


def operand_terms(pattern: Pattern, call: Call) -> tuple[int, ...] | None:
    """For each operand its term in the pattern; None if it has none."""
    fixed = call.fixed
    if pattern.operands[0].name == EACH:
        found = [0] * len(call.names)
    elif pattern.named:
        places = {term.name: i for i, term in enumerate(pattern.operands)}
        found = [places.get(name, NUMBER if i in fixed else len(places)) for i, name in enumerate(call.names)]
    else:
        found = list(range(len(call.names)))
    if fixed:
        found = [NUMBER if i in fixed else k for i, k in enumerate(found)]
    return tuple(found) if max(found, default=0) < len(pattern.operands) else None


def result_terms(pattern: Pattern, results: Sequence[Meta | None]) -> tuple[int, ...] | None:
    """For each result tensor its term in the pattern."""
    each = pattern.results[0].name == EACH
    found = tuple([0 if each else i for i, meta in enumerate(results) if meta is not None])
    return None if found and found[-1] >= len(pattern.results) else found


def picks(pattern: Pattern, call: Call) -> Picks:
    """What the arguments that pick dims say."""
    found = []
    for name in _picking(pattern):
        value = call.arguments.get(name.rstrip("!"))
        found.append((name, tuple(value) if isinstance(value, (list, tuple)) else value))
    return tuple(found)


@remembered(1024)
def _picking(pattern: Pattern) -> tuple[str, ...]:
    terms = (*pattern.operands, *pattern.results)
    return tuple(dict.fromkeys(_argument(dim) for term in terms for dim in term.dims if is_picked(dim)))


def _argument(dim: tuple[str, ...]) -> str:
    return dim[0][1:]


# --- dims to factors, once for each number of dims --------------------------------------------------------------------
@remembered(4096)
def recipe_of(
    pattern: Pattern,
    terms: tuple[int, ...],
    ndims: tuple[int, ...],
    outs: tuple[int, ...],
    out_ndims: tuple[int, ...],
    picked: Picks,
) -> Recipe | None:
    """The factors of tensors of ``ndims`` dims; None if they do not fit."""
    try:
        return _Binder(pattern, dict(picked)).recipe(
            [(Term(()) if k == NUMBER else pattern.operands[k], ndim) for k, ndim in zip(terms, ndims, strict=True)],
            [(pattern.results[k], ndim) for k, ndim in zip(outs, out_ndims, strict=True)],
        )
    except _Misfit:
        return None


class _Binder:
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
        summed = _lacking(left, right)
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
            raise _Misfit
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
                    raise _Misfit
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
        picked = self.places(_argument(term.dims[picking]), ndim)
        if any(not start <= p < stop for p in picked):
            raise _Misfit
        return start, stop, picked

    def reducible(self, term: Term, ndim: int, operands: Sequence[tuple[Term, int]]) -> tuple[Term, int, tuple[int, ...]]:
        """A result, and where it keeps dims of size one in the place of reduced ones."""
        picked: tuple[int, ...] = ()
        if not any(map(is_picked, term.dims)) and not term.additive:
            own = next(((t, n) for t, n in operands if any(map(is_picked, t.dims))), None)
            if own is not None:
                found = self.places(next(_argument(dim) for dim in own[0].dims if is_picked(dim)), own[1])
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
            raise _Misfit
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
        label = _argument(term.dims[picking]).rstrip("!")
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
                    raise _Misfit
                yield found

    def kept(self, dims: Dims, held: frozenset[str]) -> Dims:
        """Dims of a result that no operand has are new, and no factors."""
        return tuple(dim if held.issuperset(dim) else () for dim in dims)


def _lacking(operands: Sequence[Dims], results: Sequence[Dims]) -> tuple[str, ...]:
    """The factors of operands that some result lacks."""
    letters = dict.fromkeys(name for dims in operands for dim in dims for name in dim)
    return tuple([name for name in letters if not results or any(all(name not in dim for dim in dims) for dims in results)])


# --- sizes, for each call ---------------------------------------------------------------------------------------------
def sizes_of(recipe: Recipe, shapes: Sequence[tuple[int, ...]], call: Call, given: Sizes) -> dict[str, int] | None:
    """The size of each factor: the largest that it has anywhere; None if products do not come out."""
    sizes: dict[str, int] = {}
    for dims, shape in zip(recipe.operands, shapes, strict=True):
        for dim, size in zip(dims, shape, strict=True):
            if len(dim) == 1 and sizes.get(dim[0], 1) == 1:
                sizes[dim[0]] = size
    if recipe.products:
        for letter, value in given.items():
            sizes[letter] = int(value(call) if callable(value) else call[value])
        metas = [meta.shape for meta in call.results if meta is not None]
        tensors = [*zip(recipe.operands, shapes, strict=True), *zip(recipe.results, metas, strict=False)]
        for dims, shape in (*tensors, *tensors):
            for dim, size in zip(dims, shape, strict=True):
                if len(dim) > 1 and not _divided(dim, size, sizes):
                    return None
        if any(name not in sizes for dims in recipe.operands for dim in dims for name in dim):
            return None
    return sizes


def _divided(dim: tuple[str, ...], size: int, sizes: dict[str, int]) -> bool:
    """Learn the one factor of a product whose size is not known yet; whether the product can be ``size``."""
    unknown = [name for name in dim if name not in sizes]
    known = 1
    for name in dim:
        known *= sizes.get(name, 1)
    if len(unknown) == 1:
        sizes[unknown[0]] = size // max(1, known)
        known *= sizes[unknown[0]]
    return len(unknown) > 1 or known == size


def _fitted(dims: Dims, shape: Sequence[int], sizes: Mapping[str, int]) -> Dims:
    """``dims``, but none where a dim of size one is broadcast."""
    for dim, size in zip(dims, shape, strict=True):
        if len(dim) == 1 and sizes[dim[0]] != size:
            return tuple([d if len(d) != 1 or sizes[d[0]] == n else () for d, n in zip(dims, shape, strict=True)])
    return dims


# --- shapes -----------------------------------------------------------------------------------------------------------
def label_of(factor: str) -> str:
    """How the notation writes a factor: ``m``, ``s*`` for one of a group, ``@dim`` for a picked one (``s`` and ``dim`` here)."""
    return factor.partition(".")[0]


@dataclass(frozen=True, slots=True)
class ShapesOf(Word):
    """The shapes of the results where every factor has one size."""

    pattern: Pattern

    def __call__(self, call: Call) -> Shapes | None:
        terms = operand_terms(self.pattern, call)
        if terms is None:
            return None
        shapes = [tuple(layout.shape) for layout in call.operands]
        count = len(call.func._schema.returns)
        outs = tuple(range(count)) if self.pattern.results[0].name != EACH else (0,) * count
        if outs and outs[-1] >= len(self.pattern.results):
            return None
        recipe = _forward(
            self.pattern, terms, tuple(map(len, shapes)), outs, picks(self.pattern, call), bool(call.get("keepdim"))
        )
        if recipe is None or recipe.products:
            return None
        sizes: dict[str, int] = {}
        for dims, shape in zip(recipe.operands, shapes, strict=True):
            for dim, size in zip(dims, shape, strict=True):
                if dim and sizes.setdefault(dim[0], size) != size:
                    return None
        return tuple([tuple([sizes[dim[0]] if dim else 1 for dim in dims]) for dims in recipe.results])


@remembered(4096)
def _forward(
    pattern: Pattern, terms: tuple[int, ...], ndims: tuple[int, ...], outs: tuple[int, ...], picked: Picks, keepdim: bool
) -> Recipe | None:
    """As :func:`recipe_of`, for results whose numbers of dims are not known yet."""
    operands = recipe_of(pattern, terms, ndims, (), (), picked)
    if operands is None:
        return None
    binder = _Binder(pattern, dict(picked))
    given = [(pattern.operands[k], ndim) for k, ndim in zip(terms, ndims, strict=True) if k != NUMBER]
    for term, ndim in sorted(given, key=lambda item: not any(map(is_picked, item[0].dims))):
        binder.measure(term, ndim)
    letters = {name for dims in operands.operands for dim in dims for name in dim}
    gone = {name: sum(label_of(letter) == name.rstrip("!") for letter in letters) for name, _ in picked}
    ndims_out = []
    for k in outs:
        dims = pattern.results[k].dims
        if any(not dim or (is_picked(dim) and not any(dim in term.dims for term, _ in given)) for dim in dims):
            return None  # of some size of its own
        own = sum(
            binder.lengths.get(dim[0], 0) if is_group(dim) else gone[_argument(dim)] if is_picked(dim) else 1 for dim in dims
        )
        ndims_out.append(own + (sum(gone.values()) if keepdim and not any(map(is_picked, dims)) else 0))
    return recipe_of(pattern, terms, ndims, outs, tuple(ndims_out), picked)
