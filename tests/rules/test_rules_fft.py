"""Rules of Fourier transforms: other dims can be sharded, partial sums stay partial, and empty shards are valid."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor import Partial, Shard
from dtensor.testing import check

S0, S1, SUM = Shard(0), Shard(1), Partial()
MESHES = {shape: dt.init_device_mesh("cpu", shape) for shape in ((2,), (3,), (2, 2))}


def x(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=dtype)


FUNCTIONS: list[tuple[str, Any, torch.Tensor]] = [
    ("rfft", torch.fft.rfft, x(5, 6, 7)),
    ("irfft", torch.fft.irfft, x(5, 6, 4, dtype=torch.complex128)),
    ("fft of reals", torch.fft.fft, x(5, 6, 7)),
    ("ifft", torch.fft.ifft, x(5, 6, 7, dtype=torch.complex128)),
    ("hfft", torch.fft.hfft, x(5, 6, 4, dtype=torch.complex128)),
    ("padded", lambda a: torch.fft.rfft(a, n=9), x(5, 6, 7)),
]


@pytest.mark.parametrize(("name", "fn", "own"), FUNCTIONS, ids=[case[0] for case in FUNCTIONS])
def test_fft_of_sharded_untransformed_dims_does_not_communicate(name: str, fn: Any, own: torch.Tensor) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*has no sharding rule.*")
        for placement in (S0, S1, SUM):
            outcome = check(fn, own, mesh=MESHES[3,], placements=[[placement]])
            assert outcome.events == []
            assert outcome.layouts[0].placements == (placement,)


TRANSFORMS_OF_SHARDED_DIMS: list[tuple[str, Any, torch.Tensor]] = [
    ("fft2", lambda a: torch.fft.fft2(a).abs(), x(5, 6, 7)),
    ("rfftn", lambda a: torch.fft.rfftn(a).abs(), x(5, 6)),
    ("fftshift", torch.fft.fftshift, x(5, 6)),
    ("along the sharded dim", lambda a: torch.fft.fft(a, dim=0), x(5, 6)),
    ("stft", lambda a: torch.stft(a, 8, return_complex=True, window=None).abs(), x(3, 20)),
]


@pytest.mark.filterwarnings("ignore:A window was not provided")
@pytest.mark.parametrize(("name", "fn", "own"), TRANSFORMS_OF_SHARDED_DIMS, ids=[case[0] for case in TRANSFORMS_OF_SHARDED_DIMS])
def test_fft_along_sharded_dims_equals_plain_torch(name: str, fn: Any, own: torch.Tensor) -> None:
    for placements in ([S0], [S1], [SUM]):
        check(fn, own, mesh=MESHES[2,], placements=[placements])
    check(fn, own, mesh=MESHES[2, 2], placements=[[S0, S1]])


def test_fft_with_an_empty_shard_equals_plain_torch() -> None:
    check(torch.fft.rfft, x(2, 6), mesh=MESHES[3,], placements=[[S0]])
    check(torch.fft.irfft, x(2, 6, dtype=torch.complex128), mesh=MESHES[3,], placements=[[Shard(0, sizes=(0, 2, 0))]])
