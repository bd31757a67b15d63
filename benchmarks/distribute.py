"""Distribute: ``distribute_tensor`` of ``dtensor`` and of ``torch.distributed.tensor`` ("peer"), in turn in the same gloo
processes.

    python benchmarks/distribute.py [--worlds 2 4] [--rounds 40] [--only "64 x 8"]

Ratios to PyTorch's: the slowest rank's time of one call (all ranks begin it together), and of 10 calls in a row, as when a
model's parameters are distributed; processor time of all ranks. Medians over rounds; the order of the sides alternates.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT)]

CASES: dict[str, tuple[tuple[int, ...], str]] = {  # shape, how it is cut
    "64 x 8, S0": ((64, 8), "S0"),
    "64 x 8, S1": ((64, 8), "S1"),
    "64 x 8, R": ((64, 8), "R"),
    "7 x 5, S0": ((7, 5), "S0"),
    "256 x 256, S0": ((256, 256), "S0"),
    "256 x 256, S1": ((256, 256), "S1"),
    "256 x 256, R": ((256, 256), "R"),
    "1024 x 1024, S0": ((1024, 1024), "S0"),
    "1024 x 1024, R": ((1024, 1024), "R"),
}
IN_A_ROW = 10


def make_sides() -> dict[str, Callable[[torch.Tensor, str], Any]]:
    """Return for each library a function that distributes a tensor by the name of a placement."""
    import torch.distributed.tensor as peer
    from torch.distributed.device_mesh import init_device_mesh

    import dtensor as dt

    size = (dist.get_world_size(),)
    meshes = {"ours": dt.init_device_mesh("cpu", size), "peer": init_device_mesh("cpu", size)}
    libraries: dict[str, Any] = {"ours": dt, "peer": peer}

    def side(name: str) -> Callable[[torch.Tensor, str], Any]:
        library, mesh = libraries[name], meshes[name]
        known = {"S0": [library.Shard(0)], "S1": [library.Shard(1)], "R": [library.Replicate()]}
        return lambda x, how: library.distribute_tensor(x, mesh, known[how])

    return {name: side(name) for name in libraries}


def measure_rank(rank: int, world: int, file: str, rounds: int, names: list[str], out: str) -> None:
    """Time the named cases with both libraries in turn on one gloo rank; the first rank writes all times to ``out``."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=world)
    found: dict[str, dict[str, list[tuple[float, float]]]] = {}
    functions = make_sides()
    for name in names:
        shape, how = CASES[name]
        x = torch.arange(float(torch.Size(shape).numel())).view(shape)
        for fn in functions.values():
            for _ in range(3):
                fn(x, how)
        for count in (1, IN_A_ROW):
            row = found.setdefault(f"{name}|{count}", {side: [] for side in functions})
            for turn in range(rounds):
                for side in list(functions)[:: 1 if turn % 2 else -1]:
                    fn = functions[side]
                    dist.barrier()
                    began, cpu = time.perf_counter(), time.process_time()
                    for _ in range(count):
                        fn(x, how)
                    took = time.perf_counter() - began
                    dist.barrier()
                    row[side].append((took / count, (time.process_time() - cpu) / count))
    every: list[Any] = [None] * world
    dist.all_gather_object(every, found)
    if rank == 0:
        Path(out).write_text(json.dumps(every))
    dist.destroy_process_group()


def main() -> None:
    """Run the ranks of each world size and print the times and ratios of each case."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worlds", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    print(f"{'':24}{'calls':>6}{'ours, us':>10}{'peer, us':>10}{'ratio':>7}   processor: {'ours':>8}{'peer':>8}{'ratio':>7}")
    for world in options.worlds:
        with tempfile.TemporaryDirectory() as folder:
            out = f"{folder}/out.json"
            spawn(measure_rank, (world, f"{folder}/store", options.rounds, options.only, out), nprocs=world)
            every = json.loads(Path(out).read_text())
        for key, row in every[0].items():
            name, _, count = key.partition("|")
            wall, cpu = {}, {}
            for side in row:
                rounds = list(zip(*(found[key][side] for found in every), strict=True))
                wall[side] = statistics.median(max(took for took, _ in each) for each in rounds) * 1e6
                cpu[side] = statistics.median(sum(used for _, used in each) for each in rounds) * 1e6
            print(
                f"{world} ranks, {name:16}{count:>4}{wall['ours']:10.0f}{wall['peer']:10.0f}{wall['ours'] / wall['peer']:7.2f}"
                f"   {cpu['ours']:19.0f}{cpu['peer']:8.0f}{cpu['ours'] / cpu['peer']:7.2f}"
            )


if __name__ == "__main__":
    main()
