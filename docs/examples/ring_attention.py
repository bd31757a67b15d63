"""Context parallelism for long sequences: every rank has a part of the sequence, keys and values go around a ring.

    python docs/examples/ring_attention.py          or          torchrun --nproc-per-node 4 docs/examples/ring_attention.py

The model is plain PyTorch. Tokens are sharded along time, parameters are replicated. Attention with queries and keys sharded in
the same way sends blocks of keys around. A rank holds only its own block of the sequence and the one that arrives.
"""

from __future__ import annotations

from gpt_model import loss_of
from one_device import compare, model, needs, text, train

import dtensor as dt
from dtensor import Shard
from dtensor.debug import CommDebugMode


def main() -> None:
    needs(4)
    mesh = dt.init_device_mesh("cpu", (4,), mesh_dim_names=("cp",))
    batches = text(steps=6, size=1)
    distributed = [[dt.distribute_tensor(x, mesh, [Shard(1)]) for x in batch] for batch in batches]
    sharded = dt.distribute_module(model(), mesh)
    with CommDebugMode() as comm:
        loss_of(sharded(distributed[0][0]), distributed[0][1])
    if mesh.get_rank() == 0:
        print("collectives of a forward pass:", comm.get_comm_counts())
    losses = train(sharded, distributed, loss_of, value=lambda loss: loss.item())
    compare("ring attention", losses, train(model(), batches, loss_of))


if __name__ == "__main__":
    main()
