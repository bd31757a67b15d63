"""Compare training steps of a parallel model with those of the same model on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

import dtensor as dt
from dtensor.debug import CommDebugMode


def full_value(x: Any) -> Tensor:
    """Return the detached full tensor of ``x`` on the first rank of this process; a plain tensor is returned detached."""
    x = x.detach() if isinstance(x, Tensor) else x
    full = x.full_tensor() if isinstance(x, dt.DTensor) else x
    return full.shards[0] if isinstance(full, dt.PerRank) else full


def make_dp_mesh(size: int = 2) -> dt.DeviceMesh:
    return dt.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))


def make_per_rank_batch(parts: Sequence[Tensor], mesh: dt.DeviceMesh) -> Tensor:
    """Return the batch of each rank: a copy of ``parts[index of the rank in the mesh]``."""
    return dt.map_ranks(lambda at: parts[mesh.index_over(range(mesh.ndim), at)].clone(), mesh=mesh)


def assert_same_parameters(model: nn.Module, alone: nn.Module, **close: float) -> None:
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(full_value(ours), theirs.detach(), msg=lambda text, name=name: f"{name}: {text}", **close)


def assert_same_gradients(
    model: nn.Module, alone: nn.Module, value: Callable[[Any], Tensor] = full_value, **close: float
) -> None:
    """Assert that gradients equal those of the plain parameters and have the placements of the distributed parameters."""
    for (name, ours), theirs in zip(model.named_parameters(), alone.parameters(), strict=True):
        assert (ours.grad is None) == (theirs.grad is None), name
        if theirs.grad is not None:
            assert not isinstance(ours, dt.DTensor) or ours.grad.placements == ours.placements, name
            torch.testing.assert_close(value(ours.grad), theirs.grad, msg=lambda text, name=name: f"{name}.grad: {text}", **close)


def assert_same_parameters_and_gradients(model: nn.Module, alone: nn.Module, **close: float) -> None:
    assert_same_parameters(model, alone, **close)
    assert_same_gradients(model, alone, **close)


def step_and_clear_gradients(*optimizers: torch.optim.Optimizer) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def assert_same_training(
    model: nn.Module,
    alone: nn.Module,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    batches: Iterable[tuple[Any, Tensor]],
    call: Callable[[Any], Any] | None = None,
    value: Callable[[Any], Tensor] = full_value,
) -> dict[str, int]:
    """Train the parallel and the plain model, and assert equal gradients and parameters. Return the collectives of the last step.

    Args:
        batches: for each step the batch as the ranks have it, and the ranks' parts stacked.
        call: the forward pass, default the model's.
    """
    optimizers = [optimizer(each) for each in (model, alone)]
    for own, parts in batches:
        with CommDebugMode() as comm:
            ((call or model)(own) ** 2).mean().backward()
        torch.stack([(alone(part) ** 2).mean() for part in parts]).mean().backward()
        assert_same_gradients(model, alone, value)
        step_and_clear_gradients(*optimizers)
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(value(ours), theirs)
    return dict(comm.get_comm_counts())
