"""Attention: the fused operators, blocks of queries and keys, and ring attention."""

from . import operators as operators
