"""``python -m dtensor verify [pattern]`` verifies sharding rules, ``calibrate`` measures collectives, ``ops`` lists operators."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from . import calibrate
from .testing.operator_page import measured_in, page
from .testing.samples import without_sample
from .testing.verify import verify_all


def main(argv: list[str] | None = None) -> int:
    """The exit status: of ``verify`` 1 if some rule is wrong or has no sample."""
    parser = argparse.ArgumentParser(prog="python -m dtensor", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="run operators under many placements and compare with plain torch")
    verify.add_argument("pattern", nargs="?", default="*", help='names as of fnmatch: "mm", "*softmax*", "mylib::*"')
    verify.add_argument("--limit", type=int, default=60, help="placements per sample, variant and mesh")
    verify.add_argument("--budget", type=int, default=None, help="cases per rule, a random part of them")
    verify.add_argument("--seed", type=int, default=0)
    verify.add_argument("--missing", action="store_true", help="also look for placements that need no communication")
    measure = commands.add_parser("calibrate", help="measure collectives on this machine; plans are made by what is found")
    measure.add_argument("--ranks", type=int, default=4, help="processes to start, unless torchrun has started us")
    measure.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    measure.add_argument("--output", type=Path, default=None, help="default: $DTENSOR_PROFILE or ~/.cache/dtensor/profile.json")
    measure.add_argument("--seconds", type=float, default=0.05, help="for each of about fifty measurements")
    ops = commands.add_parser("ops", help="how every operator is served, as the page docs/ops.md")
    ops.add_argument("--measured", type=Path, default=Path("benchmarks/gather_share.json"), help="of benchmarks/gather_share.py")
    options = parser.parse_args(argv)
    if options.command == "ops":
        print(page(measured_in(options.measured)), end="")
        return 0
    return _calibrate(options) if options.command == "calibrate" else _verify(options)


def _calibrate(options: argparse.Namespace) -> int:
    path, profile = calibrate.run(options.ranks, options.device, options.output, options.seconds)
    if os.environ.get("RANK", "0") == "0":
        print(calibrate.table(profile, "nccl" if options.device == "cuda" else "gloo"))
        print(f"written to {path}")
    return 0


def _verify(options: argparse.Namespace) -> int:
    cases = wrong = missing = checked = 0
    for report in verify_all(
        options.pattern, limit=options.limit, budget=options.budget, seed=options.seed, look_for_missing=options.missing
    ):
        checked, cases = checked + 1, cases + report.cases
        wrong, missing = wrong + len(report.wrong), missing + len(report.missing)
        if not report:
            print(report, flush=True)
    unsampled = without_sample() if options.pattern == "*" else []
    for name in unsampled:
        print(f"{name}: no sample")
    print(f"{checked} rules, {cases} cases, {wrong} wrong, {missing} missing, {len(unsampled)} without sample")
    return 1 if wrong or unsampled else 0


if __name__ == "__main__":
    sys.exit(main())
