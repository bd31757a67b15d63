"""ZeRO: data parallelism with an optimizer state that is sharded over the ranks.

python docs/examples/zero.py          or          torchrun --nproc-per-node 4 docs/examples/zero.py
"""

from __future__ import annotations

import torch
from gpt_model import loss_of
from one_device import compare, mean, mine, model, needs, text, train

import dtensor as dt
from dtensor.parallel import ZeroRedundancyOptimizer, replicate


def main() -> None:
    needs(4)
    mesh = dt.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    batches = text(steps=8, size=8)
    replicated = replicate(model(), mesh)
    optimizer = ZeroRedundancyOptimizer(replicated.parameters(), torch.optim.AdamW, lr=3e-3)
    losses = train(
        replicated,
        batches,
        loss_of,
        optimizer,
        given=lambda x: mine(x, mesh, "dp"),
        value=lambda loss: mean(loss, mesh, "dp"),
    )
    if mesh.get_rank() == 0:
        states = [x for state in optimizer.inner.state.values() for x in state.values() if isinstance(x, dt.DTensor)]
        total, held = sum(x.layout.nbytes for x in states), sum(x.layout.max_local_nbytes for x in states)
        print(f"optimizer state: {total / 1024:.0f} KiB, of which one rank holds {held / 1024:.0f} KiB")
    compare("data parallel, optimizer state sharded", losses, train(model(), batches, loss_of))


if __name__ == "__main__":
    main()
