"""Distributed tensors with a given global value whose partial terms are all in use.

``distribute_tensor`` keeps the value at one coordinate and the identity elsewhere, under which many a wrong rule looks right.
Here every rank holds a term that matters, chosen so that the reduction is exact: integers are added, signs multiplied.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..comm import communicator_of
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..placement import Monoid, Placement
from ..tensor.dtensor import DTensor


def scatter(
    value: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement], *, seed: int = 0, requires_grad: bool = False
) -> DTensor:
    """The leaf with global value ``value``; its terms are a function of ``seed`` alone, so all ranks make the same.

    No communication: every rank cuts its piece from the whole. Raises ``PlacementError`` where placements do not fit.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> x = scatter(torch.arange(3.0), mesh, [dt.Partial()])
    >>> x.full_tensor()
    tensor([0., 1., 2.])
    """
    stride = torch.empty_like(value, device="meta").stride()
    layout = Layout.of(mesh, placements, value.shape, stride, value.dtype)
    terms = terms_of(value.detach(), layout, seed)

    def block(member: int | None) -> torch.Tensor:
        return (
            value.new_zeros(layout.local_shape(None))
            if member is None
            else piece(terms_at(terms, layout, member), layout, member)
        )

    made = DTensor.from_local(
        communicator_of(mesh).map_outside_too(block), mesh, layout.placements, shape=layout.shape, stride=layout.stride
    )
    return made.requires_grad_(requires_grad)


def piece(value: torch.Tensor, layout: Layout, member: int) -> torch.Tensor:
    """The canonical block of ``value`` at one member, as its own memory with the layout's dense strides."""
    coordinate = layout.mesh.coordinates[member]
    for dim, (start, size) in enumerate(zip(layout.local_offset(coordinate), layout.local_shape(coordinate), strict=True)):
        value = value.narrow(dim, min(start, value.shape[dim] - size), size)
    return torch.empty_strided(value.shape, layout.local_stride(coordinate), dtype=value.dtype, device=value.device).copy_(value)


def terms_of(value: torch.Tensor, layout: Layout, seed: int) -> torch.Tensor:
    """Terms of shape (sizes of the partial mesh dims ..., *shape) that reduce to ``value``, the last mesh dim first."""
    generator = torch.Generator().manual_seed(seed + 1)
    terms = value
    for mesh_dim, op in enumerate(layout.partials):
        if op is not None:
            lead = terms.ndim - value.ndim
            terms = torch.stack(split_terms(terms, op, layout.mesh.shape[mesh_dim], generator), lead)
    return terms


def terms_at(terms: torch.Tensor, layout: Layout, member: int) -> torch.Tensor:
    """What one member holds of them."""
    for mesh_dim, op in enumerate(layout.partials):
        if op is not None:
            terms = terms[layout.mesh.coordinates[member][mesh_dim]]
    return terms


def split_terms(value: torch.Tensor, op: str | Monoid, count: int, generator: torch.Generator) -> list[torch.Tensor]:
    """``count`` tensors whose reduction by ``op`` is ``value``."""

    def draw(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, value.shape, generator=generator, device="cpu").to(value.device)

    owner = draw(0, count)
    if isinstance(op, Monoid):
        return _terms_of_monoid(value, op, owner, count)
    if value.dtype is torch.bool:  # "sum" and "max" are or, "product" and "min" are and
        noise = [draw(0, 2).bool() for _ in range(count)]
        if op in ("sum", "max"):
            return [value & (mine | (owner == k)) for k, mine in enumerate(noise)]
        return [value | (mine & (owner != k)) for k, mine in enumerate(noise)]
    signed = value.dtype.is_signed
    match op:
        case "sum" | "avg":
            rest = [draw(-5 if signed else 0, 6).to(value.dtype) for _ in range(count - 1)]
            first = value - sum(rest, torch.zeros_like(value)) if op == "sum" else -sum(rest, torch.zeros_like(value))
            return [first, *rest] if op == "sum" else [value + term for term in (first, *rest)]
        case "max":
            return [torch.where(owner == k, value, _below(value, draw(0, 5))) for k in range(count)]
        case "min":
            return [torch.where(owner == k, value, _above(value, draw(0, 5))) for k in range(count)]
        case _:
            signs = [(1 - 2 * draw(0, 2) if signed else draw(1, 2)).to(value.dtype) for _ in range(count - 1)]
            product = torch.ones_like(value)
            for sign in signs:
                product = product * sign
            return [value * product, *signs]


def _terms_of_monoid(value: torch.Tensor, op: Monoid, owner: torch.Tensor, count: int) -> list[torch.Tensor]:
    """All that is known of it is its neutral element; each element may be anyone's where elements do not depend on each other."""
    neutral = op.identity(value)
    if op == FARTHEST:
        exact = not (value.dtype.is_floating_point or value.dtype.is_complex)
        nearer = torch.div(value, 2, rounding_mode="trunc") if exact else value / 2
        return [torch.where(owner == k, value, nearer) for k in range(count)]
    if op.elementwise:
        return [torch.where(owner == k, value, neutral) for k in range(count)]
    return [value, *(neutral for _ in range(count - 1))]


def _farther(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return torch.where((b.abs() > a.abs()) | b.isnan(), b, a)


# A reduction such as users write, for tests: of two numbers the one that is farther from zero, the first of equals.
FARTHEST = Monoid("farthest", _farther, torch.zeros_like, elementwise=True)


def _below(value: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    lower = _finite(value) - step.to(value.dtype)
    return torch.where((lower <= value) | value.isnan(), lower, value)  # integers that would wrap around stay


def _above(value: torch.Tensor, step: torch.Tensor) -> torch.Tensor:
    higher = _finite(value) + step.to(value.dtype)
    return torch.where((higher >= value) | value.isnan(), higher, value)


def _finite(value: torch.Tensor) -> torch.Tensor:
    """One term is infinite or NaN where the value is, others are numbers."""
    return torch.where(value.isfinite(), value, torch.full_like(value, 7))


def can_be_partial(dtype: torch.dtype, op: Any) -> bool:
    """Whether a value of this dtype can be the reduction of terms by ``op``."""
    if dtype.is_floating_point and dtype.itemsize == 1:
        return False  # torch does not compute in 8-bit floats
    if dtype in (torch.uint16, torch.uint32, torch.uint64):
        return False  # nor in these
    if op == "avg":
        return dtype.is_floating_point or dtype.is_complex
    return not (dtype.is_complex and op in ("max", "min"))
