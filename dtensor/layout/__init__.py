"""Layout: how a tensor is distributed over a mesh. Interned layouts, splits and memory orders; integer arithmetic only."""

from .layout import Layout
from .splits import Split

__all__ = ["Layout", "Split"]
