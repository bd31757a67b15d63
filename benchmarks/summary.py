"""Summary: run the benchmarks that compare ``dtensor`` with PyTorch, and write ``docs/performance.md``, its figures and rows of
README.

    python benchmarks/summary.py [--quick] [--data build/summary.json] [--only host captured training memory redistribution first]

Each part runs another benchmark of this folder in its own process, one thread for each rank. ``--data`` keeps the results, and
parts that it has are not run again. So the page can be written anew without a measurement; delete the file to measure again.
Run it on a machine where nothing else runs: 15 minutes on two cores, or 5 with ``--quick``. The figures need matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from measuring import timing

ROOT = Path(__file__).parents[1]
PAGE, PICTURES = ROOT / "docs" / "performance.md", ROOT / "docs" / "pictures"
TABLES = (ROOT / "README.md", ROOT / "docs" / "index.md")  # pages with the table of figures against PyTorch
SMALL_CASES = ("tp2", "tp4", "fsdp2", "fsdp4", "hsdp2x2", "fsdp2xtp2", "ddp2", "ddp4", "zero2")
MEDIUM_CASES = ("tp2", "fsdp2", "ddp2", "hsdp2x2")
OPERATORS: tuple[str, ...] = ("add", "mm", "sum", "softmax", "layer_norm", "view", "cat", "slice, other dim")
OPERATORS += ("linear, 3-D input", "gelu", "embedding", "cross_entropy", "sdpa, batch cut", "redistribute S -> R")
SIDES = {  # side -> label, color
    "plain": ("plain torch", "#9aa5b1"),
    "by hand": ("hand-written", "#9aa5b1"),
    "peer": ("PyTorch", "#d98c4a"),
    "ours": ("dtensor", "#3b6fb5"),
    "captured": ("dtensor, captured", "#5fa777"),
    "ours, compiled": ("dtensor, compiled", "#8e6bb0"),
    "peer, compiled": ("PyTorch, compiled", "#b08e6b"),
}


# --- measuring ---------------------------------------------------------------------------------------------------------
def run_benchmark(script: str, *arguments: str) -> Any:
    """Run a benchmark and return the JSON that it prints, or writes to the file that replaces ``FILE`` in its arguments."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "rows.json")
        command = [sys.executable, str(ROOT / "benchmarks" / script), *(str(file) if a == "FILE" else a for a in arguments)]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        return json.loads(file.read_text() if file.exists() else done.stdout[done.stdout.index("{") :])


def measure_part(part: str, quick: bool) -> Any:
    """Run the benchmarks of one part of the page and return their rows."""
    fast, rounds = (["--quick"] if quick else []), "5" if quick else "15"
    match part:
        case "host":
            return run_benchmark("dispatch.py", "--json", *fast)["rows"]
        case "captured":
            return run_benchmark("captured_steps.py", "--json", "--compiled", "aot_eager", *fast)["rows"]
        case "training":
            small = run_benchmark("train_step.py", "--json", "--quick", "--rounds", rounds, "--only", *SMALL_CASES)
            return {"small": small, "medium": run_benchmark("train_step.py", "--json", "--rounds", "7", "--only", *MEDIUM_CASES)}
        case "memory":
            memory = ("--json", "--memory", "--only", "tp2", "fsdp2")
            return {
                "small": run_benchmark("train_step.py", "--quick", *memory),
                "medium": run_benchmark("train_step.py", *memory),
            }
        case "redistribution":
            sizes = ("--worlds", "4", "--sizes", "16 KB", "256 KB", "4 MB")
            return run_benchmark("redistribute.py", "--quick", *sizes, "--json", "FILE")["rows"]
        case _:
            return run_benchmark("first_result.py", "--json", "--rounds", "3" if quick else "10")


# --- numbers -----------------------------------------------------------------------------------------------------------
def microseconds(value: Any) -> str:
    return f"{value * 1e6:.1f}" if isinstance(value, float) else "raises"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def average_transitions(rows: Sequence[Any]) -> dict[str, dict[str, float]]:
    """Return for each pair of placements the geometric mean times and ratio over meshes and sizes."""
    means: dict[str, dict[str, float]] = {}
    for pair in dict.fromkeys(row["pair"] for row in rows):
        some = [row for row in rows if row["pair"] == pair and "wall" in row["ours"]]
        both = [row for row in some if "wall" in row["peer"]]
        means[pair] = {
            "cases": len(some),
            "ours": timing.geometric_mean(row["ours"]["wall"] * 1e3 for row in some),
            "peer": timing.geometric_mean(row["peer"]["wall"] * 1e3 for row in both),
            "ratio": timing.geometric_mean(row["ours"]["wall"] / row["peer"]["wall"] for row in both),
        }
    return means


