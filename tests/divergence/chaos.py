"""``chaos.py [WORDS]``: runs the programs whose names have one of WORDS in them, and prints what came of each."""

from __future__ import annotations

import os
import re
import sys
import textwrap
import time
from collections import Counter
from pathlib import Path

for folder in ("../support", "."):
    sys.path.insert(0, str(Path(__file__).parent / folder))

import table  # noqa: E402
from pool import Outcome, Pool  # noqa: E402


def kind_of(found: list[Outcome]) -> str:
    """What came of a program, the worst over its ranks."""
    if any(outcome.kind == "exit" for outcome in found):
        return "a rank died"
    words = " ".join(outcome.words for outcome in found)
    if any(outcome.kind == "timeout" for outcome in found) or "Timed out" in words:
        return "waited for the timeout"
    if all(outcome.kind == "result" for outcome in found):
        return "all ranks got results"
    named = "differs from" in words or "differ" in words or "no rank can go on" in words or re.search(r"rank \d+ has", words)
    return "named" if named or "mismatch between collectives" in words else "some rank raised otherwise"


def main(words: list[str]) -> None:
    pool, counts, begin = Pool(3, os.environ.get("DTENSOR_CHECK_RANKS", "watch")), Counter[str](), time.monotonic()
    for name in table.PROGRAMS:
        if words and not any(word in name for word in words):
            continue
        found = pool.run("table", name, 25.0 if name in table.DEADLY else 60.0)
        counts[kind_of(found)] += 1
        short = " | ".join(f"{outcome.kind}:{outcome.name} {outcome.seconds:.1f}" for outcome in found)
        print(f"{name:<40} {kind_of(found)}: {short}", flush=True)
        for said in sorted({outcome.words for outcome in found if outcome.words}):
            print(textwrap.indent(said[:600], "      "))
    pool.close()
    print(f"{dict(counts)}, {time.monotonic() - begin:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
