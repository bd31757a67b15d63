"""Bind patterns: match the pattern of a notation with the tensors of a call, and find the factor of each tensor dim and its size.

A :class:`PatternMatch` depends on the numbers of dims and the selected dims only. It is cached, so another call of this kind only
fills in sizes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.caches import memoize
from ..placement import Monoid
from .call import Call
from .notation import EACH, Pattern, Term, is_group, is_selected, selector_argument
from .rule import Declaration, Dims, Factors, Shapes

Reduction = str | Monoid
Sizes = Mapping[str, str | Callable[[Call], int]]  # letter -> the argument that is its size, or a function that computes it
SelectedDims = tuple[tuple[str, Any], ...]  # argument -> the dims that it selects, as passed
NUMBER_TERM = -1  # the term of a number, which is in no pattern


class PatternMismatch(Exception):
    """The tensors of a call do not have as many dims as the pattern states."""


@dataclass(frozen=True, slots=True)
class PatternMatch:
    """The factors of all dims, without sizes.

    Attributes:
        unsharded: factors that must be unsharded.
        summed: factors of operands that some result lacks.
        products: some dim consists of several factors.
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    unsharded: frozenset[str]
    summed: tuple[str, ...]
    additive: frozenset[int]
    products: bool


@memoize(4096)
def match_pattern(
    pattern: Pattern,
    names: tuple[str, ...],
    fixed: frozenset[int],
    ndims: tuple[int, ...],
    out_ndims: tuple[int | None, ...],
    selected: SelectedDims,
) -> PatternMatch | None:
    """Return the factors of each tensor dim for tensors with these numbers of dims; None if the pattern does not fit.

    ``names``: the argument of each operand, of which ``fixed`` are numbers. A number of dims None is no tensor.
    """
    terms, outs = match_operand_terms(pattern, names, fixed), match_result_terms(pattern, out_ndims)
    if terms is None or outs is None:
        return None
    result_ndims = [ndim for ndim in out_ndims if ndim is not None]
    try:
        return PatternBinder(pattern, dict(selected)).bind(
            [(Term(()) if k == NUMBER_TERM else pattern.operands[k], ndim) for k, ndim in zip(terms, ndims, strict=True)],
            [(pattern.results[k], ndim) for k, ndim in zip(outs, result_ndims, strict=True)],
        )
    except PatternMismatch:
        return None


def match_operand_terms(pattern: Pattern, names: tuple[str, ...], fixed: frozenset[int]) -> tuple[int, ...] | None:
    """Return for each operand the index of its term in the pattern, or None if some operand has none."""
    if pattern.operands[0].name == EACH:
        terms = [0] * len(names)
    elif pattern.named:
        places = {term.name: i for i, term in enumerate(pattern.operands)}
        terms = [places.get(name, len(places)) for name in names]
    else:
        terms = list(range(len(names)))
    added = {k for k, term in enumerate(pattern.operands) if term.additive}  # additive terms may be numbers too
    terms = [NUMBER_TERM if i in fixed and k not in added else k for i, k in enumerate(terms)]
    return tuple(terms) if max(terms, default=0) < len(pattern.operands) else None


def match_result_terms(pattern: Pattern, ndims: Sequence[int | None]) -> tuple[int, ...] | None:
    """Return for each tensor result the index of its term in the pattern, or None if some result has none."""
    each = pattern.results[0].name == EACH
    terms = tuple([0 if each else i for i, ndim in enumerate(ndims) if ndim is not None])
    return None if terms and terms[-1] >= len(pattern.results) else terms


