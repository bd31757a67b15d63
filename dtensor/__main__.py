"""Main program, the command line: ``dtensor`` or ``python -m dtensor``, with one subcommand for each tool."""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .base.text_tables import print_table
from .clusters import MODELS
from .commands import bench, calibrate, doctor, run_script
from .commands import plan_cluster as cluster_plan
from .commands.operator_tables import operator_tables
from .commands.progress import iterate_with_progress
from .commands.spawn_ranks import spawn_ranks
from .cost.profile import is_calibrated
from .errors import ArgumentError, DTensorError
from .rules import rules
from .testing.rule_selection import select_rules
from .testing.samples import rules_without_sample, samples_of
from .testing.verify import Report, verify_rule
from .watchdog import post_mortem

Run = Callable[[argparse.Namespace], "int | Callable[[], int]"]


def main(argv: list[str] | None = None) -> int:
    """Run a command of the command line, and return its exit status: 2 for a DTensorError, such as a missing extra.

    ``verify`` returns 1 if a rule is wrong, lacks placements or has no sample. A script that is run returns its own status, and
    its exceptions are raised unchanged.
    """
    program = "python -m dtensor" if os.path.basename(sys.argv[0]) == "__main__.py" else "dtensor"
    parser = argparse.ArgumentParser(
        prog=program,
        description="Explain, plan, measure and verify programs on distributed tensors.",
        epilog="dtensor COMMAND --help has examples.",
    )
    parser.add_argument("--version", action="version", version=f"dtensor {__version__}, torch {torch.__version__}")
    commands = parser.add_subparsers(title="commands", dest="command", metavar="COMMAND")
    for add in (_add_explain, _add_trace, _add_plan, _add_bench, _add_doctor, _add_ranks, _add_verify, _add_calibrate, _add_ops):
        add(commands)
    options = parser.parse_args(argv)
    if options.command is None:
        parser.print_help()
        return 0
    try:
        status = options.run(options)
    except DTensorError as error:
        print(f"{program} {options.command}: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # for example from "dtensor ops | head"
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return int(status() if callable(status) else status)


def _add_command(commands: Any, name: str, about: str, run: Run | None, *examples: str) -> argparse.ArgumentParser:
    """Add a subcommand, which calls ``run``, with its help text and examples; return its parser."""
    command: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=f"{about[0].upper()}{about[1:]}.",
        epilog="\n  ".join(["example:" if len(examples) == 1 else "examples:", *examples]),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.set_defaults(run=run)
    return command


def check_installed(module: str, extra: str, what: str) -> None:
    """Raise ArgumentError if the optional package ``module`` is missing, before a command starts to work.

    Raises:
        ArgumentError: ``module`` is not installed.
    """
    if importlib.util.find_spec(module) is None:
        raise ArgumentError(f"{what} needs {module}, which is not installed; run pip install 'dtensor[{extra}]'")


# --- scripts ------------------------------------------------------------------------------------------------------------
def _add_script(commands: Any, name: str, about: str, run: Run, *examples: str) -> argparse.ArgumentParser:
    """Add a subcommand that runs a Python script with arguments, and return its parser."""
    command = _add_command(commands, name, about, run, *examples)
    command.add_argument("script", type=Path, metavar="SCRIPT.py", help="Python program; under torchrun, each rank runs it")
    command.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments of the script")
    return command


def _add_html(command: argparse.ArgumentParser) -> None:
    """Add the option ``--html`` to a command, which also writes its report as a page."""
    command.add_argument(
        "--html",
        type=run_script.writable_path,
        metavar="FILE",
        help="also write the report as an HTML page, beside the lines of the script",
    )


def _add_explain(commands: Any) -> None:
    """Add the subcommand ``explain`` to the parser; it reports a script's communication, compute and memory."""

    def run_explain(options: argparse.Namespace) -> Callable[[], int]:
        path = run_script.existing_file(options.script)
        return lambda: run_script.explain_script(path, options.arguments, options.html)

    about = "run a script and report its communication, compute and peak memory, by source line"
    examples = ("dtensor explain train.py --steps 1", "torchrun --nproc-per-node 4 -m dtensor explain --html page.html train.py")
    _add_html(_add_script(commands, "explain", about, run_explain, *examples))


def _add_trace(commands: Any) -> None:
    """Add the subcommand ``trace`` to the parser; it runs a script and writes a timeline of its ranks."""

    def run_trace(options: argparse.Namespace) -> Callable[[], int]:
        path = run_script.existing_file(options.script)
        return lambda: run_script.trace_script(path, options.arguments, options.output)

    about = "run a script and write a timeline of its ranks, for https://ui.perfetto.dev or chrome://tracing"
    examples = ("dtensor trace train.py", "torchrun --nproc-per-node 4 -m dtensor trace --output step.json.gz train.py")
    command = _add_script(commands, "trace", about, run_trace, *examples)
    name = "trace.json.gz"
    command.add_argument(
        "--output",
        type=run_script.writable_path,
        default=name,
        metavar="FILE",
        help=f"trace file, compressed if its name ends in .gz (default: {name})",
    )


def _add_plan(commands: Any) -> None:
    """Add the subcommand ``plan`` to the parser; it plans a script's strategies, or finds the best mesh for a known model."""

    def run_plan_command(options: argparse.Namespace) -> int | Callable[[], int]:
        """Find layouts for a known model now, or return the call that plans a script."""
        if options.script.name in MODELS:
            about = "Find the fastest parallel layouts of a training step on a cluster, by the cost model."
            parser = argparse.ArgumentParser(prog=f"dtensor plan {options.script}", description=about)
            cluster_plan.add_options(parser)
            chosen = parser.parse_args(options.arguments)
            if chosen.plot is not None:
                check_installed("matplotlib", "plot", "--plot")
            return cluster_plan.run_plan(options.script.name, chosen)
        if not options.script.is_file() and not options.script.suffix:
            raise ArgumentError(f"{options.script} is neither a script nor a known model{_near_models(options.script.name)}")
        path = run_script.existing_file(options.script)
        check_installed("scipy", "plan", "plan")
        return lambda: run_script.plan_script(path, options.arguments, options.html, options.json)

    about = "run a script and choose the strategies of all its operators together; or find the best mesh for a known model"
    examples = (
        "dtensor plan --json plan.json train.py    # then dt.capture(step, plan=dt.ProgramPlan.load('plan.json'))",
        "dtensor plan llama3-8b --ranks 64         # options: dtensor plan llama3-8b --help",
        f"models: {', '.join(MODELS)}",
    )
    command = _add_script(commands, "plan", about, run_plan_command, *examples)
    _add_html(command)
    command.add_argument(
        "--json", type=run_script.writable_path, metavar="FILE", help="also write the plan as JSON, for capture(plan=)"
    )


def _near_models(name: str) -> str:
    near = [model for model in MODELS if name and name.lower() in model] or get_close_matches(name, MODELS)
    return f"; did you mean {' or '.join(near)}?" if near else f"; known models: {', '.join(MODELS)}"


# --- measuring ----------------------------------------------------------------------------------------------------------
def _add_bench(commands: Any) -> None:
    """Add the subcommand ``bench`` to the parser; it measures redistributions or the dispatch time of operators."""
    bench_command = _add_command(
        commands,
        "bench",
        "measure redistributions or operators on this machine, with one process per rank (gloo)",
        None,
        'dtensor bench redistribute --mesh 3x2 --size 1MB --pairs "S0->S1,R" "P->R" --plot times.png',
        "dtensor bench dispatch --only add mm",
    )
    kinds = bench_command.add_subparsers(title="kinds", dest="kind", required=True, metavar="KIND")
    about = "measure redistributions and compare them with the cost model"
    redistribute_command = _add_command(
        kinds, "redistribute", about, _bench_redistribute, 'dtensor bench redistribute --mesh 3x2 --pairs "S0->S1,R"'
    )
    redistribute_command.add_argument("--mesh", default="4", help="shape of the mesh, such as 4 or 3x2 (default: 4)")
    redistribute_command.add_argument(
        "--size", nargs="+", default=["1MB"], metavar="SIZE", help="bytes (64KB) or shapes (1031x1021) of float32 tensors"
    )
    redistribute_command.add_argument(
        "--pairs",
        nargs="+",
        metavar="PAIR",
        help='source and target placements, one for each mesh dim: "S0->S1,R"; R if left out',
    )
    about = "measure the host time of operators and compare it with plain torch"
    dispatch_command = _add_command(kinds, "dispatch", about, _bench_dispatch, "dtensor bench dispatch --only add mm")
    dispatch_command.add_argument(
        "--only",
        nargs="+",
        choices=list(bench.OPERATORS),
        default=list(bench.OPERATORS),
        metavar="OPERATOR",
        help=f"operators to measure (default: all of {', '.join(bench.OPERATORS)})",
    )
    for command in (redistribute_command, dispatch_command):
        command.add_argument("--json", action="store_true", help="print the rows as JSON instead of a table")
        command.add_argument(
            "--plot",
            type=run_script.writable_path,
            metavar="FILE",
            help="also draw a plot: png, svg or pdf (needs dtensor[plot])",
        )


def _bench_redistribute(options: argparse.Namespace) -> int:
    """Measure redistributions on one process per rank, and show them next to the predictions."""
    mesh, shapes = bench.parse_mesh(options.mesh), [bench.parse_shape(text) for text in options.size]
    pairs = options.pairs or bench.default_pairs(mesh)
    for shape in shapes:
        for pair in pairs:
            bench.parse_pair(pair, mesh, len(shape))
    rows = spawn_ranks(math.prod(mesh), bench.time_redistributions, mesh, shapes, pairs)
    status = _show_rows(options, rows, len(shapes) * len(pairs))
    if not is_calibrated():
        print(
            "this machine is not calibrated: predictions use built-in constants; run dtensor calibrate to measure it",
            file=sys.stderr,
        )
    return status


def _bench_dispatch(options: argparse.Namespace) -> int:
    return _show_rows(options, spawn_ranks(2, bench.time_operators, options.only), len(options.only))


def _show_rows(options: argparse.Namespace, rows: Iterator[Any], count: int) -> int:
    """Print measured rows as a table or JSON, and plot them if requested; return the exit status."""
    if options.plot:
        check_installed("matplotlib", "plot", "--plot")
    results = list(iterate_with_progress(rows, count, f"measuring {options.kind}"))
    if options.json:
        print(json.dumps([asdict(row) for row in results], indent=1))
    else:
        print_table(bench.table_rows(results), numbers=True)
    if options.plot:
        bench.draw_plot(results, options.plot)
        print(f"written to {options.plot}", file=sys.stderr)
    return 0


def _add_calibrate(commands: Any) -> None:
    """Add the subcommand ``calibrate`` to the parser; it measures this machine's collectives for the cost model."""
    about = "measure collectives and compute on this machine, and save the constants of the cost model"
    command = _add_command(commands, "calibrate", about, _run_calibrate, "dtensor calibrate --ranks 4")
    command.add_argument("--ranks", type=int, default=4, metavar="N", help="processes to start, unless torchrun did (default: 4)")
    command.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="device type to measure (default: cpu)")
    command.add_argument(
        "--output",
        type=Path,
        default=None,
        metavar="FILE",
        help="machine profile to write (default: $DTENSOR_PROFILE or ~/.cache/dtensor/profile.json)",
    )
    command.add_argument(
        "--seconds", type=float, default=0.05, help="duration of each of about fifty measurements (default: 0.05)"
    )


