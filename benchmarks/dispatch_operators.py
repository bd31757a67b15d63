"""Dispatch of operators: whole calls of torch's operator samples relative to PyTorch DTensor ("peer"): distribution and slowest
ratios.

    python benchmarks/dispatch_operators.py [--only add mm] [--worst 40] [--json FILE]

The first sample of each operator in torch's database that fits, on a 2 x 4 mesh of torch's fake process group: tensors sharded
along tensor dim 0 over the first mesh dim ("S"), or replicated ("R"); forward, and forward with gradients. CPU time of the
calling thread, the best of five turns. Operators that one of the libraries refuses are counted separately.
"""

from __future__ import annotations

import argparse
import json
import warnings
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from measuring import timing
from measuring.sides import Distributed, peer
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._pytree import tree_leaves, tree_map

import dtensor

Run = Callable[[], object]
EFFORT = timing.Effort(repeats=5, seconds=0.003, warmup=3)


class Row(NamedTuple):
    """Seconds of one operator on each side, or the error that it raises."""

    name: str
    placed: str
    gradients: bool
    peer: float | str
    ours: float | str

    @property
    def ratio(self) -> float | None:
        return None if isinstance(self.peer, str) or isinstance(self.ours, str) else self.ours / self.peer


def distribute_value(side: Distributed, x: Any, cut: bool) -> Any:
    """Distribute a tensor over the side's 2-D mesh, as a leaf that requires gradients if ``x`` does; return other values
    unchanged.
    """
    if not isinstance(x, torch.Tensor):
        return x
    shard, replicate = side.library.Shard, side.library.Replicate
    placements = [shard(0) if cut and x.ndim else replicate(), replicate()]
    local = (x.detach().chunk(2)[0] if cut and x.ndim else x.detach()).clone(memory_format=torch.contiguous_format)
    stride = torch.empty(x.shape, device="meta").stride()
    made = side.library.DTensor.from_local(local, side.mesh_2d, placements, shape=x.shape, stride=stride, run_check=False)
    return made.requires_grad_(x.requires_grad)


def is_usable_sample(sample: Any, cut: bool) -> bool:
    """Return whether all tensors of a sample are non-empty, not large, and evenly sharded along dim 0 if ``cut``."""
    if not isinstance(sample.input, (torch.Tensor, list, tuple)):
        return False
    tensors = [x for x in tree_leaves((sample.input, sample.args, sample.kwargs)) if isinstance(x, torch.Tensor)]
    return all(0 < x.numel() <= 100_000 and not (cut and x.ndim and x.shape[0] % 2) for x in tensors)


def make_call(op: Any, side: Distributed, sample: Any, cut: bool, gradients: bool) -> Run:
    """Return a function that calls the operator on the sample's distributed tensors, and computes gradients if ``gradients``."""
    first, args, kwargs = tree_map(lambda x: distribute_value(side, x, cut), (sample.input, sample.args, sample.kwargs))

    def outputs() -> list[Any]:
        made = tree_leaves(op(first, *args, **kwargs))
        return [x for x in made if isinstance(x, torch.Tensor) and x.requires_grad]

    if not gradients:
        return lambda: op(first, *args, **kwargs)
    leaves = [x for x in tree_leaves((first, args, kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad]
    seeds = [torch.ones_like(x) for x in outputs()]
    if not seeds:
        raise ValueError("nothing to differentiate")
    return lambda: torch.autograd.grad(outputs(), leaves, seeds, allow_unused=True)


def measure_operators(only: list[str]) -> Iterator[Row]:
    """Yield the rows of each operator: sharded and replicated, forward and with gradients."""
    sides = {"peer": Distributed(peer), "ours": Distributed(dtensor)}
    for op in op_db:
        name = f"{op.name}.{op.variant_test_name}".removesuffix(".")
        if torch.float32 not in op.supported_dtypes("cpu") or (only and op.name not in only):
            continue
        for cut, gradients in ((cut, gradients) for cut in (True, False) for gradients in (False, True)):
            if gradients and not op.supports_autograd:
                continue
            samples = islice(op.sample_inputs("cpu", torch.float32, requires_grad=gradients), 12)
            sample = next((each for each in samples if is_usable_sample(each, cut)), None)
            if sample is not None:
                yield Row(name, "S" if cut else "R", gradients, **_measure_sample(op, sides, sample, cut, gradients))


def _measure_sample(op: Any, sides: dict[str, Distributed], sample: Any, cut: bool, gradients: bool) -> dict[str, Any]:
    """Return the seconds of both libraries for one sample, or "refused" and the name of the error if one of them raises."""
    runs: dict[str, Run] = {}
    for name, side in sides.items():
        try:
            runs[name] = make_call(op, side, sample, cut, gradients)
        except Exception as error:
            return {"peer": "refused", "ours": "refused"} | {name: type(error).__name__}
    return timing.time_interleaved(runs, EFFORT)


def format_report(rows: list[Row], worst: int) -> Iterator[str]:
    """Yield the lines of the report: the distribution of ratios by kind, and the slowest rows."""
    found = sorted(((row.ratio, row) for row in rows if row.ratio is not None), key=lambda pair: -pair[0])
    yield f"{'whole calls, ours / peer':28} {'rows':>5} {'mean':>5} {'median':>6} {'p90':>5} {'> 1':>4} {'> 0.8':>5}"
    for gradients in (False, True):
        for cut in "SR":
            own = sorted(ratio for ratio, row in found if (row.gradients, row.placed) == (gradients, cut))
            if own:
                mean = timing.geometric_mean(own)
                cells = f"{mean:5.2f} {own[len(own) // 2]:6.2f} {own[len(own) * 9 // 10]:5.2f}"
                above = [sum(ratio > bound for ratio in own) for bound in (1, 0.8)]
                what = f"{'with gradients' if gradients else 'forward'}, {cut}"
                yield f"{what:28} {len(own):5} {cells} {above[0]:4} {above[1]:5}"
    yield f"not on both sides: {len(rows) - len(found)}"
    for ratio, row in found[:worst]:
        kind = "with gradients" if row.gradients else "forward"
        yield f"{row.name:44} {row.placed} {kind:14} {row.peer * 1e6:8.1f} {row.ours * 1e6:8.1f} {ratio:5.2f}"


def main() -> None:
    """Measure the operators on a fake process group and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[], metavar="OPERATOR", help="names of operators")
    parser.add_argument("--worst", type=int, default=40, metavar="N", help="how many to list")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all rows")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    rows = list(measure_operators(options.only))
    print(
        *(f"{key:8} {value}" for key, value in timing.describe_machine().items()),
        "",
        *format_report(rows, options.worst),
        sep="\n",
    )
    if options.json:
        options.json.write_text(json.dumps([{**row._asdict(), "ratio": row.ratio} for row in rows], indent=1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
