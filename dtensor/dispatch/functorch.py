"""DTensors that transforms of ``torch.func`` hide, and functions of autograd that go through such transforms.

``vmap`` shows a tensor of one dim less than the DTensor below it has: as that tensor lies, see :func:`layout_of`. A function of
layouts runs on what is below, with the batch in front and a dim more in each layout. The old ``vmap``, by which autograd takes
gradients in batches (``is_grads_batched=True``, ``vectorize=True``), is no transform: what it hides is opened by its level.
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

_LEVEL = 1  # of the old vmap: torch opens one at a time


class Transformed(torch.autograd.Function):
    """A function of DTensors that transforms of ``torch.func`` go through: with ``setup_context``, where arguments may be hidden
    (see :func:`layout_of`), and :meth:`lay`, since the function runs on a batch where the batch is whole on all ranks.
    """

    @staticmethod
    def lay(x: Any, placements: Sequence[Placement]) -> Any:
        """``x`` (a DTensor, perhaps hidden) under other placements."""
        raise NotImplementedError


def recorded(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for arguments that are DTensors: without a search for what a functorch transform left behind, which
    wraps plain tensors only. Inside a transform, torch's own, or refused if the function is not :class:`Transformed`."""
    alone = super(torch.autograd.Function, function).apply  # type: ignore[misc]  # the C++ one
    if not issubclass(function, Transformed):

        def apply(*args: Any) -> Any:
            if functorch_active():
                raise UnsupportedOperationError(
                    f"{function.__name__} inside torch.func.grad, vjp, jvp or vmap is not supported; differentiate by "
                    "torch.autograd.grad, torch.autograd.functional or torch.autograd.forward_ad"
                )
            return alone(*args)

        return apply

    def call(*args: Any) -> Any:
        if functorch_active():
            return within.apply(*map(_Box.of, args))
        return in_batches(*args) if any(map(_is_old, args)) else alone(*args)

    within = _with_boxes(function, call)
    in_batches = super(torch.autograd.Function, _of_old_batches(function, call)).apply  # type: ignore[misc]
    return call


class _Box:
    """A layout among arguments that torch looks through for those that override its functions: a layout does."""

    __slots__ = ("layout",)

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @staticmethod
    def of(x: Any) -> Any:
        return _Box(x) if isinstance(x, Layout) else x


