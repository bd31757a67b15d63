"""Rule tables: helpers for tests of rule families that run operations under many placements and check their collectives."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dtensor import Placement, init_device_mesh
from dtensor.testing import Outcome, check
from dtensor.testing.placements import placement_combinations

MESHES = ((3,), (2, 2), (2,))  # three ranks have uneven blocks, two dims even ones


@dataclass(frozen=True)
class RuleCase:
    """A function, its tensors, the reductions to try as Partial, and whether it writes to its arguments."""

    fn: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    ops: tuple[str, ...] = ("sum", "max")
    written: bool = False
    gradients: bool = True


def check_many_placements(case: RuleCase, mesh_shape: tuple[int, ...], limit: int = 16) -> None:
    """Assert that the case gives plain torch's results under up to ``limit`` random combinations of placements."""
    mesh = init_device_mesh("cpu", mesh_shape)
    for placements in placement_combinations(case.tensors, mesh_shape, case.ops, limit, random.Random(str(mesh_shape))):
        check(case.fn, *case.tensors, mesh=mesh, placements=placements, cloned=case.written, gradients=case.gradients)


def check_placement(
    fn: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    mesh_shape: tuple[int, ...],
    placements: Sequence[Sequence[Placement]],
    **options: Any,
) -> Outcome:
    """Compare ``fn`` with plain torch under one combination of placements; return the outcome, with the collectives of the
    forward pass.
    """
    return check(fn, *tensors, mesh=init_device_mesh("cpu", mesh_shape), placements=placements, **options)


def get_collective_kinds(outcome: Outcome) -> list[str]:
    """Return the kinds of the collectives of the forward pass, in order."""
    return [event.kind for event in outcome.events]


def get_received_bytes(outcome: Outcome) -> int:
    """Return the bytes that one rank receives in the forward pass."""
    return sum(event.bytes for event in outcome.events)


def make_floats(*shape: int, seed: int = 0, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * (high - low) + low
    return (drawn * 64).round() / 64


def make_integers(*shape: int, seed: int = 0, low: int = -4, high: int = 5) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))
