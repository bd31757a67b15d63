"""The words in which rules are declared. Each makes a :class:`Rule` from a notation and registers it under its names.

=========== =============================================================================================================
einsum      linear in each operand, by pattern: ``einsum("mm", "m k, k n -> m n")``; letters absent on the right are summed
blockwise   block by block, by pattern: ``sums=`` names the letters whose blocks give terms, ``kernel=`` computes with blocks
            of what is in brackets
reduce      the dims that an argument picks vanish, ``op`` says how their shards combine
along       results look like the operands, the picked dims must be whole (or have a kernel)
fold        block -> monoid -> finish: one collective by declaration (``folds.py``)
scan        what runs along a dim, each block continuing those before it (``scans.py``)
pointwise   every tensor dim of the (broadcast) result is a factor
view        element order is kept, any partial kind passes
kernel_rule a function of the call gives factors and kernels: for what no notation says
composed    a function of tensors, made of other operators
=========== =============================================================================================================

How partial values pass is said in words too (``partial_rules.py``): ``linear("grad")``, ``monotone``, ``one_of("x", "other")``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import RuleError
from .bind_notation import Reduction, ShapesOf, Sizes
from .bind_notation import bind as bind
from .call import Call
from .folds import Fold, Taking
from .notation import Pattern, parse
from .notation_rules import Left, Notation, by, fitting
from .partial_rules import rows
from .registry import register, register_tagged
from .rule import ANY_PARTIAL, Factors, Kernel, LocalView, Rule, Word, labels

MakeKernel = Callable[[Call], Kernel | None]


def _pattern(text: str | Pattern | by | fitting) -> Pattern | by | fitting:
    """``"a b -> b a | s* -> s*"``: the first that fits."""
    if isinstance(text, (Pattern, fitting)):
        return text
    if isinstance(text, by):
        return by(text.argument, {value: parse(one) for value, one in text.table.items()})
    return fitting(tuple(map(parse, text.split("|")))) if "|" in text else parse(text)


def einsum(
    names: str, pattern: str, *, linear: bool = True, partials: Any = (), sizes: Sizes | None = None, **options: Any
) -> Rule:
    """A rule by pattern. ``linear``: linear in each operand, so a letter absent on the right is summed, and partial sums pass
    beside factors that are known to be finite."""
    parsed = parse(pattern)
    factors = Notation(parsed, {"*": "sum"} if linear else {}, sizes=sizes or {})
    options.setdefault("shapes", ShapesOf((parsed,)))
    passing = rows(partials, _multilinear(parsed) if linear else ())
    return register(names, Rule(factors, passing, kind="einsum", **options))


def blockwise(names: str, pattern: str | Pattern | by | fitting, **options: Any) -> Rule:
    """A rule by pattern in which nothing is taken to be linear; ``options`` as :func:`by_pattern`."""
    return register(names, by_pattern(pattern, **options))


def by_pattern(
    pattern: str | Pattern | by | fitting,
    *,
    sums: str | Mapping[str, Left] = "",
    reduce: Left = "sum",
    refuses_nothing: bool = False,
    kernel: Kernel | Fold | MakeKernel | None = None,
    kernels: Mapping[str, Kernel] | None = None,
    sizes: Sizes | None = None,
    partials: Any = (),
    kind: str = "blockwise",
    **options: Any,
) -> Rule:
    """A rule by pattern (or by several, ``by("left", {True: ..., False: ...})``), in which nothing is taken to be linear.

    Args:
        sums: letters, groups and picked dims (``"*"``: all) whose blocks give terms of results that lack them, which ``reduce``
            combines; or what each leaves, ``{"n": "sum", "k": "R"}``, also one for each result. Others must be whole.
        reduce: a reduction, or a word that chooses one for a call: ``by("reduction", {1: "avg", 2: "sum"})``.
        refuses_nothing: the operator does not reduce blocks without elements.
        kernel: what computes with blocks of the dims in brackets, a fold for one; ``kernels``: by letter.
        sizes: letters whose sizes an argument says: ``{"r": "upscale_factor"}``.
        shapes: True where the sizes of a letter are one, in operands and results, whatever other arguments say.
    """
    said = sums if not isinstance(sums, str) else {sums: reduce} if sums else {}
    left = {label: op for words, op in said.items() for label in labels(words) or {"*"}}
    if refuses_nothing:
        options.setdefault("nonempty", "reduced")
    parsed = _pattern(pattern)
    if options.get("shapes") is True:
        assert not isinstance(parsed, by)  # what an argument chooses is not told
        options["shapes"] = ShapesOf(parsed.patterns if isinstance(parsed, fitting) else (parsed,))
    made = kernel.kernel(parsed) if isinstance(kernel, Fold) else kernel
    factors = Notation(parsed, left, refuses_nothing, made, kernels or {}, sizes or {})
    return Rule(factors, rows(partials), kind=kind, **options)


def reduce(names: str, op: Left, dim: str = "dim", *, kernel: Kernel | MakeKernel | None = None, **options: Any) -> Rule:
    """A rule for operations that reduce the dims in argument ``dim``; their shards combine by ``op`` (None: must be whole)."""
    pattern = f"a* {f'@{dim}' if kernel is None and op is not None else f'[@{dim}]'} b* -> each: a* b*"
    options.setdefault("shapes", True)
    return blockwise(names, pattern, sums={"*": op}, kernel=kernel, kind="reduce", **options)


def along(names: str, dim: str = "dim", *, kernel: Kernel | MakeKernel | None = None, **options: Any) -> Rule:
    """A rule for operations whose operands and results have one shape and that need the dims in argument ``dim`` whole.

    ``kernel`` computes with such a dim sharded: a :class:`Kernel`, or a word that gives one or None for a call.
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
    """A rule whose dims in brackets are folded: what a block gives, combined over the ranks, finished on each.

    Args:
        block: ``block(part, *blocks)``, a block of each operand, gives the state: dims ``part.dims`` with size one.
        monoid: how states combine; one collective. Without ``finish`` none: the states are terms of the result.
        finish: ``finish(part, *blocks, *state)`` gives the results; of the state, a number, where they are a Python value.
        numbers: how many tensors a state consists of.
        dtype: of the state, in which floating blocks come; default that of the result, at least float32.
        takes: ``"floating"``, ``"real"`` or ``"numbers"`` (no bools): other operands must be whole.
    """
    parsed = _pattern(pattern)
    made = Fold(block, monoid, finish, numbers, dtype).kernel(parsed)
    if isinstance(parsed, Pattern):
        options.setdefault("shapes", True)
    options.setdefault("kind", "fold")
    return blockwise(names, parsed, kernel=Taking(made, takes) if takes else made, **options)


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


