"""Sharding rules: the notation, the words, the registry, and one file of declarations per operator family."""

from .factoring import by
from .folds import Fold
from .registry import lookup, register, rules, unregister
from .rows import copies, falling, forgets, linear, monotone, one_of
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
