"""Dispatch parts: host time of one operation part by part, and the minimum that any Python tensor subclass needs.

    make profile      or      python benchmarks/dispatch_parts.py             torch's fake group of 8 ranks
    torchrun --standalone --nproc-per-node 2 benchmarks/dispatch_parts.py     gloo
    python benchmarks/dispatch_parts.py --in-process 4                        all ranks in this process

CPU time of one thread, 8 x 8 locals. "round trip" is an operator on a subclass whose ``__torch_dispatch__`` does nothing: torch's
path from Python through C++ to Python and back. "look-up" is the remainder of the whole call. The second table compares lists of
100 parameters with a subclass that only unwraps, runs the operator and wraps: no look-up, no count of writes.
"""

from __future__ import annotations

import argparse
import gc
import os
import time
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from measuring import timing
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types as optimizer_types
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._foreach_utils import _foreach_supported_types as foreach_types

import dtensor as dt
from dtensor.state.wrap import wrap_local


class ConstantResultTensor(torch.Tensor):
    """Tensor subclass that answers every operator with a prepared plain tensor, without running it."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return ANSWERS.pop()


class MinimalWrapperTensor(torch.Tensor):
    """Tensor subclass that unwraps, runs the operator and wraps."""

    __slots__ = ("_local",)
    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _wrap_value(func(*[_unwrap_value(x) for x in args], **(kwargs or {})))


def wrap_minimally(local: Tensor) -> Any:
    made = torch.Tensor._make_wrapper_subclass(MinimalWrapperTensor, local.shape, dtype=local.dtype, device=local.device)
    made._local = local
    return made


def _unwrap_value(value: Any) -> Any:
    if type(value) is list:
        return [x._local for x in value] if value and type(value[0]) is MinimalWrapperTensor else value
    return value._local if type(value) is MinimalWrapperTensor else value


def _wrap_value(value: Any) -> Any:
    return (
        [wrap_minimally(x) for x in value]
        if type(value) is list
        else wrap_minimally(value)
        if type(value) is torch.Tensor
        else value
    )


ANSWERS: list[torch.Tensor] = []  # each is used once: autograd turns the answer of a view operator into a view
COUNT = 2000


def refill_answers() -> None:
    ANSWERS[:] = [torch.empty(0) for _ in range(COUNT)]


OPERATIONS: dict[str, tuple[Callable[..., object], int]] = {
    "add": (torch.add, 2),
    "mm": (torch.mm, 2),
    "t": (torch.t, 1),
    "detach": (torch.detach, 1),
    "softmax": (lambda x: torch.softmax(x, -1), 1),
    "transpose": (lambda x: x.transpose(0, 1), 1),
}


def measure_microseconds(run: Callable[[], object], repeats: int = 30) -> float:
    """Return the microseconds of one call of ``run``, the minimum over ``repeats`` rounds."""
    refill_answers()
    run()
    return min(timeit.repeat(run, refill_answers, number=COUNT, repeat=repeats, timer=time.thread_time)) / COUNT * 1e6


def measure_parts(mesh: dt.DeviceMesh) -> list[str]:
    """Return the lines of the first table: each operation's whole time, its parts and their sum without the look-up."""
    local = torch.rand(8, 8)
    x = dt.DTensor.from_local(local, mesh, [dt.Replicate()])
    idle = torch.Tensor._make_wrapper_subclass(ConstantResultTensor, (8, 8))
    wrapper = measure_microseconds(lambda: wrap_local(x._local, x.layout))
    lines = [f"{'microseconds':18} {'whole':>7} {'local op':>9} {'round trip':>11} {'wrapper':>8} {'look-up':>8} {'floor':>7}"]
    for name, (op, operands) in OPERATIONS.items():
        whole, plain, trip = (measure_microseconds(partial(op, *(t,) * operands)) for t in (x, x._local, idle))
        floor = plain + trip + wrapper
        lines.append(f"{name:18} {whole:7.2f} {plain:9.2f} {trip:11.2f} {wrapper:8.2f} {whole - floor:8.2f} {floor:7.2f}")
    return lines


def measure_parameter_lists(mesh: dt.DeviceMesh, count: int = 100) -> list[str]:
    """Return the lines of the second table: optimizer steps and foreach operators over ``count`` parameters on three sides."""
    optimizer_types.append(MinimalWrapperTensor)
    foreach_types.append(MinimalWrapperTensor)
    sides: dict[str, Callable[[Tensor], Any]] = {
        "plain": lambda local: local,
        "bare": wrap_minimally,
        "dtensor": lambda local: dt.DTensor.from_local(local, mesh, [dt.Shard(0)]),
    }

    def parameters(make: Callable[[Tensor], Any]) -> list[nn.Parameter]:
        made = [nn.Parameter(make(torch.rand(8, 8))) for _ in range(count)]
        for parameter in made:
            parameter.grad = make(torch.rand(8, 8))
        return made

    steps: dict[str, Callable[[list[nn.Parameter]], Callable[[], object]]] = {
        "AdamW, foreach": lambda given: torch.optim.AdamW(given, foreach=True).step,
        "SGD, momentum": lambda given: torch.optim.SGD(given, lr=1e-3, momentum=0.9, foreach=True).step,
        "_foreach_mul_": lambda given: partial(torch._foreach_mul_, [x.detach() for x in given], 1.0),
        "_foreach_sqrt": lambda given: partial(torch._foreach_sqrt, [x.detach() for x in given]),
    }
    lines = [f"{count} parameters, us {'plain':>9} {'bare subclass':>14} {'dtensor':>8}"]
    for name, step in steps.items():
        found = timing.time_interleaved({side: step(parameters(make)) for side, make in sides.items()}, timing.Effort(repeats=31))
        cells = [value if isinstance(value, str) else f"{value * 1e6:.0f}" for value in found.values()]
        lines.append(f"{name:18} {cells[0]:>9} {cells[1]:>14} {cells[2]:>8}")
    return lines


def main() -> None:
    """Print both tables for the process group that the launcher or the options choose."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--in-process", type=int, metavar="RANKS", help="all ranks in this process")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
        where = f"gloo, {dist.get_world_size()} processes"
    elif not options.in_process:
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
        where = "fake group of 8"
    else:
        where = f"{options.in_process} ranks in this process"
    mesh = dt.init_device_mesh("cpu", (options.in_process or dist.get_world_size(),))
    gc.disable()
    lines = [
        *(f"{key:8} {value}" for key, value in timing.describe_machine().items()),
        f"ranks    {where}",
        "",
        *measure_parts(mesh),
        "",
    ]
    lines += measure_parameter_lists(mesh)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(*lines, sep="\n")
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