def _run_calibrate(options: argparse.Namespace) -> int:
    """Measure this machine's collectives, write the profile, and print it on one rank."""
    path, profile = calibrate.run_calibration(options.ranks, options.device, options.output, options.seconds)
    if run_script.is_printing_rank():
        for title, rows in calibrate.report_tables(profile, "nccl" if options.device == "cuda" else "gloo"):
            print(title)
            print_table(rows, numbers=True)
        print(f"written to {path}")
    return 0


# --- state --------------------------------------------------------------------------------------------------------------
def _add_doctor(commands: Any) -> None:
    about = "report versions, backends and active patches on torch, and test communication between processes"
    _add_command(commands, "doctor", about, lambda options: doctor.main(), "dtensor doctor")


def _add_ranks(commands: Any) -> None:
    """Add the subcommand ``ranks`` to the parser; it prints what each rank did last, after a run that hung or died."""

    def print_rank_logs(options: argparse.Namespace) -> int:
        """Print the last events that the ranks of a job logged in its folder."""
        if options.folder is not None and not options.folder.is_dir():
            raise ArgumentError(f"there is no folder {options.folder}")
        try:
            print(post_mortem.format_rank_logs(options.folder, options.last))
        except FileNotFoundError as error:
            raise ArgumentError(str(error)) from None
        return 0

    about = "report the last operations of each rank of a job on this host, also after the ranks were killed"
    command = _add_command(commands, "ranks", about, print_rank_logs, "dtensor ranks --last 5")
    command.add_argument(
        "folder",
        type=Path,
        nargs="?",
        metavar="FOLDER",
        help="folder of the job: /dev/shm/dtensor-ranks-... (default: the newest)",
    )
    command.add_argument("--last", type=int, default=20, metavar="N", help="operations to show of each rank (default: 20)")


