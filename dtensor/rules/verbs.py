"""The words in which rules are declared. Each makes a :class:`Rule` from a notation and registers it under its names.

========== ============================================================================================
einsum     contractions and broadcasts, by pattern: ``einsum("mm", "m k, k n -> m n")``
pointwise  every tensor dim of the (broadcast) result is a factor
along      results look like the operands, the dims of one argument must be whole (or have a kernel)
reduce     the dims of one argument vanish, ``op`` says how their shards combine
view       a function gives the factors: element order is kept, any partial kind passes
========== ============================================================================================
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..errors import RuleError
from ..placement import Monoid
from .call import Call, Meta
from .notation import ELLIPSIS, Pattern, Term, parse
from .registry import register
from .rule import ANY_PARTIAL, Dims, Factors, Kernel, Partials, Rule, Shapes

MakeKernel = Callable[[Call], Kernel | None]


def einsum(names: str, pattern: str, *, linear: bool = True, partials: tuple[str, ...] = (), **options: Any) -> Rule:
    """A rule by pattern. ``linear``: linear in each operand, so a letter absent on the right is summed, and partial sums pass
    beside factors that are known to be finite."""
    parsed = parse(pattern)
    rows = partials + (_multilinear(parsed) if linear else ())

    def factors(call: Call) -> Factors | None:
        return bind(parsed, call, reduce_op="sum" if linear else None)

    return register(names, Rule(factors, rows, shapes=sizes_of_letters(parsed), kind="einsum", source=pattern, **options))


def sizes_of_letters(pattern: Pattern) -> Callable[[Call], Shapes | None]:
    """The shapes of a contraction's results, where every letter has one size."""

    def shapes(call: Call) -> Shapes | None:
        sizes: dict[Any, int] = {}
        if len(call.operands) != len(pattern.operands):
            return None
        for term, layout in zip(pattern.operands, call.operands, strict=True):
            names = term.dims[len(term.dims) - len(layout.shape) :] if term.additive else term.dims
            if len(names) != len(layout.shape):
                return None
            for name, size in zip(names, layout.shape, strict=True):
                if sizes.setdefault(name, size) != size:
                    return None
        results = tuple([tuple([sizes.get(name, 0) for name in term.dims]) for term in pattern.results])
        return None if any(0 in shape for shape in results) else results

    return shapes


def bind(pattern: Pattern, call: Call, reduce_op: str | None = "sum") -> Factors | None:
    """The factors of a call under a pattern; None if the number of dims does not fit."""
    shapes = [tuple(layout.shape) for layout in call.operands]
    if len(shapes) > len(pattern.operands):
        return None
    sizes: dict[str, int] = {}
    terms = pattern.operands[: len(shapes)]
    rest = max(
        (len(shape) - len(term.dims) + 1 for term, shape in zip(terms, shapes, strict=True) if ELLIPSIS in term.dims), default=0
    )
    for _ in range(2):  # sizes are known once all operands are seen: only then, which dims of size one are broadcast
        operands = tuple(_bind_term(term, shape, rest, sizes) for term, shape in zip(terms, shapes, strict=True))
    if any(dims is None for dims in operands):
        return None
    results = []
    for term, meta in zip(pattern.results, call.results, strict=False):
        dims = _bind_term(term, meta.shape if meta is not None else (), rest, sizes)
        if dims is None:
            return None
        results.append(dims)
    letters = {name for dims in operands for dim in dims or () for name in dim}
    reduced = dict.fromkeys(letters, reduce_op) if reduce_op is not None else {}
    additive = frozenset(i for i, term in enumerate(terms) if term.additive)
    return Factors(operands, tuple(results), sizes, pattern.whole, reduced, additive)  # type: ignore[arg-type]  # None excluded


