"""Tensor, sequence and loss parallelism of a Llama-shaped model by a plan.

    python docs/examples/llama_tp_sp.py          or          torchrun --nproc-per-node 4 docs/examples/llama_tp_sp.py

Between blocks each rank has a part of the sequence. Inside a block it has a part of the heads and of the hidden features. Logits
are sharded over the vocabulary, and cross-entropy is computed without gathering them. The model (gpt_model.py) is plain PyTorch.
"""

from __future__ import annotations

from gpt_model import loss_of
from one_device import compare, mean, model, needs, text, train

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

PLAN: dict[str, ParallelStyle] = {
    "embedding": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "blocks.*.attention_norm": SequenceParallel(),
    "blocks.*.attention": PrepareModuleInput(
        input_layouts=(Shard(1), Replicate(), Replicate()), desired_input_layouts=(Replicate(), Replicate(), Replicate())
    ),
    "blocks.*.attention.query": ColwiseParallel(use_local_output=False),
    "blocks.*.attention.key": ColwiseParallel(use_local_output=False),
    "blocks.*.attention.value": ColwiseParallel(use_local_output=False),
    "blocks.*.attention.out": RowwiseParallel(output_layouts=Shard(1)),
    "blocks.*.feed_forward_norm": SequenceParallel(),
    "blocks.*.feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
    "blocks.*.feed_forward.gate": ColwiseParallel(),
    "blocks.*.feed_forward.up": ColwiseParallel(),
    "blocks.*.feed_forward.down": RowwiseParallel(output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "head": ColwiseParallel(input_layouts=Shard(1), use_local_output=False),
}


def main() -> None:
    needs(4)
    mesh = dt.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    batches = text(steps=8, size=4)
    sharded = parallelize_module(model(), mesh["tp"], PLAN)
    losses = train(
        sharded,
        batches,
        lambda logits, targets: loss_of(logits, dt.distribute_tensor(targets, mesh, [Replicate()])),
        value=lambda loss: mean(loss, mesh),
    )
    compare("tensor and sequence parallel", losses, train(model(), batches, loss_of))


if __name__ == "__main__":
    main()
