"""Seeing what happens: communication counts, and where a tensor's blocks lie."""

from .comm_mode import CommDebugMode
from .visualize import visualize_sharding

__all__ = ["CommDebugMode", "visualize_sharding"]