class PatternBinder:
    """Find the number of dims of each group, then name the dims."""

    def __init__(self, pattern: Pattern, selected: Mapping[str, Any]) -> None:
        self.pattern, self.selected = pattern, selected
        self.lengths: dict[str, int] = {}
        self.unsharded = {word.strip("@!*.") for word in pattern.unsharded}

    def bind(self, operands: Sequence[tuple[Term, int]], results: Sequence[tuple[Term, int]]) -> PatternMatch:
        """Assign factors to the dims of all operands and results. Raise ``PatternMismatch`` if they do not fit."""
        for term, ndim in sorted((*operands, *results), key=lambda item: not any(map(is_selected, item[0].dims))):
            self.measure_groups(term, ndim)
        operand_dims = tuple([self.name_dims(term, ndim, ()) for term, ndim in operands])
        operand_factors = frozenset(name for dims in operand_dims for dim in dims for name in dim)
        result_dims = tuple(
            [
                tuple([dim if operand_factors.issuperset(dim) else () for dim in dims])  # () is a new dim
                for dims in [self.name_dims(term, ndim, self.find_kept_dims(term, ndim, operands)) for term, ndim in results]
            ]
        )
        summed = reduced_factors(operand_dims, result_dims)
        unsharded = frozenset(name for name in operand_factors if notation_label(name) in self.unsharded)
        additive = frozenset(i for i, (term, _) in enumerate(operands) if term.additive)
        products = any(len(dim) > 1 for dims in (*operand_dims, *result_dims) for dim in dims)
        return PatternMatch(operand_dims, result_dims, unsharded, summed, additive, products)

    def selected_dims_of(self, name: str, ndim: int) -> tuple[int, ...]:
        """Return the dims, as non-negative numbers, that an argument selects of a tensor. None or an empty list select all."""
        value = self.selected[name]
        if value is None or value == ():
            return () if value == () and name[-1] == "!" else tuple(range(ndim))
        dims = tuple(v + ndim if v < 0 else v for v in ((value,) if isinstance(value, int) else value)) if ndim else ()
        if any(not 0 <= v < ndim for v in dims):
            raise PatternMismatch
        return tuple(dict.fromkeys(dims))

    def measure_groups(self, term: Term, ndim: int) -> None:
        """Record how many tensor dims each group (``a*``) of a term has, if the term determines it."""
        groups = [k for k, dim in enumerate(term.dims) if is_group(dim)]
        selector = next((k for k, dim in enumerate(term.dims) if is_selected(dim)), None)
        if selector is not None:
            start, stop, selected = self.find_selected_region(term, selector, ndim)
            rest, first = stop - start - len(selected), min(selected, default=stop)
            before = sum(p not in selected for p in range(start, first)) if selector + 1 in groups else rest
            for k, length in ((selector - 1, before), (selector + 1, rest - before if selector - 1 in groups else rest)):
                if k in groups and self.lengths.setdefault(term.dims[k][0], length) != length:
                    raise PatternMismatch
        elif len(unknown := [k for k in groups if len(groups) == 1 or term.dims[k][0] not in self.lengths]) == 1:
            known_length = sum(self.lengths[term.dims[k][0]] for k in groups if k not in unknown)
            length, name = ndim - (len(term.dims) - len(groups)) - known_length, term.dims[unknown[0]][0]
            if length >= 0 and not term.additive:
                self.lengths[name] = max(length, self.lengths.get(name, 0))

    def find_selected_region(self, term: Term, selector: int, ndim: int) -> tuple[int, int, tuple[int, ...]]:
        """Return start and stop of the dims that the selected dims and adjacent groups cover, and the selected dims."""
        start = selector - (selector > 0 and is_group(term.dims[selector - 1]))
        after = selector + 1 + (selector + 1 < len(term.dims) and is_group(term.dims[selector + 1]))
        stop = ndim - (len(term.dims) - after)
        selected = self.selected_dims_of(selector_argument(term.dims[selector]), ndim)
        if any(not start <= p < stop for p in selected):
            raise PatternMismatch
        return start, stop, selected

    def find_kept_dims(self, term: Term, ndim: int, operands: Sequence[tuple[Term, int]]) -> tuple[int, ...]:
        """Return the dims of a result that have size one because ``keepdim`` keeps them, or () if it has none."""
        operand = next(((t, n) for t, n in operands if any(map(is_selected, t.dims))), None)
        if operand is None or any(map(is_selected, term.dims)) or term.additive:
            return ()
        selected = self.selected_dims_of(next(selector_argument(dim) for dim in operand[0].dims if is_selected(dim)), operand[1])
        own_ndim = sum(self.lengths.get(dim[0], 0) if is_group(dim) else 1 for dim in term.dims)
        return selected if own_ndim + len(selected) == ndim else ()

    def name_dims(self, term: Term, ndim: int, kept: tuple[int, ...]) -> Dims:
        """Return the factors of one tensor's dims. ``kept``: dims of size one in place of reduced dims."""
        dims = term.dims
        if term.additive and not any(map(is_group, dims)):
            dims = dims[-ndim:] if 0 < ndim < len(dims) else () if not ndim else dims
        selector = next((k for k, dim in enumerate(dims) if is_selected(dim)), None)
        names = list(
            self.name_around_selected(term, selector, ndim)
            if selector is not None
            else self.name_in_order(dims, ndim - len(kept))
        )
        for place in sorted(kept):
            names.insert(place, ())
        if len(names) != ndim:
            raise PatternMismatch
        return tuple(names)

    def name_in_order(self, dims: Sequence[tuple[str, ...]], ndim: int) -> Iterator[tuple[str, ...]]:
        """Yield the factors of each dim of a term without selected dims; a group takes as many dims as the tensor has."""
        groups = [dim for dim in dims if is_group(dim)]
        for dim in dims:
            if is_group(dim):
                full = self.lengths.get(dim[0], 0)
                own = ndim - len(dims) + 1 if len(groups) == 1 else full
                yield from self.name_group(dim, full, own)
            else:
                yield dim

    def name_group(self, dim: tuple[str, ...], full: int, own: int) -> Iterator[tuple[str, ...]]:
        """Yield a numbered factor (``s.0``) for each dim of a group, right-aligned if the tensor has fewer of them."""
        label = dim[0].rstrip("*.")
        return ((f"{label}.{full - own + i}",) for i in range(own))

    def name_around_selected(self, term: Term, selector: int, ndim: int) -> Iterator[tuple[str, ...]]:
        """Yield the factors of each dim of a term with selected dims, which are among the dims of the adjacent groups."""
        start, stop, selected = self.find_selected_region(term, selector, ndim)
        label = selector_argument(term.dims[selector]).rstrip("!")
        others = iter(
            [name for dim in term.dims if is_group(dim) for name in self.name_group(dim, *(self.lengths.get(dim[0], 0),) * 2)]
        )
        head, tail = iter(term.dims[:start]), iter(term.dims[len(term.dims) - (ndim - stop) :])
        for place in range(ndim):
            if place in selected:
                yield (f"{label}.{selected.index(place)}",)
            else:
                next_dim = next(head if place < start else others if place < stop else tail, None)
                if next_dim is None:
                    raise PatternMismatch
                yield next_dim


