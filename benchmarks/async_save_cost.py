"""Async save cost: how much saves in the background slow down fully sharded training steps with AdamW on gloo ranks.

    python benchmarks/async_save_cost.py [--ranks 2] [--width 1024] [--layers 8] [--batch 1024] [--every 10] [--rounds 5] \
            [--where DIR]

Runs of ``--every`` steps with one save alternate with runs without. *Call* is the time that ``Manager.save`` blocks a step,
relative to the median step without saves. *Stretch* is the time of a run with one save relative to a run without: writing takes
bandwidth and, where ranks have no spare cores, processor time from the step. Medians over rounds, on the slowest rank.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn


def measure_rank(rank: int, store: str, options: argparse.Namespace, folder: str, out: Any) -> None:
    """Train on one gloo rank, with and without saves in turn; put its median step, call and stretch and the saved bytes into
    ``out``.
    """
    import dtensor as dt
    from dtensor.checkpoint import Manager
    from dtensor.parallel import fully_shard

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    mesh = dt.init_device_mesh("cpu", (options.ranks,), mesh_dim_names=("dp",))
    model = nn.Sequential(*(nn.Linear(options.width, options.width) for _ in range(options.layers)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    batch = dt.randn(options.batch, options.width, device_mesh=mesh, placements=[dt.Shard(0)])

    def stretch(manager: Any, number: int) -> tuple[float, list[float], float]:
        """Run ``--every`` steps, the first with a save if there is a manager; return the seconds of all, of each step, and of
        ``save``.
        """
        dist.barrier()
        steps, called, begin = [], 0.0, time.perf_counter()
        for k in range(options.every):
            start = time.perf_counter()
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            steps.append(time.perf_counter() - start)
            if manager is not None and k == 0:
                manager.save(number, state)
                called = time.perf_counter() - start - steps[-1]
        whole = time.perf_counter() - begin
        if manager is not None:
            manager.wait()
        return whole, steps, called

    with Manager(folder) as manager:
        stretch(manager, 1)  # memory for the copies is kept from here on
        rows = [(stretch(None, 0), stretch(manager, 2 + k)) for k in range(options.rounds)]
    step = statistics.median(seconds for (_, steps, _), _ in rows for seconds in steps)
    call = statistics.median(called for _, (_, _, called) in rows)
    ratio = statistics.median(with_save / without for (without, _, _), (with_save, _, _) in rows)
    held = sum(p.to_local().nbytes for p in model.parameters()) * 3
    out.put((step, call / step, ratio, held))
    dist.destroy_process_group()


def main() -> None:
    """Run all ranks and print the slowest rank's cost of a save."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, number in {"ranks": 2, "width": 1024, "layers": 8, "batch": 1024, "every": 10, "rounds": 5}.items():
        parser.add_argument(f"--{name}", type=int, default=number)
    parser.add_argument("--where", type=Path, default=None)
    options = parser.parse_args()
    folder = tempfile.mkdtemp(dir=options.where)
    try:
        out = mp.get_context("spawn").SimpleQueue()
        mp.spawn(measure_rank, (f"{folder}/store", options, f"{folder}/run", out), nprocs=options.ranks)
        rows = [out.get() for _ in range(options.ranks)]
    finally:
        shutil.rmtree(folder)
    step, call, ratio, held = (max(column) for column in zip(*rows, strict=True))
    print(f"{options.ranks} ranks, {held / 2**20:.0f} MiB each, a save every {options.every} steps of {step * 1e3:.0f} ms")
    print(f"call {100 * call:.1f} % of a step; stretch {ratio:.3f} of one without")


if __name__ == "__main__":
    main()
