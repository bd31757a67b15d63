"""What was computed aside, written where it belongs: results of kernels, ``out=``, running statistics, plain tensors, views."""

from __future__ import annotations

from typing import Any


def assign(target: Any, value: Any) -> Any:
    """``target``, with the elements of ``value``, which has its shape.

    Args:
        target: a DTensor, whose local is written to; a local; a plain tensor, which every rank gives the same value.
        value: a local as ``target`` has it, whole where ``target`` is plain; or a DTensor, which is brought to its layout.
    """
    if value is target:
        return target
    if hasattr(value, "_layout"):
        return target.copy_(value)
    own = target._local if hasattr(target, "_layout") else target
    if value is not own:
        own.copy_(value if hasattr(own, "shards") else getattr(value, "shards", (value,))[0])  # of ranks that hold the same
    return target