def reduced_factors(operands: Sequence[Dims], results: Sequence[Dims]) -> tuple[str, ...]:
    """Return the factors of operands that some result lacks."""
    factors = dict.fromkeys(name for dims in operands for dim in dims for name in dim)
    return tuple([name for name in factors if not results or any(all(name not in dim for dim in dims) for dims in results)])


def notation_label(factor: str) -> str:
    """Return the label of a factor in the notation: ``s`` for factor ``s.0`` of group ``s*``, ``dim`` for ``dim.0``."""
    return factor.partition(".")[0]


# --- binding: a match with sizes ------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class BoundPattern:
    """The factors of a call's tensors, and the pattern match that they come from."""

    match: PatternMatch
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: dict[str, int]

    @property
    def summed(self) -> tuple[str, ...]:
        """Factors of operands that some result lacks."""
        return self.match.summed if self.results == self.match.results else reduced_factors(self.operands, self.results)


def bind_pattern(pattern: Pattern, call: Call, sizes: Sizes, left_out: frozenset[int] = frozenset()) -> BoundPattern | None:
    """Match a pattern with a call, and return the factors of each tensor dim with their sizes. None if it does not fit."""
    metas = [None if meta is None or i in left_out else meta.shape for i, meta in enumerate(call.results)]
    shapes = [layout.shape for layout in call.operands]
    out_ndims = tuple([None if shape is None else len(shape) for shape in metas])
    match = match_pattern(
        pattern, call.names, call.fixed_operands, tuple(map(len, shapes)), out_ndims, selector_values(pattern, call)
    )
    if match is None:
        return None
    result_shapes = [shape for shape in metas if shape is not None]
    sizes_by_factor = factor_sizes(match, shapes, result_shapes, call, sizes)
    if sizes_by_factor is None:
        return None
    operands = tuple(
        [_drop_broadcast_dims(dims, shape, sizes_by_factor) for dims, shape in zip(match.operands, shapes, strict=True)]
    )
    results = tuple(
        [_drop_broadcast_dims(dims, shape, sizes_by_factor) for dims, shape in zip(match.results, result_shapes, strict=True)]
    )
    return BoundPattern(match, operands, results, sizes_by_factor)


def factors_of_pattern(pattern: Pattern, call: Call, reduce_op: Any = "sum", sizes: Sizes | None = None) -> Factors | None:
    """Return the :class:`Factors` of a call by a pattern, reducing absent factors by ``reduce_op``. None if it does not fit."""
    bound = bind_pattern(pattern, call, sizes or {})
    if bound is None:
        return None
    reduced = {} if reduce_op is None else dict.fromkeys(bound.summed, reduce_op)
    return Factors(bound.operands, bound.results, bound.sizes, bound.match.unsharded, reduced, bound.match.additive)


def selector_values(pattern: Pattern, call: Call) -> SelectedDims:
    """Return (name, value in this call) of each argument that selects dims in the pattern."""
    if not pattern.selectors:
        return ()
    selected = []
    for name in pattern.selectors:
        value = call.arguments.get(name.rstrip("!"))
        selected.append((name, tuple(value) if isinstance(value, (list, tuple)) else value))
    return tuple(selected)


