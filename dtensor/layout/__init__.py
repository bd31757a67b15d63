"""How a tensor lies on a mesh: interned layouts, splits, orders in memory. Integer maths only."""

from .layout import Layout
from .splits import Split

__all__ = ["Layout", "Split"]
