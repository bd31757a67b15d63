"""Helpers for tests of rule families: run operations under many placements, and check their collectives."""

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
class Case:
    """A function, its tensors, the reductions to try as Partial, and whether it writes to its arguments."""

    fn: Callable[..., Any]
    tensors: tuple[torch.Tensor, ...]
    ops: tuple[str, ...] = ("sum", "max")
    written: bool = False
    gradients: bool = True


def try_all(case: Case, mesh_shape: tuple[int, ...], limit: int = 16) -> None:
    """Assert that the case equals plain torch under ``limit`` placements."""
    mesh = init_device_mesh("cpu", mesh_shape)
    for placements in placement_combinations(case.tensors, mesh_shape, case.ops, limit, random.Random(str(mesh_shape))):
        check(case.fn, *case.tensors, mesh=mesh, placements=placements, cloned=case.written, gradients=case.gradients)


def run(
    fn: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    mesh_shape: tuple[int, ...],
    placements: Sequence[Sequence[Placement]],
    **options: Any,
) -> Outcome:
    """Compare under one placement; return the collectives of the forward pass."""
    return check(fn, *tensors, mesh=init_device_mesh("cpu", mesh_shape), placements=placements, **options)


def kinds(outcome: Outcome) -> list[str]:
    """The collectives of the forward pass."""
    return [event.kind for event in outcome.events]


def received(outcome: Outcome) -> int:
    """Return the bytes that one rank receives in the forward pass."""
    return sum(event.bytes for event in outcome.events)


def floats(*shape: int, seed: int = 0, low: float = -2.0, high: float = 2.0) -> torch.Tensor:
    drawn = torch.rand(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * (high - low) + low
    return (drawn * 64).round() / 64


def integers(*shape: int, seed: int = 0, low: int = -4, high: int = 5) -> torch.Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(seed))
