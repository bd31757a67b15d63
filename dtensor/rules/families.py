"""Importing this module registers every rule of the library."""

from . import contraction, creation, linalg, pointwise, reduction, slices, views

__all__ = ["contraction", "creation", "linalg", "pointwise", "reduction", "slices", "views"]
