"""CLI of ``dtensor plan MODEL``: the fastest parallel layouts of a training step on a cluster, as a table and a plot."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..base.text_tables import print_table
from ..clusters.cluster import CLUSTERS
from ..clusters.model_sizes import MODELS
from ..clusters.step_estimate import Estimate, best
from ..errors import PlanError
from .progress import report_periodically


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of ``dtensor plan MODEL`` to a parser."""
    parser.add_argument("--ranks", type=int, required=True, help="number of devices, one rank each")
    parser.add_argument("--cluster", choices=CLUSTERS, default="h100", help="kind of cluster (default: h100)")
    parser.add_argument("--sequence", type=int, default=8192, help="tokens of a sequence (default: 8192)")
    parser.add_argument("--batch", type=int, default=2048, help="sequences of a step, over all ranks (default: 2048)")
    parser.add_argument("--most", type=int, default=8, metavar="N", help="layouts to list, the fastest first (default: 8)")
    parser.add_argument("--plot", type=Path, default=None, metavar="FILE", help="also draw time and memory (needs dtensor[plot])")


def run_plan(model: str, options: argparse.Namespace) -> int:
    """Print the fastest layouts for the model, and return the exit status: 2 if no layout fits into memory."""
    cluster = CLUSTERS[options.cluster]
    try:
        with report_periodically(lambda: f"planning {model} on {options.ranks} ranks"):
            estimates = best(MODELS[model], cluster, options.ranks, options.sequence, options.batch, options.most)
    except PlanError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{model}, {options.batch} sequences of {options.sequence} tokens, on {options.ranks} ranks")
    print(cluster)
    print_table(estimate_table(estimates), numbers=True)
    if options.plot is not None:
        title = f"{model}: {options.batch} sequences of {options.sequence} tokens on {options.ranks} {cluster.device.name}"
        plot_estimates(estimates, options.plot, title)
    return 0


def estimate_table(estimates: Sequence[Estimate]) -> list[list[str]]:
    """Return the head and a row for each estimate: time and MFU of a step, memory and bytes received per rank in GB.

    Columns that are 0 for all estimates are left out.
    """
    kinds = [kind for kind in estimates[0].memory if any(estimate.memory[kind] for estimate in estimates)]
    dims = [dim for dim in estimates[0].nbytes if any(estimate.nbytes[dim] for estimate in estimates)]
    sizes = [*(f"{kind} GB" for kind in kinds), *(f"received over {dim} GB" for dim in dims)]
    rows = [["mesh", "recomputed", "step s", "MFU %", *sizes]]
    for estimate in estimates:
        sizes = [
            f"{count / 1e9:.2f}"
            for count in (*(estimate.memory[kind] for kind in kinds), *(estimate.nbytes[dim] for dim in dims))
        ]
        rows.append([str(estimate.degrees), estimate.again, f"{estimate.step_seconds:.3f}", f"{100 * estimate.mfu:.1f}", *sizes])
    return rows


def plot_estimates(estimates: Sequence[Estimate], path: Path, title: str) -> None:
    """Write a plot of stacked bars: seconds of a step and memory of a rank by kind, the fastest layout on top."""
    from matplotlib.figure import Figure  # an optional dependency

    figure = Figure(figsize=(12, 0.45 * len(estimates) + 2.6), layout="constrained")
    figure.suptitle(title)
    names = [str(estimate.degrees) for estimate in estimates]
    panels = (
        ("seconds of a step", [estimate.seconds for estimate in estimates], 1.0),
        ("GB per rank at the peak", [estimate.memory for estimate in estimates], 1e9),
    )
    parts: Any = figure.subfigures(1, 2)
    for part, (label, values, unit) in zip(parts, panels, strict=True):
        axes = part.subplots()
        start = [0.0] * len(estimates)
        for kind in values[0]:
            widths = [value[kind] / unit for value in values]
            if any(widths):
                axes.barh(range(len(estimates)), widths, left=start, label=kind)
            start = [a + b for a, b in zip(start, widths, strict=True)]
        axes.set_yticks(range(len(estimates)), names)
        axes.set_xlabel(label)
        axes.invert_yaxis()
        part.legend(loc="outside lower center", ncols=3)
    figure.savefig(path)
