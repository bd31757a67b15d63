"""Three dims of parallelism: PyTorch's pipeline over stages that are fully sharded and tensor parallel.

    torchrun --nproc-per-node 8 docs/examples/pipeline_3d.py

The mesh is ("pp", "dp", "tp") = (2, 2, 2). Each pipeline stage is a part of the model on its own ranks. Between stages
torch.distributed.pipelining sends local tensors: this rank's part of the sequence.
"""

from __future__ import annotations

import sys

import torch
import torch.distributed as dist
from gpt_model import GPT, loss_of
from llama_tp_sp import PLAN
from one_device import compare, mean, mine, model, needs, text, train
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.parallel import ColwiseParallel, fully_shard, parallelize_module

MICROBATCHES = 2


class Stage(nn.Module):
    """The first or the second half of a model."""

    cos: Tensor
    sin: Tensor

    def __init__(self, model: GPT, index: int) -> None:
        super().__init__()
        half = len(model.blocks) // 2
        self.embedding = model.embedding if index == 0 else nn.Identity()
        self.blocks = model.blocks[:half] if index == 0 else model.blocks[half:]
        self.norm = nn.Identity() if index == 0 else model.norm
        self.head = nn.Identity() if index == 0 else model.head
        self.register_buffer("cos", model.cos, persistent=False)
        self.register_buffer("sin", model.sin, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embedding(x)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return self.head(self.norm(x))


def main() -> None:
    needs(8)
    mesh = dt.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    if mesh.kind == "in_process":
        sys.exit("a pipeline needs processes: torchrun --nproc-per-node 8 docs/examples/pipeline_3d.py")
    index = mesh.get_local_rank("pp")
    stage = Stage(model(), index)
    plan = PLAN | {"head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate())}
    here = {name: style for name, style in plan.items() if name.startswith("blocks") or (name == "embedding") == (index == 0)}
    parallelize_module(stage, mesh["tp"], here)
    for block in stage.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(stage, mesh=mesh["dp"])
    pipeline = ScheduleGPipe(
        PipelineStage(stage, index, 2, torch.device("cpu"), group=mesh.get_group("pp")), MICROBATCHES, loss_fn=loss_of
    )
    optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-3)
    batches, losses = text(steps=4, size=8), []
    for inputs, targets in batches:
        found: list[Tensor] = []
        if index == 0:
            pipeline.step(mine(inputs, mesh, "dp"))
        else:
            pipeline.step(target=mine(targets, mesh, "dp"), losses=found)
        optimizer.step()
        optimizer.zero_grad()
        loss = torch.stack(found).mean() if found else torch.zeros(())
        losses.append(mean(loss, mesh, "dp"))
    shared = torch.tensor(losses)
    dist.broadcast(shared, 4)  # a rank of the last stage
    compare("pipeline x fully sharded x tensor parallel", shared.tolist(), train(model(), batches, loss_of))


if __name__ == "__main__":
    main()
