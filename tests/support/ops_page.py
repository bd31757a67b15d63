"""Operators page: ``python tests/support/ops_page.py`` (``make docs``) prints ``docs/ops.md``.

The page is ``dtensor ops`` with a heading, and a table of the kinds of rules.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from dtensor.commands.operator_tables import operator_tables, torch_version
from dtensor.placement import Monoid
from dtensor.rules import rules
from dtensor.rules.declared_factors import DeclaredFactors
from dtensor.rules.folds import DtypeRestrictedKernel
from dtensor.rules.kernels.index_rules import IndexingFactors
from dtensor.rules.rule import Declaration, Kernel, Rule

_LANGUAGE = "dtensor.rules"
_HEAD = """# Operators

Find out how an operator runs: which dims may be sharded without communication, and what a call costs otherwise.

`make docs` writes this page from the registry, for torch {version}; do not edit it. `dtensor ops` prints its tables.
An operator with a rule uses it. Otherwise it is decomposed into operators with a rule. Otherwise its inputs are all-gathered,
which warns once, and raises under `dtensor.explicit()`.

"""
_KINDS = {
    "notation": "notation alone: the pattern gives the factors, and the operator runs on local tensors",
    "combinators": "notation and combinators of the rule language (reductions, scans, random draws, indexed reads and writes)",
    "answers": "an answer from the layouts",
    "decompositions": "a decomposition into other operators",
    "functions": "a Python function of its own, for factors or for a kernel",
}
_KINDS_NOTE = """
## Kinds of rules

{table}

The rule language alone covers {count} names. `tests/support/ops_page.py` derives this from each rule. A function that a rule
declaration passes counts as the rule's own, except for the parts of reductions and scans, which are math on plain tensors.
"""


def make_page() -> str:
    """Return the text of ``docs/ops.md``."""
    counts = Counter(classify_rule(rule) for name, rule in rules().items() if name.startswith("aten::"))
    rows = ["| names | their rule is |", "|---|---|", *(f"| {counts[kind]} | {text} |" for kind, text in _KINDS.items())]
    note = _KINDS_NOTE.format(table="\n".join(rows), count=counts["notation"] + counts["combinators"])
    return _HEAD.format(version=torch_version()) + operator_tables() + note


# --- kinds of rules -----------------------------------------------------------------------------------------------------
def classify_rule(rule: Rule) -> str:
    """Return ``"notation"``, ``"combinators"``, ``"answers"``, ``"decompositions"`` or ``"functions"``.

    ``"notation"``: factors are a declaration, and the operator runs on local tensors. ``"combinators"``: declarations (folds,
    scans, random, sharded indexing) compute for some calls. ``"functions"``: :func:`own_functions` is not empty.
    """
    if rule.kind == "decomposition":
        return "decompositions"
    if own_functions(rule):
        return "functions"
    if rule.answer is not None and not isinstance(rule.factors, DeclaredFactors):
        return "answers"
    return "combinators" if has_kernels(rule) else "notation"


def own_functions(item: Any) -> tuple[Callable[..., Any], ...]:
    """Return the functions of the operator family (or of a user) among a rule's factors and kernels.

    Functions of the rule language count only for their closures. Parts of folds and scans do not count, because they compute on
    plain tensors, independently of ranks.

    >>> own_functions(Kernel(len)), own_functions(Declaration())
    ((<built-in function len>,), ())
    """
    if isinstance(item, Rule):
        return tuple(functions for part in (item.factors, item.run) for functions in own_functions(part))
    if isinstance(item, Kernel):
        return own_functions(item.run)
    if isinstance(item, Declaration) and not _is_family_code(type(item)):
        return tuple(functions for part in _passed_functions(item) for functions in own_functions(part))
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
    return isinstance(item, Kernel) or (isinstance(item, Declaration) and any(map(has_kernels, _passed_functions(item))))


def _passed_functions(item: Declaration) -> tuple[Any, ...]:
    """Return the kernels and functions that were passed to a declaration function."""
    parts: tuple[Any, ...] = ()
    if isinstance(item, DeclaredFactors):
        parts = (*item.reductions.values(), item.kernel, *item.kernels.values(), *item.sizes.values())
    elif isinstance(item, IndexingFactors):
        parts = (item.masks,)
    elif isinstance(item, DtypeRestrictedKernel):
        parts = (item.kernel,)
    return tuple(part for part in parts if isinstance(part, Kernel) or (callable(part) and not isinstance(part, Monoid)))


def _is_family_code(item: Any) -> bool:
    module = getattr(item, "__module__", None) or ""
    return not module.startswith(_LANGUAGE) or module.startswith(f"{_LANGUAGE}.aten")


if __name__ == "__main__":
    print(make_page(), end="")
