"""Steps of captured programs: a tensor-parallel MLP and a transformer block, forward and backward, AdamW over 100 parameters, and
the block's whole training step, on one rank's host.

    python benchmarks/captured_steps.py [--quick] [--json] [--compiled aot_eager] [--only "TP MLP"]

Columns: "by hand" is Megatron-LM's program (local tensors, explicit all-reduces, one autograd function each), "plain" the same
local work without any communication, "peer" ``torch.distributed.tensor``, "ours" ``dtensor`` uncaptured, "captured" the same
under ``dtensor.capture``. The process group is torch's fake one of 8 ranks: a collective costs only its call. All sides alternate
in one process. ``--compiled BACKEND`` adds "ours, compiled" and "peer, compiled" (by ``torch.compile``; an error is shown by its
name). The last columns are captured / by hand, peer / by hand and ours / by hand.
"""

from __future__ import annotations

import argparse
import functools
import json
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from dispatching.cases import SEQUENCE, WIDTH, N, _make_parameters, make_block
from measuring import megatron_gpt, timing
from measuring.sides import WORLD, Plain, make_all_sides
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

import dtensor as dt

Run = Callable[[], None]


class ByHand(Plain):
    """Local tensors and explicit all-reduces."""

    def reduce(self, x: Tensor) -> Tensor:
        return megatron_gpt._SumOverRanks.apply(x, dist.group.WORLD)

    def enter(self, x: Tensor) -> Tensor:
        """Return the input of sharded layers; its gradient is summed over ranks."""
        return megatron_gpt._CopyToRanks.apply(x, dist.group.WORLD)


class WithoutCommunication(Plain):
    """Local tensors without communication."""

    def reduce(self, x: Tensor) -> Tensor:
        return x


def _run_uncaptured(x: Any) -> Any:
    return x


def make_mlp_step(side: Any, around: Callable[[Any], Any]) -> Run:
    """Return a step of forward and backward of a tensor-parallel MLP, its forward pass wrapped by ``around``."""
    x = side.replicate(N, N)
    up, down = side.shard(0, N, N).requires_grad_(), side.shard(1, N, N).requires_grad_()
    loss = around(lambda x: side.reduce(F.linear(F.gelu(F.linear(x, up)), down)).sum())

    def step() -> None:
        up.grad = down.grad = None
        loss(x).backward()

    return step


def make_block_step(side: Any, around: Callable[[Any], Any]) -> Run:
    """Return a step of forward and backward of a transformer block, its forward pass wrapped by ``around``."""
    module = make_block(side)
    module.enter = getattr(side, "enter", _run_uncaptured)
    x = side.replicate(1, SEQUENCE, WIDTH)
    loss = around(lambda x: module(x).sum())

    def step() -> None:
        module.zero_grad()
        loss(x).backward()

    return step


def make_adamw_step(side: Any, around: Callable[[Any], Any]) -> Run:
    """Return AdamW's step over 100 parameters, wrapped by ``around``."""
    step: Run = around(torch.optim.AdamW(_make_parameters(side, 100), lr=1e-3, fused=True).step)
    return step


def make_block_training_step(side: Any, around: Callable[[Any], Any]) -> Run:
    """Return a training step of a transformer block; ``around`` wraps forward, backward, AdamW and clearing the gradients as one
    function.
    """
    module = make_block(side)
    module.enter = getattr(side, "enter", _run_uncaptured)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)
    x = side.replicate(1, SEQUENCE, WIDTH)

    def step(x: Any) -> Any:
        loss = module(x).sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = around(step)
    return lambda: run(x)


CASES = {
    "TP MLP": make_mlp_step,
    "TP block": make_block_step,
    "AdamW, 100": make_adamw_step,
    "block, step": make_block_training_step,
}


def measure_cases(effort: timing.Effort, names: Sequence[str], backend: str | None) -> dict[str, dict[str, Any]]:
    """Return each named case's median seconds by column, or the name of the error that a column raised."""
    sides = make_all_sides()
    rows = {}
    for name in names:
        case = CASES[name]
        functions = {
            "plain": case(WithoutCommunication(), _run_uncaptured),
            "by hand": case(ByHand(), _run_uncaptured),
            "peer": case(sides["peer"], _run_uncaptured),
            "ours": case(sides["ours"], _run_uncaptured),
            "captured": case(sides["ours"], dt.capture),
        }
        if backend is not None:
            torch._dynamo.reset()
            around = functools.partial(torch.compile, backend=backend)
            functions |= {"ours, compiled": case(sides["ours"], around), "peer, compiled": case(sides["peer"], around)}
        rows[name] = timing.time_interleaved(functions, effort)
    return rows


def main() -> None:
    """Print the seconds of all cases and columns, and the ratios to the program by hand."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--compiled", metavar="BACKEND", help="also under torch.compile")
    parser.add_argument("--only", nargs="+", metavar="ROW", choices=CASES, default=list(CASES))
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    effort = timing.Effort.quick() if options.quick else timing.Effort(seconds=0.005)
    rows = measure_cases(effort, options.only, options.compiled)
    if options.json:
        print(json.dumps({"machine": timing.describe_machine(), "rows": rows}, indent=2))
        return
    print(
        f"{'microseconds':12}"
        + "".join(f"{side:>{_column_width(side)}}" for side in next(iter(rows.values())))
        + "   captured / peer / ours : by hand"
    )
    for name, row in rows.items():
        ratios = " ".join(f"{row[side] / row['by hand']:9.2f}" for side in ("captured", "peer", "ours"))
        cells = ((side, value if isinstance(value, str) else f"{value * 1e6:.0f}") for side, value in row.items())
        print(f"{name:12}" + "".join(f"{cell:>{_column_width(side)}}" for side, cell in cells) + f"   {ratios}")


def _column_width(side: str) -> int:
    return max(10, len(side) + 2)


if __name__ == "__main__":
    main()
