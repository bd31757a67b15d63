"""How partial values pass, in words. Each names the arguments that it speaks of, and makes rows for a call's operands.

=========================== =======================================================================================
``linear("grad")``          linear in this argument, whatever the others hold: sums and means of terms pass
``linear("x", "weight")``   linear in each of these while the others of them are fixed, and finite (``0 * inf`` is NaN)
``linear()``                linear in all operands together: a sum of terms of each
``monotone``, ``falling``   ``f(max(a, b)) = max(f(a), f(b))``; a falling one makes the maximum a minimum
``one_of("x", "other")``    each element of the result is an element of one of these
``copies``                  each element of the result is an element of the operand, in any order
``forgets``                 the results do not depend on what the first operand holds
``on_floats``, ``on_bools`` rows for floating results, where nothing wraps around; for an operand of bools
=========================== =======================================================================================
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..base.caches import remembered
from ..placement import REDUCE_OPS
from .call import Call
from .rule import ANY_PARTIAL, Partials, Row, Word

monotone = ("max -> max", "min -> min")
falling = ("max -> min", "min -> max")
copies = ANY_PARTIAL


@dataclass(frozen=True, slots=True)
class _Of(Word):
    """A word, and what it was given."""

    given: tuple[str, ...]

    def __init__(self, *given: str) -> None:
        object.__setattr__(self, "given", given)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.given))})"


class ByNames(_Of):
    """Rows that follow from the names of a call's operands, which of them are plain, and how many results are tensors."""

    __slots__ = ()

    def __call__(self, call: Call) -> tuple[str, ...]:
        return _rows_of(self, call.names, call.plain, sum([meta is not None for meta in call.results]))

    def made(self, names: tuple[str, ...], plain: frozenset[int], results: int) -> Iterable[str]:
        raise NotImplementedError


@remembered(4096)
def _rows_of(word: ByNames, names: tuple[str, ...], plain: frozenset[int], results: int) -> tuple[str, ...]:
    return tuple(word.made(names, plain, results))


class linear(ByNames):  # noqa: N801  a word, used like a function
    """Rows of an operation that is linear in some arguments (see the table above); a list of tensors counts as one argument.

    >>> linear("grad")
    linear('grad')
    """

    __slots__ = ()

    def made(self, names: tuple[str, ...], plain: frozenset[int], results: int) -> Iterable[str]:
        rest = "R" if len(self.given) == 1 else "finite"
        groups = [{name} for name in self.given] or [set(names)]
        factors = {*self.given, *(names[i] for i in plain)}  # numbers of list operators have names of their own
        for here in groups:
            for op in ("sum", "avg"):
                left = [op if name in here else rest if name in factors else "R" for name in names]
                if op in left:
                    yield _row(left, op, results)


class one_of(ByNames):  # noqa: N801
    """Rows of a choice: all of the named arguments in terms of one kind, or one of them beside whole ones, which are the mean,
    the maximum and the minimum of themselves."""

    __slots__ = ()

    def made(self, names: tuple[str, ...], plain: frozenset[int], results: int) -> Iterable[str]:
        given = [name for name in self.given if name in names]
        for op in REDUCE_OPS if given else ():  # what comes of whole ones alone is no term
            yield _row([op if name in given else "R" for name in names], op, results)
        for op in ("avg", "max", "min"):
            for own in given if len(given) > 1 else ():
                yield _row([op if name == own else "R" for name in names], op, results)


class _Forgets(ByNames):
    __slots__ = ()

    def made(self, names: tuple[str, ...], plain: frozenset[int], results: int) -> Iterable[str]:
        return (_row([op, *["R"] * (len(names) - 1)], "R", results) for op in REDUCE_OPS)


forgets = _Forgets()


class on_floats(_Of):  # noqa: N801
    """Rows that hold where nothing wraps around: the result is floating, and no step is given (plans do not know its value)."""

    __slots__ = ()

    def __call__(self, call: Call) -> tuple[str, ...]:
        alpha, result = call.get("alpha", 1), call.results[0]
        floating = result is not None and result.dtype.is_floating_point
        return self.given if floating and type(alpha) is int and alpha == 1 else ()


class on_bools(_Of):  # noqa: N801
    """Rows that hold for a first operand of bools."""

    __slots__ = ()

    def __call__(self, call: Call) -> tuple[str, ...]:
        return self.given if call.operands[0].dtype is torch.bool else ()


def _row(left: Iterable[str], right: str, results: int) -> str:
    return f"{','.join(left)} -> {','.join([right] * results)}"


@dataclass(frozen=True, slots=True)
class together(Word):  # noqa: N801
    """The rows of several words and texts."""

    parts: tuple[Any, ...]

    def __call__(self, call: Call) -> tuple[str | Row, ...]:
        found: list[str | Row] = []
        for part in self.parts:
            found += (part(call) or ()) if callable(part) else (part,)
        return tuple(found)

    def own(self) -> tuple[Any, ...]:
        return tuple(part for part in self.parts if callable(part) and not isinstance(part, Word))


def rows(*parts: Any) -> Any:
    """Rows given as texts, words and tuples of these: as data where no call is needed, else a word."""
    flat: list[Any] = []
    for part in parts:
        flat += part if isinstance(part, tuple) else [part]
    made: Partials | Word = together(tuple(flat)) if any(map(callable, flat)) else tuple(flat)
    return made


# --- what is written, for those who try it ------------------------------------------------------------------------------
def written(partials: Any) -> tuple[str | Row, ...]:
    """The rows that stand in a rule as they are, not those that a word or a function makes for a call."""
    parts = partials.parts if isinstance(partials, together) else () if callable(partials) else partials
    return tuple(part for part in parts if not callable(part))


def reductions(partials: Any) -> frozenset[str]:
    """The reductions that rows and words speak of (a function's are not known)."""
    found: set[str] = set()
    for part in (partials,) if callable(partials) else partials:
        match part:
            case str():
                found.update(word.strip().removesuffix("...") for side in part.split("->") for word in side.split(","))
            case together(parts=parts) | on_floats(given=parts) | on_bools(given=parts):
                found |= reductions(parts)
            case one_of() | _Forgets():
                found.update(REDUCE_OPS)
            case linear():
                found.update(("sum", "avg"))
    return frozenset(found.intersection(REDUCE_OPS))
