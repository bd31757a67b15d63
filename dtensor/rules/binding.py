"""A notation bound to a call: which factor every tensor dim is, and how large each factor is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..base.caches import remembered
from ..placement import Monoid
from .call import Call, Meta
from .notation import EACH, Pattern, is_group, is_picked
from .recipe import NUMBER, Binder, Picks, Recipe, argument_of, label_of, lacking, recipe_of
from .rule import Dims, Factors, Shapes, Word

Reduction = str | Monoid
Sizes = Mapping[str, str | Callable[[Call], int]]  # letter -> the argument that is its size, or what computes it


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
    summed = recipe.summed if results == recipe.results else lacking(operands, results)
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
        added = {k for k, term in enumerate(pattern.operands) if term.additive}  # once, as a number too
        found = [NUMBER if i in fixed and k not in added else k for i, k in enumerate(found)]
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
    return tuple(dict.fromkeys(argument_of(dim) for term in terms for dim in term.dims if is_picked(dim)))


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
    return recipe_of(pattern, terms, ndims, outs, tuple(ndims_out), picked)
