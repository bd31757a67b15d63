"""Parameter penalties under data parallelism: a penalty of distributed parameters plus the loss of each rank's batch."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from gloo_processes import run_gloo
from torch import nn

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.parallel import fully_shard, replicate

WAYS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "fully_shard": lambda m, mesh: fully_shard(m, mesh=mesh),
    "replicate": replicate,
}


def penalty(parameters: Any) -> Any:
    return 1e-2 * sum(p.pow(2).sum() for p in parameters)


def model_and_batch() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(8, 6), torch.randint(3, (8,))


def expected(model: nn.Module, x: torch.Tensor, t: torch.Tensor) -> list[torch.Tensor]:
    plain = copy.deepcopy(model)
    (F.cross_entropy(plain(x), t) + penalty(plain.parameters())).backward()
    return [p.grad for p in plain.parameters() if p.grad is not None]


def gradients(model: nn.Module) -> list[Any]:
    return [p.grad.full_tensor() for p in model.parameters()]


@pytest.mark.parametrize("way", WAYS)
def test_full_tensor_of_penalty_plus_loss_has_gradients_of_plain_model(way: str) -> None:
    model, x, t = model_and_batch()
    wanted, mesh = expected(model, x, t), dt.init_device_mesh("cpu", (4,))
    WAYS[way](model, mesh)
    loss = F.cross_entropy(model(dt.per_rank(list(x.chunk(4)))), dt.per_rank(list(t.chunk(4))))
    with pytest.raises(dt.errors.MixedTensorError, match="full_tensor"):
        loss + penalty(model.parameters())
    (loss + penalty(model.parameters()).full_tensor()).backward()
    torch.testing.assert_close(gradients(model), wanted)


def _check_penalties() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    for way in WAYS.values():
        model, x, t = model_and_batch()
        wanted = expected(model, x, t)
        way(model, mesh)
        rank = mesh.get_local_rank()
        for whole in (False, True):  # first each rank has its part of the batch, then the full batch
            own, labels = (x, t) if whole else (x.chunk(2)[rank], t.chunk(2)[rank])
            model.zero_grad()
            loss, more = F.cross_entropy(model(own), labels), penalty(model.parameters())
            (loss + (more if whole else more.full_tensor())).backward()
            torch.testing.assert_close(gradients(model), wanted)


@pytest.mark.gloo
def test_gradients_of_penalty_plus_loss_equal_plain_model_on_process_groups() -> None:
    run_gloo(_check_penalties, 2)


def test_gradient_of_a_plain_operand_is_a_plain_tensor() -> None:
    mesh = dt.init_device_mesh("cpu", (4,))
    w, x = torch.randn(5, requires_grad=True), dt.distribute_tensor(torch.randn(8, 3), mesh, [Shard(0)]).requires_grad_()
    (w.sum() * x).sum().backward()
    assert type(w.grad) is torch.Tensor
    torch.testing.assert_close(w.grad, x.detach().sum().full_tensor().expand(5))
    assert x.grad.placements in ((Shard(0),), (Replicate(),))