def _with_boxes(function: type[Transformed], call: Callable[..., Any]) -> type[Transformed]:
    """The same function of boxed layouts."""

    def opened(args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(x.layout if isinstance(x, _Box) else x for x in args)

    def forward(*args: Any) -> Any:
        return function.forward(*opened(args))

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        function.setup_context(ctx, opened(inputs), output)

    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        made = call(*_of_batch(function, info.batch_size, opened(args), in_dims))
        return made, (0,) * len(made) if isinstance(made, tuple) else 0

    methods = {"forward": forward, "setup_context": setup_context, "vmap": vmap}
    return type(function.__name__, (function,), {name: staticmethod(method) for name, method in methods.items()})


def _of_old_batches(function: type[Transformed], call: Callable[..., Any]) -> type[Transformed]:
    """The same function of tensors under the old ``vmap``."""

    def forward(*args: Any) -> Any:
        given = [remove_batch_dim(x, _LEVEL, 1, 0) if _is_old(x) else x for x in args]
        dims = [0 if _is_old(x) else None for x in args]
        size = next(x.shape[0] for x, dim in zip(given, dims, strict=True) if dim == 0)
        made = call(*_of_batch(function, size, given, dims))
        return tuple(map(_batched, made)) if isinstance(made, tuple) else _batched(made)

    return type(function.__name__, (function,), {"forward": staticmethod(forward)})


def _batched(x: Any) -> Any:
    return add_batch_dim(x, 0, _LEVEL)


def _of_batch(function: type[Transformed], size: int, args: Sequence[Any], dims: Sequence[Any]) -> list[Any]:
    """The arguments below a ``vmap``: row-major tensors, the batch in front and whole on all ranks, layouts of a dim more."""
    given = []
    for x, dim in zip(args, dims, strict=True):
        if isinstance(x, Layout):
            x = _widened(x, size)
        elif isinstance(x, torch.Tensor):
            x = (x.expand(size, *x.shape) if dim is None else x.movedim(dim, 0)).contiguous()
            if (own := layout_of(x)) is not None:
                wanted = tuple(_moved(p, 1) for p in _without(own, 0).placements)
                x = x if wanted == own.placements else function.lay(x, wanted)
        given.append(x)
    return given


def _widened(layout: Layout, size: int) -> Layout:
    placements = tuple(_moved(p, 1) for p in layout.placements)
    return layout.replace(placements=placements, shape=(size, *layout.shape))


def _without(layout: Layout, dim: int) -> Layout:
    """The layout of each of the tensors along a dim; where that is cut, each is whole."""
    placements = tuple(
        Replicate() if getattr(p, "dim", None) == dim else _moved(p, -1) if getattr(p, "dim", dim) > dim else p
        for p in layout.placements
    )
    shape, stride = [*layout.shape], [*layout.stride]
    del shape[dim], stride[dim]
    return Layout.of(layout.mesh, placements, tuple(shape), tuple(stride), layout.dtype)


def _moved(placement: Placement, by: int) -> Placement:
    return replace(placement, dim=placement.dim + by) if isinstance(placement, Shard) else placement


def layout_of(x: Any) -> Any:
    """The layout of a DTensor, as it is seen also where transforms hide it: ``vmap`` takes a dim away. None: it is no DTensor."""
    own = getattr(x, "_layout", None)
    if own is not None or not isinstance(x, torch.Tensor):
        return own
    if is_functorch_wrapped(x):
        below = layout_of(functorch_unwrapped(x))
        return _without(below, hidden_dim(x)) if below is not None and is_functorch_batched(x) else below
    if is_legacy_batched(x):
        below = layout_of(_opened(x))
        return None if below is None else _without(below, 0)
    return None


def placed_of(x: Any) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """Mesh and placements of a DTensor, also where transforms hide it; a compiled program asks for these without sizes."""
    own: tuple[DeviceMesh, tuple[Placement, ...]] | None = getattr(x, "_placed", None)
    if own is None:
        layout = layout_of(x)
        own = layout.mesh, layout.placements
    return own


def _opened(x: torch.Tensor) -> torch.Tensor:
    """What is below the old ``vmap``, the batch in front."""
    below = remove_batch_dim(x, _LEVEL, 1, 0)
    if is_legacy_batched(below):
        raise UnsupportedOperationError("nested batched gradients of a DTensor (is_grads_batched=True) are not supported")
    return below


def below_transforms() -> AbstractContextManager[Any]:
    """What is made here is a constant to transforms of ``torch.func`` around, which would wrap each rank's tensor."""
    return DisableFuncTorch() if functorch_active() else nullcontext()


def transformed() -> bool:
    """Whether transforms of ``torch.func`` see what is done here (see :func:`below_transforms`)."""
    return functorch_active() and not is_key_excluded(DispatchKey.FuncTorchDynamicLayerFrontMode)


def within_transforms(made: Any) -> Any:
    """What was made below them, as they take what is made inside of them: something that the function may write to."""
    return made.clone() if functorch_active() else made


def constant(x: torch.Tensor) -> torch.Tensor:
    """What a plain tensor is below all transforms.

    Raises:
        LayoutError: one of them differentiates it. UnsupportedOperationError: one of them hides a dim.
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
    """Whether derivatives are carried forward with ``x``."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None


def alone(x: torch.Tensor) -> torch.Tensor:
    """``x.detach()``, for which the old ``vmap`` has no rule."""
    if not is_legacy_batched(x):
        return x.detach()
    with torch.no_grad():
        return x.view_as(x)


def _is_old(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and is_legacy_batched(x)


def is_wrapped(x: torch.Tensor) -> bool:
    """Whether a transform (``vmap``, also the one of ``gradcheck``) hides what this tensor is."""
    return is_functorch_wrapped(x) or is_legacy_batched(x)
