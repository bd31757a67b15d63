"""Distributed data parallelism: replicated parameters, gradients averaged in buckets during the backward pass.

python docs/examples/ddp.py          or          torchrun --nproc-per-node 4 docs/examples/ddp.py
"""

from __future__ import annotations

from gpt_model import loss_of
from one_device import compare, mean, mine, model, needs, text, train

import dtensor as dt
from dtensor.parallel import replicate


def main() -> None:
    needs(4)
    mesh = dt.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    batches = text(steps=8, size=8)
    losses = train(
        replicate(model(), mesh),
        batches,
        loss_of,
        given=lambda x: mine(x, mesh, "dp"),
        value=lambda loss: mean(loss, mesh, "dp"),
    )
    compare("data parallel", losses, train(model(), batches, loss_of))


if __name__ == "__main__":
    main()
