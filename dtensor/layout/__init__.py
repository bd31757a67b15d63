"""How a tensor lies on a mesh: interned layouts, splits, orders in memory. Integer maths only."""

from .layout import Layout, Split

__all__ = ["Layout", "Split"]
