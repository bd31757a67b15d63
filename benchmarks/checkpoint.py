"""Checkpoints on gloo: ``dtensor.checkpoint`` against ``torch.distributed.checkpoint`` with PyTorch's DTensors ("peer").

    python benchmarks/checkpoint.py [--quick] [--mb 64] [--rounds 5] [--ranks 4] [--json FILE]

The libraries alternate. Wall time is the slowest rank's, the median over rounds; both libraries flush files to disk. Bytes read
are those of the busiest rank, as the system counts them (``rchar`` of ``/proc/self/io``, manifests included), relative to the
bytes of its own blocks; reads of mapped memory (blocks inside one stored block, and runs shorter than a page) are not counted.
Peak memory is the largest growth of the busiest rank's resident set during the call.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import shutil
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

Row = dict[str, Any]
ROWS = 1024  # of each matrix; with 4-byte elements and 512 columns one is 2 MiB
COLUMNS = 512


def list_cases(ranks: int) -> list[tuple[str, tuple[int, ...], str, tuple[int, ...], str]]:
    """Return rows of name, mesh and placements at the save, mesh and placements at the load. In placements a digit shards that
    dim.
    """
    two = (2, ranks // 2)
    return [
        ("fsdp to fsdp", (ranks,), "0", (ranks,), "0"),
        ("fsdp to tp", (ranks,), "0", (ranks,), "1"),
        ("tp to fsdp", (ranks,), "1", (ranks,), "0"),
        ("fsdp + tp to fsdp", two, "01", (ranks,), "0"),
        ("fsdp to replicas of tp", (ranks,), "0", two, "R1"),
    ]


def make_state(side: ModuleType, mesh: Any, placements: str, count: int, filled: bool) -> dict[str, Any]:
    where = [side.Replicate() if p == "R" else side.Shard(int(p)) for p in placements]
    make = side.ones if filled else side.zeros
    return {f"layers.{k}.weight": make(ROWS, COLUMNS, device_mesh=mesh, placements=where) for k in range(count)}


# --- one rank --------------------------------------------------------------------------------------------------------------
def measure_rank(rank: int, store: str, options: argparse.Namespace, out: Any) -> None:
    """Save and load each case with both libraries in turn on one gloo rank; the first rank sends a summary of each case."""
    import torch.distributed.checkpoint as dcp
    import torch.distributed.tensor as peer

    import dtensor

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=options.ranks)
    count = max(1, options.mb * 2**20 // (ROWS * COLUMNS * 4))
    verbs: dict[str, tuple[ModuleType, Callable[..., Any], Callable[..., Any]]] = {
        "ours": (dtensor, dtensor.checkpoint.save, dtensor.checkpoint.load),
        "peer": (peer, lambda s, f: dcp.save(s, checkpoint_id=f), lambda s, f: dcp.load(s, checkpoint_id=f)),
    }
    for name, mesh, placements, mesh_then, placements_then in list_cases(options.ranks):
        rounds: dict[str, list[Row]] = {side: [] for side in verbs}
        for turn in range(options.rounds + 1):
            for side in list(verbs)[:: 1 if turn % 2 else -1]:
                module, save, load = verbs[side]
                folder = f"{options.folder}/{side}-{turn}"
                saved = make_state(module, module.init_device_mesh("cpu", mesh), placements, count, True)
                wanted = make_state(module, module.init_device_mesh("cpu", mesh_then), placements_then, count, False)
                row = measure_call("save", save, saved, folder) | measure_call("load", load, wanted, folder)
                assert all(bool((x.to_local() == 1).all()) for x in wanted.values())
                row["needed"] = sum(x.to_local().nbytes for x in wanted.values())
                if turn:  # the first round imports and connects
                    rounds[side].append(row)
                dist.barrier()
                if rank == 0:
                    shutil.rmtree(folder)
        gathered: list[Any] = [None] * options.ranks
        dist.all_gather_object(gathered, rounds)
        if rank == 0:
            out.send({"name": name} | {side: summarize_ranks([ranks[side] for ranks in gathered]) for side in verbs})
    dist.barrier()
    dist.destroy_process_group()


def measure_call(what: str, run: Callable[..., Any], *args: Any) -> Row:
    """Run a save or a load; return its seconds, the bytes that the process read and the growth of its resident memory."""
    dist.barrier()
    reset_peak_memory()
    before, read, start = get_resident_bytes("VmRSS"), get_bytes_read(), time.perf_counter()
    run(*args)
    wall = time.perf_counter() - start
    return {what: wall, f"{what} read": get_bytes_read() - read, f"{what} peak": max(0, get_resident_bytes("VmHWM") - before)}


def summarize_ranks(ranks: list[list[Row]]) -> Row:
    """Return the median over rounds of each measurement, of the slowest or busiest rank in each round."""
    per_round = [{key: max(row[key] for row in rows) for key in rows[0]} for rows in zip(*ranks, strict=True)]
    ratio = [max(row["load read"] / row["needed"] for row in rows) for rows in zip(*ranks, strict=True)]
    return {key: statistics.median(row[key] for row in per_round) for key in per_round[0]} | {
        "read ratio": statistics.median(ratio)
    }


def reset_peak_memory() -> None:
    ctypes.CDLL(None).malloc_trim(0)  # what was freed before would hide what is taken now
    Path("/proc/self/clear_refs").write_text("5")


def get_resident_bytes(which: str) -> int:
    """Return ``VmRSS`` or ``VmHWM`` of this process in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(which))
    return int(line.split()[1]) * 1024


