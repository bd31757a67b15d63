"""A character GPT trained by data parallelism, with a data loader, snapshots and resume: minGPT's trainer in one file.

    python docs/examples/char_gpt_ddp.py          or          torchrun --nproc-per-node 4 docs/examples/char_gpt_ddp.py

The trainer runs one epoch and is discarded. Another trainer resumes from the snapshot and runs the second epoch. One device
reads the same batches, because their order does not depend on the number of ranks.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt_model import loss_of
from one_device import compare, model, needs, text
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import dtensor as dt
from dtensor.checkpoint import Manager
from dtensor.parallel import DistributedBatchSampler, replicate

SAMPLES, BATCH = 32, 8


class Characters(Dataset[tuple[Tensor, Tensor]]):
    """Windows of text, each with the characters that follow."""

    def __init__(self) -> None:
        ((self.inputs, self.targets),) = text(steps=1, size=SAMPLES)

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.inputs[i], self.targets[i]


class Trainer:
    """Trains a model by epochs, from the last snapshot in ``folder`` on, if there is one."""

    def __init__(self, model: nn.Module, mesh: dt.DeviceMesh, folder: Path) -> None:
        self.model, self.data, self.losses = model, Characters(), list[float]()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
        self.sampler = DistributedBatchSampler(self.data, mesh, batch_size=BATCH)
        self.state = {"model": model, "optimizer": self.optimizer, "sampler": self.sampler}
        self.snapshots = Manager(folder, keep=2)
        self.step = self.snapshots.resume(self.state)

    def epoch(self) -> None:
        for inputs, targets in DataLoader(self.data, batch_sampler=self.sampler):
            self.model.train()
            loss = loss_of(self.model(self.sampler.distribute(inputs)), self.sampler.distribute(targets))
            self.optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.optimizer.step()
            self.losses.append(loss.item())
            self.step += 1
        self.snapshots.save(self.step, self.state)
        self.snapshots.close()


def alone(epochs: int) -> list[float]:
    """The losses of one device, which reads whole batches."""
    one = dt.init_device_mesh("meta", (1,), mesh_dim_names=("dp",))
    data, plain, losses = Characters(), model(), []
    sampler = DistributedBatchSampler(data, one, batch_size=BATCH)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=3e-3, weight_decay=0.1)
    for _ in range(epochs):
        for inputs, targets in DataLoader(data, batch_sampler=sampler):
            loss = loss_of(plain(inputs), targets)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    return losses


def main() -> None:
    needs(4)
    mesh = dt.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    folder: list[Any] = [tempfile.mkdtemp() if mesh.get_rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(folder)
    losses = []
    for _ in range(2):
        trainer = Trainer(replicate(model(), mesh), mesh, Path(folder[0]))
        trainer.epoch()
        losses += trainer.losses
    compare("data parallel, resumed from a snapshot", losses, alone(epochs=2))


if __name__ == "__main__":
    main()
