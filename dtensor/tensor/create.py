"""Factories: distributed tensors made piece by piece, without a whole one anywhere (random ones: see ``random``).

All take the global shape (as ints or one sequence), ``device_mesh`` (default: the one entered by ``with mesh:``),
``placements`` (one per mesh dim, default ``Replicate()``), ``dtype`` and ``requires_grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypedDict, Unpack, cast

import torch

from ..base.torch_internals import functorch_active
from ..base.validation import sizes_of
from ..comm import communicator_of
from ..dispatch.functorch import below_transforms, within_transforms
from ..errors import ArgumentError, PlacementError
from ..layout.layout import Layout
from ..mesh.device_mesh import as_mesh
from ..placement import Placement
from ..random.distributions import SAMPLERS
from ..random.draw import DRAWING, as_one_step, block_of, draw, draw_counted
from ..redistribute import redistribute_local
from .dtensor import DTensor, wrap


class Options(TypedDict, total=False):
    """What all factories take by keyword beside the size."""

    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    device_mesh: Any
    placements: Sequence[Placement] | None


def zeros(*size: Any, **options: Unpack[Options]) -> DTensor:
    """Filled with zeros; options as in ``torch.zeros``, no communication.

    Raises:
        ArgumentError, PlacementError, MeshError: options that there are not, placements that do not fit, no mesh.

    >>> import dtensor as dt
    >>> x = dt.zeros(5, 3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> x.shape, [tuple(local.shape) for local in x.to_local().shards], x.sum().item()
    (torch.Size([5, 3]), [(3, 3), (2, 3)], 0.0)
    """
    return _filled(torch.zeros, size, **options)


def ones(*size: Any, **options: Unpack[Options]) -> DTensor:
    """Filled with ones; options as in ``torch.ones``, no communication.

    Raises:
        ArgumentError, PlacementError, MeshError: options that there are not, placements that do not fit, no mesh.

    >>> import dtensor as dt
    >>> x = dt.ones(5, 3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> x.shape, [tuple(local.shape) for local in x.to_local().shards], x.sum().item()
    (torch.Size([5, 3]), [(3, 3), (2, 3)], 15.0)
    """
    return _filled(torch.ones, size, **options)


def empty(*size: Any, **options: Unpack[Options]) -> DTensor:
    """Uninitialised; options as in ``torch.empty``, no communication.

    Raises:
        ArgumentError, PlacementError, MeshError: options that there are not, placements that do not fit, no mesh.

    >>> import dtensor as dt
    >>> x = dt.empty(5, 3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> x.shape, [tuple(local.shape) for local in x.to_local().shards]
    (torch.Size([5, 3]), [(3, 3), (2, 3)])
    """
    return _filled(torch.empty, size, **options)


def full(size: Sequence[int], fill_value: Any, **options: Unpack[Options]) -> DTensor:
    """Filled with ``fill_value``; options as in ``torch.full``, no communication.

    Raises:
        ArgumentError, PlacementError, MeshError: options that there are not, placements that do not fit, no mesh.

    >>> import dtensor as dt
    >>> x = dt.full((5, 3), 2.0, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> x.shape, [tuple(local.shape) for local in x.to_local().shards], x.sum().item()
    (torch.Size([5, 3]), [(3, 3), (2, 3)], 30.0)
    """
    return _filled(lambda shape, **kwargs: torch.full(shape, fill_value, **kwargs), (size,), **options)


def linspace(start: Any, end: Any, steps: int, **options: Unpack[Options]) -> DTensor:
    """``steps`` numbers from ``start`` to ``end`` in equal steps, bit for bit those of ``torch.linspace``; both ends numbers or
    tensors of one element.

    No communication, but for an end that is a DTensor; each rank makes the whole for a moment.

    Raises:
        ArgumentError, PlacementError, MeshError: options that there are not, placements that do not fit, no mesh.

    >>> import dtensor as dt
    >>> dt.linspace(0, 1, 5, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)]).to_local().shards
    (tensor([0.0000, 0.2500, 0.5000]), tensor([0.7500, 1.0000]))
    """
    return _spaced(torch.linspace, start, end, steps, **options)


def logspace(start: Any, end: Any, steps: int, base: float = 10.0, **options: Unpack[Options]) -> DTensor:
    """``base`` to the powers that :func:`linspace` gives, bit for bit those of ``torch.logspace``.

    No communication, but for an end that is a DTensor; each rank makes the whole for a moment.

    Raises:
        ArgumentError, PlacementError, MeshError: options that there are not, placements that do not fit, no mesh.

    >>> import dtensor as dt
    >>> dt.logspace(0, 2, 3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)]).to_local().shards
    (tensor([ 1., 10.]), tensor([100.]))
    """
    return _spaced(partial(torch.logspace, base=base), start, end, steps, **options)


def rand(*size: Any, **options: Unpack[Options]) -> DTensor:
    """Uniform on [0, 1): the values that ``torch.rand`` gives on one device for the same seed, whatever the layout.

    (Those of one device under ``random_mode("counter")`` are other ones, and as independent of the layout.)

    No communication.

    Raises:
        ArgumentError, PlacementError, MeshError: options that there are not, placements that do not fit, no mesh.

    >>> import torch, dtensor as dt
    >>> _ = torch.manual_seed(0)
    >>> x = dt.rand(5, 3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> _ = torch.manual_seed(0)
    >>> torch.equal(x.full_tensor(), torch.rand(5, 3))
    True
    """
    return _drawn(torch.rand, size, **options)


def randn(*size: Any, **options: Unpack[Options]) -> DTensor:
    """Standard normal: the values that ``torch.randn`` gives on one device for the same seed, whatever the layout.

    No communication.

    Raises:
        ArgumentError, PlacementError, MeshError: options that there are not, placements that do not fit, no mesh.

    >>> import torch, dtensor as dt
    >>> _ = torch.manual_seed(0)
    >>> x = dt.randn(5, 3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> _ = torch.manual_seed(0)
    >>> torch.equal(x.full_tensor(), torch.randn(5, 3))
    True
    """
    return _drawn(torch.randn, size, **options)


def _filled(fill: Any, size: Any, **options: Any) -> DTensor:
    def blocks(layout: Layout, **kind: Any) -> Callable[[int | None], torch.Tensor]:
        def block(member: int | None) -> torch.Tensor:
            made, coordinate = (torch.zeros, None) if member is None else (fill, layout.mesh.coordinates[member])
            return cast(torch.Tensor, made(layout.local_shape(coordinate), **kind))

        return block

    return _in_blocks(blocks, fill, size, **options)


def _spaced(space: Any, start: Any, end: Any, steps: int, **options: Unpack[Options]) -> DTensor:
    """No number of torch's follows from its place alone, to the last bit: a process makes all, and each rank keeps its own."""
    start, end = (x.item() if isinstance(x, torch.Tensor) else x for x in (start, end))

    def fill(size: Sequence[int], **kind: Any) -> torch.Tensor:
        return cast(torch.Tensor, space(start, end, *size, **kind))

    def blocks(layout: Layout, **kind: Any) -> Callable[[int | None], torch.Tensor]:
        return partial(block_of, fill(layout.shape, **kind), layout)

    return _in_blocks(blocks, fill, (steps,), **options)


def _in_blocks(
    blocks: Any, fill: Any, size: Any, *, placements: Sequence[Placement] | None = None, device_mesh: Any = None, **options: Any
) -> DTensor:
    layout, reduced, requires_grad = _prepare(size, placements, device_mesh, options, fill)
    kind = {"dtype": layout.dtype, "device": torch.device(layout.mesh.device_type)}
    with below_transforms():
        local = communicator_of(layout.mesh).map_outside_too(blocks(layout, **kind))
    return _finish(local, layout, reduced, requires_grad)


def _drawn(
    fill: Any, size: Any, *, placements: Sequence[Placement] | None = None, device_mesh: Any = None, **options: Any
) -> DTensor:
    layout, reduced, requires_grad = _prepare(size, placements, device_mesh, options, fill)

    def block(layouts: Sequence[Layout]) -> Any:
        (drawn,) = layouts
        if DRAWING.mode == "counter":
            return draw_counted(drawn, SAMPLERS["uniform" if fill is torch.rand else "normal"], {})
        return draw(drawn, lambda device: fill(tuple(drawn.shape), dtype=drawn.dtype, device=device))

    if functorch_active():
        torch.empty(0, device="cpu").uniform_()  # torch's own error, where each of a batch is to have other numbers
    with below_transforms():
        local = as_one_step((reduced,), block)
    return _finish(local, layout, reduced, requires_grad)


def _prepare(size: Any, placements: Any, device_mesh: Any, options: dict[str, Any], fill: Any) -> tuple[Layout, Layout, bool]:
    mesh = as_mesh(device_mesh)
    shape = sizes_of(size[0] if len(size) == 1 and isinstance(size[0], Iterable) else size, "the size of a tensor")
    requires_grad = bool(options.pop("requires_grad", False))
    if options.pop("layout", torch.strided) != torch.strided:
        raise PlacementError("only layout=torch.strided is supported for DTensors; leave layout= out")
    dtype = options.pop("dtype", None)
    if options:
        raise ArgumentError(
            f"unexpected keyword arguments {sorted(options)}; supported besides the size: device_mesh, "
            "placements, dtype, requires_grad (the device is that of the mesh)"
        )
    dtype = fill((0,), device="cpu", dtype=dtype).dtype  # torch's own error, where there is no such number
    layout = Layout.of(mesh, placements, shape, None, dtype)
    reduced = layout.reduced()
    return layout, reduced, requires_grad


def _finish(local: Any, layout: Layout, reduced: Layout, requires_grad: bool) -> DTensor:
    with below_transforms():
        made = wrap(local if reduced is layout else redistribute_local(local, reduced, layout), layout)
    made = within_transforms(made)
    return made.requires_grad_() if requires_grad else made
