"""Timing: host time of several functions for the same work, measured in turn so that noise of the machine affects all equally.
Host time is the processor time of the calling thread. Nothing here waits, so on a quiet machine it equals wall time, and on a
busy one it leaves out the time of other programs.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from time import thread_time

import torch


@dataclass(frozen=True, slots=True)
class Effort:
    """How long to measure: ``repeats`` rounds, in each of which every function runs for about ``seconds``."""

    repeats: int = 51
    seconds: float = 0.002
    warmup: int = 5

    @staticmethod
    def quick() -> Effort:
        return Effort(repeats=7, seconds=0.001, warmup=3)


def time_interleaved(
    functions: Mapping[str, Callable[[], object]],
    effort: Effort,
    around: Callable[[str], AbstractContextManager[object]] = nullcontext,
) -> dict[str, float | str]:
    """Return each function's median seconds, or the name of the error that it raised. The functions alternate, each round in
    another order, so that noise of the machine affects all equally. Each turn of a function runs inside ``around(name)``, which
    is not timed.
    """
    result: dict[str, float | str] = {}
    counts: dict[str, int] = {}
    for name, function in functions.items():
        try:
            with around(name):
                counts[name] = _calls_per_round(function, effort)
        except Exception as error:
            result[name] = type(error).__name__
    times: dict[str, list[float]] = {name: [] for name in counts}
    for repeat in range(effort.repeats):
        names = list(counts)
        for name in names[repeat % len(names) :] + names[: repeat % len(names)] if names else ():
            with around(name):
                times[name].append(_time_calls(functions[name], counts[name]) / counts[name])
    return {name: result[name] if name in result else statistics.median(times[name]) for name in functions}


def time_first_calls(rounds: Iterable[Mapping[str, Callable[[], object]]]) -> dict[str, float | str]:
    """Return each function's median time in its first call. Each round makes new ones; the first round does not count."""
    times: dict[str, list[float]] = {}
    errors: dict[str, float | str] = {}
    for number, functions in enumerate(rounds):
        for name, function in functions.items():
            try:
                time = _time_calls(function, 1)
            except Exception as error:
                errors[name] = type(error).__name__
                continue
            times.setdefault(name, []).extend([time] if number else [])
    return errors | {name: statistics.median(found) for name, found in times.items() if name not in errors}


def _calls_per_round(function: Callable[[], object], effort: Effort) -> int:
    for _ in range(effort.warmup):
        function()
    return max(1, round(effort.seconds / max(1e-7, _time_calls(function, 3) / 3)))


def _time_calls(function: Callable[[], object], count: int) -> float:
    """Return the seconds of thread time of ``count`` calls, without garbage collection."""
    calls = range(count)
    gc.collect(0)
    gc.disable()
    try:
        start = thread_time()
        for _ in calls:
            function()
        return thread_time() - start
    finally:
        gc.enable()


def geometric_mean(values: Iterable[float]) -> float:
    """Return the geometric mean of the values that are positive numbers; NaN if there are none."""
    positive = [value for value in values if value > 0]
    return statistics.geometric_mean(positive) if positive else math.nan


def describe_machine() -> dict[str, str]:
    """Return the processor, its cores, the versions of the software and the commit of a measurement."""
    return {
        "cpu": _get_cpu_name(),
        "cores": str(os.cpu_count()),
        "system": platform.platform(),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
        "commit": _get_commit(),
    }


def _get_cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())


def _get_commit() -> str:
    command = ["git", "-C", str(Path(__file__).parent), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip() or "unknown"
    except OSError:
        return "unknown"
