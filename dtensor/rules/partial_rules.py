"""Partial rules: declarations of how partial values pass. Each names arguments, and makes strategies for a call's operands.

=========================== =======================================================================================
``linear("grad")``          linear in this argument, whatever the others hold: partial sums and means pass
``linear("x", "weight")``   linear in each of these while the others of them are fixed and finite (``0 * inf`` is NaN)
``linear()``                linear in all operands together: a sum of addends of each
``monotone``, ``falling``   ``f(max(a, b)) = max(f(a), f(b))``; a falling one makes the maximum a minimum
``one_of("x", "other")``    each element of the result is an element of one of these
``copies``                  each element of the result is an element of the operand, in any order
``forgets``                 the results do not depend on the values of the first operand
``on_floats``, ``on_bools`` strategies for floating results, which do not wrap around; for an operand of bools
=========================== =======================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..base.caches import memoize
from ..placement import REDUCE_OPS
from .call import Call
from .rule import ANY_PARTIAL, Declaration, Partials, Strategy

monotone = ("max -> max", "min -> min")
falling = ("max -> min", "min -> max")
copies = ANY_PARTIAL


@dataclass(frozen=True, slots=True)
class _PartialDeclaration(Declaration):
    """A declaration, and its arguments."""

    given: tuple[str, ...]

    def __init__(self, *given: str) -> None:
        object.__setattr__(self, "given", given)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.given))})"


class ByNames(_PartialDeclaration):
    """Strategies that follow from the names of a call's operands, which of them are plain, and the number of tensor results."""

    __slots__ = ()

    def __call__(self, call: Call) -> tuple[str, ...]:
        return _strategies_by_names(self, call.names, call.plain, sum([meta is not None for meta in call.results]))

    def _iter_strategies(self, names: tuple[str, ...], plain: frozenset[int], results: int) -> Iterable[str]:
        raise NotImplementedError


@memoize(4096)
def _strategies_by_names(word: ByNames, names: tuple[str, ...], plain: frozenset[int], results: int) -> tuple[str, ...]:
    return tuple(word._iter_strategies(names, plain, results))


class linear(ByNames):  # noqa: N801  used like a function
    """Strategies of an operator that is linear in some arguments (see the table above). A list of tensors counts as one argument.

    >>> linear("grad")
    linear('grad')
    """

    __slots__ = ()

    def _iter_strategies(self, names: tuple[str, ...], plain: frozenset[int], results: int) -> Iterable[str]:
        """Yield the strategies of a linear operator as texts: one group of operands is partial, the others are not."""
        other = "R" if len(self.given) == 1 else "finite"
        groups = [{name} for name in self.given] or [set(names)]
        factors = {*self.given, *(names[i] for i in plain)}  # numbers of list operators have own argument names
        for group in groups:
            for op in ("sum", "avg"):
                operands = [op if name in group else other if name in factors else "R" for name in names]
                if op in operands:
                    yield _format_strategy(operands, op, results)


class one_of(ByNames):  # noqa: N801
    """Strategies of an operator that selects elements: all named arguments are partial, or one is and the others are replicated.

    A replicated value is its own mean, maximum and minimum.
    """

    __slots__ = ()

    def _iter_strategies(self, names: tuple[str, ...], plain: frozenset[int], results: int) -> Iterable[str]:
        """Yield strategies as texts: all given operands are partial, or one of several is and the others are replicated."""
        present = [name for name in self.given if name in names]
        for op in REDUCE_OPS if present else ():  # replicated operands alone give no partial result
            yield _format_strategy([op if name in present else "R" for name in names], op, results)
        for op in ("avg", "max", "min"):
            for own in present if len(present) > 1 else ():
                yield _format_strategy([op if name == own else "R" for name in names], op, results)


class _Forgets(ByNames):
    __slots__ = ()

    def _iter_strategies(self, names: tuple[str, ...], plain: frozenset[int], results: int) -> Iterable[str]:
        return (_format_strategy([op, *["R"] * (len(names) - 1)], "R", results) for op in REDUCE_OPS)


forgets = _Forgets()


class on_floats(_PartialDeclaration):  # noqa: N801
    """Strategies that hold if nothing wraps around: the result is floating, and ``alpha`` is 1, because plans do not know its
    value."""

    __slots__ = ()

    def __call__(self, call: Call) -> tuple[str, ...]:
        """Return the strategies if the result is floating and ``alpha`` is 1, else ()."""
        alpha, result = call.get("alpha", 1), call.results[0]
        floating = result is not None and result.dtype.is_floating_point
        return self.given if floating and type(alpha) is int and alpha == 1 else ()


class on_bools(_PartialDeclaration):  # noqa: N801
    """Strategies for a first operand of bools."""

    __slots__ = ()

    def __call__(self, call: Call) -> tuple[str, ...]:
        return self.given if call.operands[0].dtype is torch.bool else ()


def _format_strategy(operands: Iterable[str], result: str, results: int) -> str:
    return f"{','.join(operands)} -> {','.join([result] * results)}"


@dataclass(frozen=True, slots=True)
class CombinedPartials(Declaration):
    """The strategies of several declarations and texts."""

    parts: tuple[Any, ...]

    def __call__(self, call: Call) -> tuple[str | Strategy, ...]:
        """Return the strategies of all parts for one call."""
        strategies: list[str | Strategy] = []
        for part in self.parts:
            strategies += (part(call) or ()) if callable(part) else (part,)
        return tuple(strategies)


def combine_partials(*parts: Any) -> Any:
    """Join partial strategies (texts, declarations, tuples) into one tuple, or a function of the call if one needs it."""
    flat: list[Any] = []
    for part in parts:
        flat += part if isinstance(part, tuple) else [part]
    partials: Partials | Declaration = CombinedPartials(tuple(flat)) if any(map(callable, flat)) else tuple(flat)
    return partials


# --- inspection of declared strategies ----------------------------------------------------------------------------------
def listed_strategies(partials: Any) -> tuple[str | Strategy, ...]:
    """Return the partial strategies that a rule lists as data, without those that a function makes for a call."""
    parts = partials.parts if isinstance(partials, CombinedPartials) else () if callable(partials) else partials
    return tuple(part for part in parts if not callable(part))


def named_reductions(partials: Any) -> frozenset[str]:
    """Return the reductions (``"sum"``, ``"max"`` ...) that a rule's partial strategies mention.

    Those of a function are not known.
    """
    names: set[str] = set()
    for part in (partials,) if callable(partials) else partials:
        match part:
            case str():
                names.update(word.strip().removesuffix("...") for side in part.split("->") for word in side.split(","))
            case CombinedPartials(parts=parts) | on_floats(given=parts) | on_bools(given=parts):
                names |= named_reductions(parts)
            case one_of() | _Forgets():
                names.update(REDUCE_OPS)
            case linear():
                names.update(("sum", "avg"))
    return frozenset(names.intersection(REDUCE_OPS))
