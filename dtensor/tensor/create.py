"""Create distributed tensors: factories that make each local tensor directly, without a global tensor.

All take the global shape (as ints or one sequence), ``device_mesh`` (default: the one entered by ``with mesh:``),
``placements`` (in any form, default ``Replicate()`` on every mesh dim), ``dtype`` and ``requires_grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, TypedDict, Unpack, cast

import torch

from ..base.torch_internals import functorch_active
from ..base.validation import check_sizes
from ..comm.map_ranks import communicator_of
from ..errors import ArgumentError, PlacementError
from ..layout.layout import Layout
from ..mesh.device_mesh import as_mesh
from ..placement import Placements
from ..random.distributions import SAMPLERS
from ..random.draw import RANDOM_MODE, clone_block, draw, draw_counted, run_as_graph_op
from ..redistribute import redistribute_local
from ..state.functorch import as_writable_in_transform, below_transforms
from .dtensor import DTensor, wrap


class FactoryOptions(TypedDict, total=False):
    """Keyword arguments of all factories."""

    dtype: torch.dtype | None
    layout: torch.layout
    requires_grad: bool
    device_mesh: Any
    placements: Placements | None


def zeros(*size: Any, **options: Unpack[FactoryOptions]) -> DTensor:
    """Return a tensor of zeros; options as in ``torch.zeros``, no communication.

    Raises:
        ArgumentError, PlacementError, MeshError: unknown options, placements that do not fit, no mesh.

    >>> import dtensor as dt
    >>> x = dt.zeros(5, 3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> x.shape, [tuple(local.shape) for local in x.to_local().shards], x.sum().item()
    (torch.Size([5, 3]), [(3, 3), (2, 3)], 0.0)
    """
    return _make_filled(torch.zeros, size, **options)


def ones(*size: Any, **options: Unpack[FactoryOptions]) -> DTensor:
    """Return a tensor of ones; options as in ``torch.ones``, no communication.

    Raises:
        ArgumentError, PlacementError, MeshError: unknown options, placements that do not fit, no mesh.

    >>> import dtensor as dt
    >>> x = dt.ones(5, 3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> x.shape, [tuple(local.shape) for local in x.to_local().shards], x.sum().item()
    (torch.Size([5, 3]), [(3, 3), (2, 3)], 15.0)
    """
    return _make_filled(torch.ones, size, **options)


def empty(*size: Any, **options: Unpack[FactoryOptions]) -> DTensor:
    """Return an uninitialized tensor; options as in ``torch.empty``, no communication.

    Raises:
        ArgumentError, PlacementError, MeshError: unknown options, placements that do not fit, no mesh.

    >>> import dtensor as dt
    >>> x = dt.empty(5, 3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> x.shape, [tuple(local.shape) for local in x.to_local().shards]
    (torch.Size([5, 3]), [(3, 3), (2, 3)])
    """
    return _make_filled(torch.empty, size, **options)


def full(size: Sequence[int], fill_value: Any, **options: Unpack[FactoryOptions]) -> DTensor:
    """Return a tensor filled with ``fill_value``; options as in ``torch.full``, no communication.

    Raises:
        ArgumentError, PlacementError, MeshError: unknown options, placements that do not fit, no mesh.

    >>> import dtensor as dt
    >>> x = dt.full((5, 3), 2.0, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> x.shape, [tuple(local.shape) for local in x.to_local().shards], x.sum().item()
    (torch.Size([5, 3]), [(3, 3), (2, 3)], 30.0)
    """
    return _make_filled(lambda shape, **kwargs: torch.full(shape, fill_value, **kwargs), (size,), **options)


def linspace(start: Any, end: Any, steps: int, **options: Unpack[FactoryOptions]) -> DTensor:
    """Return ``steps`` numbers from ``start`` to ``end`` in equal steps, bit for bit those of ``torch.linspace``.

    ``start`` and ``end`` are numbers or tensors of one element. No communication, except for an end that is a DTensor. Each rank
    makes the full tensor temporarily.

    Raises:
        ArgumentError, PlacementError, MeshError: unknown options, placements that do not fit, no mesh.

    >>> import dtensor as dt
    >>> dt.linspace(0, 1, 5, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)]).to_local().shards
    (tensor([0.0000, 0.2500, 0.5000]), tensor([0.7500, 1.0000]))
    """
    return _make_spaced(torch.linspace, start, end, steps, **options)


def logspace(start: Any, end: Any, steps: int, base: float = 10.0, **options: Unpack[FactoryOptions]) -> DTensor:
    """Return ``base`` to the powers that :func:`linspace` returns, bit for bit those of ``torch.logspace``.

    No communication, except for an end that is a DTensor. Each rank makes the full tensor temporarily.

    Raises:
        ArgumentError, PlacementError, MeshError: unknown options, placements that do not fit, no mesh.

    >>> import dtensor as dt
    >>> dt.logspace(0, 2, 3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)]).to_local().shards
    (tensor([ 1., 10.]), tensor([100.]))
    """
    return _make_spaced(partial(torch.logspace, base=base), start, end, steps, **options)


def rand(*size: Any, **options: Unpack[FactoryOptions]) -> DTensor:
    """Return uniform numbers on [0, 1): those of ``torch.rand`` on one device for the same seed, whatever the layout.

    Under ``random_mode("counter")`` they are other numbers, which do not depend on the layout either. No communication.

    Raises:
        ArgumentError, PlacementError, MeshError: unknown options, placements that do not fit, no mesh.

    >>> import torch, dtensor as dt
    >>> _ = torch.manual_seed(0)
    >>> x = dt.rand(5, 3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> _ = torch.manual_seed(0)
    >>> torch.equal(x.full_tensor(), torch.rand(5, 3))
    True
    """
    return _make_random(torch.rand, size, **options)


def randn(*size: Any, **options: Unpack[FactoryOptions]) -> DTensor:
    """Return standard normal numbers: those of ``torch.randn`` on one device for the same seed, whatever the layout.

    Under ``random_mode("counter")`` they are other numbers, which do not depend on the layout either. No communication.

    Raises:
        ArgumentError, PlacementError, MeshError: unknown options, placements that do not fit, no mesh.

    >>> import torch, dtensor as dt
    >>> _ = torch.manual_seed(0)
    >>> x = dt.randn(5, 3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> _ = torch.manual_seed(0)
    >>> torch.equal(x.full_tensor(), torch.randn(5, 3))
    True
    """
    return _make_random(torch.randn, size, **options)


def _make_filled(fill: Any, size: Any, **options: Any) -> DTensor:
    """Return a tensor with local tensors that ``fill(shape)`` makes; ranks outside the mesh get zeros."""

    def make_blocks(layout: Layout, **kind: Any) -> Callable[[int | None], torch.Tensor]:
        """Return a function that makes the local tensor of a member (None: a rank outside the mesh, which gets zeros)."""

        def make_block(member: int | None) -> torch.Tensor:
            make, coordinate = (torch.zeros, None) if member is None else (fill, layout.mesh.coordinates[member])
            return cast(torch.Tensor, make(layout.local_shape(coordinate), **kind))

        return make_block

    return _make_by_blocks(make_blocks, fill, size, **options)


def _make_spaced(space: Any, start: Any, end: Any, steps: int, **options: Unpack[FactoryOptions]) -> DTensor:
    """Return a tensor of evenly spaced numbers.

    Torch's numbers cannot be computed from their index alone, to the last bit. So each process makes all, and each rank keeps its
    shard.
    """
    start, end = (x.item() if isinstance(x, torch.Tensor) else x for x in (start, end))

    def fill(size: Sequence[int], **kind: Any) -> torch.Tensor:
        return cast(torch.Tensor, space(start, end, *size, **kind))

    def make_blocks(layout: Layout, **kind: Any) -> Callable[[int | None], torch.Tensor]:
        return partial(clone_block, fill(layout.shape, **kind), layout)

    return _make_by_blocks(make_blocks, fill, (steps,), **options)


def _make_by_blocks(
    make_blocks: Any,
    fill: Any,
    size: Any,
    *,
    placements: Placements | None = None,
    device_mesh: Any = None,
    **options: Any,
) -> DTensor:
    """Return a DTensor of which ``make_blocks(layout, dtype=, device=)(member)`` makes the local tensors."""
    layout, reduced, requires_grad = _parse_options(size, placements, device_mesh, options, fill)
    kind = {"dtype": layout.dtype, "device": torch.device(layout.mesh.device_type)}
    with below_transforms():
        local = communicator_of(layout.mesh).map_outside_too(make_blocks(layout, **kind))
    return _wrap_result(local, layout, reduced, requires_grad)


def _make_random(
    fill: Any, size: Any, *, placements: Placements | None = None, device_mesh: Any = None, **options: Any
) -> DTensor:
    """Return a tensor of random numbers; each rank has its block of one global draw."""
    layout, reduced, requires_grad = _parse_options(size, placements, device_mesh, options, fill)

    def draw_local_tensors(layouts: Sequence[Layout]) -> Any:
        """Draw the local tensors of a layout from the global random stream, in the current random mode."""
        (layout_to_draw,) = layouts
        if RANDOM_MODE.mode == "counter":
            return draw_counted(layout_to_draw, SAMPLERS["uniform" if fill is torch.rand else "normal"], {})
        return draw(layout_to_draw, lambda device: fill(tuple(layout_to_draw.shape), dtype=layout_to_draw.dtype, device=device))

    if functorch_active():
        torch.empty(0, device="cpu").uniform_()  # torch's own error if vmap's randomness is not set
    with below_transforms():
        local = run_as_graph_op((reduced,), draw_local_tensors)
    return _wrap_result(local, layout, reduced, requires_grad)


def _parse_options(
    size: Any, placements: Any, device_mesh: Any, options: dict[str, Any], fill: Any
) -> tuple[Layout, Layout, bool]:
    """Return a factory's layout, that layout with Partial replaced by Replicate, and ``requires_grad``."""
    mesh = as_mesh(device_mesh)
    shape = check_sizes(size[0] if len(size) == 1 and isinstance(size[0], Iterable) else size, "the size of a tensor")
    requires_grad = bool(options.pop("requires_grad", False))
    if options.pop("layout", torch.strided) != torch.strided:
        raise PlacementError("only layout=torch.strided is supported for DTensors; leave layout= out")
    dtype = options.pop("dtype", None)
    if options:
        raise ArgumentError(
            f"unexpected keyword arguments {sorted(options)}; supported besides the size: device_mesh, "
            "placements, dtype, requires_grad (the device is that of the mesh)"
        )
    dtype = fill((0,), device="cpu", dtype=dtype).dtype  # torch's own error if there is no such dtype
    layout = Layout.of(mesh, placements, shape, None, dtype)
    reduced = layout.reduced()
    return layout, reduced, requires_grad


def _wrap_result(local: Any, layout: Layout, reduced: Layout, requires_grad: bool) -> DTensor:
    """Return new local tensors of layout ``reduced`` as a DTensor redistributed to ``layout``."""
    with below_transforms():
        result = wrap(local if reduced is layout else redistribute_local(local, reduced, layout), layout)
    result = as_writable_in_transform(result)
    return result.requires_grad_() if requires_grad else result
