"""For tests: the oracle, rule verification, random programs; hypothesis strategies in ``dtensor.testing.strategies``."""

from .oracle import Mismatch, Outcome, check, compare
from .samples import Sample
from .scatter import scatter
from .verify import Report, verify_all, verify_rule

__all__ = ["Mismatch", "Outcome", "Report", "Sample", "check", "compare", "scatter", "verify_all", "verify_rule"]
