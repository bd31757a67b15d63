"""How a rule is served: by the language alone, or with functions of its family. Derived from the rule, not claimed by it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..placement import Monoid
from .rule import Kernel, Rule, Word

_LANGUAGE = __name__.rpartition(".")[0]


def served_by(rule: Rule) -> str:
    """One of ``"notation"``, ``"combinators"``, ``"answers"``, ``"decompositions"`` and ``"functions"``.

    ``"notation"``: factors are a word of the language, and the operator runs on locals. ``"combinators"``: words of the language
    (folds, scans, draws, owned reads and writes) compute for some calls. ``"functions"``: :func:`own_functions` is not empty.
    """
    if rule.kind == "decomposition":
        return "decompositions"
    if own_functions(rule):
        return "functions"
    if rule.answer is not None and not rule.factors.__class__.__module__.endswith(("factoring", "folds")):
        return "answers"
    return "combinators" if has_kernels(rule) else "notation"


def own_functions(item: Any) -> tuple[Callable[..., Any], ...]:
    """The functions of a family's own (or a user's) among what gives a rule's factors and kernels: those that are no words.

    Words tell what was handed to them (:meth:`Word.own`); functions of the language itself are words too, but for what they close
    over. Parts of folds and scans are mathematics on plain tensors, which know of no ranks, and are not counted.

    >>> own_functions(Kernel(len)), own_functions(Word())
    ((<built-in function len>,), ())
    """
    if isinstance(item, Rule):
        return tuple(found for part in (item.factors, item.run) for found in own_functions(part))
    if isinstance(item, Kernel):
        return own_functions(item.run)
    if isinstance(item, Word) and not _of_family(type(item)):
        return tuple(found for part in item.own() for found in own_functions(part))
    if not callable(item) or isinstance(item, Monoid):
        return ()
    if _of_family(item):
        return (item,)
    return tuple(found for cell in getattr(item, "__closure__", None) or () for found in own_functions(cell.cell_contents))


def has_kernels(item: Any) -> bool:
    """Whether a combinator of the language computes instead of the operator, for some calls at least."""
    if isinstance(item, Rule):
        return item.run is not None or has_kernels(item.factors)
    return isinstance(item, Kernel) or (isinstance(item, Word) and any(map(has_kernels, item.own())))


def _of_family(item: Any) -> bool:
    module = getattr(item, "__module__", None) or ""
    return not module.startswith(_LANGUAGE) or module.startswith(f"{_LANGUAGE}.aten")
