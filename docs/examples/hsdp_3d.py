"""Hybrid sharded data parallelism over tensor parallelism: parameters replicated over one mesh dim, sharded over two.

python docs/examples/hsdp_3d.py          or          torchrun --nproc-per-node 8 docs/examples/hsdp_3d.py
"""

from __future__ import annotations

from gpt_model import loss_of
from llama_tp_sp import PLAN
from one_device import compare, mean, mine, model, needs, text, train

import dtensor as dt
from dtensor import Replicate
from dtensor.parallel import fully_shard, parallelize_module


def main() -> None:
    needs(8)
    mesh = dt.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("ddp", "fsdp", "tp"))
    batches = text(steps=4, size=8)
    sharded = parallelize_module(model(), mesh["tp"], PLAN)
    for block in sharded.blocks:
        fully_shard(block, mesh=mesh["ddp", "fsdp"])
    fully_shard(sharded, mesh=mesh["ddp", "fsdp"])
    losses = train(
        sharded,
        batches,
        lambda logits, targets: loss_of(logits, dt.DTensor.from_local(targets, mesh["tp"], [Replicate()])),
        given=lambda x: mine(x, mesh, "ddp", "fsdp"),
        value=lambda loss: mean(loss, mesh, "ddp", "fsdp"),
    )
    if mesh.get_rank() == 0:
        print("head.weight:", sharded.head.weight.layout)
    compare("hybrid sharded x tensor parallel", losses, train(model(), batches, loss_of))


if __name__ == "__main__":
    main()