def _bind_term(term: Term, shape: tuple[int, ...], rest: int, sizes: dict[str, int]) -> Dims | None:
    """Factors of one operand; ``...`` and added operands, which broadcast, are right-aligned.

    A dim of size one where others are larger is a broadcast and carries no factor.
    """
    names: list[tuple[str, ...]] = []
    dims = (
        term.dims[-len(shape) :]
        if term.additive and 0 < len(shape) < len(term.dims)
        else ()
        if term.additive and not shape
        else term.dims
    )
    for dim in dims:
        if dim == ELLIPSIS:
            own = len(shape) - len(term.dims) + 1
            names += [(f".{rest - own + i}",) for i in range(own)]
        else:
            names.append(dim)
    if len(names) != len(shape):
        return None
    for dim, size in zip(names, shape, strict=True):
        if len(dim) == 1:
            known = sizes.get(dim[0], 1)
            sizes[dim[0]] = size if known == 1 else known
    return tuple(dim if len(dim) != 1 or sizes[dim[0]] == size else () for dim, size in zip(names, shape, strict=True))


def _multilinear(pattern: Pattern) -> tuple[str, ...]:
    """Linear in each factor operand, the others fixed and finite; an added one is one more term of the sum (or of the mean)."""
    rows = []
    results = len(pattern.results)
    added = [term.additive for term in pattern.operands]
    for i, additive in enumerate(added):
        if not additive:
            for op, bias in (("sum", "sum"), ("avg", "R"), *([("avg", "avg")] if any(added) else [])):
                left = [op if j == i else bias if added[j] else "finite" for j in range(len(added))]
                rows.append(f"{','.join(left)} -> {','.join([op] * results)}")
    if any(added):
        rows.append(f"{','.join('avg' if a else 'R' for a in added)} -> {','.join(['avg'] * results)}")
    return tuple(rows)


def pointwise(names: str, *, partials: Partials | Callable[[Call], Partials] = (), **options: Any) -> Rule:
    """A rule for operations that act element by element on broadcast operands."""
    return register(names, Rule(broadcast_factors, partials, shapes=one_shape, kind="pointwise", source="... -> ...", **options))


def one_shape(call: Call) -> Shapes | None:
    """The shape of all operands that have dims is that of the results."""
    found = {tuple(layout.shape) for layout in call.operands if layout.shape} or {()}
    return None if len(found) > 1 else tuple(found) * _count(call)


def _count(call: Call) -> int:
    return len(call.func._schema.returns)


def broadcast_factors(call: Call) -> Factors | None:
    """Factors of a broadcasting operation: one for each dim of the largest result."""
    shapes = [tuple(layout.shape) for layout in call.operands]
    ndim = max(map(len, shapes), default=0)
    sizes: dict[str, int] = {}
    for shape in shapes:
        for d, size in enumerate(shape, ndim - len(shape)):
            if sizes.get(f"d{d}", 1) == 1:
                sizes[f"d{d}"] = size
    operands = tuple(aligned(shape, ndim, sizes) for shape in shapes)
    results = tuple(aligned(meta.shape, ndim, sizes) for meta in call.results if meta is not None)
    return Factors(operands, results, sizes)


def aligned(shape: tuple[int, ...], ndim: int, sizes: dict[str, int]) -> Dims:
    """Factors ``d0 .. d(ndim - 1)`` right-aligned to ``shape``, none where a dim of size one broadcasts."""
    first = ndim - len(shape)
    return tuple((f"d{d}",) if sizes[f"d{d}"] == size else () for d, size in enumerate(shape, first))


def along(
    names: str, dim: str = "dim", *, partials: tuple[str, ...] = (), kernel: Kernel | MakeKernel | None = None, **options: Any
) -> Rule:
    """A rule for operations whose operands and results have one shape and that need the dims in argument ``dim`` whole.

    ``kernel`` computes with such a dim sharded: a :class:`Kernel`, or a function of the call giving one or None.
    """

    def factors(call: Call) -> Factors | None:
        ndim = len(call.shape(0))
        if any(len(shape.shape) != ndim for shape in call.operands):
            return None
        sizes = {f"d{d}": size for d, size in enumerate(call.shape(0))}
        operands = tuple(aligned(tuple(layout.shape), ndim, sizes) for layout in call.operands)
        results = tuple(aligned(meta.shape, ndim, sizes) for meta in call.results if meta is not None)
        picked = {f"d{d}" for d in call.dims(dim, ndim)}
        made = kernel(call) if callable(kernel) else kernel
        if made is not None and len(picked) == 1:
            return Factors(operands, results, sizes, kernels=dict.fromkeys(picked, made))
        return Factors(operands, results, sizes, whole=frozenset(picked))

    source = f"... [{dim}] -> ... [{dim}]"
    return register(names, Rule(factors, partials, shapes=one_shape, kind="along", source=source, **options))


