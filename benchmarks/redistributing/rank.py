"""Rank of ``redistribute.py``: measures every case for both libraries in turn in the same process."""

from __future__ import annotations

import gc
import logging
import math
import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor as peer
from redistributing import cases as rc
from redistributing.cases import Case
from redistributing.lower_bound import make_bare_exchange
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import dtensor
from dtensor.debug import CommDebugMode

SIDES: dict[str, ModuleType] = {"peer": peer, "ours": dtensor}


@dataclass(frozen=True)
class Effort:
    """Rounds per case, and the seconds for which each library runs in a round."""

    rounds: int = 7
    seconds: float = 0.03

    @staticmethod
    def quick() -> Effort:
        return Effort(3, 0.01)


class CollectiveCounter(TorchDispatchMode):
    """Dispatch mode that counts functional collectives and the bytes that this rank receives by the usual ring algorithms."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.bytes = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Count an operator if it is a functional collective, and run it."""
        kind = func._schema.name.partition("::")[2]
        shares = {
            "all_gather_into_tensor": lambda n: n - 1,
            "reduce_scatter_tensor": lambda n: (n - 1) / n,
            "all_reduce": lambda n: 2 * (n - 1) / n,
            "all_to_all_single": lambda n: (n - 1) / n,
        }
        if kind in shares and isinstance(args[0], torch.Tensor):
            group = dist.distributed_c10d._resolve_process_group(args[-1])
            self.count += 1
            self.bytes += shares[kind](group.size()) * args[0].numel() * args[0].itemsize
        return func(*args, **(kwargs or {}))


def measure_rank(rank: int, path: str, options: Any, pipe: Any) -> None:
    """Measure all cases on one gloo rank; the first rank sends a row per case through ``pipe``."""
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore")
    dist.init_process_group(
        "gloo", init_method=f"file://{path}", rank=rank, world_size=options.world, timeout=timedelta(seconds=300)
    )
    try:
        for case in rc.list_cases(options.world, options.sizes, options.only, options.meshes):
            row = _measure_case(case, rank, options.effort)
            if rank == 0:
                pipe.send(row)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def _measure_case(case: Case, rank: int, effort: Effort) -> dict[str, Any]:
    """Check and measure one case for both libraries and the bare exchange, and return its row."""
    calls = {name: _make_call(case, rank, library) for name, library in SIDES.items()}
    errors = {name: _check_result(case, rank, call) for name, call in calls.items()}
    row: dict[str, Any] = {
        "name": case.name,
        "mesh": case.mesh,
        "pair": case.pair,
        "size": case.size,
        "even": case.even,
        "bound": case.bound,
    }
    for name, call in calls.items():
        row[name] = (
            {"error": errors[name]}
            if errors[name] not in ("", "wrong")
            else {"error": errors[name], **_measure_cost(call, name, case)}
        )
    running = {name: call for name, call in calls.items() if "collectives" in row[name]}
    bare = make_bare_exchange(case, rank)
    if bare is not None:
        assert torch.equal(bare(), case.blocks(case.dst)[rank].of(rc.make_global_tensor(case))), (
            f"{case.name}: the floor itself is wrong"
        )
        running["bare"] = bare
        row["bare"] = {}
    row["ours"]["planned_peak"] = _planned_peak(case, rank)
    for name, (wall, cpu) in _measure_times(running, effort, case).items():
        row[name] |= {"wall": wall, "cpu": cpu}
    gc.collect()
    return row


def _planned_peak(case: Case, rank: int) -> int:
    x, mesh = _make_source(case, rank, dtensor)
    return int(x.explain_redistribute(rc.make_placements(dtensor, case.dst), device_mesh=mesh).peak_bytes)


def _make_call(case: Case, rank: int, library: ModuleType) -> Callable[[], Any]:
    x, mesh = _make_source(case, rank, library)
    dst = rc.make_placements(library, case.dst)
    return lambda: x.redistribute(mesh, dst)


