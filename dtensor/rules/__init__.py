"""Sharding rules: the notation, the declaration functions, the registry, and a file of declarations for each operator family."""

from .declared_factors import by
from .folds import Fold
from .partial_rules import copies, falling, forgets, linear, monotone, one_of
from .registry import lookup, register, rules, unregister
from .rule import Kernel

__all__ = [
    "Fold",
    "Kernel",
    "by",
    "copies",
    "falling",
    "forgets",
    "linear",
    "lookup",
    "monotone",
    "one_of",
    "register",
    "rules",
    "unregister",
]