def reduce(
    names: str,
    op: str | None,
    dim: str = "dim",
    *,
    partials: tuple[str, ...] = (),
    kernel: Kernel | MakeKernel | None = None,
    **options: Any,
) -> Rule:
    """A rule for operations that reduce the dims in argument ``dim``; their shards combine by ``op`` (None: must be whole)."""

    def factors(call: Call) -> Factors | None:
        made = kernel(call) if callable(kernel) else kernel
        return reduction_factors(call, call.dims(dim, len(call.shape(0))), op, made)

    def shapes(call: Call) -> Shapes | None:
        shape = call.shape(0)
        picked = call.dims(dim, len(shape))
        if any(not 0 <= d < len(shape) for d in picked):
            return None
        kept = [1 if d in picked else size for d, size in enumerate(shape) if call.get("keepdim") or d not in picked]
        return (tuple(kept),) * _count(call)

    options.setdefault("shapes", shapes)
    return register(names, Rule(factors, partials, kind="reduce", source=f"... {dim} -> ...", **options))


def reduction_factors(call: Call, dims: tuple[int, ...], op: str | Monoid | None, kernel: Kernel | None = None) -> Factors:
    """Factors of a reduction over ``dims`` of operand 0; kept dims of size one are recognised by the number of result dims."""
    shape = call.shape(0)
    sizes = {f"d{d}": size for d, size in enumerate(shape)}
    picked = frozenset(f"d{d}" for d in dims)
    operand: Dims = tuple((f"d{d}",) for d in range(len(shape)))
    results = tuple(_reduced(meta, operand, picked) for meta in call.results if meta is not None)
    others = tuple(
        operand if layout.shape == call.operands[0].shape else ((),) * len(layout.shape) for layout in call.operands[1:]
    )
    kernels = dict.fromkeys(picked, kernel) if kernel is not None else {}
    whole = picked if op is None and kernel is None else frozenset()
    return Factors((operand, *others), results, sizes, whole, {} if op is None else dict.fromkeys(picked, op), kernels=kernels)


def _reduced(meta: Meta, operand: Dims, picked: frozenset[str]) -> Dims:
    kept = tuple(() if dim[0] in picked else dim for dim in operand)
    return kept if len(meta.shape) == len(operand) else tuple(dim for dim in kept if dim)


def view(names: str, factors: Callable[[Call], Factors | None], **options: Any) -> Rule:
    """A rule for operations that only rename, split, merge, drop or repeat dims: partial values of any kind pass."""
    options.setdefault("partials", ANY_PARTIAL)
    return register(names, Rule(factors, kind="view", source=factors.__name__, **options))


def kernel_rule(
    names: str, factors: Callable[[Call], Factors | None], *, partials: Partials | Callable[[Call], Partials] = (), **options: Any
) -> Rule:
    """A rule whose factors (with their kernels) are given by a function of the call."""
    if not callable(factors):
        raise RuleError(f"kernel_rule({names!r}) needs a function of the call")
    return register(names, Rule(factors, partials, kind="kernel", source=factors.__name__, **options))


def composed(names: str, function: Callable[..., Any], parts: str) -> Rule:
    """Operators that are others put together: ``function``, called with DTensors; ``parts`` names what it is made of."""
    return register(names, Rule(_no_factors, decompose=function, kind="decomposition", source=parts))


def _no_factors(call: Call) -> Factors | None:
    return None


def local_size(argument: str) -> Callable[..., dict[str, Any]]:
    """``local_args`` that replaces a size argument by the local size of result 0."""
    return lambda call, at: {argument: at.results[0]}