def _make_source(case: Case, rank: int, library: ModuleType) -> tuple[Any, Any]:
    """Return the source DTensor of a library for this rank, and its mesh, which is made once for each library and shape."""
    make = library.init_device_mesh if hasattr(library, "init_device_mesh") else dist.device_mesh.init_device_mesh
    mesh = _MESHES.setdefault((library, case.mesh), make("cpu", case.mesh)) if (library, case.mesh) in _MESHES else None
    if mesh is None:
        mesh = _MESHES[library, case.mesh] = make("cpu", case.mesh)
    src = rc.make_placements(library, case.src)
    x = library.DTensor.from_local(
        rc.make_local_tensor(case, rank), mesh, src, run_check=False, shape=torch.Size(case.shape), stride=(case.shape[1], 1)
    )
    return x, mesh


_MESHES: dict[Any, Any] = {}


def _check_result(case: Case, rank: int, call: Callable[[], Any]) -> str:
    """Return "" if the call gives the right block on all ranks, else "wrong" or the name of the error, equal on every rank."""
    try:
        got = call()
        if "P" in case.dst:
            got = got.redistribute(got.device_mesh, [p.__class__() if p.is_partial() else p for p in got.placements])
            after = ["R" if p == "P" else p for p in case.dst]
            got = got.redistribute(got.device_mesh, rc.make_placements(peer if isinstance(got, peer.DTensor) else dtensor, after))
        want = rc.Case.blocks(case, case.dst)[rank].of(rc.make_global_tensor(case))
        mine = "" if torch.equal(got.to_local(), want) else "wrong"
    except Exception as error:
        mine = type(error).__name__
    found: list[Any] = [None] * case.ranks
    dist.all_gather_object(found, mine)
    return max(found, key=len)


def _measure_cost(call: Callable[[], Any], name: str, case: Case) -> dict[str, Any]:
    """Return collectives, bytes received and peak memory of the busiest rank, with its source included in the peak."""
    call()
    if name == "peer":
        with CollectiveCounter() as traffic:
            call()
        count, received = traffic.count, int(traffic.bytes)
    else:
        with CommDebugMode() as seen:
            call()
        count, received = len(seen.events), sum(event.bytes for event in seen.events)
    with _discard_stderr(), profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        kept = call()
    now = most = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    del kept
    source = 4 * max(math.prod(block.size) for block in case.blocks(case.src))
    found: list[Any] = [None] * case.ranks
    dist.all_gather_object(found, (count, received, most + source))
    count, received, most = (max(column) for column in zip(*found, strict=True))
    return {"collectives": count, "bytes": received, "peak": most}


@contextmanager
def _discard_stderr() -> Iterator[None]:
    """Discard stderr by its file descriptor, to which the profiler's library writes directly."""
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _measure_times(calls: dict[str, Callable[[], Any]], effort: Effort, case: Case) -> dict[str, tuple[float, float]]:
    """Return the median seconds of each call: wall time of the slowest rank, CPU time of all ranks together."""
    counts = {name: _choose_call_count(call, effort, case) for name, call in calls.items()}
    mine: dict[str, list[tuple[float, float]]] = {name: [] for name in calls}
    for k in range(effort.rounds if max(counts.values(), default=0) > 1 else max(3, effort.rounds // 2)):
        for name in list(calls)[:: 1 if k % 2 else -1]:
            mine[name].append(_time_calls(calls[name], counts[name]))
    every: list[Any] = [None] * case.ranks
    dist.all_gather_object(every, mine)
    result = {}
    for name in calls:
        rounds = list(zip(*(ranks[name] for ranks in every), strict=True))
        walls, cpus = ([combine(times[i] for times in one) for one in rounds] for i, combine in ((0, max), (1, sum)))
        result[name] = (_median(walls), _median(cpus))
    return result


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _time_calls(call: Callable[[], Any], count: int) -> tuple[float, float]:
    """Return wall and CPU seconds per call of ``count`` calls, after a barrier and without garbage collection."""
    gc.collect(0)
    gc.disable()
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        call()
    spent = (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count
    gc.enable()
    return spent


def _choose_call_count(call: Callable[[], Any], effort: Effort, case: Case) -> int:
    """Return how often to call in a round, so that the slowest rank takes about ``effort.seconds``; equal on all ranks."""
    wall, _ = _time_calls(call, 2)
    slowest = torch.tensor([wall])
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return max(1, min(1000, round(effort.seconds / slowest.item())))
