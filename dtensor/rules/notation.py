"""The factor notation: an operation seen as a map between named factors of its tensor dims.

``"m k, k n -> m n"`` names the dims of two operands and one result. A letter that stands on both sides passes through, one
that is absent on the right is reduced. ``[d]`` must be whole on every rank, ``(a b)`` is one dim made of two factors (major
first), ``...`` stands for the remaining dims, ``1`` for a dim of size one, and ``+`` before an operand says that it is
added to the result once.

>>> parse("+m n, m k, k n -> m n").operands[1].dims
(('m',), ('k',))
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..base.caches import remembered
from ..errors import RuleError

Dim = tuple[str, ...]  # the factors of one tensor dim, major first; () is a dim of size one
ELLIPSIS: Dim = ("...",)

_TOKEN = re.compile(r"\s*(\.\.\.|\[[a-z]\w*\]|\([a-z\w\s]*\)|[a-z]\w*|1)\s*")


@dataclass(frozen=True, slots=True)
class Term:
    """One operand or result: its dims, and whether it is added to the result once."""

    dims: tuple[Dim, ...]
    additive: bool = False


@dataclass(frozen=True, slots=True)
class Pattern:
    """A parsed rule notation."""

    text: str
    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    whole: frozenset[str]


@remembered(8192)
def parse(text: str) -> Pattern:
    """The pattern that ``text`` denotes.

    Raises:
        RuleError: not of the form ``"a b, b c -> a c"``.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"pattern {text!r} has no '->'; write for example \"m k, k n -> m n\"")
    whole: set[str] = set()
    operands = tuple(_term(part, text, whole) for part in left.split(","))
    results = tuple(_term(part, text, whole) for part in right.split(","))  # nothing on the right is one 0-d result
    known = {name for term in operands for dim in term.dims for name in dim}
    unknown = {name for term in results for dim in term.dims for name in dim} - known
    if unknown:
        raise RuleError(f"pattern {text!r}: {sorted(unknown)} stand only on the right")
    return Pattern(text, operands, results, frozenset(whole))


def _term(part: str, text: str, whole: set[str]) -> Term:
    part = part.strip()
    additive = part.startswith("+")
    rest = part.removeprefix("+")
    dims: list[Dim] = []
    while rest.strip():
        match = _TOKEN.match(rest)
        if match is None:
            raise RuleError(f"pattern {text!r}: cannot read {rest!r}")
        token, rest = match.group(1), rest[match.end() :]
        if token == "1":
            dims.append(())
        elif token == "...":
            dims.append(ELLIPSIS)
        elif token[0] == "[":
            whole.add(token[1:-1])
            dims.append((token[1:-1],))
        else:
            dims.append(tuple(token.strip("()").split()))
    return Term(tuple(dims), additive)