# --- figures -----------------------------------------------------------------------------------------------------------
def draw_bars(name: str, title: str, unit: str, groups: dict[str, dict[str, float]]) -> str:
    """Draw grouped horizontal bars to a file of ``docs/pictures``, and return the line of Markdown that shows it."""
    import matplotlib as mpl  # optional: only figures need it

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": name, "svg.fonttype": "none", "font.size": 9})
    from matplotlib import pyplot

    sides = list(dict.fromkeys(side for bars in groups.values() for side in bars))
    high = 0.8 / len(sides)
    figure, axes = pyplot.subplots(figsize=(7.5, 0.5 + 0.16 * (len(sides) + 1) * len(groups)), layout="constrained")
    for k, side in enumerate(sides):
        places = [(i + k * high, bars[side]) for i, bars in enumerate(groups.values()) if side in bars]
        axes.barh([at for at, _ in places], [value for _, value in places], high, label=SIDES[side][0], color=SIDES[side][1])
    axes.set(yticks=[i + 0.4 - high / 2 for i in range(len(groups))], yticklabels=list(groups), xlabel=unit, xscale="log")
    axes.invert_yaxis()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(PICTURES / f"{name}.svg", metadata={"Date": None})
    return f"![{title}](pictures/{name}.svg)"


# --- sections ----------------------------------------------------------------------------------------------------------
HOST = """## Host time of an operator

{table}

{picture}

Over all {rows} rows of `benchmarks/dispatch.py`, a call takes {whole:.2f} of PyTorch's time. Its overhead over plain torch is
{overhead:.2f} of PyTorch's. A first call, which plans, takes {first:.2f} ({first_rows} rows).

Why: a repeated call looks up one key, made of interned layouts and static arguments. Then it runs a list of bound steps.
PyTorch's DTensor makes a schema of each call and hashes it.
"""
CAPTURED = """## Host time of a captured or compiled program

Microseconds of one rank. Compiled is `torch.compile(backend="aot_eager")`.

{table}

Why: `dt.capture` replays the local operators and collectives of a recorded call. No module code, dispatch or autograd runs.
"""
TRAINING = """## Training steps

Forward, backward and AdamW of a Llama-shaped model on gloo processes. Small is 2 layers of width 64, medium 4 layers of width
256. [Training steps](measurements/training.md) explains the cases.

{tables}

{picture}

Why: under TP the host time of operators decides, and it is about half. Under FSDP a unit's gathers and reductions are one
collective each, issued before they are needed. DDP issues the same all-reduces as PyTorch's. The hooks of
PyTorch's are in C++.
"""
MEMORY = """## Memory of a rank

Growth of resident memory to its peak in three steps, MiB. It includes the modules that a library imports.

{table}

Why: a redistributed copy lives as long as its tensor, so the backward pass does not gather again.
`DTENSOR_CACHED_COPIES_BYTES` limits these copies.
"""
REDISTRIBUTION = """## Redistribution

Four gloo processes, a mesh of 4 and one of 2 x 2, tensors of 16 KB to 4 MB. Means are geometric. Over all transitions the ratio
is {whole:.2f}.

{table}

{picture}

Why: a planner sends each element once, from a rank that has it to a rank that needs it. PyTorch's DTensor changes one mesh dim
after the other.
"""
FIRST = """## Time to the first result

Processor time of a fresh process up to the fifth operator on four ranks, milliseconds, medians. The sides take turns.

{table}

Why: no operator imports `torch.distributed.tensor`, sympy or Dynamo, and shapes are inferred without Python meta kernels.
"""
AHEAD = """## Where PyTorch is ahead

In this run dtensor took longer here (ratio of times):

{table}

Two other points have no figure. PyTorch's DTensor runs in production on many GPUs, and it has symmetric memory.
"""
HEAD = """# Performance

After this page you know how fast the library is compared with PyTorch's own, and where it is slower.

`python benchmarks/summary.py` writes this page, its figures and the figures of README. Each table is from one run: {where}.
PyTorch is `torch.distributed.tensor`, FSDP2, `DistributedDataParallel` or `ZeroRedundancyOptimizer`.
Programs of one table took turns in one process, except for memory. [Measurements](measurements/README.md) has all rows.
"""


