"""A model with halves on different ranks: activations are redistributed from one mesh to the other.

    python docs/examples/two_meshes.py          or          torchrun --nproc-per-node 4 docs/examples/two_meshes.py

The first half is data parallel over ranks 0 and 1, the second one tensor parallel over ranks 2 and 3. It remains one program:
every rank runs all lines, and computes nothing where it has no local tensor. Gradients return by the same exchange.
"""

from __future__ import annotations

from gpt_model import GPT, loss_of
from one_device import compare, model, needs, text, train
from torch import Tensor, nn

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

COLUMNS, ROWS = ColwiseParallel(use_local_output=False), RowwiseParallel(use_local_output=False)
PLAN = {
    **{f"blocks.*.attention.{name}": COLUMNS for name in ("query", "key", "value")},
    **{f"blocks.*.feed_forward.{name}": COLUMNS for name in ("gate", "up")},
    "blocks.*.attention.out": ROWS,
    "blocks.*.feed_forward.down": ROWS,
    "head": COLUMNS,
}


class OnTwoMeshes(nn.Module):
    """The blocks of a model, the first half on one mesh and the others on another."""

    def __init__(self, model: GPT, first: dt.DeviceMesh, second: dt.DeviceMesh) -> None:
        super().__init__()
        half = len(model.blocks) // 2
        self.second, self.cos, self.sin = second, model.cos, model.sin
        self.early = nn.ModuleList([model.embedding, *model.blocks[:half]])
        self.late = nn.ModuleDict({"blocks": model.blocks[half:], "norm": model.norm, "head": model.head})
        dt.distribute_module(self.early, first)
        dt.distribute_module(parallelize_module(self.late, second, PLAN), second)

    def forward(self, tokens: Tensor) -> Tensor:
        embedding, *blocks = self.early
        x = embedding(tokens)
        cos, sin = (dt.distribute_tensor(x, tokens.device_mesh) for x in (self.cos, self.sin))
        for block in blocks:
            x = block(x, cos, sin)
        x = x.redistribute(self.second, [Replicate()])
        cos, sin = (dt.distribute_tensor(x, self.second) for x in (self.cos, self.sin))
        for block in self.late["blocks"]:
            x = block(x, cos, sin)
        return self.late["head"](self.late["norm"](x))


def main() -> None:
    needs(4)
    everywhere = dt.init_device_mesh("cpu", (4,))
    first, second = dt.DeviceMesh("cpu", [0, 1], mesh_dim_names=("dp",)), dt.DeviceMesh("cpu", [2, 3], mesh_dim_names=("tp",))
    batches = text(steps=6, size=4)
    sharded = OnTwoMeshes(model(), first, second)
    losses = train(
        sharded,
        [(dt.distribute_tensor(x, first, [Shard(0)]), dt.distribute_tensor(y, second, [Replicate()])) for x, y in batches],
        loss_of,
        value=lambda loss: loss.redistribute(everywhere, [Replicate()]).item(),
    )
    compare("halves on two meshes", losses, train(model(), batches, loss_of))


if __name__ == "__main__":
    main()