# --- factor sizes of a call -------------------------------------------------------------------------------------------
def factor_sizes(
    match: PatternMatch,
    shapes: Sequence[Sequence[int]],
    result_shapes: Sequence[Sequence[int]],
    call: Call,
    declared_sizes: Sizes,
) -> dict[str, int] | None:
    """Return the size of each factor: the largest in any operand. None if the sizes of products contradict each other."""
    sizes: dict[str, int] = {}
    for dims, shape in zip(match.operands, shapes, strict=True):
        for dim, size in zip(dims, shape, strict=True):
            if len(dim) == 1 and sizes.get(dim[0], 1) == 1:
                sizes[dim[0]] = size
    if match.products:
        for letter, value in declared_sizes.items():
            sizes[letter] = int(value(call) if callable(value) else call[value])
        tensors = [*zip(match.operands, shapes, strict=True), *zip(match.results, result_shapes, strict=False)]
        for dims, shape in (*tensors, *tensors):
            for dim, size in zip(dims, shape, strict=True):
                if len(dim) > 1 and not _infer_factor_size(dim, size, sizes):
                    return None
        if any(name not in sizes for dims in match.operands for dim in dims for name in dim):
            return None
    return sizes


def _infer_factor_size(dim: tuple[str, ...], size: int, sizes: dict[str, int]) -> bool:
    """Infer the one unknown factor size of a dim that is a product of factors. Return False if the product cannot be ``size``."""
    unknown = [name for name in dim if name not in sizes]
    known_product = math.prod(sizes.get(name, 1) for name in dim)
    if len(unknown) == 1:
        sizes[unknown[0]] = size // max(1, known_product)
        known_product *= sizes[unknown[0]]
    return len(unknown) > 1 or known_product == size


def _drop_broadcast_dims(dims: Dims, shape: Sequence[int], sizes: Mapping[str, int]) -> Dims:
    """Replace the factors of dims of size one that broadcast by ()."""
    for dim, size in zip(dims, shape, strict=True):
        if len(dim) == 1 and sizes[dim[0]] != size:
            return tuple([d if len(d) != 1 or sizes[d[0]] == n else () for d, n in zip(dims, shape, strict=True)])
    return dims


# --- shapes -----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class ShapesOf(Declaration):
    """The shapes of the results by the first of these patterns that fits, if every factor has one size."""

    patterns: tuple[Pattern, ...]

    def __call__(self, call: Call) -> Shapes | None:
        """Return the result shapes of a call, or None if they do not follow from the pattern and the operand shapes."""
        shapes = [layout.shape for layout in call.operands]
        ndims, count, keepdim = tuple(map(len, shapes)), len(call.func._schema.returns), bool(call.get("keepdim"))
        matches = (
            _match_operands(one, call.names, call.fixed_operands, ndims, count, selector_values(one, call), keepdim)
            for one in self.patterns
        )
        match = next((one for one in matches if one is not None), None)
        if match is None or match.products:
            return None
        sizes: dict[str, int] = {}
        for dims, shape in zip(match.operands, shapes, strict=True):
            for dim, size in zip(dims, shape, strict=True):
                if dim and sizes.setdefault(dim[0], size) != size:
                    return None
        return tuple([tuple([sizes[dim[0]] if dim else 1 for dim in dims]) for dims in match.results])


@memoize(4096)
def _match_operands(
    pattern: Pattern,
    names: tuple[str, ...],
    fixed: frozenset[int],
    ndims: tuple[int, ...],
    count: int,
    selected: SelectedDims,
    keepdim: bool,
) -> PatternMatch | None:
    """Match a pattern with operands alone: infer how many dims each of ``count`` results has, then return the complete match."""
    terms, outs = match_operand_terms(pattern, names, fixed), match_result_terms(pattern, (0,) * count)
    operands = match_pattern(pattern, names, fixed, ndims, (), selected)
    if operands is None or terms is None or outs is None:
        return None
    binder = PatternBinder(pattern, dict(selected))
    operand_terms = [(pattern.operands[k], ndim) for k, ndim in zip(terms, ndims, strict=True) if k != NUMBER_TERM]
    for term, ndim in sorted(operand_terms, key=lambda item: not any(map(is_selected, item[0].dims))):
        binder.measure_groups(term, ndim)
    letters = {name for dims in operands.operands for dim in dims for name in dim}
    gone = {name: sum(notation_label(letter) == name.rstrip("!") for letter in letters) for name, _ in selected}
    ndims_out = []
    for k in outs:
        dims = pattern.results[k].dims
        if any(not dim or (is_selected(dim) and not any(dim in term.dims for term, _ in operand_terms)) for dim in dims):
            return None  # the dim has a size of its own
        own = sum(
            binder.lengths.get(dim[0], 0) if is_group(dim) else gone[selector_argument(dim)] if is_selected(dim) else 1
            for dim in dims
        )
        ndims_out.append(own + (sum(gone.values()) if keepdim and not any(map(is_selected, dims)) else 0))
    return match_pattern(pattern, names, fixed, ndims, tuple(ndims_out), selected)
