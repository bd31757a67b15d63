"""Fully sharded data parallelism from the meta device, with prefetching, clipping and a checkpoint: PyTorch's FSDP2 example.

    python docs/examples/fsdp2.py          or          torchrun --nproc-per-node 2 docs/examples/fsdp2.py

After half of the steps the model and the optimizer are saved. A second model, built anew, continues from there.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from gpt_model import loss_of
from meta_start import started
from one_device import CONFIG, Batch, compare, mean, mine, model, needs, text
from torch import nn

import dtensor as dt
from dtensor import checkpoint
from dtensor.parallel import FSDPModule

STEPS = 8


def prefetch(blocks: list[FSDPModule], ahead: int = 2) -> None:
    """Gather the next ``ahead`` blocks while one runs, and the same backwards."""
    for k, block in enumerate(blocks):
        block.set_modules_to_forward_prefetch(blocks[k + 1 : k + 1 + ahead])
        block.set_modules_to_backward_prefetch(blocks[max(0, k - ahead) : k][::-1])


def sharded(mesh: dt.DeviceMesh) -> tuple[Any, torch.optim.Optimizer]:
    made: Any = started(CONFIG, mesh)
    prefetch(list(made.blocks))
    return made, torch.optim.Adam(made.parameters(), lr=1e-2)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Batch], mesh: dt.DeviceMesh | None) -> list[float]:
    """The loss of every step; each rank of ``mesh`` has its own rows."""
    losses = []
    for inputs, targets in batches:
        if mesh is not None:
            inputs, targets = mine(inputs, mesh, "dp"), mine(targets, mesh, "dp")
        loss = loss_of(model(inputs), targets)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()) if mesh is None else mean(loss, mesh, "dp"))
    return losses


def main() -> None:
    needs(2)
    mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    batches = text(steps=STEPS, size=8)
    folder: list[Any] = [tempfile.mkdtemp() if mesh.get_rank() == 0 else None]
    if dist.is_initialized():
        dist.broadcast_object_list(folder)
    path = Path(folder[0]) / "half"
    first, optimizer = sharded(mesh)
    losses = train(first, optimizer, batches[: STEPS // 2], mesh)
    checkpoint.save({"model": first, "optimizer": optimizer}, path)
    second, optimizer = sharded(mesh)
    checkpoint.load({"model": second, "optimizer": optimizer}, path)
    losses += train(second, optimizer, batches[STEPS // 2 :], mesh)
    alone = model()
    compare("fully sharded, resumed", losses, train(alone, torch.optim.Adam(alone.parameters(), lr=1e-2), batches, None))


if __name__ == "__main__":
    main()
