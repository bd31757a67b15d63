"""Plan: planning time of redistributions, for random pairs of layouts on meshes of 8 to 4,096 ranks.

    python benchmarks/plan.py [--pairs 200] [--json FILE]

Host time of ``plan(src, dst)`` without the cache, in milliseconds: median, 95th percentile and maximum. The kinds are the
placements allowed on a mesh dim: R and S (replicated, or sharded along one of two tensor dims), and P (also partial sums).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import statistics
from pathlib import Path
from time import thread_time
from typing import Any

import torch
from measuring import timing

from dtensor import DeviceMesh, Partial, Replicate, Shard
from dtensor.layout.layout import Layout
from dtensor.redistribute import plan

MESHES = ((2, 2, 2), (4, 4, 4), (8, 8, 8), (16, 16, 16), (2,) * 6, (4,) * 6)
KINDS: dict[str, list[Any]] = {"R S": [Replicate(), Shard(0), Shard(1)], "R S P": [Replicate(), Shard(0), Shard(1), Partial()]}


def time_plans(mesh: DeviceMesh, choices: list[Any], pairs: int) -> list[float]:
    """Return the sorted seconds of planning ``pairs`` random redistributions on a mesh; none is planned twice."""
    draw, found = random.Random(0), []
    for _ in range(pairs + 5):
        shape = tuple(draw.randint(500, 5000) for _ in range(3))
        src, dst = (Layout.of(mesh, draw.choices(choices, k=mesh.ndim), shape) for _ in range(2))
        start = thread_time()
        plan(src, dst)
        found.append(thread_time() - start)
    return sorted(found[5:])  # the first ones fill the tables of the mesh


def main() -> None:
    """Print median, 95th percentile and maximum of the planning time for each mesh and kind of placements."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=int, default=200)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    about = timing.describe_machine()
    print(*(f"{key:8} {value}" for key, value in about.items()), "", sep="\n")
    print(f"{'mesh':14} {'ranks':>6} {'kinds':6} {'median':>8} {'95 %':>8} {'most':>8}  ms")
    rows = []
    for shape in MESHES:
        mesh = DeviceMesh("cpu", torch.arange(math.prod(shape)).reshape(shape))
        for kinds, choices in KINDS.items():
            gc.collect()
            gc.disable()
            found = time_plans(mesh, choices, options.pairs)
            gc.enable()
            row = {
                "mesh": "x".join(map(str, shape)),
                "kinds": kinds,
                "median": statistics.median(found),
                "p95": found[int(0.95 * len(found))],
                "most": found[-1],
            }
            rows.append(row)
            cells = " ".join(f"{row[what] * 1e3:8.3f}" for what in ("median", "p95", "most"))
            print(f"{row['mesh']:14} {math.prod(shape):6,} {kinds:6} {cells}")
    if options.json:
        Path(options.json).write_text(json.dumps({"machine": about, "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
