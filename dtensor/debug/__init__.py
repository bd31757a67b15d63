"""Seeing what happens: communication counts."""

from .comm_mode import CommDebugMode

__all__ = ["CommDebugMode"]
