"""Check ranks: the overhead of ``check_ranks`` on gloo for one small all-reduce, for operations and for a fully sharded training
step.

    python benchmarks/check_ranks.py [--ranks 2] [--rounds 10]

"host" is the processor time of a rank, which other programs on the machine hardly change; both are the minimum over rounds, with
the ratio to level "off" in brackets. The levels alternate. The last line is the cost of the checks of one collective without the
collective itself: logging it, comparing the ranks' logs, and announcing the wait.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

import dtensor as dt  # noqa: E402  # it is found by the path above
from dtensor.comm.map_ranks import communicator_of  # noqa: E402
from dtensor.comm.processes.checked_collectives import ranks_of  # noqa: E402
from dtensor.parallel import fully_shard  # noqa: E402
from dtensor.watchdog.collective_hooks import get_or_make_log  # noqa: E402
from dtensor.watchdog.collective_log import CollectiveRecord  # noqa: E402

LEVELS = ("off", "watch", "strict")
OPERATIONS = 500  # between two collectives


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(measure_rank, (options.ranks, options.rounds, folder), options.ranks)


def measure_rank(rank: int, size: int, rounds: int, folder: str) -> None:
    """Measure all steps at all levels on one gloo rank; the first rank prints the rows."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size)
    mesh = dt.init_device_mesh("cpu", (size,), mesh_dim_names=("dp",))
    steps = (
        ("all-reduce", make_all_reduce(mesh), 100),
        ("operations", make_operations_step(mesh), 5),
        ("FSDP step", make_training_step(mesh), 3),
    )
    for name, step, repeated in steps:
        found = measure_levels(step, repeated, rounds)
        for level in LEVELS:
            wall, host = (min(each[k] for each in found[level]) for k in (0, 1))
            wall_off, host_off = (min(each[k] for each in found["off"]) for k in (0, 1))
            if rank == 0:
                ratios = (
                    f"wall {wall * 1e6:10,.1f} us ({wall / wall_off:.3f})  host {host * 1e6:10,.1f} us ({host / host_off:.3f})"
                )
                print(f"{size} ranks  {name:<11} {level:<7} {ratios}", flush=True)
                if name == "operations" and level == "watch":
                    print(f"{size} ranks  an operation takes {(host - host_off) / OPERATIONS * 1e6:.2f} us more", flush=True)
    if rank == 0:
        print(f"{size} ranks  besides a collective {time_checks(mesh) * 1e6:.2f} us", flush=True)
    dist.barrier()
    dist.destroy_process_group()


def measure_levels(step: Callable[[], None], repeated: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Return wall and processor seconds of one step by level of ``check_ranks``, a pair for each round."""
    found: dict[str, list[tuple[float, float]]] = {level: [] for level in LEVELS}
    for turn in range(rounds + 1):
        for level in LEVELS:
            dt.check_ranks(level)
            step()
            dist.barrier()
            clock, host = time.perf_counter(), time.process_time()
            for _ in range(repeated):
                step()
            if turn:
                found[level].append(((time.perf_counter() - clock) / repeated, (time.process_time() - host) / repeated))
    dt.check_ranks("watch")
    return found


def make_all_reduce(mesh: dt.DeviceMesh) -> Callable[[], None]:
    reduce, x = communicator_of(mesh).bind_all_reduce((0,), "sum", torch.float32), torch.ones(64)
    return lambda: reduce.run(x).wait()


def make_operations_step(mesh: dt.DeviceMesh) -> Callable[[], None]:
    """Return a step of ``OPERATIONS`` local operations and one all-reduce, at which the ranks' logs are compared."""
    reduce, x = make_all_reduce(mesh), dt.distribute_tensor(torch.ones(64), mesh, [dt.Shard(0)])

    def step() -> None:
        for _ in range(OPERATIONS):
            torch.add(x, x)
        reduce()

    return step


def make_training_step(mesh: dt.DeviceMesh) -> Callable[[], None]:
    """Return a training step of a fully sharded model of eight layers with AdamW."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(256, 256), nn.GELU()) for _ in range(8)))
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer, x = torch.optim.AdamW(model.parameters(), foreach=True), torch.ones(64, 256)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def time_checks(mesh: dt.DeviceMesh) -> float:
    """Return the seconds that level "watch" takes to log, compare and announce one collective, without the collective."""
    group = communicator_of(mesh)._group((0,))
    chain = get_or_make_log(ranks_of(group), group.handle, group.backend)
    assert chain is not None

    record = CollectiveRecord.of("all_reduce(sum) float32[64]", "('dp',)")

    def once() -> None:
        chain.log_and_compare(record)
        chain.begin_wait(chain.count)
        chain.end_wait()

    times = []
    for _ in range(20):
        begin = time.perf_counter()
        for _ in range(1000):
            once()
        times.append((time.perf_counter() - begin) / 1000)
    return min(times)


if __name__ == "__main__":
    main()
