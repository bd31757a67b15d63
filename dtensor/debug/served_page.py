"""How many operators are served in which way, for the page of operators."""

from __future__ import annotations

from collections import Counter

from ..rules import rules
from ..rules.served import besides, served_by

_SERVED = {
    "notation": "by notation: the pattern gives the factors, the operator runs on locals",
    "combinators": "by notation and combinators of the language (folds, scans, draws, owned reads and writes)",
    "answers": "by an answer from layouts",
    "decompositions": "by a function of tensors, made of other operators",
    "functions": "with a Python function of their own for factors or a kernel",
}


def table_of_served() -> str:
    """How many names are served in which way: ``rules.served.served_by`` of each rule."""
    found = {name: rule for name, rule in rules().items() if name.startswith("aten::")}
    counts = Counter(map(served_by, found.values()))
    language = [rule for rule in found.values() if served_by(rule) in ("notation", "combinators")]
    others = Counter(name for rule in language for name in besides(rule))
    lines = ["| names | served |", "|---|---|", *(f"| {counts[how]} | {text} |" for how, text in _SERVED.items())]
    return "\n".join(lines) + _METHOD.format(
        count=len(language), told=", ".join(f"{n} {count}" for n, count in others.most_common())
    )


_METHOD = """

{count} are served by the language alone. This is derived from each rule (`dtensor/rules/served.py`): a function that a family's
file hands to its words counts as its own, but for the parts of folds and scans, which are mathematics on plain tensors. Beside
factors and kernels functions of families say of these: {told}.
"""
