"""Functorch: DTensors inside transforms of ``torch.func``, and autograd functions that such transforms support.

``vmap`` wraps a DTensor in a tensor with one dim less; :func:`layout_of` gives the layout without that dim. An autograd function
with layouts among its arguments runs on the DTensors below, with the batch as the first dim and one more dim in each layout. The
legacy ``vmap``, by which autograd takes gradients in batches (``is_grads_batched=True``, ``vectorize=True``), is no transform of
``torch.func``: its tensors are unwrapped by their level.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch

from ..base.torch_internals import (
    DisableFuncTorch,
    DispatchKey,
    add_batch_dim,
    current_transform,
    forward_ad,
    functorch_active,
    functorch_unwrapped,
    hidden_dim,
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

_LEGACY_LEVEL = 1  # torch enters one legacy vmap at a time


class FunctorchFunction(torch.autograd.Function):
    """An autograd function of DTensors that transforms of ``torch.func`` support.

    Subclasses define ``setup_context``, in which arguments may be wrapped by a transform (see :func:`layout_of`), and
    :meth:`lay`, since the function runs on batches with an unsharded batch dim.
    """

    @staticmethod
    def lay(x: Any, placements: Sequence[Placement]) -> Any:
        """Return ``x`` (a DTensor, perhaps wrapped by a transform) redistributed to other placements."""
        raise NotImplementedError


def make_apply(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """Return ``function.apply`` for DTensor arguments.

    Outside of transforms it skips torch's search for wrappers of dead transforms, which wrap plain tensors only. Inside of a
    transform it raises UnsupportedOperationError if ``function`` is not :class:`FunctorchFunction`.
    """
    apply_directly = super(torch.autograd.Function, function).apply  # type: ignore[misc]  # the method in C++
    if not issubclass(function, FunctorchFunction):

        def apply(*args: Any) -> Any:
            """Apply the function; raise inside of transforms of ``torch.func``."""
            if functorch_active():
                raise UnsupportedOperationError(
                    f"{function.__name__} inside torch.func.grad, vjp, jvp or vmap is not supported; differentiate by "
                    "torch.autograd.grad, torch.autograd.functional or torch.autograd.forward_ad"
                )
            return apply_directly(*args)

        return apply

    def apply_with_or_without_transforms(*args: Any) -> Any:
        if functorch_active():
            return boxed.apply(*map(_LayoutBox.of, args))
        return apply_batched(*args) if any(map(_is_legacy_wrapped, args)) else apply_directly(*args)

    boxed = _make_boxed_function(function, apply_with_or_without_transforms)
    apply_batched = super(torch.autograd.Function, _make_legacy_function(function, apply_with_or_without_transforms)).apply  # type: ignore[misc]
    return apply_with_or_without_transforms


class _LayoutBox:
    """Box of a layout among arguments: torch searches arguments for objects with ``__torch_function__``, and a layout has one."""

    __slots__ = ("layout",)

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @staticmethod
    def of(x: Any) -> Any:
        return _LayoutBox(x) if isinstance(x, Layout) else x


def _make_boxed_function(function: type[FunctorchFunction], call: Callable[..., Any]) -> type[FunctorchFunction]:
    """Return ``function`` with boxed layouts as arguments, and with a ``vmap`` rule."""

    def unbox(args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(x.layout if isinstance(x, _LayoutBox) else x for x in args)

    def forward(*args: Any) -> Any:
        return function.forward(*unbox(args))

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        function.setup_context(ctx, unbox(inputs), output)

    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        result = call(*_make_batched_args(function, info.batch_size, unbox(args), in_dims))
        return result, (0,) * len(result) if isinstance(result, tuple) else 0

    methods = {"forward": forward, "setup_context": setup_context, "vmap": vmap}
    return type(function.__name__, (function,), {name: staticmethod(method) for name, method in methods.items()})


def _make_legacy_function(function: type[FunctorchFunction], call: Callable[..., Any]) -> type[FunctorchFunction]:
    """Return ``function`` for tensors of the legacy ``vmap``."""

    def wrap_batch(x: Any) -> Any:
        return add_batch_dim(x, 0, _LEGACY_LEVEL)

    def forward(*args: Any) -> Any:
        """Run the function on batched tensors, and wrap its results for the legacy ``vmap``."""
        unwrapped = [remove_batch_dim(x, _LEGACY_LEVEL, 1, 0) if _is_legacy_wrapped(x) else x for x in args]
        dims = [0 if _is_legacy_wrapped(x) else None for x in args]
        size = next(x.shape[0] for x, dim in zip(unwrapped, dims, strict=True) if dim == 0)
        result = call(*_make_batched_args(function, size, unwrapped, dims))
        return tuple(map(wrap_batch, result)) if isinstance(result, tuple) else wrap_batch(result)

    return type(function.__name__, (function,), {"forward": staticmethod(forward)})


def _make_batched_args(function: type[FunctorchFunction], size: int, args: Sequence[Any], dims: Sequence[Any]) -> list[Any]:
    """Return the arguments below a ``vmap``: row-major tensors with an unsharded batch dim first, and layouts with one more dim.

    Args:
        size: the batch size.
        dims: the batch dim of each argument; None if it has none.
    """
    batched = []
    for x, dim in zip(args, dims, strict=True):
        if isinstance(x, Layout):
            placements = tuple(_shift_shard_dim(p, 1) for p in x.placements)
            x = x.replace(placements=placements, shape=(size, *x.shape))
        elif isinstance(x, torch.Tensor):
            x = (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).contiguous()
            if (own := layout_of(x)) is not None:
                target = tuple(_shift_shard_dim(p, 1) for p in _remove_dim(own, 0).placements)
                x = x if target == own.placements else function.lay(x, target)
        batched.append(x)
    return batched


def _remove_dim(layout: Layout, dim: int) -> Layout:
    """Return the layout of one slice along ``dim``; a mesh dim that shards ``dim`` replicates the slice."""
    placements = tuple(
        Replicate() if getattr(p, "dim", None) == dim else _shift_shard_dim(p, -1) if getattr(p, "dim", dim) > dim else p
        for p in layout.placements
    )
    shape, stride = [*layout.shape], [*layout.stride]
    del shape[dim], stride[dim]
    return Layout.of(layout.mesh, placements, tuple(shape), tuple(stride), layout.dtype)


def _shift_shard_dim(placement: Placement, by: int) -> Placement:
    return replace(placement, dim=placement.dim + by) if isinstance(placement, Shard) else placement


def layout_of(x: Any) -> Any:
    """Return the layout of a DTensor, also inside transforms, without the dims that ``vmap`` removes; None for other objects."""
    own = getattr(x, "_layout", None)
    if own is not None or not isinstance(x, torch.Tensor):
        return own
    if is_functorch_wrapped(x):
        below = layout_of(functorch_unwrapped(x))
        return _remove_dim(below, hidden_dim(x)) if below is not None and is_functorch_batched(x) else below
    if is_legacy_batched(x):
        below = layout_of(_unwrap_legacy(x))
        return None if below is None else _remove_dim(below, 0)
    return None


def mesh_and_placements_of(x: Any) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Return the mesh and the placements of a DTensor, also inside transforms; torch.compile traces this without sizes."""
    own: tuple[DeviceMesh, tuple[Placement, ...]] | None = getattr(x, "_placed", None)
    if own is None:
        layout = layout_of(x)
        own = layout.mesh, layout.placements
    return own


def _unwrap_legacy(x: torch.Tensor) -> torch.Tensor:
    """Return the tensor below the legacy ``vmap``, with the batch as its first dim."""
    below = remove_batch_dim(x, _LEGACY_LEVEL, 1, 0)
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
    """Unwrap a plain tensor from all transforms.

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
    """Return ``x.detach()``, for which the legacy ``vmap`` has no rule."""
    if not is_legacy_batched(x):
        return x.detach()
    with torch.no_grad():
        return x.view_as(x)


def _is_legacy_wrapped(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and is_legacy_batched(x)


def is_wrapped_by_transform(x: torch.Tensor) -> bool:
    """Return True if a transform wraps ``x``, also the legacy ``vmap`` of ``gradcheck``."""
    return is_functorch_wrapped(x) or is_legacy_batched(x)
