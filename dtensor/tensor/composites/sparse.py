"""What torch would give as a sparse tensor. No DTensor is sparse, so a value comes as a plain one, whole on every rank, and
a gradient comes dense, in the layout of its leaf.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...base.modes import MODES
from ...errors import ImplicitCommunicationError
from ...placement import Replicate
from ..dtensor import DTensor
from .recomposed import recomposed

aten = torch.ops.aten


def converted(overload: Any) -> Callable[..., Tensor]:
    """``x.to_sparse()``: that of the whole value, which costs what ``x.full_tensor()`` does; differentiable."""

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(x, DTensor):
            return NotImplemented
        if MODES.explicit and not all(isinstance(p, Replicate) for p in x.placements):
            name = overload._schema.name
            raise ImplicitCommunicationError(
                f"{name} would gather {x.layout!r} under explicit(); write x.full_tensor().to_sparse()"
            )
        return overload(x.full_tensor(), *args, **kwargs)

    return run


def with_dense_gradient(overload: Any, name: str) -> Callable[..., Any]:
    """The operator without the flag ``name``, which asks for a sparse gradient."""
    names = [argument.name for argument in overload._schema.arguments]
    place = names.index(name)

    refused = names.index("scale_grad_by_freq")  # torch has no sparse gradients of this kind, and says so

    def run(*args: Any, **kwargs: Any) -> Any:
        wanted, by_frequency = (
            args[i] if len(args) > i else kwargs.get(flag) for i, flag in ((place, name), (refused, "scale_grad_by_freq"))
        )
        if not wanted or by_frequency:
            return NotImplemented
        _announce(f"{overload}: {name}=True")
        given = dict(zip(names, args, strict=False)) | kwargs | {name: False}
        positional = [
            given.pop(argument.name)
            for argument in overload._schema.arguments
            if not argument.kwarg_only and argument.name in given
        ]
        return overload(*positional, **given)

    return run


def embedding_gradient(grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool) -> Any:
    if scale_grad_by_freq:
        return NotImplemented  # torch refuses it
    _announce("embedding: sparse=True")
    return aten.embedding_dense_backward(grad, indices, num_weights, padding_idx, False)


def gather_gradient(x: Tensor, dim: int, index: Tensor, grad: Tensor) -> Tensor:
    _announce("gather: sparse_grad=True")
    return torch.zeros_like(x).scatter_add(dim, index, grad)


def _announce(what: str) -> None:
    warnings.warn(f"{what} has no effect on DTensors, whose gradients are dense", stacklevel=3)


recomposed("aten::embedding_sparse_backward", embedding_gradient)
recomposed("aten::_gather_sparse_backward", gather_gradient)
for _packet in (aten.to_sparse, aten.to_sparse_csr, aten.to_sparse_csc, aten.to_sparse_bsr, aten.to_sparse_bsc):
    for _overload in (getattr(_packet, name) for name in _packet.overloads() if "out" not in name):
        recomposed(_overload.name(), converted(_overload))
for _overload, _flag in (
    (aten.embedding_bag.default, "sparse"),
    (aten.embedding_bag.padding_idx, "sparse"),
):
    recomposed(_overload.name(), with_dense_gradient(_overload, _flag))
