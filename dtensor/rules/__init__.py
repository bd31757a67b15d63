"""Sharding rules: the notation, the registry, and one file of declarations per operator family."""

from .registry import lookup, register, rules, unregister

__all__ = ["lookup", "register", "rules", "unregister"]
