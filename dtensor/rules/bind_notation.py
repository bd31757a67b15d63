"""A notation bound to a call: which factor every tensor dim is, and how large each factor is."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.caches import remembered
from ..placement import Monoid
from .call import Call
from .notation import Pattern, argument_of, is_group, is_picked
from .pattern_match import NUMBER, Binder, Picks, Recipe, label_of, lacking, operand_terms, recipe_of, result_terms
from .rule import Dims, Factors, Shapes, Word

Reduction = str | Monoid
Sizes = Mapping[str, str | Callable[[Call], int]]  # letter -> the argument that is its size, or what computes it


@dataclass(frozen=True, slots=True)
class Bound:
    """The factors of a call's tensors, and what its recipe says of them."""

    recipe: Recipe
    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: dict[str, int]

    @property
    def summed(self) -> tuple[str, ...]:
        """Factors of operands that some result lacks."""
        return self.recipe.summed if self.results == self.recipe.results else lacking(self.operands, self.results)


def bound(pattern: Pattern, call: Call, sizes: Sizes, left_out: frozenset[int] = frozenset()) -> Bound | None:
    """``call`` under a pattern, but for the results ``left_out``; None if the number of dims does not fit."""
    metas = [None if meta is None or i in left_out else meta.shape for i, meta in enumerate(call.results)]
    shapes = [layout.shape for layout in call.operands]
    out_ndims = tuple([None if shape is None else len(shape) for shape in metas])
    recipe = recipe_of(pattern, call.names, call.fixed, tuple(map(len, shapes)), out_ndims, picks(pattern, call))
    if recipe is None:
        return None
    made = [shape for shape in metas if shape is not None]
    known = sizes_of(recipe, shapes, made, call, sizes)
    if known is None:
        return None
    operands = tuple([_fitted(dims, shape, known) for dims, shape in zip(recipe.operands, shapes, strict=True)])
    results = tuple([_fitted(dims, shape, known) for dims, shape in zip(recipe.results, made, strict=True)])
    return Bound(recipe, operands, results, known)


def bind(pattern: Pattern, call: Call, reduce_op: Any = "sum", sizes: Sizes | None = None) -> Factors | None:
    """The factors of a call under a pattern; None if the number of dims does not fit."""
    found = bound(pattern, call, sizes or {})
    if found is None:
        return None
    reduced = {} if reduce_op is None else dict.fromkeys(found.summed, reduce_op)
    return Factors(found.operands, found.results, found.sizes, found.recipe.whole, reduced, found.recipe.additive)


def picks(pattern: Pattern, call: Call) -> Picks:
    """What the arguments that pick dims say."""
    if not pattern.picking:
        return ()
    found = []
    for name in pattern.picking:
        value = call.arguments.get(name.rstrip("!"))
        found.append((name, tuple(value) if isinstance(value, (list, tuple)) else value))
    return tuple(found)


# --- sizes, for each call ---------------------------------------------------------------------------------------------
def sizes_of(
    recipe: Recipe, shapes: Sequence[Sequence[int]], made: Sequence[Sequence[int]], call: Call, given: Sizes
) -> dict[str, int] | None:
    """The size of each factor: the largest that it has anywhere; None if products do not come out."""
    sizes: dict[str, int] = {}
    for dims, shape in zip(recipe.operands, shapes, strict=True):
        for dim, size in zip(dims, shape, strict=True):
            if len(dim) == 1 and sizes.get(dim[0], 1) == 1:
                sizes[dim[0]] = size
    if recipe.products:
        for letter, value in given.items():
            sizes[letter] = int(value(call) if callable(value) else call[value])
        tensors = [*zip(recipe.operands, shapes, strict=True), *zip(recipe.results, made, strict=False)]
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
    known = math.prod(sizes.get(name, 1) for name in dim)
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
@dataclass(frozen=True, slots=True)
class ShapesOf(Word):
    """The shapes of the results where every factor has one size, by the first of these patterns that fits."""

    patterns: tuple[Pattern, ...]

    def __call__(self, call: Call) -> Shapes | None:
        shapes = [layout.shape for layout in call.operands]
        ndims, count, keepdim = tuple(map(len, shapes)), len(call.func._schema.returns), bool(call.get("keepdim"))
        found = (_forward(one, call.names, call.fixed, ndims, count, picks(one, call), keepdim) for one in self.patterns)
        recipe = next((one for one in found if one is not None), None)
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
    pattern: Pattern,
    names: tuple[str, ...],
    fixed: frozenset[int],
    ndims: tuple[int, ...],
    count: int,
    picked: Picks,
    keepdim: bool,
) -> Recipe | None:
    """As :func:`recipe_of`, for ``count`` results whose numbers of dims are not known yet."""
    terms, outs = operand_terms(pattern, names, fixed), result_terms(pattern, (0,) * count)
    operands = recipe_of(pattern, names, fixed, ndims, (), picked)
    if operands is None or terms is None or outs is None:
        return None
    binder = Binder(pattern, dict(picked))
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
            binder.lengths.get(dim[0], 0) if is_group(dim) else gone[argument_of(dim)] if is_picked(dim) else 1 for dim in dims
        )
        ndims_out.append(own + (sum(gone.values()) if keepdim and not any(map(is_picked, dims)) else 0))
    return recipe_of(pattern, names, fixed, ndims, tuple(ndims_out), picked)
