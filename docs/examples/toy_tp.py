"""Tensor and sequence parallelism of a small MLP: PyTorch's first examples of tensor parallelism, with another import.

    python docs/examples/toy_tp.py          or          torchrun --nproc-per-node 4 docs/examples/toy_tp.py

Both shard the first matrix by outputs and the second by inputs. Under tensor parallelism all ranks have the same batch. Under
sequence parallelism each has its own rows, which are gathered before the first matrix and reduce-scattered after the second.
"""

from __future__ import annotations

import torch
from one_device import Batch, compare, mean, mine, needs, train
from torch import Tensor, nn

import dtensor as dt
from dtensor import Shard
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def toy() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(10, 32), nn.ReLU(), nn.Linear(32, 5))


def data(steps: int) -> list[Batch]:
    dice = torch.Generator().manual_seed(1)
    return [(torch.rand(20, 10, generator=dice), torch.rand(20, 5, generator=dice)) for _ in range(steps)]


def loss_of(out: Tensor, target: Tensor) -> Tensor:
    return (out - target).square().mean()


def main() -> None:
    needs(4)
    mesh = dt.init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    batches = data(steps=6)
    alone = train(toy(), batches, loss_of)
    sharded = parallelize_module(toy(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    same = train(sharded, batches, loss_of, value=lambda loss: mean(loss, mesh))
    plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0), use_local_output=False)}
    rows = parallelize_module(toy(), mesh, plan)

    def loss_of_rows(out: dt.DTensor, target: Tensor) -> Tensor:
        return loss_of(out, dt.DTensor.from_local(target, mesh, [Shard(0)]))

    own = train(rows, batches, loss_of_rows, given=lambda x: mine(x, mesh, "tp"), value=lambda loss: mean(loss, mesh))
    compare("tensor parallel, then sequence parallel", same + own, alone + alone)


if __name__ == "__main__":
    main()
