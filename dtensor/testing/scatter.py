"""Scatter: DTensors with a given global value, and partial values in which every rank has an addend that matters.

``distribute_tensor`` puts the value on one coordinate and the identity on the others, which hides many wrong rules. Here every
rank has an addend, chosen so that the reduction is exact: integers are added, signs are multiplied.
"""

from __future__ import annotations

from typing import Any

import torch

from ..comm.map_ranks import communicator_of
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..placement import Monoid, Placements
from ..tensor.dtensor import DTensor


def scatter(
    value: torch.Tensor, mesh: DeviceMesh, placements: Placements, *, seed: int = 0, requires_grad: bool = False
) -> DTensor:
    """Return a leaf DTensor with the global value ``value`` in these placements; partial addends depend only on ``seed``.

    No communication: every rank takes its shard from ``value``. Raises ``PlacementError`` if the placements do not fit.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> x = scatter(torch.arange(3.0), mesh, [dt.Partial()])
    >>> x.full_tensor()
    tensor([0., 1., 2.])
    """
    stride = torch.empty_like(value, device="meta").stride()
    layout = Layout.of(mesh, placements, value.shape, stride, value.dtype)
    addends = make_addends(value.detach(), layout, seed)

    def make_shard(member: int | None) -> torch.Tensor:
        """Return the local tensor of one member of the mesh; zeros for a rank outside of it."""
        return (
            value.new_zeros(layout.local_shape(None))
            if member is None
            else local_block(addend_at(addends, layout, member), layout, member)
        )

    result = DTensor.from_local(
        communicator_of(mesh).map_outside_too(make_shard), mesh, layout.placements, shape=layout.shape, stride=layout.stride
    )
    return result.requires_grad_(requires_grad)


def local_block(value: torch.Tensor, layout: Layout, member: int) -> torch.Tensor:
    """Return a copy of the block of ``value`` that the layout gives one member, with the layout's local strides."""
    coordinate = layout.mesh.coordinates[member]
    for dim, (start, size) in enumerate(zip(layout.local_offset(coordinate), layout.local_shape(coordinate), strict=True)):
        value = value.narrow(dim, min(start, value.shape[dim] - size), size)
    return torch.empty_strided(value.shape, layout.local_stride(coordinate), dtype=value.dtype, device=value.device).copy_(value)


def make_addends(value: torch.Tensor, layout: Layout, seed: int) -> torch.Tensor:
    """Return ``value`` split into partial addends: stacked, with a leading dim for each partial mesh dim.

    The shape is that of ``value`` after one dim for each partial mesh dim.
    """
    generator = torch.Generator().manual_seed(seed + 1)
    addends = value
    for mesh_dim, op in enumerate(layout.partials):
        if op is not None:
            lead = addends.ndim - value.ndim
            addends = torch.stack(split_addends(addends, op, layout.mesh.shape[mesh_dim], generator), lead)
    return addends


def addend_at(addends: torch.Tensor, layout: Layout, member: int) -> torch.Tensor:
    """Return the addend of one member of the mesh."""
    for mesh_dim, op in enumerate(layout.partials):
        if op is not None:
            addends = addends[layout.mesh.coordinates[member][mesh_dim]]
    return addends


def split_addends(value: torch.Tensor, op: str | Monoid, count: int, generator: torch.Generator) -> list[torch.Tensor]:
    """Return ``count`` tensors with the reduction ``value`` by ``op``."""

    def random_integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, value.shape, generator=generator, device="cpu").to(value.device)

    owner = random_integers(0, count)
    if isinstance(op, Monoid):
        return _split_by_monoid(value, op, owner, count)
    if value.dtype is torch.bool:  # "sum" and "max" are "or"; "product" and "min" are "and"
        noise = [random_integers(0, 2).bool() for _ in range(count)]
        if op in ("sum", "max"):
            return [value & (mine | (owner == k)) for k, mine in enumerate(noise)]
        return [value | (mine & (owner != k)) for k, mine in enumerate(noise)]
    signed = value.dtype.is_signed
    match op:
        case "sum" | "avg":
            rest = [random_integers(-5 if signed else 0, 6).to(value.dtype) for _ in range(count - 1)]
            first = value - sum(rest, torch.zeros_like(value)) if op == "sum" else -sum(rest, torch.zeros_like(value))
            return [first, *rest] if op == "sum" else [value + addend for addend in (first, *rest)]
        case "max":
            return [torch.where(owner == k, value, _values_below(value, random_integers(0, 5))) for k in range(count)]
        case "min":
            return [torch.where(owner == k, value, _values_above(value, random_integers(0, 5))) for k in range(count)]
        case _:
            signs = [
                (1 - 2 * random_integers(0, 2) if signed else random_integers(1, 2)).to(value.dtype) for _ in range(count - 1)
            ]
            product = torch.ones_like(value)
            for sign in signs:
                product = product * sign
            return [value * product, *signs]


def _split_by_monoid(value: torch.Tensor, op: Monoid, owner: torch.Tensor, count: int) -> list[torch.Tensor]:
    """Return ``count`` tensors that reduce to ``value`` by a user-defined monoid.

    Only the identity of a monoid is known. If elements are reduced independently, a random member has each element.
    """
    neutral = op.identity(value)
    if op == FARTHEST:
        exact = not (value.dtype.is_floating_point or value.dtype.is_complex)
        nearer = torch.div(value, 2, rounding_mode="trunc") if exact else value / 2
        return [torch.where(owner == k, value, nearer) for k in range(count)]
    if op.elementwise:
        return [torch.where(owner == k, value, neutral) for k in range(count)]
    return [value, *(neutral for _ in range(count - 1))]


def _select_farther(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where((b.abs() > a.abs()) | b.isnan(), b, a)


# User-defined reduction for tests: of two numbers the one with the larger magnitude, the first if they are equal.
FARTHEST = Monoid("farthest", _select_farther, torch.zeros_like, elementwise=True)


def _values_below(value: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    lower = _replace_nonfinite(value) - step.to(value.dtype)
    return torch.where((lower <= value) | value.isnan(), lower, value)  # integers that would wrap around are kept


def _values_above(value: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    higher = _replace_nonfinite(value) + step.to(value.dtype)
    return torch.where((higher >= value) | value.isnan(), higher, value)


def _replace_nonfinite(value: torch.Tensor) -> torch.Tensor:
    """Return ``value`` with infinite and NaN elements replaced by 7."""
    return torch.where(value.isfinite(), value, torch.full_like(value, 7))


def can_be_partial(dtype: torch.dtype, op: Any) -> bool:
    """Return True if a value of this dtype can be the reduction of addends by ``op``."""
    if dtype.is_floating_point and dtype.itemsize == 1:
        return False  # torch has no arithmetic for 8-bit floats
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        return False  # nor for these
    if op == "avg":
        return dtype.is_floating_point or dtype.is_complex
    return not (dtype.is_complex and op in ("max", "min"))
