"""Sparse results: a sparse value is returned as a plain tensor, complete on every rank, and a sparse gradient as a dense one.

No DTensor is sparse.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ...base.modes import MODES
from ...base.tensor_tree import map_tensors
from ...errors import ImplicitCommunicationError
from ...placement import Replicate
from ..dtensor import DTensor
from .register import overload_named

aten = torch.ops.aten


_COMPRESSED = ("csr", "csc", "bsr", "bsc")
CONSTRUCTORS = tuple(
    getattr(packet, name).name()
    for packet in (
        aten.to_sparse,
        aten.sparse_mask,
        aten.sparse_coo_tensor,
        aten._sparse_coo_tensor_unsafe,
        aten.sparse_compressed_tensor,
        *(getattr(aten, name.format(kind)) for kind in _COMPRESSED for name in ("to_sparse_{}", "sparse_{}_tensor")),
    )
    for name in packet.overloads()
    if "out" not in name
)
"""Full names of the operators that return a sparse tensor."""


def of_full_tensors(name: str) -> Callable[..., Tensor]:
    """Return an override that runs the operator ``name`` on the gathered full tensors of its DTensors; differentiable.

    Examples: ``x.to_sparse()``, ``x.sparse_mask(mask)``, ``torch.sparse_coo_tensor(indices, values)``.
    """
    overload = overload_named(name)
    schema_name = overload._schema.name

    def gather_dtensor(x: Tensor) -> Tensor:
        """Return a DTensor as a plain full tensor; raise under ``explicit()`` if that communicates."""
        if not isinstance(x, DTensor):
            return x
        if MODES.explicit and not all(isinstance(p, Replicate) for p in x.placements):
            raise ImplicitCommunicationError(
                f"{schema_name} would all-gather {x.layout!r} under explicit(); pass x.full_tensor()"
            )
        return x.full_tensor()

    return lambda *args, **kwargs: overload(*map_tensors(gather_dtensor, args), **map_tensors(gather_dtensor, kwargs))


def embedding_bag_with_dense_gradient(name: str) -> Callable[..., Any]:
    """Return an override of ``embedding_bag`` that ignores ``sparse=True``, so that the gradient is dense."""
    overload = overload_named(name)
    arguments = overload._schema.arguments
    names = [argument.name for argument in arguments]

    def run_with_dense_gradient(*args: Any, **kwargs: Any) -> Any:
        """Call the operator with ``sparse=False``, and warn of the dense gradient."""
        values = dict(zip(names, args, strict=False)) | kwargs
        if not values.get("sparse") or values.get("scale_grad_by_freq"):  # both together: torch raises
            return NotImplemented
        _warn_of_dense_gradient(f"{overload}: sparse=True")
        values["sparse"] = False
        positional = [values.pop(argument.name) for argument in arguments if not argument.kwarg_only and argument.name in values]
        return overload(*positional, **values)

    return run_with_dense_gradient


def embedding_sparse_backward(grad: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool) -> Any:
    """Return the gradient of an embedding table as a dense tensor, with a warning."""
    if scale_grad_by_freq:
        return NotImplemented  # torch raises
    _warn_of_dense_gradient("embedding: sparse=True")
    return aten.embedding_dense_backward(grad, indices, num_weights, padding_idx, False)


def gather_sparse_backward(x: Tensor, dim: int, index: Tensor, grad: Tensor) -> Tensor:
    _warn_of_dense_gradient("gather: sparse_grad=True")
    return torch.zeros_like(x).scatter_add(dim, index, grad)


def _warn_of_dense_gradient(option: str) -> None:
    warnings.warn(f"{option} has no effect on DTensors: their gradients are dense", stacklevel=3)