# --- element by element -------------------------------------------------------------------------------------------------
def pointwise(names: str, *, partials: Any = (), **options: Any) -> Rule:
    """A rule for operations that act element by element on broadcast operands."""
    return register(names, _pointwise(partials, **options))


def _pointwise(partials: Any = (), **options: Any) -> Rule:
    return Rule(POINTWISE, rows(partials), shapes=ONE_SHAPE, kind="pointwise", **options)


_BROADCAST = parse("each: s* -> each: s*")
POINTWISE = Notation(_BROADCAST)
ONE_SHAPE = ShapesOf((_BROADCAST,))
register_tagged(torch.Tag.pointwise, _pointwise())


# --- functions of the call ----------------------------------------------------------------------------------------------
def view(names: str, factors: str | Callable[[Call], Factors | None], **options: Any) -> Rule:
    """A rule for operations that only rename, split, merge, drop or repeat dims: partial values of any kind pass."""
    options["partials"] = rows(options.pop("partials", ANY_PARTIAL))
    sizes = options.pop("sizes", {})
    made = Notation(_pattern(factors), sizes=sizes) if isinstance(factors, str) else factors
    return register(names, Rule(made, kind="view", **options))


def kernel_rule(names: str, factors: Callable[[Call], Factors | None], *, partials: Any = (), **options: Any) -> Rule:
    """A rule whose factors (with their kernels) are given by a function of the call."""
    if not callable(factors):
        raise RuleError(f"kernel_rule({names!r}) needs a function of the call")
    return register(names, Rule(factors, rows(partials), kind="kernel", **options))


def composed(names: str, function: Callable[..., Any], plain: tuple[str, ...] = ()) -> Rule:
    """Operators that are others put together: ``function``, called with DTensors, each part placed by its own rule."""
    return register(names, Rule(NOTHING, decompose=function, kind="decomposition", plain=plain))


class _Nothing(Word):
    """No factors: the rule has nothing to place."""

    def __call__(self, call: Call) -> Factors | None:
        return None


NOTHING = _Nothing()


@dataclass(frozen=True, slots=True)
class local_size(Word):  # noqa: N801  a word, used like a function
    """``local_args`` that replaces a size argument by the local size of result 0."""

    argument: str

    def __call__(self, call: Call, at: LocalView) -> dict[str, Any]:
        return {self.argument: at.results[0]}