def _add_ops(commands: Any) -> None:
    """Add the subcommand ``ops`` to the parser; it prints how each operator runs, as Markdown tables."""

    def print_operator_tables(options: argparse.Namespace) -> int:
        print(operator_tables(), end="")
        return 0

    about = "print how each operator runs, as Markdown tables: dims that may be sharded, collectives, partial inputs"
    _add_command(commands, "ops", about, print_operator_tables, "dtensor ops > operators.md")


def _add_verify(commands: Any) -> None:
    """Add the subcommand ``verify`` to the parser; it runs sharding rules on samples and compares with plain torch."""
    about = "run operators under many placements and compare the results with PyTorch on plain tensors"
    examples = ('dtensor verify "*softmax*"', "dtensor verify my.module::halve")
    command = _add_command(commands, "verify", about, _verify_rules, *examples)
    command.add_argument(
        "words",
        nargs="*",
        metavar="MODULE | FILE.py | PATTERN",
        help='operator names or fnmatch patterns (mm, "*softmax*", "mylib::*"); modules to import first, whose rules are '
        "verified if nothing else is named; or both (my.module::halve). Default: all rules",
    )
    command.add_argument(
        "--limit", type=int, default=60, metavar="N", help="placements to try per sample, variant and mesh (default: 60)"
    )
    command.add_argument("--budget", type=int, default=None, metavar="N", help="cases per rule, chosen at random (default: all)")
    command.add_argument("--seed", type=int, default=0, metavar="N", help="seed of the random choices (default: 0)")
    command.add_argument(
        "--missing",
        action="store_true",
        help="also search for placements that would need no communication, but that no strategy of the rule has",
    )
    command.add_argument("--device", default="cpu", help="device type to run on (default: cpu)")