def is_first_call(row: Any) -> bool:
    return str(row["name"]).startswith("cold")


def write_host_section(rows: Sequence[Any]) -> str:
    """Return the section about host time of operators, and draw its figure."""
    hot = {row["name"]: row for row in rows if not is_first_call(row)}
    first = [row["whole"] for row in rows if is_first_call(row) and row["whole"]]
    shown = [hot[name] for name in OPERATORS if not isinstance(hot[name]["peer"], str)]
    sides = ("plain", "peer", "ours")
    bars = {row["name"]: {side: row[side] * 1e6 for side in sides} for row in shown}
    cells = [[f"`{row['name']}`", *(microseconds(row[side]) for side in sides), f"{row['whole']:.2f}"] for row in shown]
    return HOST.format(
        table=table(["operator", "plain torch, us", "PyTorch, us", "dtensor, us", "dtensor / PyTorch"], cells),
        picture=draw_bars("performance_host", "Host time of operators by library", "microseconds", bars),
        rows=len(hot),
        whole=timing.geometric_mean(row["whole"] for row in hot.values() if row["whole"]),
        overhead=timing.geometric_mean(row["ratio"] for row in hot.values() if row["ratio"]),
        first=timing.geometric_mean(first),
        first_rows=len(first),
    )


def write_captured_section(rows: dict[str, Any]) -> str:
    sides = [side for side in SIDES if side in next(iter(rows.values()))]
    cells = [[name, *(microseconds(row[side]) for side in sides)] for name, row in rows.items()]
    return CAPTURED.format(table=table(["program", *(SIDES[side][0] for side in sides)], cells))


def step_ratio(row: Any) -> float:
    return float(row["ours"]["ms"] / row["peer"]["ms"])


def write_training_section(rows: dict[str, Any]) -> str:
    """Return the section about training steps, and draw its figure."""
    sides = ("by hand", "peer", "ours")
    head = ["case", "hand-written, ms", "PyTorch, ms", "dtensor, ms", "dtensor / PyTorch"]
    tables: list[str] = []
    bars: dict[str, dict[str, float]] = {}
    for size, found in rows.items():
        times = {case: {side: row[side]["ms"] for side in sides} for case, row in found.items()}
        cells = [
            [f"`{case}`", *(f"{value:.1f}" for value in row.values()), f"{step_ratio(found[case]):.2f}"]
            for case, row in times.items()
        ]
        tables.append(f"{size.capitalize()}:\n\n{table(head, cells)}")
        bars |= {f"{case}, {size}": row for case, row in times.items()}
    picture = draw_bars("performance_training", "Training steps by library", "milliseconds of a step", bars)
    return TRAINING.format(tables="\n\n".join(tables), picture=picture)


def write_memory_section(rows: dict[str, Any]) -> str:
    """Return the section about the memory of a rank."""
    sides = ("by hand", "peer", "ours")
    cells = [
        [f"`{case}`, {size}", *(f"{found[side]['peak_mib']:.0f}" for side in sides)]
        for size, cases in rows.items()
        for case, found in cases.items()
    ]
    return MEMORY.format(table=table(["case", "hand-written", "PyTorch", "dtensor"], cells))


def write_redistribution_section(rows: Sequence[Any]) -> str:
    """Return the section about redistribution, and draw its figure."""
    means = average_transitions(rows)
    cells = [
        [f"`{pair}`", *(f"{value:.2f}" if value > 0 else "raises" for value in (row["peer"], row["ours"], row["ratio"]))]
        for pair, row in means.items()
    ]
    bars = {pair: {side: row[side] for side in ("peer", "ours") if row[side] > 0} for pair, row in means.items()}
    return REDISTRIBUTION.format(
        whole=timing.geometric_mean(row["ratio"] for row in means.values()),
        table=table(["transition", "PyTorch, ms", "dtensor, ms", "dtensor / PyTorch"], cells),
        picture=draw_bars("performance_redistribution", "Redistribution by library", "milliseconds", bars),
    )


def write_first_result_section(rows: dict[str, Any]) -> str:
    """Return the section about the time to the first result."""
    sides = rows["rounds"]
    parts = next(iter(sides.values()))[0]
    cells = [
        [part, *(f"{statistics.median(one[part] for one in found) * 1e3:.0f}" for found in sides.values())] for part in parts
    ]
    labels = [side.replace("ours", "dtensor").replace("peer", "PyTorch") for side in sides]
    return FIRST.format(table=table(["part", *labels], cells))


