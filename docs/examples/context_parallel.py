"""Long sequences with models on local tensors, as torchtitan's programs are written: FSDP over ranks that share sequences.

    python docs/examples/context_parallel.py          or          torchrun --nproc-per-node 4 docs/examples/context_parallel.py

Each rank of ``dp`` has its own batches. The ranks of ``cp`` share a batch: each has an early and a late part of its sequences,
and attention sends keys around a ring. Parameters are sharded over all ranks. Their gradients are those of the mean loss.
"""

from __future__ import annotations

import torch
from gpt_model import loss_of
from one_device import compare, mean, mine, model, needs, text, train

import dtensor as dt
from dtensor.experimental import context_parallel
from dtensor.fsdp import fully_shard


def main() -> None:
    needs(4)
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
    batches, losses = text(steps=4, size=4), []
    sharded = fully_shard(model(), mesh=mesh.flatten("dp_cp"))
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=3e-3)
    tables = [buffer for _, buffer in sharded.named_buffers()]
    for batch in batches:
        tokens, targets = (mine(x, mesh, "dp") for x in batch)
        with context_parallel(mesh["cp"], buffers=[tokens, targets, *tables], buffer_seq_dims=[1, 1, *[0] * len(tables)]):
            loss = loss_of(sharded(tokens), targets)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean(loss, mesh, "dp", "cp"))
    compare("context parallel", losses, train(model(), batches, loss_of))


if __name__ == "__main__":
    main()
