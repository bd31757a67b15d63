"""Recorder cost: the overhead of recording collectives without listeners, for every row of ``dispatch.py``.

    python benchmarks/recorder_cost.py [--quick] [--only add "redistribute*"] [--again 3]

Both alternate in one process, on separate meshes and so with separate plans: one side's were bound with ``issue_for_cause``
and the check for listeners and ranges before a collective, the other's without. A row above 1.01 is measured again, ``--again``
times; rows that stay above it are listed at the end. Process group, sizes and clock are those of
``dispatch.py``.
"""

from __future__ import annotations

import argparse
import fnmatch
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from dispatch import build_case
from dispatching.cases import CASES
from measuring import timing
from measuring.sides import GRID, WORLD, Distributed
from torch.testing._internal.distributed.fake_pg import FakeStore

import dtensor
from dtensor.base.recorder_hooks import ACTIVE_RECORDERS, current_recorder
from dtensor.comm.communicator import Communicator
from dtensor.comm.processes import reductions, torch_backends, transfer
from dtensor.dispatch.programs import program
from dtensor.redistribute import coalesce, executor

LARGEST_RATIO = 1.01


def wrap_issue_without_listeners(
    self: Communicator, kind: str, dims: Any, run: Callable[..., Any], nbytes: Any
) -> Callable[..., Any]:
    """Replace ``Communicator._wrap_issue`` by a version without the check for listeners."""

    def issue(x: Any) -> Any:
        if ACTIVE_RECORDERS and (recorder := current_recorder()) is not None:
            return recorder.record_op(issue, (x,), {})
        return run(x)

    return issue


def bind_collective_without_recording(comm: Any, issue: Callable[..., Any], step: Any) -> executor.BoundStep:
    """Replace ``executor._bind_collective`` by a version without recording."""
    finish = executor._make_finisher(comm, step)
    if finish is None:
        return executor.BoundStep(lambda x: issue(x).wait(), issue)
    return executor.BoundStep(lambda x: finish(issue(x).wait()), lambda x: issue(x).then(finish))


def bind_all_reduce_without_recording(group: Any, op: Any) -> Callable[..., Any]:
    """Replace ``bind_native_all_reduce`` by a version without recording."""
    issue, options = group.handle.allreduce, torch_backends._async_options(dist.AllreduceOptions(), reduceOp=op)
    return lambda x: issue([x], options)


@contextmanager
def disable_recording() -> Iterator[None]:
    """Patch the library inside the context, so that collectives are bound and run without the recording code."""
    taken = [patch.object(Communicator, "_wrap_issue", wrap_issue_without_listeners)]
    taken += [
        patch.object(executor, "_bind_collective", bind_collective_without_recording),
        patch.object(reductions, "bind_native_all_reduce", bind_all_reduce_without_recording),
    ]
    taken += [patch.object(module, "issue_for_cause", lambda cause, fn: fn) for module in (program, coalesce)]
    for module in (transfer, reductions):
        names = [name for name in vars(module) if hasattr(getattr(torch_backends, name, None), "__wrapped__")]
        taken += [patch.object(module, name, getattr(module, name).__wrapped__) for name in names]
    for each in taken:
        each.start()
    try:
        yield
    finally:
        for each in reversed(taken):
            each.stop()


def enter_side(name: str) -> AbstractContextManager[None]:
    return disable_recording() if name == "without" else nullcontext()


def make_sides() -> dict[str, Distributed]:
    """Return the sides with and without recording on separate meshes, so that they share no plan."""
    found = {"with": Distributed(dtensor), "without": Distributed(dtensor)}
    for name, side in found.items():
        side.mesh = dtensor.init_device_mesh("cpu", (WORLD,), mesh_dim_names=(name,))
        side.mesh_2d = dtensor.init_device_mesh("cpu", GRID, mesh_dim_names=(f"dp {name}", f"tp {name}"))
    return found


def measure_ratio(name: str, effort: timing.Effort) -> tuple[float, float] | str:
    """Return the seconds of a case with recording and their ratio to those without, or the name of the error that was raised."""
    functions = {}
    for side_name, side in make_sides().items():
        with enter_side(side_name):
            functions[side_name] = build_case(CASES[name], side)
    taken = timing.time_interleaved(functions, effort, enter_side)
    within, without = taken["with"], taken["without"]
    if isinstance(within, str) or isinstance(without, str):
        return str(within)
    return within, within / without


def main() -> None:
    """Print the ratio of each row, measured again while it is too large, and the rows that stay too large."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repeats")
    parser.add_argument("--only", nargs="+", metavar="ROW", default=["*"], help="names or patterns (*) of rows")
    parser.add_argument("--again", type=int, default=3, help=f"how often a row over {LARGEST_RATIO} is measured again")
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    effort = timing.Effort.quick() if options.quick else timing.Effort(repeats=101, seconds=0.001)
    over: dict[str, float] = {}
    for name in CASES:
        if not any(fnmatch.fnmatch(name, pattern) for pattern in options.only):
            continue
        found = measure_ratio(name, effort)
        if isinstance(found, str):
            print(f"{name:24} {found}")
            continue
        ratios = [found[1]]
        while ratios[-1] > LARGEST_RATIO and len(ratios) <= options.again:
            again = measure_ratio(name, effort)
            ratios.append(LARGEST_RATIO if isinstance(again, str) else again[1])
        print(f"{name:24} {found[0] * 1e6:10.1f} us  {'  '.join(f'{ratio:.3f}' for ratio in ratios)}", flush=True)
        if min(ratios) > LARGEST_RATIO:
            over[name] = min(ratios)
    print(
        f"over {LARGEST_RATIO} in every measurement: {', '.join(f'{name} {ratio:.3f}' for name, ratio in over.items()) or 'none'}"
    )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
