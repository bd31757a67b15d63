"""Declaration functions of rules. Each makes a :class:`Rule` from a notation and registers it under its operator names.

=========== =============================================================================================================
einsum      linear in each operand: ``einsum("mm", "m k, k n -> m n")``; letters absent on the right are summed
blockwise   block by block: ``sums=`` names the letters with blocks that leave partial values, ``kernel=`` computes with
            blocks of the dims in brackets
reduce      the dims of an argument vanish, ``op`` combines their shards
along       results have the shape of operands, the selected dims must be unsharded (or have a kernel)
fold        block -> monoid -> finish: one collective by declaration (``folds.py``)
scan        a running operation along a dim, each block continuing those before it (``scans.py``)
pointwise   every tensor dim of the (broadcast) result is a factor
view        element order is kept, any partial kind passes
kernel_rule a function of the call returns factors and kernels, where no notation does
composed    a function of tensors, made of other operators
=========== =============================================================================================================

``partial_rules.py`` declares how partial values pass: ``linear("grad")``, ``monotone``, ``one_of("x", "other")``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import RuleError
from .bind_pattern import Reduction, ShapesOf, Sizes
from .call import Call
from .declared_factors import DeclaredFactors, ReduceChoice, by, fitting
from .folds import DtypeRestrictedKernel, Fold
from .notation import Pattern, parse_notation
from .partial_rules import combine_partials
from .registry import register, register_for_tag
from .rule import ANY_PARTIAL, Declaration, Factors, Kernel, LocalView, Rule, parse_labels

MakeKernel = Callable[[Call], Kernel | None]


def _parse_patterns(text: str | Pattern | by | fitting) -> Pattern | by | fitting:
    """Parse the notation of a rule. Alternatives (``"a b -> b a | s* -> s*"``) give :class:`fitting`, tables :class:`by`."""
    if isinstance(text, (Pattern, fitting)):
        return text
    if isinstance(text, by):
        return by(text.argument, {value: parse_notation(one) for value, one in text.table.items()})
    return fitting(tuple(map(parse_notation, text.split("|")))) if "|" in text else parse_notation(text)


def einsum(
    names: str, pattern: str, *, linear: bool = True, partials: Any = (), sizes: Sizes | None = None, **options: Any
) -> Rule:
    """Declare operators that are products and sums, by their notation.

    ``linear``: linear in each operand. Letters absent on the right are summed, and partial sums pass beside finite operands.
    """
    parsed = parse_notation(pattern)
    factors = DeclaredFactors(parsed, {"*": "sum"} if linear else {}, sizes=sizes or {})
    options.setdefault("shapes", ShapesOf((parsed,)))
    passing = combine_partials(partials, _multilinear_partials(parsed) if linear else ())
    return register(names, Rule(factors, passing, kind="einsum", **options))


def blockwise(names: str, pattern: str | Pattern | by | fitting, **options: Any) -> Rule:
    """Declare operators that compute block by block and are not taken to be linear (see :func:`make_blockwise_rule`)."""
    return register(names, make_blockwise_rule(pattern, **options))


def make_blockwise_rule(
    pattern: str | Pattern | by | fitting,
    *,
    sums: str | Mapping[str, ReduceChoice] = "",
    reduce: ReduceChoice = "sum",
    refuses_nothing: bool = False,
    kernel: Kernel | Fold | MakeKernel | None = None,
    kernels: Mapping[str, Kernel] | None = None,
    sizes: Sizes | None = None,
    partials: Any = (),
    kind: str = "blockwise",
    **options: Any,
) -> Rule:
    """Make a rule from a notation, or one for each value of an argument, and do not register it.

    The operator is not taken to be linear. ``by("left", {True: ..., False: ...})`` selects by an argument.

    Args:
        sums: letters, groups and selected dims (``"*"``: all) with blocks that leave partial results, combined by ``reduce``. Or
            the reduction of each: ``{"n": "sum", "k": "R"}``, also one for each result. Others must be unsharded.
        reduce: a reduction, or a function that chooses one for a call: ``by("reduction", {1: "avg", 2: "sum"})``.
        refuses_nothing: the operator does not reduce blocks without elements.
        kernel: computes with blocks of the dims in brackets, for example a fold. ``kernels``: by letter.
        sizes: letters with a size that an argument states: ``{"r": "upscale_factor"}``.
        shapes: True if each letter has one size in operands and results, whatever other arguments say.
    """
    reduce_ops = sums if not isinstance(sums, str) else {sums: reduce} if sums else {}
    reductions = {label: op for words, op in reduce_ops.items() for label in parse_labels(words) or {"*"}}
    if refuses_nothing:
        options.setdefault("nonempty", "reduced")
    parsed = _parse_patterns(pattern)
    if options.get("shapes") is True:
        assert not isinstance(parsed, by)  # the pattern that an argument chooses is unknown here
        options["shapes"] = ShapesOf(parsed.patterns if isinstance(parsed, fitting) else (parsed,))
    kernel_of_pattern = kernel.make_kernel(parsed) if isinstance(kernel, Fold) else kernel
    factors = DeclaredFactors(parsed, reductions, refuses_nothing, kernel_of_pattern, kernels or {}, sizes or {})
    return Rule(factors, combine_partials(partials), kind=kind, **options)


def reduce(names: str, op: ReduceChoice, dim: str = "dim", *, kernel: Kernel | MakeKernel | None = None, **options: Any) -> Rule:
    """Declare operators that reduce the dims in argument ``dim``. Shards combine by ``op`` (None: the dims must be unsharded)."""
    pattern = f"a* {f'@{dim}' if kernel is None and op is not None else f'[@{dim}]'} b* -> each: a* b*"
    options.setdefault("shapes", True)
    return blockwise(names, pattern, sums={"*": op}, kernel=kernel, kind="reduce", **options)


def along(names: str, dim: str = "dim", *, kernel: Kernel | MakeKernel | None = None, **options: Any) -> Rule:
    """Declare operators along argument ``dim`` (softmax, sort): these dims must be unsharded, and all tensors have one shape.

    ``kernel`` computes with such a dim sharded: a :class:`Kernel`, or a function that returns one or None for a call.
    """
    pattern = f"each: a* [@{dim}] b* -> each: a* [@{dim}] b*"
    options.setdefault("shapes", True)
    return blockwise(names, pattern, kernel=kernel, kind="along", **options)


def fold(
    names: str,
    pattern: str | by,
    *,
    block: Callable[..., Any],
    monoid: Reduction | Callable[[Call], Reduction],
    finish: Callable[..., Any] | None = None,
    numbers: int = 1,
    dtype: Any = None,
    takes: str = "",
    **options: Any,
) -> Rule:
    """Declare operators that reduce each block to a state, combine the states over ranks, and finish on each rank.

    Args:
        block: ``block(part, *blocks)``, with a block of each operand, returns the state: dims ``part.dims`` have size one.
        monoid: combines states in one collective. Without ``finish`` there is none: the states are addends of the result.
        finish: ``finish(part, *blocks, *state)`` returns the results. For a Python value it gets the state, a number.
        numbers: how many tensors a state consists of.
        dtype: dtype of the state, to which floating blocks are converted. Default: that of the result, at least float32.
        takes: ``"floating"``, ``"real"`` or ``"numbers"`` (no bools). Other operands must be unsharded.
    """
    parsed = _parse_patterns(pattern)
    kernel = Fold(block, monoid, finish, numbers, dtype).make_kernel(parsed)
    if isinstance(parsed, Pattern):
        options.setdefault("shapes", True)
    options.setdefault("kind", "fold")
    return blockwise(names, parsed, kernel=DtypeRestrictedKernel(kernel, takes) if takes else kernel, **options)


def _multilinear_partials(pattern: Pattern) -> tuple[str, ...]:
    """Return strategies for partial sums and means of an operator that is linear in each multiplied operand.

    The other operands are finite. An added operand is one more addend of the sum (or of the mean).
    """
    strategies = []
    results = len(pattern.results)
    added = [term.additive for term in pattern.operands]
    for i, additive in enumerate(added):
        if not additive:
            for op, bias in (("sum", "sum"), ("avg", "R"), *([("avg", "avg")] if any(added) else [])):
                operands = [op if j == i else bias if added[j] else "finite" for j in range(len(added))]
                strategies.append(f"{','.join(operands)} -> {','.join([op] * results)}")
    if any(added):
        strategies.append(f"{','.join('avg' if a else 'R' for a in added)} -> {','.join(['avg'] * results)}")
    return tuple(strategies)


# --- element by element -------------------------------------------------------------------------------------------------
def pointwise(names: str, *, partials: Any = (), **options: Any) -> Rule:
    """Declare operators that compute element by element on operands that broadcast."""
    return register(names, _make_pointwise_rule(partials, **options))


def _make_pointwise_rule(partials: Any = (), **options: Any) -> Rule:
    return Rule(POINTWISE, combine_partials(partials), shapes=ONE_SHAPE, kind="pointwise", **options)


_BROADCAST = parse_notation("each: s* -> each: s*")
POINTWISE = DeclaredFactors(_BROADCAST)
ONE_SHAPE = ShapesOf((_BROADCAST,))
register_for_tag(torch.Tag.pointwise, _make_pointwise_rule())


# --- functions of the call ----------------------------------------------------------------------------------------------
def view(names: str, factors: str | Callable[[Call], Factors | None], **options: Any) -> Rule:
    """Declare operators that only rename, split, merge, drop or repeat dims; partial operands of any kind stay partial."""
    options["partials"] = combine_partials(options.pop("partials", ANY_PARTIAL))
    sizes = options.pop("sizes", {})
    factors_of_call = DeclaredFactors(_parse_patterns(factors), sizes=sizes) if isinstance(factors, str) else factors
    return register(names, Rule(factors_of_call, kind="view", **options))


def kernel_rule(names: str, factors: Callable[[Call], Factors | None], *, partials: Any = (), **options: Any) -> Rule:
    """Declare operators by a function of the call that returns their factors and kernels, where no notation can."""
    if not callable(factors):
        raise RuleError(f"kernel_rule({names!r}) needs a function of the call")
    return register(names, Rule(factors, combine_partials(partials), kind="kernel", **options))


def composed(names: str, function: Callable[..., Any], plain: tuple[str, ...] = ()) -> Rule:
    """Declare that operators run as a function of other operators, which is called with DTensors (a decomposition)."""
    return register(names, Rule(NO_FACTORS, decompose=function, kind="decomposition", plain=plain))


class _NoFactors(Declaration):
    """No factors: the rule places nothing."""

    def __call__(self, call: Call) -> Factors | None:
        return None


NO_FACTORS = _NoFactors()


@dataclass(frozen=True, slots=True)
class local_size(Declaration):  # noqa: N801  used like a function
    """``local_args`` that replaces a size argument by the local size of result 0."""

    argument: str

    def __call__(self, call: Call, at: LocalView) -> dict[str, Any]:
        return {self.argument: at.results[0]}
