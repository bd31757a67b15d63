"""What the examples share: data, a training loop, and the losses of one device compared with those of the mesh."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Sequence
from pydoc_data.topics import topics
from typing import Any

import torch
import torch.distributed as dist
from gpt_model import GPT, Config
from torch import Tensor, nn

import dtensor as dt

Batch = tuple[Tensor, Tensor]
CONFIG = Config(vocabulary=128, context=32, width=32, heads=4, layers=2)


def needs(count: int) -> None:
    """Raise unless this program has ``count`` ranks: a launcher's processes, or ranks of this process without a launcher.

    Raises:
        SystemExit: the launcher started another number of processes. The message has the command to type.
    """
    started = int(os.environ.get("WORLD_SIZE", count))
    if started != count:
        script = os.path.relpath(sys.argv[0])
        raise SystemExit(
            f"{script} needs {count} processes and has {started}; start it as: torchrun --nproc-per-node {count} {script}"
        )


def text(steps: int, size: int) -> list[Batch]:
    """(inputs, targets) of each step, (size, context) each: windows of Python's own documentation, as character codes."""
    tokens = torch.tensor([min(ord(character), 127) for character in "".join(topics.values())])
    starts = torch.randint(len(tokens) - CONFIG.context, (steps, size, 1), generator=torch.Generator().manual_seed(1))
    windows = tokens[starts + torch.arange(CONFIG.context + 1)]
    return [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows]


def model() -> GPT:
    """The same model, whoever asks."""
    torch.manual_seed(0)
    return GPT(CONFIG)


def mine(x: Tensor, mesh: dt.DeviceMesh, *names: str) -> Tensor:
    """Return each rank's part of a batch, sharded along dim 0 over the named mesh dims: a ``PerRank`` tensor in one process."""
    dims = [mesh.dim_index(name) for name in names]
    parts = x.chunk(math.prod(mesh.shape[dim] for dim in dims))

    def part(at: tuple[int, ...]) -> Tensor:
        index = 0
        for dim in dims:
            index = index * mesh.shape[dim] + at[dim]
        return parts[index].clone()

    return dt.map_ranks(part, mesh=mesh)


def mean(loss: Any, mesh: dt.DeviceMesh, *names: str) -> float:
    """The mean over the named mesh dims of losses that each rank has computed from its part of the batch."""
    if isinstance(loss, dt.DTensor):
        loss = loss.full_tensor()
    if names:
        over = mesh[names]
        loss = dt.DTensor.from_local(loss.detach(), over, [dt.Partial("avg")] * over.ndim).full_tensor()
    shards = getattr(loss, "shards", (loss,))
    return float(shards[0].detach())


def train(
    model: nn.Module,
    batches: Sequence[Batch],
    loss_of: Callable[[Any, Any], Any],
    optimizer: Any = None,
    given: Callable[[Tensor], Any] = lambda x: x,
    value: Callable[[Any], float] = float,
) -> list[float]:
    """The loss of every step; ``given`` makes the model's tensors from a batch's, ``value`` a number of the loss."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for inputs, targets in batches:
        loss = loss_of(model(given(inputs)), given(targets))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(value(loss.detach()))
    return losses


def compare(title: str, sharded: Sequence[float], alone: Sequence[float], tolerance: float = 1e-3) -> None:
    """Both losses at every step, printed once.

    Raises:
        SystemExit: they differ by more than ``tolerance`` somewhere.
    """
    worst = max(abs(ours - theirs) for ours, theirs in zip(sharded, alone, strict=True))
    if not dist.is_initialized() or dist.get_rank() == 0:
        where = f"{dist.get_world_size()} processes" if dist.is_initialized() else "all ranks in this process"
        print(f"{title}, {where}\n  step       mesh   one device")
        for step, (ours, theirs) in enumerate(zip(sharded, alone, strict=True)):
            print(f"  {step:4} {ours:10.6f}   {theirs:10.6f}")
        print(f"largest difference: {worst:.1e}")
    if dist.is_initialized():
        dist.destroy_process_group()
    if not worst <= tolerance:
        raise SystemExit("the mesh's loss is not the single device's")
