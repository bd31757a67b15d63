"""Redistribute: redistributions by ``dtensor`` and by ``torch.distributed.tensor`` ("peer"), in turn in the same gloo processes.

    python benchmarks/redistribute.py [--quick] [--worlds 2 4 8] [--meshes 2x4] [--sizes "16 KB" "64 MB"] [--only "S0>R"]
                                      [--json FILE] [--plot FILE] [--add FILE ...]

Wall time is the slowest rank's and CPU time that of all ranks together, medians over rounds; a ratio is dtensor / peer. Bytes are
those that one rank receives, for both libraries by the usual ring algorithms; the bound is the minimum for any plan. Peak memory
is torch's allocation on the busiest rank, its source included. Every rank's result is compared with its canonical block. "bare"
is a hand-written exchange of only the missing elements, relative to PyTorch's time: a lower bound for any library.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch.multiprocessing as mp
from measuring import timing
from redistributing import cases as rc

Row = dict[str, Any]


def measure_cases(world: int, options: argparse.Namespace) -> Iterator[Row]:
    """Start ``world`` gloo ranks and yield the row of each case that they measure."""
    from redistributing.rank import Effort, measure_rank  # it imports the peer, which only the ranks need

    spawner = mp.get_context("spawn")
    options = argparse.Namespace(**vars(options), world=world, effort=Effort.quick() if options.quick else Effort())
    with tempfile.TemporaryDirectory(prefix="gloo-") as folder:
        reader, writer = spawner.Pipe(duplex=False)
        ranks = [spawner.Process(target=measure_rank, args=(rank, f"{folder}/store", options, writer)) for rank in range(world)]
        for process in ranks:
            process.start()
        writer.close()
        try:
            while True:
                yield reader.recv() | {"ranks": world}
        except EOFError:
            pass
        finally:
            for process in ranks:
                process.join(30)
                process.kill()
        if any(process.exitcode for process in ranks):
            raise SystemExit(f"a rank of {world} failed: exit codes {[process.exitcode for process in ranks]}")


# --- what is shown ------------------------------------------------------------------------------------------------------
def get_ratio(row: Row, what: str, side: str = "ours", base: str = "peer") -> float | None:
    """Return a measurement of one side relative to another side's; None if one of them did not run."""
    if what not in row.get(side, ()) or what not in row.get(base, ()):
        return None
    return row[side][what] / row[base][what]


def format_row(row: Row) -> str:
    """Return a line of the table: times relative to PyTorch, collectives, bytes and peak memory of one case."""
    ours, theirs = row["ours"], row["peer"]
    if "wall" not in ours:
        return f"{row['name']:48} dtensor: {ours['error']}"
    cells = [f"{row['name']:48}", f"{ours['wall'] * 1e3:9.3f}"]
    cells += [f"{value:6.2f}" if (value := get_ratio(row, what)) is not None else "      " for what in ("wall", "cpu")]
    cells += [f"{value:6.2f}" if (value := get_ratio(row, "wall", "bare")) is not None else "      "]
    for what, width in (("collectives", 3), ("bytes", 11), ("peak", 11)):
        cells += [f"{ours[what]:{width},}", f"{theirs.get(what, ''):{width},}" if what in theirs else " " * width]
    return " ".join(
        [*cells, f"{row['bound']:11,}", *(f"{side} {row[side]['error']}" for side in ("ours", "peer") if row[side]["error"])]
    )


SMALL = 3 << 20  # bytes that small messages may be packed into, on top of what a plan says (docs/redistribution.md)
HEAD = (
    f"{'mesh   pair                         size':48} {'ms':>9} {'wall':>6} {'cpu':>6} {'bare':>6} {'collect.':>7} "
    f"{'bytes: ours':>11} {'peer':>11} {'peak: ours':>11} {'peer':>11} {'bound':>11}"
)


