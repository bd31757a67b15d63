"""Two dims of parallelism, activation checkpointing and a learning-rate schedule: how torchtitan trains a Llama.

    python docs/examples/titan.py          or          torchrun --nproc-per-node 4 docs/examples/titan.py

The order is torchtitan's: tensor and sequence parallelism by a plan, activation checkpointing of each block, then each block
fully sharded. Gradients are accumulated over two microbatches and clipped by their global norm.
"""

from __future__ import annotations

import torch
from gpt_model import GPT, loss_of
from llama_tp_sp import PLAN
from one_device import Batch, compare, mean, mine, model, needs, text
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.optim.lr_scheduler import LambdaLR

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.parallel import ColwiseParallel, fully_shard, parallelize_module

STEPS, WARM, MICROBATCHES = 6, 2, 2


def parallel(made: GPT, mesh: dt.DeviceMesh) -> nn.Module:
    parallelize_module(made, mesh["tp"], PLAN | {"head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())})
    for k, block in enumerate(made.blocks):
        made.blocks[k] = fully_shard(checkpoint_wrapper(block), mesh=mesh["dp"])
    return fully_shard(made, mesh=mesh["dp"])


def rate(step: int) -> float:
    """Linear up, then linear down."""
    return (step + 1) / WARM if step < WARM else (STEPS - step) / (STEPS - WARM)


def train(model: nn.Module, batches: list[Batch], mesh: dt.DeviceMesh | None) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    schedule, losses = LambdaLR(optimizer, rate), []
    for inputs, targets in batches:
        total = 0.0
        for x, y in zip(inputs.chunk(MICROBATCHES), targets.chunk(MICROBATCHES), strict=True):
            if mesh is not None:
                x, y = mine(x, mesh, "dp"), mine(y, mesh, "dp")
            loss = loss_of(model(x), y) / MICROBATCHES
            loss.backward()
            total += float(loss.detach()) if mesh is None else mean(loss, mesh, "dp")
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses


def main() -> None:
    needs(4)
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batches = text(steps=STEPS, size=8)
    losses = train(parallel(model(), mesh), batches, mesh)
    compare("fully sharded x tensor parallel, recomputed", losses, train(model(), batches, None))


if __name__ == "__main__":
    main()
