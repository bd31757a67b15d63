"""The tensor class ``DTensor``: conversion between local and global tensors, autograd, creation, distribution and views."""

from .dtensor import DTensor

__all__ = ["DTensor"]
