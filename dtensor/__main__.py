"""``explain script.py`` tells what a program moves, line by line, ``trace script.py`` writes it over time, ``plan script.py``
tells how it should run, ``plan MODEL`` how a known model lies on a cluster, ``bench`` what redistributions and operators take
here, ``doctor`` looks at the machine, ``verify [module] [pattern]`` verifies rules, ``calibrate`` measures collectives, ``ops``
lists operators, ``ranks`` tells what the ranks of a job did last.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .base.on_ranks import on_ranks
from .base.progress import progress
from .clusters import MODELS
from .clusters import command as cluster_plan
from .cost import calibrate
from .debug import bench, doctor, script
from .debug.operator_page import measured_in, page
from .errors import ArgumentError, RuleError
from .redistribute import moves
from .rules import rules
from .testing.asked import rules_asked
from .testing.samples import samples_of, without_sample
from .testing.verify import Report, verify_rule
from .watch import reading


def main(argv: list[str] | None = None) -> int:
    """The exit status: 2 where what is asked for means nothing or needs what is not installed; of ``verify`` 1 if some rule is
    wrong, lacks placements or has no sample.
    """
    parser = argparse.ArgumentParser(prog="python -m dtensor", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    for add in (_explain, _trace, _plan, _bench, _doctor, _ranks, _verify, _calibrate, _ops):
        add(commands)
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        return int(options.run(options))
    except (ArgumentError, RuleError) as error:
        print(f"python -m dtensor {options.command}: {error}", file=sys.stderr)
        return 2


def needs(module: str, extra: str, what: str) -> None:
    """Asks for what is optional before work starts.

    Raises:
        ArgumentError: it is not installed.
    """
    if importlib.util.find_spec(module) is None:
        raise ArgumentError(f"{what} needs {module}; pip install 'dtensor[{extra}]'")


# --- scripts ------------------------------------------------------------------------------------------------------------
def _script(commands: Any, name: str, what: str, run: Callable[..., int]) -> argparse.ArgumentParser:
    command: argparse.ArgumentParser = commands.add_parser(name, help=f"run a script and {what} (also under torchrun -m)")
    command.add_argument("script", type=Path, metavar="SCRIPT.py")
    command.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    command.set_defaults(run=run)
    return command


def _explain(commands: Any) -> None:
    def run(options: argparse.Namespace) -> int:
        return script.explained(script.asked(options.script), options.arguments, options.html)

    _html(_script(commands, "explain", "tell what it moves, computes and holds, by line", run))


def _html(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--html", type=script.writable, metavar="FILE", help="also as a page: the script's lines beside what they move"
    )


def _trace(commands: Any) -> None:
    def run(options: argparse.Namespace) -> int:
        return script.traced(script.asked(options.script), options.arguments, options.output)

    command = _script(commands, "trace", "write what it does, over time, for Perfetto and chrome://tracing", run)
    command.add_argument("--output", type=script.writable, default="trace.json", metavar="FILE", help="default trace.json")


def _plan(commands: Any) -> None:
    def run(options: argparse.Namespace) -> int:
        if options.script.name in MODELS:
            parser = argparse.ArgumentParser(prog=f"python -m dtensor plan {options.script}")
            cluster_plan.add_options(parser)
            chosen = parser.parse_args(options.arguments)
            if chosen.plot is not None:
                needs("matplotlib", "plot", "--plot")
            return cluster_plan.main(options.script.name, chosen)
        needs("scipy", "plan", "plan")
        return script.planned(script.asked(options.script), options.arguments, options.html, options.json)

    command = _script(commands, "plan", "tell how its calls together should run, by line", run)
    command.epilog = (
        f"In place of a script {', '.join(MODELS)}: ways to lay a training step of it over a cluster (plan MODEL --help)."
    )
    _html(command)
    command.add_argument(
        "--json", type=script.writable, metavar="FILE", help="the plan, for capture(plan=ProgramPlan.load(FILE))"
    )


# --- measuring ----------------------------------------------------------------------------------------------------------
def _bench(commands: Any) -> None:
    command = commands.add_parser("bench", help="measure redistributions or operators on processes of this machine (gloo)")
    kinds = command.add_subparsers(dest="kind", required=True)
    moved = kinds.add_parser(
        "redistribute", help="beside what plans are made by; benchmarks/redistribute.py of the repository compares with torch's"
    )
    moved.add_argument("--mesh", default="4", help="as 4 or 3x2")
    moved.add_argument("--size", nargs="+", default=["1MB"], help="of the float32 tensor, as 64KB, or its shape, as 1031x1021")
    moved.add_argument("--pairs", nargs="+", metavar="PAIR", help='as "S0->S1,R": a placement for each mesh dim, else R')
    moved.set_defaults(run=_redistribute)
    called = kinds.add_parser(
        "dispatch", help="host time beside plain torch's; benchmarks/dispatch.py of the repository compares with torch's DTensor"
    )
    called.add_argument("--only", nargs="+", choices=list(bench.OPERATORS), default=list(bench.OPERATORS), metavar="OPERATOR")
    called.set_defaults(run=_dispatch)
    for each in (moved, called):
        each.add_argument("--json", action="store_true", help="rows as JSON on stdout instead of the table")
        each.add_argument("--plot", type=script.writable, metavar="FILE", help="as png, svg or pdf")


def _redistribute(options: argparse.Namespace) -> int:
    mesh, shapes = bench.mesh_of(options.mesh), [bench.shape_of(text) for text in options.size]
    pairs = options.pairs or bench.usual_pairs(mesh)
    for shape in shapes:
        for pair in pairs:
            bench.pair_of(pair, mesh, len(shape))
    rows = on_ranks(math.prod(mesh), bench.moves_on_ranks, mesh, shapes, pairs)
    return _shown(options, rows, len(shapes) * len(pairs), bench.moved_head(mesh), bench.moved_line)


def _dispatch(options: argparse.Namespace) -> int:
    rows = on_ranks(2, bench.calls_on_ranks, options.only)
    return _shown(options, rows, len(options.only), bench.CALLED_HEAD, bench.called_line)


def _shown(options: argparse.Namespace, rows: Iterator[Any], count: int, head: str, line: Callable[[Any], str]) -> int:
    if options.plot:
        needs("matplotlib", "plot", "--plot")
    found = list(progress(rows, count, options.kind))
    if options.json:
        print(json.dumps(bench.as_json(found), indent=1))
    else:
        print(head, *map(line, found), sep="\n")
    if options.plot:
        bench.plot(found, options.plot)
        print(f"written to {options.plot}", file=sys.stderr)
    return 0


def _calibrate(commands: Any) -> None:
    command = commands.add_parser("calibrate", help="measure collectives on this machine; plans are made by what is found")
    command.add_argument("--ranks", type=int, default=4, help="processes to start, unless torchrun has started us")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    command.add_argument("--output", type=Path, default=None, help="default: $DTENSOR_PROFILE or ~/.cache/dtensor/profile.json")
    command.add_argument("--seconds", type=float, default=0.05, help="for each of about fifty measurements")
    command.set_defaults(run=_calibrated)


def _calibrated(options: argparse.Namespace) -> int:
    path, profile = calibrate.run(moves, options.ranks, options.device, options.output, options.seconds)
    if script.first():
        print(calibrate.table(profile, "nccl" if options.device == "cuda" else "gloo"))
        print(f"written to {path}")
    return 0


# --- what is there ------------------------------------------------------------------------------------------------------
def _doctor(commands: Any) -> None:
    command = commands.add_parser("doctor", help="versions, backends, what is changed of torch, and whether processes can talk")
    command.set_defaults(run=lambda options: doctor.main())


def _ranks(commands: Any) -> None:
    def run(options: argparse.Namespace) -> int:
        print(reading.told(options.folder, options.last))
        return 0

    command = commands.add_parser("ranks", help="what the ranks of a job of this host did last, also after they were killed")
    command.add_argument("folder", type=Path, nargs="?", help="dtensor-ranks-... in /dev/shm; default the newest")
    command.add_argument("--last", type=int, default=20, help="how many things of each rank")
    command.set_defaults(run=run)


def _ops(commands: Any) -> None:
    command = commands.add_parser("ops", help="how every operator is served, as the page docs/ops.md")
    command.add_argument(
        "--measured", type=Path, default=Path("benchmarks/gather_share.json"), help="by benchmarks/gather_share.py"
    )
    command.set_defaults(run=_page)


def _page(options: argparse.Namespace) -> int:
    print(page(measured_in(options.measured)), end="")
    return 0


def _verify(commands: Any) -> None:
    command = commands.add_parser("verify", help="run operators under many placements and compare with plain torch")
    command.add_argument(
        "words",
        nargs="*",
        metavar="MODULE | FILE.py | PATTERN",
        help='names as of fnmatch ("mm", "*softmax*", "mylib::*"), modules to import first (their rules, if nothing else is '
        "named), or both (my.module::halve); default all rules",
    )
    command.add_argument("--limit", type=int, default=60, help="placements per sample, variant and mesh")
    command.add_argument("--budget", type=int, default=None, help="cases per rule, a random part of them")
    command.add_argument("--seed", type=int, default=0)
    command.add_argument("--missing", action="store_true", help="also look for placements that need no communication")
    command.add_argument("--device", default="cpu", help="where to run: a device type")
    command.set_defaults(run=_verified)


def _verified(options: argparse.Namespace) -> int:
    names = rules_asked(options.words)
    unsampled = sorted({*names} & {*without_sample()} | {name for name in names if name not in rules()})
    given = {name: getattr(options, name) for name in ("limit", "budget", "seed", "device")}
    given["look_for_missing"] = options.missing
    reports = []
    for name in progress(names, len(names), "verifying"):
        if name in unsampled or not samples_of(name):  # of operators that have no kernel on a CPU there are none
            continue
        reports.append(verify_rule(name, **given))
        if not reports[-1]:
            print(reports[-1], flush=True)
    for name in unsampled:
        print(f"{name}: no sample" if name in rules() else f"{name}: no rule")
    cases, wrong, missing = map(sum, zip(*map(_counts, reports), strict=True)) if reports else (0, 0, 0)
    print(f"{len(reports)} rules, {cases} cases, {wrong} wrong, {missing} missing, {len(unsampled)} without sample or rule")
    return 1 if unsampled or not all(reports) or not reports else 0


def _counts(report: Report) -> tuple[int, int, int]:
    return report.cases, len(report.wrong), len(report.missing)


if __name__ == "__main__":
    sys.exit(main())
