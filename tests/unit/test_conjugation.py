"""Complex numbers: lazy conjugations are carried out inside operators that are composed of others."""

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
    "pinv": lambda x, y: torch.linalg.pinv(x),  # composed of others, below our dispatch
    "lstsq": lambda x, y: torch.linalg.lstsq(x, y)[0],
    "imag of conj": lambda x, y: x.conj().imag,
    "solve with the adjoint": lambda x, y: torch.linalg.solve(x.mH, y),
    "cov": lambda x, y: torch.cov(x),
    "where": lambda x, y: torch.where(x.real > 0, x.conj(), y),
}


@pytest.mark.parametrize("placement", [dt.Replicate(), dt.Shard(0), dt.Shard(1), dt.Partial()], ids=str)
@pytest.mark.parametrize("fn", CASES.values(), ids=CASES)
def test_lazy_conjugation_is_carried_out(fn: Callable[..., torch.Tensor], placement: dt.Placement) -> None:
    torch.manual_seed(0)
    x, y = (torch.randn(3, 3, dtype=torch.complex128) for _ in range(2))
    check(fn, x, y, mesh=dt.init_device_mesh("cpu", (2,)), placements=[[placement], [placement]])


@pytest.mark.parametrize("placement", [dt.Replicate(), dt.Shard(0)], ids=str)
def test_a_piece_that_is_lazily_negated_is_what_it_shows(placement: dt.Placement) -> None:
    mesh, x = dt.init_device_mesh("cpu", (2,)), torch.randn(3, 2, dtype=torch.complex128)
    held = dt.distribute_tensor(x, mesh, [placement]).requires_grad_()
    made = dt.DTensor.from_local(held.to_local().conj().imag, mesh, [placement])
    assert torch.equal((made * 2).full_tensor(), x.conj().imag * 2)
    made.sum().backward()
    assert torch.equal(held.grad.full_tensor(), torch.full_like(x, -1j))


WINDOWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {  # their elements have two places
    "conj of windows": lambda x: x.unfold(1, 2, 1).conj()[..., 0],
    "adjoint of windows": lambda x: x.unfold(1, 2, 1).mH.diagonal(0, 0, 1)[:1],
    "imag of conj, in windows": lambda x: x.conj().imag.unfold(1, 2, 1)[1, -1],
    "windows, imag of conj": lambda x: x.unfold(1, 2, 1).conj().imag[1, -1],
}


@pytest.mark.parametrize("placement", [dt.Replicate(), dt.Shard(0), dt.Shard(1), dt.Partial()], ids=str)
@pytest.mark.parametrize("view", WINDOWS.values(), ids=WINDOWS)
def test_what_is_written_to_mirrored_elements_arrives(
    view: Callable[[torch.Tensor], torch.Tensor], placement: dt.Placement
) -> None:
    x = torch.complex(torch.arange(12.0).view(3, 4), torch.arange(12.0, 24.0).view(3, 4))
    made = scatter(x, dt.init_device_mesh("cpu", (4,)), [placement])
    for value in (x, made):
        view(value).mul_(3)
    assert torch.equal(made.full_tensor(), x)


@pytest.mark.parametrize("placement", [dt.Replicate(), dt.Shard(0), dt.Partial()], ids=str)
@pytest.mark.parametrize("detached", [False, True])
def test_bits_that_are_written_by_another_name_are_read_anew(detached: bool, placement: dt.Placement) -> None:
    x = torch.complex(torch.arange(12.0).view(3, 4), torch.arange(12.0, 24.0).view(3, 4))
    value, made = (y.requires_grad_() * 1 for y in (x, scatter(x, dt.init_device_mesh("cpu", (4,)), [placement])))
    for each in (value, made):
        parts = each.view(torch.float32)
        each.sin()  # what it needed of the value is remembered
        (parts.detach() if detached else parts.data).add_(1)
    torch.testing.assert_close(made.sin().full_tensor(), value.sin())
