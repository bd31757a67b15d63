"""``explain script.py`` tells what a program moves, line by line, ``doctor`` looks at the machine, ``verify [module] [pattern]``
verifies rules, ``calibrate`` measures collectives, ``plan`` lays a model over a cluster, ``ops`` lists operators.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from .cost import calibrate
from .debug import doctor, script
from .debug.operator_page import measured_in, page
from .errors import RuleError
from .plan import command
from .redistribute import moves
from .rules import rules
from .testing.asked import rules_asked
from .testing.samples import samples_of, without_sample
from .testing.verify import Report, verify_rule


def main(argv: list[str] | None = None) -> int:
    """The exit status: of ``verify`` 1 if some rule is wrong, lacks placements or has no sample, 2 if nothing is meant."""
    parser = argparse.ArgumentParser(prog="python -m dtensor", description=__doc__)
    commands = parser.add_subparsers(dest="command")
    explain = commands.add_parser("explain", help="run a script and tell what it moves, by line (also under torchrun -m)")
    explain.add_argument("script", type=Path, metavar="SCRIPT.py")
    explain.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    commands.add_parser("doctor", help="versions, backends, what is changed of torch, and whether two processes can talk")
    verify = commands.add_parser("verify", help="run operators under many placements and compare with plain torch")
    verify.add_argument(
        "words",
        nargs="*",
        metavar="MODULE | FILE.py | PATTERN",
        help='names as of fnmatch ("mm", "*softmax*", "mylib::*"), modules to import first (their rules, if nothing else is '
        "named), or both (my.module::halve); default all rules",
    )
    verify.add_argument("--limit", type=int, default=60, help="placements per sample, variant and mesh")
    verify.add_argument("--budget", type=int, default=None, help="cases per rule, a random part of them")
    verify.add_argument("--seed", type=int, default=0)
    verify.add_argument("--missing", action="store_true", help="also look for placements that need no communication")
    measure = commands.add_parser("calibrate", help="measure collectives on this machine; plans are made by what is found")
    measure.add_argument("--ranks", type=int, default=4, help="processes to start, unless torchrun has started us")
    measure.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    measure.add_argument("--output", type=Path, default=None, help="default: $DTENSOR_PROFILE or ~/.cache/dtensor/profile.json")
    measure.add_argument("--seconds", type=float, default=0.05, help="for each of about fifty measurements")
    command.add_options(commands.add_parser("plan", help="ways to lay a training step of a known model over a cluster"))
    ops = commands.add_parser("ops", help="how every operator is served, as the page docs/ops.md")
    ops.add_argument("--measured", type=Path, default=Path("benchmarks/gather_share.json"), help="of benchmarks/gather_share.py")
    options = parser.parse_args(argv)
    match options.command:
        case "ops":
            print(page(measured_in(options.measured)), end="")
            return 0
        case "explain":
            return script.explained(options.script, options.arguments)
        case "doctor":
            return doctor.main()
        case "plan":
            return command.main(options)
        case "calibrate":
            return _calibrate(options)
        case "verify":
            return _verify(options)
    parser.print_help()
    return 0


def _calibrate(options: argparse.Namespace) -> int:
    path, profile = calibrate.run(moves, options.ranks, options.device, options.output, options.seconds)
    if os.environ.get("RANK", "0") == "0":
        print(calibrate.table(profile, "nccl" if options.device == "cuda" else "gloo"))
        print(f"written to {path}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    try:
        names = rules_asked(options.words)
    except RuleError as error:
        print(error, file=sys.stderr)
        return 2
    unsampled = sorted({*names} & {*without_sample()} | {name for name in names if name not in rules()})
    given = {"limit": options.limit, "budget": options.budget, "seed": options.seed, "look_for_missing": options.missing}
    reports = []
    for name in names:
        if name in unsampled or not samples_of(name):  # of operators that have no kernel on a CPU there are none
            continue
        reports.append(verify_rule(name, **given))
        if not reports[-1]:
            print(reports[-1], flush=True)
    for name in unsampled:
        print(f"{name}: no sample" if name in rules() else f"{name}: no rule")
    cases, wrong, missing = (sum(counts) for counts in zip((0, 0, 0), *map(_counts, reports), strict=True))
    print(f"{len(reports)} rules, {cases} cases, {wrong} wrong, {missing} missing, {len(unsampled)} without sample or rule")
    return 1 if unsampled or not all(reports) or not reports else 0


def _counts(report: Report) -> tuple[int, int, int]:
    return report.cases, len(report.wrong), len(report.missing)


if __name__ == "__main__":
    sys.exit(main())
