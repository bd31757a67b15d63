"""What differs between a result on distributed tensors and the plain one, piece by piece, agreed upon by all ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..comm import communicator_of
from ..mesh.device_mesh import DeviceMesh
from ..placement import Placement
from ..tensor.dtensor import DTensor
from .scatter import piece

# (relative, absolute): what reassociation may change
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
class Options:
    """What to compare; see ``oracle.compare``."""

    values: bool = True
    strides: bool = True
    tolerance: tuple[float, float] | None = None
    cotangents: Sequence[Placement] | None = None
    seed: int = 0


def everybodys(problems: list[str], mesh: DeviceMesh) -> list[str]:
    """The problems that the ranks of the mesh see, alike on all of them: none goes on alone while the others stop."""
    comm = communicator_of(mesh)
    if not comm.talks:
        return problems
    gathered = comm.all_gather_object(problems, tuple(range(mesh.ndim)))
    return list(dict.fromkeys(problem for own in gathered for problem in own))


def differences(got: Any, expected: Any, options: Options | None = None) -> list[str]:
    """What differs between a result and the plain one, one line each."""
    options = options or Options()
    if not isinstance(expected, torch.Tensor):
        return [] if not options.values or _same_value(got, expected) else [f"{got!r}, not {expected!r}"]
    if not isinstance(got, torch.Tensor):
        return [f"{got!r} is no tensor"]
    expected = expected.detach()
    if expected.layout is not torch.strided:
        if got.layout != expected.layout:
            return [f"layout {got.layout}, not {expected.layout}"]
        got, expected = got.detach().to_dense(), expected.to_dense()
    found = []
    if got.dtype != expected.dtype:
        found.append(f"dtype {got.dtype}, not {expected.dtype}")
    if got.shape != expected.shape:
        found.append(f"shape {tuple(got.shape)}, not {tuple(expected.shape)}")
    elif options.strides and _strides(got) != _strides(expected):
        found.append(f"strides {got.stride()}, not {expected.stride()} (shape {tuple(got.shape)})")
    if found and (got.dtype != expected.dtype or got.shape != expected.shape):
        return found
    if isinstance(got, DTensor):
        return found + _different_pieces(got, expected, options)
    return found + ([] if not options.values or close(got.detach(), expected, options.tolerance) else [_shown(got, expected)])


def _different_pieces(got: DTensor, expected: torch.Tensor, options: Options) -> list[str]:
    layout = got.layout
    problems: list[str] = []
    if (got.shape, got.stride(), got.dtype) != (layout.shape, layout.stride, layout.dtype):
        problems.append(f"the tensor ({tuple(got.shape)}, {got.stride()}, {got.dtype}) is not as its layout {layout!r}")
    with torch.no_grad():
        problems = everybodys(problems + _unfitting(got), layout.mesh)
        if problems or not options.values:
            return problems
        detached = got.detach()
        assert isinstance(detached, DTensor)
        whole = detached.redistribute(placements=layout.reduced().placements)
    for member, local in communicator_of(layout.mesh).pieces(whole._local).items():
        want = piece(expected, whole.layout, member)
        if not close(local, want, options.tolerance):
            problems.append(
                f"rank {layout.mesh.ranks[member]} at {layout.mesh.coordinates[member]} of {layout!r}: {_shown(local, want)}"
            )
    return problems


def _unfitting(got: DTensor) -> list[str]:
    layout, problems = got.layout, []
    for member, local in communicator_of(layout.mesh).pieces(got._local).items():
        block = layout.local_shape(layout.mesh.coordinates[member])
        if tuple(local.shape) != block or local.dtype != layout.dtype:
            problems.append(
                f"rank {layout.mesh.ranks[member]} holds {local.dtype}{tuple(local.shape)}, {layout!r} gives it {block}"
            )
    return problems


def close(got: torch.Tensor, expected: torch.Tensor, tolerance: tuple[float, float] | None = None) -> bool:
    """Equal; floating values up to reassociation, NaN equal to NaN."""
    if got.shape != expected.shape or got.dtype != expected.dtype:
        return False
    wider = _WIDER.get(expected.dtype)
    if wider is not None:
        return close(got.to(wider), expected.to(wider), tolerance or (3e-2, 2e-2))
    if expected.dtype not in TOLERANCE:
        return bool(torch.equal(got, expected))
    rtol, atol = tolerance or TOLERANCE[expected.dtype]
    if torch.allclose(got, expected, rtol=rtol, atol=atol, equal_nan=True):
        return True
    atol += rtol / 100 * _largest(expected)  # what cancels leaves rounding errors of the size of its terms
    return torch.allclose(got, expected, rtol=rtol, atol=atol, equal_nan=True)


def _largest(x: torch.Tensor) -> float:
    """The largest finite magnitude."""
    finite = x[x.isfinite()].abs()
    return float(finite.max()) if finite.numel() else 0.0


def _strides(x: torch.Tensor) -> tuple[int, ...]:
    """Strides that mean something: none of tensors without elements, none of dims of size one."""
    if x.numel() <= 1:
        return ()
    return tuple(step for step, size in zip(x.stride(), x.shape, strict=True) if size > 1)


def _same_value(got: Any, expected: Any) -> bool:
    if isinstance(expected, float) and isinstance(got, float):
        return math.isclose(got, expected, rel_tol=1e-6, abs_tol=1e-9) or (math.isnan(got) and math.isnan(expected))
    return type(got) is type(expected) and bool(got == expected)


def _shown(got: torch.Tensor, expected: torch.Tensor) -> str:
    if expected.numel() > 24 and expected.dtype in TOLERANCE and got.shape == expected.shape:
        return f"differs by up to {(got.detach() - expected).abs().max().item()}"
    return f"got {got.tolist()}, expected {expected.tolist()}"
