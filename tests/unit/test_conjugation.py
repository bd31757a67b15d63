"""Conjugation: lazy conjugate and negative bits in composite operators, local tensors and writes to views."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import dtensor as dt
from dtensor.testing import check, scatter

CASES: dict[str, Callable[..., torch.Tensor]] = {
    "conj": lambda x, y: x.conj(),
    "conj times": lambda x, y: x.conj() * y,
    "product with the adjoint": lambda x, y: x.mH @ y,
    "pinv": lambda x, y: torch.linalg.pinv(x),  # torch decomposes it below __torch_dispatch__
    "lstsq": lambda x, y: torch.linalg.lstsq(x, y)[0],
    "imag of conj": lambda x, y: x.conj().imag,
    "solve with the adjoint": lambda x, y: torch.linalg.solve(x.mH, y),
    "cov": lambda x, y: torch.cov(x),
    "where": lambda x, y: torch.where(x.real > 0, x.conj(), y),
}


@pytest.mark.parametrize("placement", [dt.Replicate(), dt.Shard(0), dt.Shard(1), dt.Partial()], ids=str)
@pytest.mark.parametrize("fn", CASES.values(), ids=CASES)
def test_operators_of_lazily_conjugated_tensors_equal_plain_torch(
    fn: Callable[..., torch.Tensor], placement: dt.Placement
) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(3, 3, dtype=torch.complex128) for _ in range(2))
    check(fn, x, y, mesh=dt.init_device_mesh("cpu", (2,)), placements=[[placement], [placement]])


@pytest.mark.parametrize("placement", [dt.Replicate(), dt.Shard(0)], ids=str)
def test_from_local_of_a_lazily_negated_tensor_has_its_value_and_gradient(placement: dt.Placement) -> None:
    mesh, x = dt.init_device_mesh("cpu", (2,)), torch.randn(3, 2, dtype=torch.complex128)
    source = dt.distribute_tensor(x, mesh, [placement]).requires_grad_()
    result = dt.DTensor.from_local(source.to_local().conj().imag, mesh, [placement])
    assert torch.equal((result * 2).full_tensor(), x.conj().imag * 2)
    result.sum().backward()
    assert torch.equal(source.grad.full_tensor(), torch.full_like(x, -1j))


CONJUGATED_WINDOWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # views with overlapping windows of conjugated tensors
    "conj of windows": lambda x: x.unfold(1, 2, 1).conj()[..., 0],
    "adjoint of windows": lambda x: x.unfold(1, 2, 1).mH.diagonal(0, 0, 1)[:1],
    "imag of conj, in windows": lambda x: x.conj().imag.unfold(1, 2, 1)[1, -1],
    "windows, imag of conj": lambda x: x.unfold(1, 2, 1).conj().imag[1, -1],
}


@pytest.mark.parametrize("placement", [dt.Replicate(), dt.Shard(0), dt.Shard(1), dt.Partial()], ids=str)
@pytest.mark.parametrize("view", CONJUGATED_WINDOWS.values(), ids=CONJUGATED_WINDOWS)
def test_writes_to_conjugated_overlapping_windows_reach_the_base(
    view: Callable[[torch.Tensor], torch.Tensor], placement: dt.Placement
) -> None:
    x = torch.complex(torch.arange(12.0).view(3, 4), torch.arange(12.0, 24.0).view(3, 4))
    result = scatter(x, dt.init_device_mesh("cpu", (4,)), [placement])
    for value in (x, result):
        view(value).mul_(3)
    assert torch.equal(result.full_tensor(), x)


@pytest.mark.parametrize("placement", [dt.Replicate(), dt.Shard(0), dt.Partial()], ids=str)
@pytest.mark.parametrize("detached", [False, True])
def test_writes_through_a_real_view_of_a_complex_tensor_invalidate_cached_copies(detached: bool, placement: dt.Placement) -> None:
    x = torch.complex(torch.arange(12.0).view(3, 4), torch.arange(12.0, 24.0).view(3, 4))
    value, result = (y.requires_grad_() * 1 for y in (x, scatter(x, dt.init_device_mesh("cpu", (4,)), [placement])))
    for each in (value, result):
        real_view = each.view(torch.float32)
        each.sin()  # caches a redistributed copy
        (real_view.detach() if detached else real_view.data).add_(1)
    torch.testing.assert_close(result.sin().full_tensor(), value.sin())