def get_bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split()[1])


# --- what is shown ---------------------------------------------------------------------------------------------------------
def format_row(row: Row) -> str:
    """Return a line of the table: times, bytes read and peak memory of one case in both libraries."""
    ours, peer = row["ours"], row["peer"]
    cells = [f"{row['name']:24}"]
    for what in ("save", "load"):
        cells.append(f"{ours[what] * 1e3:8.0f} {peer[what] * 1e3:8.0f} {ours[what] / peer[what]:6.2f}")
    cells.append(f"{ours['read ratio']:7.3f} {peer['read ratio']:6.3f}")
    for what in ("save peak", "load peak"):
        cells.append(f"{ours[what] / 2**20:7.1f} {peer[what] / 2**20:7.1f}")
    return "  ".join(cells)


def main() -> None:
    """Run all ranks, print their rows, and exit with an error if a rank failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="16 MB, 2 rounds")
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--json")
    options = parser.parse_args()
    if options.quick:
        options.mb, options.rounds = 16, 2
    rows = []
    print(
        f"{options.ranks} ranks, {options.mb} MiB of float32 in matrices of {ROWS} x {COLUMNS}, {os.cpu_count()} cores, "
        f"torch {torch.__version__}"
    )
    print(
        f"{'':24}  {'save ms':>8} {'peer':>8} {'ratio':>6}  {'load ms':>8} {'peer':>8} {'ratio':>6}  "
        f"{'read/needed':>11} peer  {'save MiB':>7} {'peer':>6}  {'load MiB':>7} {'peer':>6}"
    )
    spawner = mp.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="checkpoint-") as folder:
        options.folder = folder
        reader, writer = spawner.Pipe(duplex=False)
        ranks = [spawner.Process(target=measure_rank, args=(r, f"{folder}/store", options, writer)) for r in range(options.ranks)]
        for process in ranks:
            process.start()
        writer.close()
        try:
            while True:
                rows.append(reader.recv())
                print(format_row(rows[-1]), flush=True)
        except EOFError:
            pass
        for process in ranks:
            process.join(30)
            process.kill()
    if options.json:
        Path(options.json).write_text(
            json.dumps({"options": vars(options) | {"torch": torch.__version__}, "rows": rows}, indent=1)
        )
    sys.exit(any(process.exitcode for process in ranks))


if __name__ == "__main__":
    main()
