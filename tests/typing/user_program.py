"""User's program: mypy and pyright accept it in strict mode, without a cast. It runs in one process and under torchrun."""

from __future__ import annotations

import torch
from torch import nn

import dtensor as dt
from dtensor.parallel import ColwiseParallel, FSDPModule, RowwiseParallel, fully_shard, parallelize_module


class Mlp(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.up(x)
        out: torch.Tensor = self.down(hidden.relu())
        return out

    def count_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


@dt.capture
def scaled_sum(x: dt.DTensor, scale: float = 2.0) -> dt.DTensor:
    return (x * scale).sum()


@dt.local_map(out_placements=[dt.Partial(), dt.Replicate()])
def sum_rows(x: torch.Tensor) -> torch.Tensor:
    return x.sum(0)


def normalize(x: dt.DTensor, epsilon: float = 1e-6) -> dt.DTensor:
    centered = x - x.mean(-1, keepdim=True)
    largest, _ = centered.abs().max(-1, keepdim=True)
    return centered / (largest + epsilon)


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, x: dt.DTensor) -> None:
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()


def main() -> dt.DTensor:
    dt.manual_seed(0)
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = dt.randn(8, 4, device_mesh=mesh, placements=[dt.Shard(0), dt.Replicate()])
    y = normalize(1.0 - x) @ x.T
    y += y[0]
    columns = y.redistribute(placements=[dt.Replicate(), dt.Shard(1)])
    print(columns.placements, scaled_sum(columns, scale=3.0).item(), sum_rows(x).placements)
    local = x.to_local()
    if isinstance(local, dt.PerRank):
        print([tuple(shard.shape) for shard in local.shards])

    model = parallelize_module(Mlp(4), mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    assert isinstance(model, FSDPModule)
    model.set_requires_gradient_sync(True)
    train_step(model, torch.optim.SGD(model.parameters(), lr=0.1 / model.count_parameters()), x)
    weight = model.up.weight
    assert isinstance(weight, dt.DTensor)
    assert weight.grad is not None
    return weight.grad.redistribute(placements=[dt.Replicate()] * mesh.ndim)


if __name__ == "__main__":
    print(main())
