"""Process pool of gloo ranks that run programs, each in a new world, and report the outcome of every rank."""

from __future__ import annotations

import faulthandler
import importlib
import multiprocessing
import os
import signal
import tempfile
import time
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from gloo_processes import _processes

_processes.set_forkserver_preload(["torch", "torch.distributed.pipelining", "dtensor"])  # unless it has started
TIMEOUT_S = float(os.environ.get("DTENSOR_CHAOS_TIMEOUT", "300"))  # of the process groups, longer than any promised wait


class Outcome(NamedTuple):
    """Outcome of a program on one rank.

    Attributes:
        kind: "result", "error" (class and words follow), "exit" (a signal, as -9, or an exit code), "timeout".
        seconds: duration.
    """

    kind: str
    name: str
    words: str
    value: Any
    seconds: float


class Pool:
    """Pool that starts processes when needed, and again after one is lost."""

    def __init__(self, size: int, level: str = "watch", *, fresh: bool = False, apart: bool = False) -> None:
        self.size, self._level, self._apart = size, level, apart
        # spawned processes have different hash seeds
        self._context: Any = multiprocessing.get_context("spawn") if fresh else _processes
        self._ranks: list[tuple[BaseProcess, Connection]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="pool-")
        self._count = 0

    @property
    def running(self) -> bool:
        return bool(self._ranks)

    def run(self, name: str, all_do: str = "", timeout_s: float = 100.0) -> list[Outcome]:
        """Run a program of the table on each rank; ``all_do`` "usual" or "other" makes all ranks do that."""
        return self.run_program(name, all_do, timeout_s)

    def run_program(self, program: Any, all_do: str = "", timeout_s: float = 100.0) -> list[Outcome]:
        """Run a program object on each rank."""
        if not self._ranks:
            self._start()
        self._count += 1
        begin = time.monotonic()
        for _, pipe in self._ranks:
            pipe.send((program, all_do, f"{self._folder.name}/{self._count}"))
        found = self._collect(begin, begin + timeout_s)
        if any(outcome.kind in ("exit", "timeout") for outcome in found):
            self._end()
        return found

    def close(self) -> None:
        self._end()
        self._folder.cleanup()

    def _end(self) -> None:
        for process, pipe in self._ranks:
            process.kill()
            process.join()
            pipe.close()
        self._ranks = []

    def _start(self) -> None:
        for rank in range(self.size):
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_main, args=(theirs, rank, self.size, self._level, self._apart))
            process.start()
            theirs.close()
            self._ranks.append((process, ours))
        for _, pipe in self._ranks:
            pipe.recv()

    def _collect(self, begin: float, deadline: float) -> list[Outcome]:
        found: dict[int, Outcome] = {}
        waiting = {pipe: rank for rank, (_, pipe) in enumerate(self._ranks)}
        while waiting and (ready := wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                assert isinstance(pipe, Connection)
                rank, seconds = waiting.pop(pipe), time.monotonic() - begin
                try:
                    found[rank] = Outcome(*pipe.recv(), seconds)
                except (EOFError, ConnectionResetError):
                    self._ranks[rank][0].join(2.0)
                    found[rank] = Outcome("exit", str(self._ranks[rank][0].exitcode), "", None, seconds)
        for rank in waiting.values():
            found[rank] = Outcome("timeout", "", "", None, time.monotonic() - begin)
        return [found[rank] for rank in range(self.size)]


def _main(pipe: Connection, rank: int, size: int, level: str, apart: bool) -> None:
    faulthandler.enable()
    signal.signal(signal.SIGINT, signal.default_int_handler)  # shells ignore SIGINT for background jobs
    torch.set_num_threads(1)
    if apart:  # as if each rank were on another host
        importlib.import_module("dtensor.watchdog.host_state")._host_identity = lambda: f"host {rank}"
    importlib.import_module("divergent_programs").warm_up(level)
    importlib.import_module("all_divergent_programs")
    pipe.send("ready")
    with suppress(EOFError):
        while True:
            program, all_do, store = pipe.recv()
            pipe.send(_outcome(program, all_do, store, rank, size))
    os.kill(os.getpid(), signal.SIGKILL)


def _outcome(program: Any, all_do: str, store: str, rank: int, size: int) -> tuple[str, str, str, Any]:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=timedelta(seconds=TIMEOUT_S)
    )
    os.environ["POOL_FOLDER"] = store
    try:
        if isinstance(program, str):
            program = importlib.import_module("all_divergent_programs").PROGRAMS[program]
        value = program.run(rank, all_do)
        time.sleep(0.2)  # other ranks may still be reading
        _leave()
        return "result", "", "", value
    except (Exception, KeyboardInterrupt) as error:
        _leave()
        return "error", type(error).__name__, str(error), None


def _leave() -> None:
    time.sleep(0.2)  # the watchdog looks ten times a second
    with suppress(Exception):
        dist.destroy_process_group()
    time.sleep(0.2)
