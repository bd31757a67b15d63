"""``python -m dtensor verify [pattern]``: verify the registered sharding rules whose names match."""

from __future__ import annotations

import argparse
import sys

from .testing.samples import without_sample
from .testing.verify import verify_all


def main(argv: list[str] | None = None) -> int:
    """The exit status: 1 if some rule is wrong or has no sample."""
    parser = argparse.ArgumentParser(prog="python -m dtensor", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    verify = commands.add_parser("verify", help="run operators under many placements and compare with plain torch")
    verify.add_argument("pattern", nargs="?", default="*", help='names as of fnmatch: "mm", "*softmax*", "mylib::*"')
    verify.add_argument("--limit", type=int, default=60, help="placements per sample, variant and mesh")
    verify.add_argument("--budget", type=int, default=None, help="cases per rule, a random part of them")
    verify.add_argument("--seed", type=int, default=0)
    verify.add_argument("--missing", action="store_true", help="also look for placements that need no communication")
    options = parser.parse_args(argv)
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