def summarize_rows(rows: Sequence[Row]) -> list[str]:
    """Return the lines of the summary: mean ratios, slow cases, wrong results, and bytes and memory above their bounds."""
    lines = []
    for world in sorted({row["ranks"] for row in rows}):
        some = [row for row in rows if row["ranks"] == world]
        for label, part in (("all", some), *((size, [row for row in some if row["size"] == size]) for size in rc.EVEN)):
            means = [
                timing.geometric_mean([r for row in part if (r := get_ratio(row, what)) is not None]) for what in ("wall", "cpu")
            ]
            if part:
                lines.append(
                    f"{world} ranks, {label:>6}: geometric mean of dtensor / peer over {len(part)} cases: "
                    f"wall {means[0]:.3f}, CPU {means[1]:.3f}"
                )
        plain = [row for row in some if "bare" in row and "wall" in row["peer"]]
        for side in ("ours", "bare"):
            means = [timing.geometric_mean([r for row in plain if (r := get_ratio(row, what, side))]) for what in ("wall", "cpu")]
            lines.append(f"{world} ranks, without terms, {side}: {len(plain)} cases: wall {means[0]:.3f}, CPU {means[1]:.3f}")
    slower = sorted((row for row in rows if (get_ratio(row, "wall") or 0) > 1.05), key=lambda row: -(get_ratio(row, "wall") or 0))
    lines.append(f"above 1.05 in wall time: {len(slower)}")
    lines += [
        f"  {get_ratio(row, 'wall'):.2f} (CPU {get_ratio(row, 'cpu'):.2f})  {row['ranks']} ranks {row['name']}"
        for row in slower[:15]
    ]
    wrong, theirs = ([row["name"] for row in rows if row[side]["error"]] for side in ("ours", "peer"))
    above = [row["name"] for row in rows if row["ours"].get("bytes", 0) > 1.05 * row["bound"] + 64]
    lines.append(
        f"dtensor wrong or refused: {len(wrong)} {wrong or ''}; peer wrong or refused: {len(theirs)}; "
        f"bytes above 1.05 x bound: {len(above)} {above or ''}"
    )
    over = [row["name"] for row in rows if row["ours"].get("peak", 0) > row["ours"].get("planned_peak", 0) + SMALL]
    lines.append(f"peak memory above the plan's + {SMALL:,} B: {len(over)} {over or ''}")
    return lines


def plot_ratios(rows: Sequence[Row], path: str) -> None:
    """Plot the ratio of wall times against the tensor's size, one dot per case."""
    import matplotlib  # optional

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axis = plt.subplots(figsize=(8, 5))
    for world in sorted({row["ranks"] for row in rows}):
        dots = [
            (list(rc.EVEN).index(row["size"]) + world / 40, r)
            for row in rows
            if row["ranks"] == world and (r := get_ratio(row, "wall"))
        ]
        axis.scatter(*zip(*dots, strict=True), s=12, label=f"{world} ranks")
    axis.set(yscale="log", ylabel="wall time, dtensor / peer", xticks=range(len(rc.EVEN)), xticklabels=list(rc.EVEN))
    axis.axhline(1, color="grey", linewidth=0.8)
    axis.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure the cases that the options choose on all world sizes; print the rows and the summary."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help=f"only {', '.join(rc.QUICK)}, fewer rounds, 4 ranks unless --worlds")
    parser.add_argument("--worlds", type=int, nargs="*", choices=list(rc.MESHES))
    parser.add_argument("--meshes", nargs="+", default=(), metavar="MESH", help='as "2x4"')
    parser.add_argument("--sizes", nargs="+", choices=list(rc.EVEN))
    parser.add_argument("--only", nargs="+", default=(), metavar="PAIR", help='as "S0,S1>S1,S0"')
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--add", nargs="+", default=(), metavar="FILE", help="rows of earlier runs, for one summary and plot")
    parser.add_argument("--plot", metavar="FILE")
    options = parser.parse_args()
    options.sizes = options.sizes or (rc.QUICK if options.quick else list(rc.EVEN))
    os.environ |= {"OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR", "KINETO_LOG_LEVEL": "5"}
    about = timing.describe_machine()
    print(*(f"{key:8} {value}" for key, value in about.items()), "", HEAD, sep="\n", flush=True)
    worlds = options.worlds if options.worlds is not None else [4] if options.quick else list(rc.MESHES)
    rows: list[Row] = [row for path in options.add for row in json.loads(Path(path).read_text())["rows"]]
    for world in worlds:
        for row in measure_cases(world, options):
            rows.append(row)
            print(format_row(row), flush=True)
            if options.json:  # after each row: a long run may be cut short
                Path(options.json).write_text(json.dumps({"machine": about, "rows": rows}, indent=1))
    print("", *summarize_rows(rows), sep="\n")
    if options.plot:
        try:
            plot_ratios(rows, options.plot)
        except ImportError:
            print("no plot: matplotlib is not installed (pip install 'dtensor[plot]')", file=sys.stderr)


if __name__ == "__main__":
    main()
