"""Where the microseconds of one operation go, part by part; what no Python subclass of a tensor can do without is its floor.

    make profile      or      python benchmarks/dispatch_parts.py

Smallest of many repeats, 8 x 8 locals, torch's fake process group. "round trip" is an operator on a subclass whose
``__torch_dispatch__`` does nothing: torch's way from Python through C++ to Python and back. "look-up" is what
remains of the whole.
"""

from __future__ import annotations

import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

import timing
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

import dtensor as dt
from dtensor.dispatch import wrap_local


class Idle(torch.Tensor):
    """Answers every operator with a plain tensor that was made before."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return ANSWERS.pop()


ANSWERS: list[torch.Tensor] = []  # each is used once: autograd turns the answer of a view operator into a view
COUNT = 2000


def refill() -> None:
    ANSWERS[:] = [torch.empty(0) for _ in range(COUNT)]


OPERATIONS: dict[str, tuple[Callable[..., object], int]] = {
    "add": (torch.add, 2),
    "mm": (torch.mm, 2),
    "t": (torch.t, 1),
    "detach": (torch.detach, 1),
    "softmax": (lambda x: torch.softmax(x, -1), 1),
    "transpose": (lambda x: x.transpose(0, 1), 1),
}


def best(run: Callable[[], object], repeats: int = 30) -> float:
    """Microseconds."""
    refill()
    run()
    return min(timeit.repeat(run, refill, number=COUNT, repeat=repeats)) / COUNT * 1e6


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    mesh = dt.init_device_mesh("cpu", (8,))
    local = torch.rand(8, 8)
    x = dt.DTensor.from_local(local, mesh, [dt.Replicate()])
    idle = torch.Tensor._make_wrapper_subclass(Idle, (8, 8))
    wrapper = best(lambda: wrap_local(local, x.layout))
    print(*(f"{key:8} {value}" for key, value in timing.machine().items()), "", sep="\n")
    print(f"{'microseconds':12} {'whole':>7} {'local op':>9} {'round trip':>11} {'wrapper':>8} {'look-up':>8} {'floor':>7}")
    for name, (op, operands) in OPERATIONS.items():
        whole, plain, trip = (best(partial(op, *(t,) * operands)) for t in (x, local, idle))
        floor = plain + trip + wrapper
        print(f"{name:12} {whole:7.2f} {plain:9.2f} {trip:11.2f} {wrapper:8.2f} {whole - floor:8.2f} {floor:7.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
