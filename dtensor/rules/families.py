"""Importing this module registers every rule of the library."""

from . import contraction, pointwise, reduction, views

__all__ = ["contraction", "pointwise", "reduction", "views"]
