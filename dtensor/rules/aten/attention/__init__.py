"""Attention: the fused operators, blocks of rows and of keys, and rings."""

from . import operators as operators
