"""Functorch function: autograd functions with DTensor arguments that transforms of ``torch.func`` support.

With layouts among its arguments, such a function runs on the DTensors below a transform. The batch is their first dim, and each
layout gets one more dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..base.torch_internals import (
    add_batch_dim,
    functorch_active,
    remove_batch_dim,
)
from ..errors import UnsupportedOperationError
from ..layout.layout import Layout
from ..placement import Placement
from ..state.functorch import LEGACY_LEVEL, is_legacy_wrapped, layout_of, layout_without_dim, shift_shard_dim


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

        def apply_outside_transforms(*args: Any) -> Any:
            """Apply the function; raise inside of transforms of ``torch.func``."""
            if functorch_active():
                raise UnsupportedOperationError(
                    f"{function.__name__} inside torch.func.grad, vjp, jvp or vmap is not supported; differentiate by "
                    "torch.autograd.grad, torch.autograd.functional or torch.autograd.forward_ad"
                )
            return apply_directly(*args)

        return apply_outside_transforms

    def apply_with_or_without_transforms(*args: Any) -> Any:
        """Apply the function in the form that the active ``torch.func`` or legacy ``vmap`` transform needs."""
        if functorch_active():
            return boxed.apply(*map(_LayoutBox.of, args))
        return apply_batched(*args) if any(map(is_legacy_wrapped, args)) else apply_directly(*args)

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
        return add_batch_dim(x, 0, LEGACY_LEVEL)

    def forward(*args: Any) -> Any:
        """Run the function on batched tensors, and wrap its results for the legacy ``vmap``."""
        unwrapped = [remove_batch_dim(x, LEGACY_LEVEL, 1, 0) if is_legacy_wrapped(x) else x for x in args]
        dims = [0 if is_legacy_wrapped(x) else None for x in args]
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
            placements = tuple(shift_shard_dim(p, 1) for p in x.placements)
            x = x.replace(placements=placements, shape=(size, *x.shape))
        elif isinstance(x, torch.Tensor):
            x = (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).contiguous()
            if (own := layout_of(x)) is not None:
                target = tuple(shift_shard_dim(p, 1) for p in layout_without_dim(own, 0).placements)
                x = x if target == own.placements else function.lay(x, target)
        batched.append(x)
    return batched
