"""The class: local and global values, autograd, creation, distribution, views."""

from .dtensor import DTensor

__all__ = ["DTensor"]