SECTIONS: dict[str, Callable[[Any], str]] = {
    "host": write_host_section,
    "captured": write_captured_section,
    "training": write_training_section,
    "memory": write_memory_section,
    "redistribution": write_redistribution_section,
    "first": write_first_result_section,
}


def list_slower_cases(results: dict[str, Any]) -> str:
    """Return the section that lists what was slower than PyTorch in this run."""
    ratios = {f"operator `{row['name']}`": row["whole"] or 0 for row in results.get("host", ())}
    for size, found in results.get("training", {}).items():
        ratios |= {f"training step `{case}`, {size}": step_ratio(row) for case, row in found.items()}
    means = average_transitions(results.get("redistribution", ()))
    ratios |= {f"redistribution `{pair}`": row["ratio"] for pair, row in means.items()}
    slower = [f"- {what}: {ratio:.2f}" for what, ratio in ratios.items() if ratio > 1]
    return AHEAD.format(table="\n".join(slower) or "- nothing that was measured")


def write_page(results: dict[str, Any]) -> str:
    about = results["about"]
    where = ", ".join(f"{key} {about[key]}" for key in ("cpu", "cores", "python", "torch", "commit", "date"))
    sections = [section(results[part]) for part, section in SECTIONS.items() if part in results]
    return "\n".join([HEAD.format(where=where), *sections, list_slower_cases(results)])


def yield_table_figures(results: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the beginning of a row of the tables and the figures of dtensor in it, for the parts that were measured."""
    if "host" in results:
        hot = timing.geometric_mean(row["ratio"] for row in results["host"] if row["ratio"] and not is_first_call(row))
        first = timing.geometric_mean(row["ratio"] for row in results["host"] if row["ratio"] and is_first_call(row))
        yield "| host time of a call minus", f"ratio {hot:.2f}; for the first call of an operator {first:.2f}"
    if "training" in results:
        kinds = {
            "TP": ("tp2", "tp4"),
            "FSDP": ("fsdp2", "fsdp4"),
            "HSDP": ("hsdp2x2",),
            "ZeRO": ("zero2",),
            "DDP": ("ddp2", "ddp4"),
        }
        small = results["training"]["small"]
        means = {kind: timing.geometric_mean(step_ratio(small[case]) for case in cases) for kind, cases in kinds.items()}
        yield (
            "| training step, 2 layers of width 64",
            "ratios: " + ", ".join(f"{kind} {ratio:.2f}" for kind, ratio in means.items()),
        )
    if "redistribution" in results:
        ratio = timing.geometric_mean(row["ratio"] for row in average_transitions(results["redistribution"]).values())
        yield (
            "| redistribution, 4 gloo processes",
            f"ratio {ratio:.2f}; bytes: 1.02 times the minimum (the elements that a rank lacks)",
        )
    if "first" in results:
        rounds = results["first"]["rounds"]
        medians = {side: statistics.median(one["after torch"] for one in found) for side, found in rounds.items()}
        yield "| first operators of a process", f"ratio {medians['ours'] / medians['peer']:.2f}"


def update_tables(results: dict[str, Any]) -> None:
    """Replace the figures of the rows that this run measured in the tables of README and of the index page."""
    for page in TABLES:
        lines = page.read_text().splitlines()
        for start, figures in yield_table_figures(results):
            [at] = [i for i, line in enumerate(lines) if line.startswith(start)]
            cells = lines[at].split(" | ")
            lines[at] = " | ".join([cells[0], figures, *cells[2:]])
        page.write_text("\n".join(lines) + "\n")


def main() -> None:
    """Run the parts without earlier results, and write the page and the tables of README and the index page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument(
        "--data", type=Path, default=ROOT / "build" / "summary.json", help="results; parts that it has are not run"
    )
    parser.add_argument("--only", nargs="+", choices=list(SECTIONS), default=list(SECTIONS))
    options = parser.parse_args()
    results = json.loads(options.data.read_text()) if options.data.exists() else {}
    options.data.parent.mkdir(parents=True, exist_ok=True)
    for part in options.only:
        if part not in results:
            print(f"measuring: {part}", flush=True)
            results[part] = measure_part(part, options.quick)
            results["about"] = {**timing.describe_machine(), "date": date.today().isoformat()}
            options.data.write_text(json.dumps(results))
    PAGE.write_text(write_page(results))
    update_tables(results)


if __name__ == "__main__":
    main()
