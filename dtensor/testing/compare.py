"""Compare a result on DTensors with the result of plain torch, shard by shard; all ranks get the same list of differences."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from ..comm.map_ranks import communicator_of
from ..mesh.device_mesh import DeviceMesh
from ..placement import Placements
from ..tensor.dtensor import DTensor
from .scatter import local_block

# (relative, absolute) tolerance: reassociation changes floating results
TOLERANCE: dict[torch.dtype, tuple[float, float]] = {
    torch.float64: (1e-8, 1e-9),
    torch.complex128: (1e-8, 1e-9),
    torch.float32: (2e-4, 2e-5),
    torch.complex64: (2e-4, 2e-5),
    torch.float16: (3e-2, 2e-2),
    torch.bfloat16: (1e-1, 6e-2),
}
# dtypes that torch cannot compare
_NARROW = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz)
_WIDER: dict[torch.dtype, torch.dtype] = {torch.complex32: torch.complex64, **dict.fromkeys(_NARROW, torch.float32)}


@dataclass(frozen=True, slots=True)
class CompareOptions:
    """Options of a comparison with plain torch; see ``oracle.compare``."""

    values: bool = True
    strides: bool = True
    tolerance: tuple[float, float] | None = None
    cotangents: Placements | None = None
    seed: int = 0


def gather_problems(problems: list[str], mesh: DeviceMesh) -> list[str]:
    """Return the texts of problems of all ranks of the mesh, identical on every rank, so that all ranks stop together."""
    comm = communicator_of(mesh)
    if not comm.has_other_processes:
        return problems
    gathered = comm.all_gather_object(problems, tuple(range(mesh.ndim)))
    return list(dict.fromkeys(problem for of_rank in gathered for problem in of_rank))


def find_differences(got: Any, expected: Any, options: CompareOptions | None = None) -> list[str]:
    """Return texts on how a result differs from the result of plain torch, one line each; [] if they agree."""
    options = options or CompareOptions()
    if not isinstance(expected, torch.Tensor):
        return [] if not options.values or _same_value(got, expected) else [f"{got!r}, not {expected!r}"]
    if not isinstance(got, torch.Tensor):
        return [f"{got!r} is no tensor"]
    expected = expected.detach()
    if expected.layout is not torch.strided:
        if got.layout != expected.layout:
            return [f"layout {got.layout}, not {expected.layout}"]
        got, expected = got.detach().to_dense(), expected.to_dense()
    problems = []
    if got.dtype != expected.dtype:
        problems.append(f"dtype {got.dtype}, not {expected.dtype}")
    if got.shape != expected.shape:
        problems.append(f"shape {tuple(got.shape)}, not {tuple(expected.shape)}")
    elif options.strides and _significant_strides(got) != _significant_strides(expected):
        problems.append(f"strides {got.stride()}, not {expected.stride()} (shape {tuple(got.shape)})")
    if problems and (got.dtype != expected.dtype or got.shape != expected.shape):
        return problems
    if isinstance(got, DTensor):
        return problems + _shard_differences(got, expected, options)
    return problems + (
        [] if not options.values or is_close(got.detach(), expected, options.tolerance) else [_difference_text(got, expected)]
    )


def _shard_differences(got: DTensor, expected: torch.Tensor, options: CompareOptions) -> list[str]:
    """Return a text for each local tensor that differs from its block of the expected global tensor."""
    layout = got.layout
    problems: list[str] = []
    if (got.shape, got.stride(), got.dtype) != (layout.shape, layout.stride, layout.dtype):
        problems.append(f"the tensor ({tuple(got.shape)}, {got.stride()}, {got.dtype}) is not as its layout {layout!r}")
    with torch.no_grad():
        problems = gather_problems(problems + _shard_shape_problems(got), layout.mesh)
        if problems or not options.values:
            return problems
        detached = got.detach()
        assert isinstance(detached, DTensor)
        reduced = detached.redistribute(placements=layout.reduced().placements)
    for member, local in communicator_of(layout.mesh).shards_by_member(reduced._local).items():
        expected_block = local_block(expected, reduced.layout, member)
        if not is_close(local, expected_block, options.tolerance):
            where = f"rank {layout.mesh.ranks[member]} at {layout.mesh.coordinates[member]} of {layout!r}"
            problems.append(f"{where}: {_difference_text(local, expected_block)}")
    return problems


def _shard_shape_problems(got: DTensor) -> list[str]:
    """Return a text for each local tensor that has another shape or dtype than its layout says."""
    layout, problems = got.layout, []
    for member, local in communicator_of(layout.mesh).shards_by_member(got._local).items():
        shape = layout.local_shape(layout.mesh.coordinates[member])
        if tuple(local.shape) != shape or local.dtype != layout.dtype:
            problems.append(
                f"rank {layout.mesh.ranks[member]} holds {local.dtype}{tuple(local.shape)}, {layout!r} gives it {shape}"
            )
    return problems


def is_close(got: torch.Tensor, expected: torch.Tensor, tolerance: tuple[float, float] | None = None) -> bool:
    """Return True if the tensors are equal; floating values up to rounding errors, NaN equal to NaN."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    wider = _WIDER.get(expected.dtype)
    if wider is not None:
        return is_close(got.to(wider), expected.to(wider), tolerance or (3e-2, 2e-2))
    if expected.dtype not in TOLERANCE:
        return bool(torch.equal(got, expected))
    rtol, atol = tolerance or TOLERANCE[expected.dtype]
    if torch.allclose(got, expected, rtol=rtol, atol=atol, equal_nan=True):
        return True
    atol += rtol / 100 * _largest_magnitude(expected)  # cancellation leaves rounding errors of the size of the addends
    return torch.allclose(got, expected, rtol=rtol, atol=atol, equal_nan=True)


def _largest_magnitude(x: torch.Tensor) -> float:
    """Return the largest absolute value among the finite elements of ``x``; 0.0 if there is none."""
    finite = x[x.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _significant_strides(x: torch.Tensor) -> tuple[int, ...]:
    """Return the strides of dims with more than one element; () for a tensor with at most one element."""
    if x.numel() <= 1:
        return ()
    return tuple(step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1)


def _same_value(got: Any, expected: Any) -> bool:
    """Return True if two results that are no tensors are equal; floats up to rounding errors."""
    if isinstance(expected, float) and isinstance(got, float):
        return math.isclose(got, expected, rel_tol=1e-6, abs_tol=1e-9) or (math.isnan(got) and math.isnan(expected))
    return type(got) is type(expected) and bool(got == expected)


def _difference_text(got: torch.Tensor, expected: torch.Tensor) -> str:
    """Return text with both values, or with the largest difference of long floating-point tensors."""
    if expected.numel() > 24 and expected.dtype in TOLERANCE and got.shape == expected.shape:
        return f"differs by up to {(got.detach() - expected).abs().max().item()}"
    return f"got {got.tolist()}, expected {expected.tolist()}"
