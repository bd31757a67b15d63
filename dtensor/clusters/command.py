"""``python -m dtensor plan``: ways to lay a training step over a cluster, as a table and a plot."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from ..debug.visualize import table as columns
from ..errors import PlanError
from .cluster import CLUSTERS
from .composed import Estimate, best
from .transformer import MODELS


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of the command."""
    parser.add_argument("--ranks", type=int, required=True)
    parser.add_argument("--cluster", choices=CLUSTERS, default="h100")
    parser.add_argument("--sequence", type=int, default=8192, help="tokens of a sequence")
    parser.add_argument("--batch", type=int, default=2048, help="sequences of a step, of all ranks")
    parser.add_argument("--most", type=int, default=8, help="rows of the table")
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE", help="also draw seconds and memory (extra: plot)")


def main(model: str, options: argparse.Namespace) -> int:
    """The exit status: 2 if nothing fits."""
    cluster = CLUSTERS[options.cluster]
    try:
        found = best(MODELS[model], cluster, options.ranks, options.sequence, options.batch, options.most)
    except PlanError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{model}, {options.batch} sequences of {options.sequence} tokens, on {options.ranks} ranks")
    print(cluster)
    print(table(found))
    if options.plot is not None:
        plot(found, options.plot)
    return 0


def table(found: Sequence[Estimate]) -> str:
    """A row for each: what backward computes anew, seconds of a step, MFU, what a rank holds and receives in a step, by kind."""
    rows = [
        [
            "mesh",
            "again",
            "step s",
            "MFU %",
            *(f"{kind} GB" for kind in found[0].memory),
            *(f"{dim} GB" for dim in found[0].nbytes),
        ]
    ]
    for one in found:
        sizes = [f"{count / 1e9:.2f}" for count in (*one.memory.values(), *one.nbytes.values())]
        rows.append([str(one.degrees), one.again, f"{one.step_seconds:.3f}", f"{100 * one.mfu:.1f}", *sizes])
    return columns(rows, str.rjust)


def plot(found: Sequence[Estimate], path: Path) -> None:
    """Seconds of a step and bytes of a rank by kind, stacked, one bar for each."""
    from matplotlib.figure import Figure  # an extra

    figure = Figure(figsize=(11, 0.45 * len(found) + 2.2), layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    names = [str(one.degrees) for one in found]
    for axes, parts, unit in ((left, [one.seconds for one in found], 1.0), (right, [one.memory for one in found], 1e9)):
        start = [0.0] * len(found)
        for kind in parts[0]:
            widths = [part[kind] / unit for part in parts]
            axes.barh(names, widths, left=start, label=kind)
            start = [a + b for a, b in zip(start, widths, strict=True)]
        axes.invert_yaxis()
        axes.legend(fontsize="small")
    left.set_xlabel("seconds of a step")
    right.set_xlabel("GB of a rank")
    figure.savefig(path)