def _verify_rules(options: argparse.Namespace) -> int:
    """Verify the sharding rules that the arguments select, print the wrong ones, and return the exit status."""
    names = select_rules(options.words)
    unsampled = sorted({*names} & {*rules_without_sample()} | {name for name in names if name not in rules()})
    options_of_verify = {name: getattr(options, name) for name in ("limit", "budget", "seed", "device")}
    options_of_verify["look_for_missing"] = options.missing
    reports = []
    for name in iterate_with_progress(names, len(names), "verifying"):
        if name in unsampled or not samples_of(name):  # operators without a CPU kernel have no samples
            continue
        reports.append(verify_rule(name, **options_of_verify))
        if not reports[-1]:
            print(reports[-1], flush=True)
    for name in unsampled:
        print(f"{name}: no sample" if name in rules() else f"{name}: no rule")
    cases, wrong, missing = map(sum, zip(*map(_count_results, reports), strict=True)) if reports else (0, 0, 0)
    verified = f"{len(reports)} rule{'s' * (len(reports) != 1)}, {cases} cases, {wrong} wrong, {missing} missing"
    print(f"{verified}, {len(unsampled)} without sample or rule")
    return 1 if unsampled or not all(reports) or not reports else 0


def _count_results(report: Report) -> tuple[int, int, int]:
    return report.cases, len(report.wrong), len(report.missing)


if __name__ == "__main__":
    sys.exit(main())
