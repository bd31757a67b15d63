"""Optimizer steps over lists, whose kernels go through memory without a look at strides."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch

from ..propagation.op_schema import Operator
from ..ranks.per_rank import shards_of
from ..ranks.write_result import assign


def through_memory(operator: Operator) -> Callable[..., Any]:
    """The operator. Tensors laid out otherwise than those of the first list are copied before and, where written, back."""
    func, written = operator.func, [name in operator.mutated for name in operator.names]

    def run(*local_args: Any, **local_kwargs: Any) -> Any:
        strayed: list[tuple[Any, Any]] = []
        first = local_args[0]
        if not _none_strays([listed for listed in local_args if isinstance(listed, list)]):
            for k, listed in enumerate(local_args):
                if isinstance(listed, list):
                    strayed += [pair for pair in _brought(listed, first, k == 0) if written[k]]
        computed = func(*local_args, **local_kwargs)
        for x, copy in strayed:
            assign(x, copy)
        return computed

    return run


def _brought(listed: list[Any], first: list[Any], is_first: bool) -> list[tuple[Any, Any]]:
    """What stood in a list and was replaced there, each with its copy."""
    strayed = []
    for i, (x, like) in enumerate(zip(listed, first, strict=False)):
        if not (all(map(_dense, shards_of(x))) if is_first else all(map(_alike, shards_of(x), shards_of(like)))):
            listed[i] = torch.empty_like(like, dtype=x.dtype).copy_(x)
            strayed.append((x, listed[i]))
    return strayed


def _none_strays(lists: list[list[Any]]) -> bool:
    """Whether that is plain at once, most often: one look at all strides, of which numbers (step counts) have none."""
    if {*map(type, chain.from_iterable(lists))} != {torch.Tensor} or not all(map(torch.Tensor.is_contiguous, lists[0])):
        return False
    strides = list(map(torch.Tensor.stride, lists[0]))
    return all((own := list(map(torch.Tensor.stride, listed))) == strides or not any(own) for listed in lists[1:])


def _dense(x: torch.Tensor) -> bool:
    """No gaps in memory, as a slice of rows has them."""
    return x.numel() < 2 or x.stride() == torch.empty_like(x).stride()


def _alike(x: torch.Tensor, first: torch.Tensor) -> bool:
    return x.shape != first.shape or x.stride() == first.stride() or x.numel() < 2
