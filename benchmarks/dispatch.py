"""Dispatch: host time per op of plain torch, ``torch.distributed.tensor`` ("peer") and ``dtensor``, in one run.

    make bench      or      python benchmarks/dispatch.py [--quick] [--json] [--plot FILE] [--only add mm] [--part hot|cold]

Each rank holds 8 x 8 numbers and the process group is torch's fake one of 8 ranks, on which communication takes no time, so the
time is the library's own. "plain" does the same local work on plain tensors. The last columns are (dtensor - plain) / (peer -
plain), which is below 1 where ``dtensor`` adds less overhead; the largest ratio that we allow; and dtensor / peer of the whole
call. Rows named "cold" time the first call on a shape, the others repeated calls.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from dispatching.cases import BOUNDS, CASES, Case
from dispatching.first_calls import BOUND, COLD, ColdCase
from measuring import timing
from measuring.sides import WORLD, Side, make_all_sides
from torch.testing._internal.distributed.fake_pg import FakeStore


@dataclass(frozen=True, slots=True)
class Row:
    """Seconds, or the name of the error, of one case on each side, and the largest overhead ratio that we allow."""

    name: str
    plain: float | str
    peer: float | str
    ours: float | str
    bound: float

    @property
    def ratio(self) -> float | None:
        """Return our overhead relative to PyTorch DTensor's, both at least the clock's resolution."""
        if isinstance(self.plain, str) or isinstance(self.peer, str) or isinstance(self.ours, str):
            return None
        return max(self.ours - self.plain, 5e-8) / max(self.peer - self.plain, 5e-8)

    @property
    def whole(self) -> float | None:
        """Return the time of our whole call relative to PyTorch DTensor's."""
        return None if isinstance(self.peer, str) or isinstance(self.ours, str) else self.ours / self.peer


def measure_repeated_calls(name: str, case: Case, sides: dict[str, Side], effort: timing.Effort) -> Row:
    functions = {side_name: build_case(case, side) for side_name, side in sides.items()}
    return Row(name, **timing.time_interleaved(functions, effort), bound=BOUNDS[name])


def build_case(case: Case, side: Side) -> Callable[[], object]:
    """Return the function to time of a case on one side, or a function that raises the error of building it."""
    try:
        return case(side)
    except Exception as error:
        raised = error

        def fail() -> None:
            raise raised

        return fail


_FRESH = iter(range(17, 1_000_000))  # sizes that no row has used


def measure_first_calls(name: str, case: ColdCase, sides: dict[str, Side], repeats: int) -> Row:
    def rounds() -> Iterator[dict[str, Callable[[], object]]]:
        for size in (next(_FRESH) for _ in range(repeats + 1)):
            yield {side_name: build_case(lambda side, size=size: case(side, size), side) for side_name, side in sides.items()}

    return Row(name, **timing.time_first_calls(rounds()), bound=BOUND)


def measure_rows(names: Sequence[str], effort: timing.Effort) -> list[Row]:
    """Measure the named rows on a fake process group that exists only during this call."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=WORLD)
    sides = make_all_sides()
    rows = [
        measure_repeated_calls(name, CASES[name], sides, effort)
        if name in CASES
        else measure_first_calls(name, COLD[name], sides, max(3, effort.repeats // 4))
        for name in names
    ]
    dist.destroy_process_group()
    return rows


def format_table(rows: Sequence[Row]) -> str:
    """Return the table of microseconds and ratios as text, with the mean ratios at the end."""
    sides = f"{'plain':>10} {'peer':>12} {'dtensor':>12}"
    lines = [f"{'microseconds per call':24} {sides} {'overhead ratio':>15} {'bound':>6} {'whole':>6}"]
    for row in rows:
        ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
        whole = "" if row.whole is None else f"{row.whole:.2f}"
        cells = f"{_format_seconds(row.plain):>10} {_format_seconds(row.peer):>12} {_format_seconds(row.ours):>12}"
        lines.append(f"{row.name:24} {cells} {ratio:>15} {row.bound:>6} {whole:>6}")
    return "\n".join([*lines, "", *summarize_parts(rows)])


def _format_seconds(value: float | str) -> str:
    return value[:12] if isinstance(value, str) else f"{value * 1e6:.1f}"


def summarize_parts(rows: Sequence[Row]) -> list[str]:
    parts = {"repeated calls": [row for row in rows if row.name in CASES], "first calls": [r for r in rows if r.name in COLD]}
    return [f"{what}: {summarize_ratios(part)}" for what, part in parts.items() if part]


def summarize_ratios(rows: Sequence[Row]) -> str:
    """Return a line with the geometric mean of the overhead ratios, and the rows above their bound."""
    ratios = {row.name: row.ratio for row in rows if row.ratio is not None}
    if not ratios:
        return "no case ran on all three sides"
    mean = timing.geometric_mean(ratios.values())
    above = ", ".join(f"{row.name} {row.ratio:.2f}" for row in rows if row.ratio is not None and row.ratio > row.bound)
    return (
        f"overhead ratio dtensor / peer: geometric mean {mean:.2f} over {len(ratios)} of {len(rows)} cases; "
        f"above their bound: {above or 'none'}"
    )


def plot_ratios(rows: Sequence[Row], file: Path) -> None:
    """Draw the overhead ratios as bars, with their bounds."""
    import matplotlib as mpl  # optional: only pictures need it

    mpl.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row.ratio is not None][::-1]
    figure, axes = pyplot.subplots(figsize=(8, 0.22 * len(shown) + 1), layout="constrained")
    axes.barh([row.name for row in shown], [row.ratio for row in shown], color="steelblue")
    axes.plot([row.bound for row in shown], range(len(shown)), "k|", label="bound")
    axes.axvline(1, color="gray", linestyle=":", label="the peer")
    axes.set(xlabel="host time over plain torch, dtensor / torch.distributed.tensor")
    axes.margins(y=0.01)
    axes.legend()
    figure.savefig(file)


def main() -> None:
    """Measure the rows that the options choose, and print them as a table or JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer and shorter repeats")
    parser.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the ratios, with matplotlib")
    parser.add_argument("--only", nargs="+", metavar="ROW", help="names or patterns (*) of rows")
    parser.add_argument("--part", choices=("hot", "cold"), help="repeated or first calls only")
    options = parser.parse_args()
    names = [*(CASES if options.part != "cold" else ()), *(COLD if options.part != "hot" else ())]
    for pattern in options.only or ():
        if not fnmatch.filter(names, pattern):
            parser.error(f"no such row: {pattern}; there are {', '.join(names)}")
    chosen = [name for name in names if not options.only or any(fnmatch.fnmatch(name, pattern) for pattern in options.only)]
    rows = measure_rows(chosen, timing.Effort.quick() if options.quick else timing.Effort())
    about = timing.describe_machine()
    if options.json:
        columns = [{**asdict(row), "ratio": row.ratio, "whole": row.whole} for row in rows]
        print(json.dumps({"machine": about, "unit": "seconds", "rows": columns, "verdict": summarize_parts(rows)}, indent=1))
    else:
        print(*(f"{key:8} {value}" for key, value in about.items()), "", format_table(rows), sep="\n")
    if options.plot:
        plot_ratios(rows, options.plot)


if __name__ == "__main__":
    main()
