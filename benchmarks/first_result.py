"""First result: time to the first operators in a fresh process, with ``dtensor`` and ``torch.distributed.tensor`` ("peer") in
turn.

    python benchmarks/first_result.py [--rounds 10] [--imports]

Each process imports torch, which both need, and then one library. It makes a mesh of four ranks and runs the first
``distribute_tensor``, ``matmul``, ``add``, ``relu`` and ``sum``. "ours" and "peer" use torch's fake process group of four ranks,
and "ours, in process" needs no process group. Processor time of the process: medians over rounds, smallest values in brackets.
``--imports`` lists the packages that a process imports after torch, with the time of each (``-X importtime``).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path

from measuring import timing

ROOT = Path(__file__).parents[1]
SIDES = ("ours, in process", "ours", "peer")
PROGRAM = """
import sys, time
times = {{}}

def timed(name, function):
    start = time.process_time()
    result = function()
    times[name] = time.process_time() - start
    return result

def import_torch():
    import torch.distributed

def import_library():
    if {side!r} == "peer":
        import torch.distributed.tensor as library
    else:
        import dtensor as library
    return library

def make_mesh():
    make = dist.device_mesh.init_device_mesh if {side!r} == "peer" else library.init_device_mesh
    return make("cpu", (4,))

timed("import torch", import_torch)
print("AFTER TORCH", file=sys.stderr)
import torch
import torch.distributed as dist
if {side!r} != "ours, in process":
    from torch.testing._internal.distributed.fake_pg import FakeStore
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
library = timed("import library", import_library)
mesh = timed("mesh", make_mesh)
a, b = torch.rand(8, 8), torch.rand(8, 8)
x = timed("distribute_tensor", lambda: library.distribute_tensor(a, mesh, [library.Shard(0)]))
w = timed("distribute_tensor, second", lambda: library.distribute_tensor(b, mesh, [library.Replicate()]))
y = timed("matmul", lambda: x @ w)
y = timed("add", lambda: y + y)
y = timed("relu", lambda: torch.relu(y))
timed("sum", lambda: y.sum())
import json
print(json.dumps(times))
"""


def run_process(side: str, *options: str) -> tuple[dict[str, float], str]:
    """Run the program of one side in a fresh process. Return the seconds of its parts, and its standard error."""
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    command = [sys.executable, *options, "-c", PROGRAM.format(side=side)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT, env=variables | {"OMP_NUM_THREADS": "1"})
    times: dict[str, float] = json.loads(done.stdout)
    times["after torch"] = sum(seconds for part, seconds in times.items() if part != "import torch")
    return times, done.stderr


def measure(rounds: int) -> dict[str, list[dict[str, float]]]:
    """Return the times of each round by side. The first round of each side, which may compile files, does not count."""
    found: dict[str, list[dict[str, float]]] = {side: [] for side in SIDES}
    for number in range(rounds + 1):
        for side in SIDES:
            times, _ = run_process(side)
            found[side] += [times] if number else []
    return found


def format_table(found: dict[str, list[dict[str, float]]]) -> str:
    """Return the table of medians in milliseconds, with smallest times in brackets and the ratios to PyTorch."""

    def cell(side: str, part: str) -> str:
        times = [1000 * one[part] for one in found[side]]
        return f"{statistics.median(times):10.1f} ({min(times):.1f})"

    lines = [f"{'ms':28}" + "".join(f"{side:>22}" for side in SIDES)]
    lines += [f"{part:28}" + "".join(f"{cell(side, part):>22}" for side in SIDES) for part in found[SIDES[0]][0]]
    for name, choose in (("median", statistics.median), ("smallest", min)):
        after = {side: choose([one["after torch"] for one in found[side]]) for side in SIDES}
        ratios = (after[side] / after["peer"] for side in SIDES)
        lines.append(f"{'ratio of ' + name + ', after torch':28}" + "".join(f"{ratio:22.2f}" for ratio in ratios))
    return "\n".join(lines)


def list_imports(side: str) -> str:
    """Return the packages that one side's process imports after torch, with their numbers of modules and own milliseconds."""
    _, errors = run_process(side, "-X", "importtime")
    counts, spent = Counter[str](), Counter[str]()
    for line in errors.partition("AFTER TORCH\n")[2].splitlines():
        if line.startswith("import time:"):
            microseconds, _, module = line.removeprefix("import time:").split("|")
            package = ".".join(module.strip().split(".")[:2])
            counts[package] += 1
            spent[package] += int(microseconds)
    total = f"{side}: {counts.total()} modules, {spent.total() / 1000:.0f} ms"
    return "\n".join([total, *(f"  {name:34} {counts[name]:5} {own / 1000:8.1f} ms" for name, own in spent.most_common(25))])


def main() -> None:
    """Measure fresh processes and print the table, JSON, or the imported packages."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="fresh processes of each side")
    parser.add_argument("--imports", action="store_true", help="list the modules that are imported instead")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    options = parser.parse_args()
    if options.imports:
        print(*map(list_imports, SIDES), sep="\n\n")
        return
    about, found = timing.describe_machine(), measure(options.rounds)
    if options.json:
        print(json.dumps({"machine": about, "unit": "seconds", "rounds": found}, indent=1))
    else:
        print(*(f"{key:8} {value}" for key, value in about.items()), "", format_table(found), sep="\n")


if __name__ == "__main__":
    main()
