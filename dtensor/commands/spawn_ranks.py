"""Spawn ranks: run a function on new processes, one for each rank, for the measurements and tests of the command line."""

from __future__ import annotations

import multiprocessing
import os
import queue
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..errors import DTensorError


def spawn_ranks(
    ranks: int, rows: Callable[..., Iterator[Any]], *args: Any, seconds: float = 600.0, device_type: str = "cpu"
) -> Iterator[Any]:
    """Run the generator ``rows(*args)`` on ``ranks`` new processes, and yield what rank 0 yields, as it arrives.

    Args:
        rows: a generator function of a module, so that processes can import it.
        device_type: the group is gloo, or NCCL for ``"cuda"``.
        seconds: time limit; processes that still run then are killed.

    Raises:
        DTensorError: a process raises, dies or does not end in time. The message has its error.
    """
    context = multiprocessing.get_context("spawn")
    messages: Any = context.Queue()
    with tempfile.TemporaryDirectory(prefix="dtensor-") as directory:
        common = (ranks, directory, device_type, messages, rows, args)
        processes = [context.Process(target=_run_rank, args=(k, *common), daemon=True) for k in range(ranks)]
        for process in processes:
            process.start()
        try:
            yield from _collect_messages(messages, processes, time.monotonic() + seconds, seconds)
        finally:
            for process in processes:
                process.join(5.0)
                process.kill()


def _collect_messages(messages: Any, processes: list[Any], deadline: float, seconds: float) -> Iterator[Any]:
    """Yield the rows that the processes send; raise if one fails, dies, or the deadline passes."""

    def exited_ranks() -> list[str]:
        return [f"rank {k} died (exit code {p.exitcode})" for k, p in enumerate(processes) if p.exitcode]

    running = len(processes)
    while running:
        try:
            kind, value = messages.get(timeout=0.2)
        except queue.Empty:
            late = f"{len(processes)} processes did not end within {seconds:.0f} s (a firewall on loopback, a slow machine?)"
            if (exited := exited_ranks()) or time.monotonic() > deadline:
                raise DTensorError("; ".join(exited) or late) from None
            continue
        if kind == "error":  # the death of another process may be its cause
            raise DTensorError("; ".join([*exited_ranks(), value]))
        if kind == "row":
            yield value
        running -= kind == "end"


def _run_rank(
    rank: int, ranks: int, folder: str, device_type: str, messages: Any, rows: Callable[..., Iterator[Any]], args: tuple[Any, ...]
) -> None:
    """Run the generator ``rows`` as one rank of a process group; rank 0 sends what it yields, a failing rank its error."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // ranks))
    try:
        store = f"file://{Path(folder) / 'store'}"
        if device_type == "cuda":
            torch.cuda.set_device(rank)
        backend = "nccl" if device_type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=store, rank=rank, world_size=ranks, timeout=timedelta(minutes=5))
        for row in rows(*args):
            if rank == 0:
                messages.put(("row", row))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        where = traceback.format_tb(error.__traceback__)[-1].strip().partition("\n")[0]
        messages.put(("error", f"rank {rank}: {type(error).__name__}: {error} ({where})"))
    else:
        messages.put(("end", None))
