"""Killable processes: ``run_killable`` runs one function on each rank of a gloo group, of which some may be killed."""

from __future__ import annotations

import faulthandler
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import torch
import torch.distributed as dist
from gloo_processes import _processes

DEAD = "killed"


def run_killable(
    fn: Callable[..., Any], world_size: int, *args: Any, kill: tuple[int, float] | None = None, timeout_s: float = 60.0
) -> list[Any]:
    """Run ``fn(*args)`` on each rank and return the results by rank, with ``DEAD`` for killed ranks.

    Args:
        kill: a rank to kill from outside, and the seconds to wait after all ranks are ready.

    Raises:
        RuntimeError: a rank raised, or did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="gloo-") as folder:
        ranks: list[tuple[BaseProcess, Connection]] = []
        for rank in range(world_size):
            ours, theirs = _processes.Pipe()
            process = _processes.Process(target=_run_rank, args=(theirs, fn, args, rank, world_size, folder, timeout_s))
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            for _, pipe in ranks:
                pipe.recv()
            for _, pipe in ranks:
                pipe.send("go")
            if kill is not None:
                time.sleep(kill[1])
                ranks[kill[0]][0].kill()
            return _collect_outcomes(ranks, time.monotonic() + timeout_s)
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()


def _run_rank(
    pipe: Connection, fn: Callable[..., Any], args: tuple[Any, ...], rank: int, size: int, folder: str, timeout_s: float
) -> None:
    """Join the gloo group in a new process, wait for all ranks, run ``fn`` and send its pickled result or traceback."""
    faulthandler.dump_traceback_later(timeout_s, exit=False)
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=size, timeout=timedelta(seconds=2 * timeout_s)
        )
        dist.barrier()
        pipe.send("ready")
        pipe.recv()
        pipe.send_bytes(pickle.dumps((True, fn(*args))))
        pipe.recv()  # nobody closes its connections while a slower rank still reads from them
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    os._exit(0)


def _collect_outcomes(ranks: list[tuple[BaseProcess, Connection]], deadline: float) -> list[Any]:
    """Receive the results of all ranks until the deadline, ``DEAD`` for a rank whose process ended; raise if a rank raised."""
    found: dict[int, Any] = {}
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise RuntimeError(f"ranks {sorted(waiting.values())} did not end in time; the others: {found}")
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except (EOFError, ConnectionResetError):
                succeeded, value = True, DEAD
            if not succeeded:
                raise RuntimeError(f"rank {rank}:\n{value}")
            found[rank] = value
    return [found[rank] for rank in range(len(ranks))]


class CallCounter:
    """Counts this process's calls of Python and built-in functions, and kills the process at the call number ``last``."""

    def __init__(self, last: int | None = None) -> None:
        self.count, self.last = 0, last

    def __call__(self, frame: Any, event: str, arg: Any) -> None:
        """Count one call; kill the process if it is the last one (profile function of ``sys.setprofile``)."""
        if event in ("call", "c_call"):
            self.count += 1
            if self.count == self.last:
                os.kill(os.getpid(), signal.SIGKILL)

    def __enter__(self) -> CallCounter:
        threading.setprofile(self)
        sys.setprofile(self)
        return self

    def __exit__(self, *exception: object) -> None:
        sys.setprofile(None)
        threading.setprofile(None)
