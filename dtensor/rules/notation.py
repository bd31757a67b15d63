"""Notation of factors: an operation as a map between named factors of its tensor dims.

``"m k, k n -> m n"`` names the dims of two operands and one result. A letter on both sides passes through, one that is absent on
the right is reduced.

======================= =====================================================================================================
``m``                   a factor, one dim
``[m]``                 must be unsharded, unless the rule has a kernel that computes with its blocks
``(g i)``, ``(g [i])``  one dim made of two factors, major first
``s*``, ``[s*]``        any number of dims, the same in every term that has them, right-aligned; size one broadcasts
``...``                 a group too, without a name
``@dim``, ``[@dim]``    the dims that argument ``dim`` selects; ``a* @dim b*``: those before and those after them.
                        Absent on the right they are reduced (``keepdim`` leaves a dim of size one); only on the right, new.
                        None and an empty list select all dims, of ``@dim!`` none
``1``, ``[]``           a dim that is no factor: of size one, or one that cannot be sharded
``+m n``                an operand that is added to the result once
``weight: m n``         the operand of this argument; operands that a call lacks are left out
``each: s*``            every operand, every result
``m n -> n m | s* -> s*`` the first that has as many dims as the tensors of the call
======================= =====================================================================================================

>>> parse_notation("+m n, m k, k n -> m n").operands[1].dims
(('m',), ('k',))
>>> parse_notation("a* [@dim] b* -> a* b*").unsharded
frozenset({'@dim'})
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from ..base.caches import memoize
from ..errors import RuleError

Dim = tuple[str, ...]  # the factors of one tensor dim, major first; () if it has none
EACH = "each"

_WORD = r"\.\.\.|@[a-z]\w*!?|[a-z]\w*\*?"
_TOKEN = re.compile(rf"\s*({_WORD}|\[(?:{_WORD})?\]|\([\w\s\[\]]*\)|1)\s*")
_NAME = re.compile(r"\s*([A-Za-z_]\w*)\s*:")


@dataclass(frozen=True, slots=True)
class Term:
    """An operand or result: its dims, whether it is added to the result once, and the name of its argument if it is given."""

    dims: tuple[Dim, ...]
    additive: bool = False
    name: str = ""


@dataclass(frozen=True, slots=True, eq=False)
class Pattern:
    """A parsed rule notation. Equal texts give the same object.

    Attributes:
        unsharded: the factors in brackets.
        selectors: the arguments that select dims, as written (``dim``, ``dim!``).
    """

    text: str
    operands: tuple[Term, ...]
    results: tuple[Term, ...]
    unsharded: frozenset[str]
    selectors: tuple[str, ...]

    @property
    def named(self) -> bool:
        """Return True if operands are identified by their arguments, not by their positions."""
        return bool(self.operands[0].name)


def is_group(dim: Dim) -> bool:
    """Return True if the dim of a notation is a group (``s*`` or ``...``), which matches any number of tensor dims."""
    return len(dim) == 1 and dim[0][-1] in "*."


def is_selected(dim: Dim) -> bool:
    """Return True if the dim of a notation is written ``@name``: argument ``name`` of the call selects the tensor dims."""
    return len(dim) == 1 and dim[0][0] == "@"


def selector_argument(dim: Dim) -> str:
    """Return the name of the argument that selects a dim written ``@name``. It may end with ``!``."""
    return dim[0][1:]


@memoize(8192)
def parse_notation(text: str) -> Pattern:
    """Parse the notation of a rule (``"m k, k n -> m n"``) into its terms for operands and results (cached).

    Raises:
        RuleError: not of the form ``"a b, b c -> a c"``.
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f"pattern {text!r} has no '->'; write for example \"m k, k n -> m n\"")
    unsharded: set[str] = set()
    operands = tuple(_parse_term(part, text, unsharded) for part in left.split(","))
    results = tuple(_parse_term(part, text, unsharded) for part in right.split(","))  # an empty right side is one 0-d result
    if len({bool(term.name) for term in operands}) > 1:
        raise RuleError(f"pattern {text!r} names some operands but not all; name all of them")
    operand_factors = {name for term in operands for dim in term.dims for name in dim}
    unknown = {name for term in results for dim in term.dims for name in dim if name[0] != "@"} - operand_factors
    if unknown:
        raise RuleError(f"pattern {text!r}: {sorted(unknown)} appear only on the right of '->'")
    selectors = dict.fromkeys(selector_argument(dim) for term in (*operands, *results) for dim in term.dims if is_selected(dim))
    return Pattern(text, operands, results, frozenset(unsharded), tuple(selectors))


def _parse_term(part: str, text: str, unsharded: set[str]) -> Term:
    """Parse the part of a notation for one operand or result. Add its factors in brackets to the set ``unsharded``."""
    name = _NAME.match(part)
    part = part[name.end() :] if name else part
    part = part.strip()
    additive = part.startswith("+")
    rest = part.removeprefix("+")
    dims: list[Dim] = []
    while rest.strip():
        match = _TOKEN.match(rest)
        if match is None:
            raise RuleError(f"pattern {text!r}: cannot read {rest!r}")
        token, rest = match.group(1), rest[match.end() :]
        if token in ("1", "[]"):
            dims.append(())
        elif token[0] == "[":
            unsharded.add(token[1:-1])
            dims.append((token[1:-1],))
        elif token[0] == "(":
            unsharded.update(inner[1:-1] for inner in token[1:-1].split() if inner[0] == "[")
            dims.append(tuple(token[1:-1].replace("[", "").replace("]", "").split()))
        else:
            dims.append((token,))
    if sum(map(is_selected, dims)) > 1:
        raise RuleError(f"pattern {text!r}: at most one argument selects dims of a tensor")
    return Term(tuple(dims), additive, name.group(1) if name else "")
