"""Fully sharded data parallelism over tensor parallelism: a mesh of two dims.

    python docs/examples/fsdp_tp_2d.py          or          torchrun --nproc-per-node 4 docs/examples/fsdp_tp_2d.py

A weight is sharded over "tp" first, then each tensor-parallel shard over "dp"; the placements say so by their level. Each
"dp" rank has its own part of the batch. One reduce-scatter for each block averages the gradients.
"""

from __future__ import annotations

from gpt_model import loss_of
from llama_tp_sp import PLAN
from one_device import compare, mean, mine, model, needs, text, train

import dtensor as dt
from dtensor import Replicate
from dtensor.parallel import fully_shard, parallelize_module


def main() -> None:
    needs(4)
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    batches = text(steps=8, size=4)
    sharded = parallelize_module(model(), mesh["tp"], PLAN)
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(sharded, mesh=mesh["dp"])
    losses = train(
        sharded,
        batches,
        lambda logits, targets: loss_of(logits, dt.DTensor.from_local(targets, mesh["tp"], [Replicate()])),
        given=lambda x: mine(x, mesh, "dp"),
        value=lambda loss: mean(loss, mesh, "dp"),
    )
    if mesh.get_rank() == 0:
        print("head.weight:", sharded.head.weight.layout)
    compare("fully sharded x tensor parallel", losses, train(model(), batches, loss_of))


if __name__ == "__main__":
    main()
