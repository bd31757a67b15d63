"""What torch would give as a sparse tensor. No DTensor is sparse, so a value, converted or put together of its parts, comes as a
plain one, whole on every rank, and a gradient comes dense, in the layout of its leaf.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...base.modes import MODES
from ...base.tensor_tree import mapped
from ...errors import ImplicitCommunicationError
from ...placement import Replicate
from ..dtensor import DTensor
from .above_autograd import recomposed

aten = torch.ops.aten


def of_whole(overload: Any) -> Callable[..., Tensor]:
    """``x.to_sparse()``, ``x.sparse_mask(mask)``, ``torch.sparse_coo_tensor(indices, values)``: of the whole values, which costs
    what ``full_tensor()`` of them does; differentiable."""
    name = overload._schema.name

    def whole(x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):
            return x
        if MODES.explicit and not all(isinstance(p, Replicate) for p in x.placements):
            raise ImplicitCommunicationError(f"{name} would all-gather {x.layout!r} under explicit(); pass x.full_tensor()")
        return x.full_tensor()

    return lambda *args, **kwargs: overload(*mapped(whole, args), **mapped(whole, kwargs))


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
    warnings.warn(f"{what} has no effect on DTensors: their gradients are dense", stacklevel=3)


recomposed("aten::embedding_sparse_backward", embedding_gradient)
recomposed("aten::_gather_sparse_backward", gather_gradient)
_COMPRESSED = ("csr", "csc", "bsr", "bsc")
for _packet in (
    aten.to_sparse,
    aten.sparse_mask,
    aten.sparse_coo_tensor,
    aten._sparse_coo_tensor_unsafe,
    aten.sparse_compressed_tensor,
    *(getattr(aten, name.format(kind)) for kind in _COMPRESSED for name in ("to_sparse_{}", "sparse_{}_tensor")),
):
    for _overload in (getattr(_packet, name) for name in _packet.overloads() if "out" not in name):
        recomposed(_overload.name(), of_whole(_overload))
for _overload, _flag in (
    (aten.embedding_bag.default, "sparse"),
    (aten.embedding_bag.padding_idx, "sparse"),
):
    recomposed(_overload.name(), with_dense_gradient(_overload, _flag))
