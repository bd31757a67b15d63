"""Gloo processes: ``run_gloo`` runs one function on each rank of a real gloo group, fails loudly and never hangs."""

from __future__ import annotations

import contextlib
import faulthandler
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

IMPORTS_S = 60.0  # until a rank has begun
GRACE_S = 2.0  # after the first failure: the others may be about to tell the cause, then they wait for a dead peer

# The fork server imports torch once; each rank is then a fork of a process that has run no op and started no thread.
_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload(["torch", "torch.distributed", "dtensor"])


class RankFailed(RuntimeError):
    """A rank raised, died or timed out; the message has its traceback."""


def run_gloo(fn: Callable[..., Any], world_size: int, *args: Any, timeout_s: float = 120.0) -> list[Any]:
    """Run ``fn(*args)`` on ``world_size`` processes with a gloo group and return the results in rank order. ``fn`` and ``args``
    are pickled, so ``fn`` is a module-level function. The group's rendezvous is a file, so that runs use no port and do not
    interfere.

    Raises:
        RankFailed: with the traceback of the first rank that failed, or every rank's stack after ``timeout_s`` seconds.
    """
    with tempfile.TemporaryDirectory(prefix="gloo-") as folder:
        ranks: list[tuple[BaseProcess, Connection]] = []
        for rank in range(world_size):
            ours, theirs = _processes.Pipe(duplex=False)
            process: BaseProcess = _processes.Process(
                target=_rank_main, args=(theirs, fn, args, rank, world_size, folder, timeout_s), name=f"gloo-rank-{rank}"
            )
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            for _, pipe in ranks:  # what ``fn`` imports is loaded by now
                with contextlib.suppress(EOFError):
                    if pipe.poll(timeout_s + IMPORTS_S):
                        pipe.recv_bytes()
            return _collect_results(ranks, Path(folder), time.monotonic() + timeout_s + GRACE_S)
        finally:
            for process, _ in ranks:
                process.kill()
                process.join()


def _rank_main(
    pipe: Connection, fn: Callable[..., Any], args: tuple[Any, ...], rank: int, world_size: int, folder: str, timeout_s: float
) -> None:
    """Join the gloo group in a new process, run ``fn`` and send its pickled result or its traceback through the pipe."""
    stacks = open(f"{folder}/stacks-{rank}", "w")  # noqa: SIM115 - faulthandler writes to it until the process ends
    faulthandler.enable(stacks)
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=stacks)
    pipe.send_bytes(b"begun")
    try:
        torch.set_num_threads(1)
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/store",
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        try:
            pipe.send_bytes(pickle.dumps((True, fn(*args))))
            dist.barrier()  # nobody closes its connections while a slower rank still reads from them
        finally:
            dist.destroy_process_group()
    except BaseException:
        pipe.send_bytes(pickle.dumps((False, traceback.format_exc())))
    faulthandler.cancel_dump_traceback_later()


def _collect_results(ranks: list[tuple[BaseProcess, Connection]], folder: Path, deadline: float) -> list[Any]:
    """Receive the results of all ranks until the deadline; raise ``RankFailed`` if a rank fails, dies or is late."""
    results: dict[int, Any] = {}
    failures: list[str] = []
    waiting = {pipe: rank for rank, (_, pipe) in enumerate(ranks)}
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            break
        for pipe in ready:
            assert isinstance(pipe, Connection)
            rank = waiting.pop(pipe)
            try:
                succeeded, value = pickle.loads(pipe.recv_bytes())
            except EOFError:  # it died without a word: a signal, os._exit, or faulthandler's time-out
                ranks[rank][0].join(GRACE_S)
                succeeded, value = False, f"exit code {ranks[rank][0].exitcode}\n{_read_if_exists(folder / f'stacks-{rank}')}"
            if succeeded:
                results[rank] = value
            else:
                failures.append(f"--- rank {rank} of {len(ranks)} ---\n{value}")
                deadline = min(deadline, time.monotonic() + GRACE_S)
    if failures:
        still = f"\n--- ranks still running: {sorted(waiting.values())} ---" if waiting else ""
        raise RankFailed("\n" + "\n".join(failures) + still)
    if waiting:
        raise RankFailed(f"ranks {sorted(waiting.values())} did not end in time")
    return [results[rank] for rank in range(len(ranks))]


def _read_if_exists(path: Path) -> str:
    return path.read_text() if path.exists() else ""
