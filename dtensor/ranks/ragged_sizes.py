"""Ragged sizes: shapes, strides and numbers of elements of ``PerRank`` tensors, as numbers of each rank where ranks differ."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..base.torch_internals import TensorBase
from .per_rank import _JOINT, PerRank, over_ranks, parts
from .rank_values import one_or_each


def _sizes(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Return the sizes that all ranks have, else a tuple with a ``RankNumber`` for each dim in which they differ."""
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, PerRank):
        return over_ranks(func, args, kwargs)
    found = [func(*own, **named) for own, named in parts(args, kwargs, len(x.shards))]
    first = found[0]
    if all(value == first for value in found):
        return first
    if all(isinstance(value, int) for value in found):
        return one_or_each(found)
    if len({len(value) for value in found}) > 1:
        return over_ranks(func, args, kwargs)  # raises: ranks have tensors of other numbers of dims
    return tuple(map(one_or_each, zip(*found, strict=True)))


_SIZES = (vars(TensorBase)["shape"].__get__, Tensor.size, Tensor.stride, Tensor.numel, Tensor.nelement, torch.numel)
_JOINT.update({func: partial(_sizes, func) for func in _SIZES})
