"""Testing tools: the oracle and rule verification; hypothesis strategies are in ``dtensor.testing.strategies``."""

from .force_strategy import Undeclared, forced
from .oracle import Mismatch, Outcome, check, compare
from .samples import Sample
from .scatter import FARTHEST, scatter
from .verify import Report, verify_all, verify_rule

__all__ = [
    "FARTHEST",
    "Mismatch",
    "Outcome",
    "Report",
    "Sample",
    "Undeclared",
    "check",
    "compare",
    "forced",
    "scatter",
    "verify_all",
    "verify_rule",
]
