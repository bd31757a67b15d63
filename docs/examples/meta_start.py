"""Start on the meta device: a model that is never complete anywhere, with the values of one device.

    python docs/examples/meta_start.py          or          torchrun --nproc-per-node 2 docs/examples/meta_start.py
    torchrun --nproc-per-node 2 docs/examples/meta_start.py --billion      one billion parameters in bfloat16, memory only

The second command builds a large model, and prints what one rank holds and its peak memory.
"""

from __future__ import annotations

import resource
import sys

import torch
import torch.distributed as dist
from gpt_model import GPT, Config, loss_of, rotary_angles
from one_device import CONFIG, compare, mean, mine, model, needs, text, train
from torch import nn

import dtensor as dt
from dtensor.parallel import fully_shard, materialize

BILLION = Config(vocabulary=32_000, context=128, width=2048, heads=16, layers=13)


def init(module: nn.Module, config: Config) -> None:
    """The tensors that ``module`` itself has."""
    if isinstance(module, GPT):
        angles = rotary_angles(config.context, config.width // config.heads)
        for buffer, value in ((module.cos, angles.cos()), (module.sin, angles.sin())):
            assert isinstance(buffer, dt.DTensor)
            buffer.copy_(dt.distribute_tensor(value, buffer.device_mesh, buffer.placements))
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()


def started(config: Config, mesh: dt.DeviceMesh, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Build on meta, shard over ``mesh``, then materialize unit by unit."""
    with torch.device("meta"):
        made = GPT(config).to(dtype)
    for block in made.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(made, mesh=mesh)
    torch.manual_seed(0)
    return materialize(made, init=lambda module: init(module, config))


def peak() -> float:
    """The largest resident memory of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(mesh: dt.DeviceMesh) -> None:
    before = peak()
    made = started(BILLION, mesh, torch.bfloat16)
    after = peak()
    held = sum(p.to_local().untyped_storage().nbytes() for p in made.parameters()) / 2**20
    count = sum(p.numel() for p in made.parameters())
    largest = max(p.numel() for p in made.parameters()) * 2 / 2**20
    if mesh.get_rank() == 0:
        print(f"{count / 1e9:.3f} billion parameters, {count * 2 / 2**20:.0f} MiB in bfloat16, {mesh.size()} ranks")
        print(f"a rank holds {held:.0f} MiB; its memory grew by {after - before:.0f} MiB at the peak")
        print(f"(the largest parameter, of which a whole one is drawn at a time, has {largest:.0f} MiB)")


def main() -> None:
    needs(2)
    mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    if "--billion" in sys.argv:
        measure(mesh)
        if dist.is_initialized():
            dist.destroy_process_group()
        return
    batches = text(steps=8, size=8)
    losses = train(
        started(CONFIG, mesh),
        batches,
        loss_of,
        given=lambda x: mine(x, mesh, "dp"),
        value=lambda loss: mean(loss, mesh, "dp"),
    )
    compare("started on meta, fully sharded", losses, train(model(), batches, loss_of))


if __name__ == "__main__":
    main()
