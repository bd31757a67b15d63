"""Predicted costs of plans compared with measured costs on gloo processes: bytes, peak memory, and which plan is faster.

    python benchmarks/predicted_costs.py [--ranks 4] [--width 256] [--layers 2] [--seconds 0.05]
    python benchmarks/predicted_costs.py --planning 32         # time of planning a Llama of 32 layers on a dry run of 512 x
            8 ranks

Two layers of attention and MLP are placed for data, tensor and fully sharded parallelism. Each step is planned as a program, as a
program within nine tenths of the memory of the first plan, and operator by operator. *Bytes* are those that one rank receives;
*peak* is the memory of the tensors of the busiest rank; *time* is the minimum over captured steps on their slowest rank, beside
the plan's prediction from a profile that ``dtensor calibrate`` measures first. The last line has the rank correlations of
predicted and measured times (Spearman), of all rows and of the plans of each step.

Needs the extra ``plan``; ``--planning`` the extra ``hf`` too.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn
from torch.nn import functional as F

import dtensor as dt
from dtensor.commands import calibrate
from dtensor.debug import CommDebugMode
from dtensor.plan.graph_recorder import record_graph
from dtensor.plan.liveness import MemoryModel
from dtensor.plan.make_plan import broadcast_result, make_plan
from dtensor.plan.plan_builder import eager_plan
from dtensor.plan.plan_executor import PlanExecutor
from dtensor.plan.strategy_options import recorded_options

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from live_memory import LiveTensorMemory  # as the tests count memory

WAYS = {
    "data": ({}, dt.Shard(0)),
    "tensor": ({"q": dt.Shard(0), "o": dt.Shard(1), "up": dt.Shard(0), "down": dt.Shard(1)}, dt.Replicate()),
    "fully sharded": (dict.fromkeys(("q", "o", "up", "down"), dt.Shard(0)), dt.Shard(0)),
}
HEADS, LENGTH = 4, 64
SECONDS = 10.0  # for each plan


@dataclass(frozen=True)
class Row:
    """Predicted and measured (bytes, peak bytes, seconds) of one step under one plan."""

    way: str
    plan: str
    predicted: tuple[int, int, float]  # bytes, peak, seconds
    measured: tuple[int, int, float]


def make_step(mesh: dt.DeviceMesh, way: str, width: int, layers: int) -> tuple[Callable[[], Any], list[dt.DTensor]]:
    """Return a training step of attention and MLP layers without an optimizer, and its tensors, the batch first."""
    cuts, spot = WAYS[way]
    generator = torch.Generator().manual_seed(0)
    sizes = {"q": (3 * width, width), "o": (width, width), "up": (4 * width, width), "down": (width, 4 * width)}

    def drawn(shape: tuple[int, ...], place: Any) -> dt.DTensor:
        return dt.distribute_tensor(torch.randn(*shape, generator=generator) / width**0.5, mesh, [place])

    weights = [
        {k: drawn(shape, cuts.get(k, dt.Replicate())).requires_grad_() for k, shape in sizes.items()} for _ in range(layers)
    ]
    x = drawn((8, LENGTH, width), spot)
    leaves = [p for w in weights for p in w.values()]

    def step() -> Any:
        for p in leaves:
            p.grad = None
        h = x
        for w in weights:
            q, k, v = F.linear(F.layer_norm(h, (width,)), w["q"]).view(8, LENGTH, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
            mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(8, LENGTH, width)
            h = h + F.linear(mixed, w["o"])
            h = h + F.linear(F.gelu(F.linear(F.layer_norm(h, (width,)), w["up"])), w["down"])
        loss = h.square().mean()
        loss.backward()
        return loss.detach()

    return step, [x, *leaves]


def make_plans(step: Callable[[], Any], given: Sequence[dt.DTensor]) -> dict[str, dt.ProgramPlan]:
    """Return the plans of one step by name: of the whole program, within nine tenths of its memory if possible, and operator by
    operator.
    """
    step()
    for p in given:
        p.grad = None
    _, graph = record_graph(step, (), {})
    assert graph.mesh is not None
    found = {"program": broadcast_result(graph.mesh, lambda: make_plan(graph, SECONDS))}
    least = 0.9 * found["program"].peak_bytes
    with suppress(dt.errors.PlanError):  # there is none
        found["within 0.9"] = broadcast_result(graph.mesh, lambda: make_plan(graph, SECONDS, least))
    found["by itself"] = eager_plan(
        found["program"], MemoryModel(graph).compute_usage(recorded_options(graph), without_plan=True).peak
    )
    return found


def measure_plan(step: Callable[[], Any], given: Sequence[dt.DTensor], plan: dt.ProgramPlan, runs: int) -> tuple[int, int, float]:
    """Run a step by a plan; return received bytes and peak bytes of the busiest rank, and the seconds of the slowest rank."""
    for p in given:
        p.grad = None
    with LiveTensorMemory(given) as live, CommDebugMode() as comm, PlanExecutor(plan) as following:
        step()
    assert following.is_complete, following.difference
    nbytes = sum(event.bytes for event in comm.events)
    run = dt.capture(step, plan=plan)
    while not run.cache_info().replayed:
        run()
    times = []
    for _ in range(runs):
        dist.barrier()
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (nbytes, live.peak, times))
    sizes, peaks, taken = zip(*told, strict=True)
    return max(sizes), max(peaks), min(map(max, zip(*taken, strict=True)))


def measure_rank(rank: int, ranks: int, folder: str, width: int, layers: int, runs: int) -> None:
    """Plan and measure all steps on one gloo rank; the first rank writes the rows to ``folder``."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    mesh, rows = dt.init_device_mesh("cpu", (ranks,)), []
    for way in WAYS:
        step, given = make_step(mesh, way, width, layers)
        for name, plan in make_plans(step, given).items():
            found = measure_plan(step, given, plan, runs)
            rows.append((way, name, (plan.nbytes, plan.peak_bytes, plan.seconds), found))
    if rank == 0:
        Path(folder, "rows").write_text(json.dumps(rows))
    dist.destroy_process_group()


