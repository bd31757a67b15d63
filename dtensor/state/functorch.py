"""Functorch: what is known of a DTensor inside transforms of ``torch.func``.

``vmap`` wraps a DTensor in a tensor with one dim less; :func:`layout_of` gives the layout without that dim. The
legacy ``vmap``, by which autograd takes gradients in batches (``is_grads_batched=True``, ``vectorize=True``), is no transform of
``torch.func``: its tensors are unwrapped by their level.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch

from ..base.torch_internals import (
    DisableFuncTorch,
    DispatchKey,
    batch_dim_of,
    current_transform,
    forward_ad,
    functorch_active,
    functorch_unwrapped,
    is_functorch_batched,
    is_functorch_wrapped,
    is_key_excluded,
    is_legacy_batched,
    remove_batch_dim,
    transform_level,
)
from ..errors import LayoutError, UnsupportedOperationError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..placement import Placement, Replicate, Shard

LEGACY_LEVEL = 1  # torch enters one legacy vmap at a time


def layout_without_dim(layout: Layout, dim: int) -> Layout:
    """Return the layout of one slice along ``dim``, without that dim; a mesh dim that shards ``dim`` replicates the slice."""
    placements = tuple(
        Replicate() if getattr(p, "dim", None) == dim else shift_shard_dim(p, -1) if getattr(p, "dim", dim) > dim else p
        for p in layout.placements
    )
    shape, stride = [*layout.shape], [*layout.stride]
    del shape[dim], stride[dim]
    return Layout.of(layout.mesh, placements, tuple(shape), tuple(stride), layout.dtype)


def shift_shard_dim(placement: Placement, by: int) -> Placement:
    """Return a placement after ``by`` tensor dims were put in front: ``Shard`` names a later dim, others stay."""
    return replace(placement, dim=placement.dim + by) if isinstance(placement, Shard) else placement


def layout_of(x: Any) -> Any:
    """Return the layout of a DTensor, also inside transforms, without the dims that ``vmap`` removes; None for other objects."""
    own = getattr(x, "_layout", None)
    if own is not None or not isinstance(x, torch.Tensor):
        return own
    if is_functorch_wrapped(x):
        below = layout_of(functorch_unwrapped(x))
        return layout_without_dim(below, batch_dim_of(x)) if below is not None and is_functorch_batched(x) else below
    if is_legacy_batched(x):
        below = layout_of(_unwrap_legacy(x))
        return None if below is None else layout_without_dim(below, 0)
    return None


def mesh_and_placements_of(x: Any) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return mesh and placements of a DTensor, also inside transforms, without its sizes, as torch.compile needs it."""
    own: tuple[DeviceMesh, tuple[Placement, ...]] | None = getattr(x, "_placed", None)
    if own is None:
        layout = layout_of(x)
        own = layout.mesh, layout.placements
    return own


def _unwrap_legacy(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` without the wrapper of the legacy ``vmap``, with the batch as its first dim."""
    below = remove_batch_dim(x, LEGACY_LEVEL, 1, 0)
    if is_legacy_batched(below):
        raise UnsupportedOperationError("nested batched gradients of a DTensor (is_grads_batched=True) are not supported")
    return below


def below_transforms() -> AbstractContextManager[Any]:
    """Return a context in which new tensors are constants to the transforms of ``torch.func`` around it.

    Otherwise these would wrap the local tensor of each rank.
    """
    return DisableFuncTorch() if functorch_active() else nullcontext()


def is_inside_transform() -> bool:
    """Return True inside a transform of ``torch.func``, but not inside of :func:`below_transforms`."""
    return functorch_active() and not is_key_excluded(DispatchKey.FuncTorchDynamicLayerFrontMode)


def as_writable_in_transform(x: Any) -> Any:
    """Return ``x``, made below the active transforms, as a tensor that the transformed function may write to."""
    return x.clone() if functorch_active() else x


def unwrap_constant(x: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor without the wrappers of all transforms, to which it is a constant.

    Raises:
        LayoutError: a transform differentiates it.
        UnsupportedOperationError: a ``vmap`` batches it.
    """
    with ExitStack() as levels:
        while is_functorch_wrapped(x):
            while (transform := current_transform()).level() > transform_level(x):
                levels.enter_context(transform.lower())
            if is_functorch_batched(x):
                raise UnsupportedOperationError(
                    "a tensor inside vmap becomes a DTensor with DTensor.from_local(x, mesh, placements)"
                )
            if x.requires_grad or has_tangent(x):
                raise LayoutError(
                    "a tensor inside torch.func.grad becomes a DTensor with DTensor.from_local(x, mesh, placements)"
                )
            x = functorch_unwrapped(x)
    return x


def has_tangent(x: torch.Tensor) -> bool:
    """Return True if ``x`` has a tangent of forward-mode differentiation."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def detach_any(x: torch.Tensor) -> torch.Tensor:
    """Return ``x.detach()``; under the legacy ``vmap``, which has no rule for it, a view made without autograd."""
    if not is_legacy_batched(x):
        return x.detach()
    with torch.no_grad():
        return x.view_as(x)


def is_legacy_wrapped(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and is_legacy_batched(x)


def is_wrapped_by_transform(x: torch.Tensor) -> bool:
    """Return True if a transform wraps ``x``, also the legacy ``vmap`` of ``gradcheck``."""
    return is_functorch_wrapped(x) or is_legacy_batched(x)
