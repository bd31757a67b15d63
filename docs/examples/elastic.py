"""Elastic training: killed anywhere and restarted on any number of ranks, with the losses of one long run.

python docs/examples/elastic.py     or     torchrun --standalone --nproc-per-node 4 --max-restarts 9 docs/examples/elastic.py
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import dtensor as dt
from dtensor.checkpoint import Manager
from dtensor.parallel import DistributedBatchSampler, fully_shard

Losses = dict[int, float]


def samples() -> TensorDataset:
    dice = torch.Generator().manual_seed(1)
    return TensorDataset(*(torch.randn(40, size, generator=dice, dtype=torch.float64) for size in (16, 3)))


def train(mesh: dt.DeviceMesh, folder: Path, steps: int, every: int) -> Losses:
    """The losses of the steps that this start of the program made; rank 0 writes them to ``losses.txt`` as it goes."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 3)).double()
    model = fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data = samples()
    sampler = DistributedBatchSampler(data, mesh, batch_size=12)
    state = {"model": model, "optimizer": optimizer, "sampler": sampler}
    losses: Losses = {}
    with Manager(folder, every=every, keep=2) as manager:
        step = manager.resume(state)
        while step < steps:
            for x, y in DataLoader(data, batch_sampler=sampler):
                loss = (model(sampler.distribute(x)) - sampler.distribute(y)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                step += 1
                losses[step] = loss.item()
                if mesh.get_rank() == 0:
                    with open(folder.parent / "losses.txt", "a") as out:
                        out.write(f"{os.getpid()} {mesh.size()} {step} {losses[step]!r}\n")
                manager.save(step, state)
                if step == steps:
                    break
    return losses


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "elastic")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--every", type=int, default=5)
    given = options.parse_args()
    given.folder.mkdir(parents=True, exist_ok=True)
    mesh = dt.init_device_mesh("cpu", (int(os.environ.get("WORLD_SIZE", "4")),), mesh_dim_names=("dp",))
    losses = train(mesh, given.folder / "checkpoints", given.steps, given.every)
    if mesh.get_rank() == 0:
        first = min(losses, default=given.steps + 1)
        print(f"steps {first} to {given.steps} on {mesh.size()} ranks" + (f", loss {losses[given.steps]:.4f}" if losses else ""))


if __name__ == "__main__":
    main()