def rank_correlation(a: Sequence[float], b: Sequence[float]) -> float:
    """Return Spearman's rank correlation of values without ties."""
    places = [[sorted(side).index(x) for x in side] for side in (a, b)]
    n = len(a)
    return 1 - 6 * sum((i - j) ** 2 for i, j in zip(*places, strict=True)) / (n * (n * n - 1))


def correlate_times(rows: Sequence[Row]) -> float:
    return rank_correlation([row.predicted[2] for row in rows], [row.measured[2] for row in rows])


def compare_costs(options: argparse.Namespace) -> None:
    """Measure a profile, run all ranks, and print predicted and measured costs with their rank correlations."""
    with tempfile.TemporaryDirectory(prefix="predicted-") as folder:
        profile = Path(folder, "profile.json")
        calibrate.run_calibration(options.ranks, "cpu", profile, options.seconds)
        os.environ["DTENSOR_PROFILE"] = str(profile)
        spawn(measure_rank, (options.ranks, folder, options.width, options.layers, options.runs), nprocs=options.ranks)
        rows = [Row(*row) for row in json.loads(Path(folder, "rows").read_text())]
    print(f"{'step':14} {'plan':11} {'bytes':>12} {'run':>12} {'peak':>12} {'run':>12} {'ratio':>6} {'time':>9} {'run':>9}  ms")
    for row in rows:
        (nbytes, peak, seconds), (received, held, taken) = row.predicted, row.measured
        sizes = f"{nbytes:12,} {received:12,} {peak:12,} {held:12,} {held / peak:6.3f}"
        print(f"{row.way:14} {row.plan:11} {sizes} {seconds * 1e3:9.2f} {taken * 1e3:9.2f}")
    each = {way: [row for row in rows if row.way == way] for way in WAYS}
    parts = [f"{way} {correlate_times(own):.2f}" for way, own in each.items() if len(own) > 1]
    print(f"order of times: all {correlate_times(rows):.2f}", *parts, sep=", ")


def time_planning(layers: int) -> None:
    """Plan a Llama of ``layers`` layers in a dry run of 512 x 8 ranks; print the seconds of planning and the plan's costs."""
    from costing.families import Size
    from program_cost import prepare_model

    size = Size(layers, 4096, 512, 4096, 128_256, (32, 8), 14_336, torch.bfloat16)
    mesh = dt.init_device_mesh("meta", (512, 8), mesh_dim_names=("dp", "tp"))
    with torch.device("meta"), dt.implicit_replication():
        model, inputs, _ = prepare_model("tp_dp", "llama", size, mesh)
        start = perf_counter()
        plan = dt.plan(lambda: model(**inputs).loss.backward())
    taken = perf_counter() - start
    print(f"{layers} layers, {len(plan.calls):,} calls on 512 x 8 ranks, planned in {taken:.1f} s:")
    print(f"{plan.seconds * 1e3:.1f} ms a step, {plan.nbytes:,} B received per rank;", end=" ")
    print(f"without a plan {plan.eager_seconds * 1e3:.1f} ms, {plan.eager_nbytes:,} B")


def main() -> None:
    """Compare predicted and measured costs, or time the planning of a large model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--seconds", type=float, default=0.05, help="of each measurement of the profile")
    parser.add_argument("--planning", type=int, metavar="LAYERS", help="time of planning instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if options.planning:
        time_planning(options.planning)
    else:
        compare_costs(options)


if __name__ == "__main__":
    main()
