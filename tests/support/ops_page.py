"""Rule kind: whether a rule is made of declarations alone, or has functions of its family. Derived from the rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..placement import Monoid
from .rule import Declaration, Kernel, Rule

_LANGUAGE = __name__.rpartition(".")[0]


def classify_rule(rule: Rule) -> str:
    """Return ``"notation"``, ``"combinators"``, ``"answers"``, ``"decompositions"`` or ``"functions"``.

    ``"notation"``: factors are a declaration, and the operator runs on local tensors. ``"combinators"``: declarations (folds,
    scans, random, sharded indexing) compute for some calls. ``"functions"``: :func:`own_functions` is not empty.
    """
    if rule.kind == "decomposition":
        return "decompositions"
    if own_functions(rule):
        return "functions"
    if rule.answer is not None and not rule.factors.__class__.__module__.endswith(("factoring", "folds")):
        return "answers"
    return "combinators" if has_kernels(rule) else "notation"


def own_functions(item: Any) -> tuple[Callable[..., Any], ...]:
    """Return the functions of the operator family (or of a user) among a rule's factors and kernels.

    Declarations return their own functions (:meth:`Declaration.embedded_functions`). Functions of the rule language count only
    for their closures. Parts of folds and scans are mathematics on plain tensors, which is independent of ranks, and are not
    counted.

    >>> own_functions(Kernel(len)), own_functions(Declaration())
    ((<built-in function len>,), ())
    """
    if isinstance(item, Rule):
        return tuple(functions for part in (item.factors, item.run) for functions in own_functions(part))
    if isinstance(item, Kernel):
        return own_functions(item.run)
    if isinstance(item, Declaration) and not _is_family_code(type(item)):
        return tuple(functions for part in item.embedded_functions() for functions in own_functions(part))
    if not callable(item) or isinstance(item, Monoid):
        return ()
    if _is_family_code(item):
        return (item,)
    return tuple(
        functions for cell in getattr(item, "__closure__", None) or () for functions in own_functions(cell.cell_contents)
    )


def has_kernels(item: Any) -> bool:
    """Return True if a declaration computes instead of the operator, for some calls at least."""
    if isinstance(item, Rule):
        return item.run is not None or has_kernels(item.factors)
    return isinstance(item, Kernel) or (isinstance(item, Declaration) and any(map(has_kernels, item.embedded_functions())))


def _is_family_code(item: Any) -> bool:
    module = getattr(item, "__module__", None) or ""
    return not module.startswith(_LANGUAGE) or module.startswith(f"{_LANGUAGE}.aten")
