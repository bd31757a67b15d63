"""``run_divergent.py [WORDS] [--level strict] [--ranks 4] [--part 1/3] [--out FILE]``: runs the programs whose names have one of
WORDS in them, or all programs, and prints the outcome of each and the number of programs by kind and outcome. Wrong outcomes are
printed in full. ``--out`` writes a line for each program; ``--counts FILE...`` prints the sum of the counts of such files.

With ``DTENSOR_CHAOS_PEER=1 TORCH_DISTRIBUTED_DEBUG=DETAIL DTENSOR_CHAOS_TIMEOUT=8`` those of ``divergent_programs.py`` in which
one rank does something else are run by ``torch.distributed.tensor``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import textwrap
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from threading import Lock, Thread
from typing import Any

for folder in ("../support", "."):
    sys.path.insert(0, str(Path(__file__).parent / folder))

import divergent_programs  # noqa: E402
from all_divergent_programs import PROGRAMS  # noqa: E402
from outcome import Judge, kind_of  # noqa: E402
from process_pool import Pool  # noqa: E402

_PRINTING = Lock()


def main() -> int:
    """Run programs and return how many have another outcome than promised."""
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--level", default=os.environ.get("DTENSOR_CHECK_RANKS", "watch"))
    parser.add_argument("--ranks", type=int, default=3)
    parser.add_argument("--part", default="1/1")
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--apart", action="store_true", help="as if each rank were on a host of its own")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--counts", nargs="+", type=Path)
    options = parser.parse_args()
    if options.counts:
        kept = [json.loads(line) for path in options.counts for line in path.read_text().splitlines()]
        print(counted({(one["level"], one["name"]): one for one in kept}.values()))  # the last run of each
        return 0
    part, parts = map(int, options.part.split("/"))
    programs = divergent_programs.DIFFERENT if divergent_programs.PEER else PROGRAMS
    names = [name for name in programs if not options.words or any(word in name for word in options.words)]
    names = names[len(names) * (part - 1) // parts : len(names) * part // parts]
    found: list[dict[str, Any]] = []
    shares = [names[len(names) * k // options.at_once : len(names) * (k + 1) // options.at_once] for k in range(options.at_once)]
    threads = [Thread(target=run, args=(share, options, found)) for share in shares]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(counted(found))
    return sum(bool(one["wrong"]) for one in found)


def run(names: list[str], options: argparse.Namespace, found: list[dict[str, Any]]) -> None:
    pool = Pool(options.ranks, options.level, apart=options.apart)
    judge = Judge(pool, options.level)
    for name in names:
        begin = time.monotonic()
        finding = judge.of(name)
        one = {
            "name": name,
            "level": "peer" if divergent_programs.PEER else options.level,
            "kind": kind_of(name),
            **finding._asdict(),
            "seconds": time.monotonic() - begin,
        }
        with _PRINTING:
            found.append(one)
            if options.out is not None:
                with options.out.open("a") as file:
                    file.write(json.dumps(one) + "\n")
            short = " | ".join(f"{outcome.kind}:{outcome.name} {outcome.seconds:.1f}" for outcome in judge.found)
            print(f"{'WRONG ' if finding.wrong else ''}{name:<40} {finding.what}: {short}", flush=True)
            if finding.wrong:
                print(textwrap.indent(finding.wrong[:2000], "      "), flush=True)
            elif options.words:
                for said in sorted({outcome.words for outcome in judge.found if outcome.words}):
                    print(textwrap.indent(said[:600], "      "), flush=True)
    pool.close()


def counted(found: Iterable[dict[str, Any]]) -> str:
    """Count outcomes of programs, by level and kind."""
    counts = Counter((one["level"], one["kind"], one["what"], "WRONG" if one["wrong"] else "") for one in found)
    return "\n".join(
        f"{level:<7} {kind:<10} {count:>4} {what} {wrong}" for (level, kind, what, wrong), count in sorted(counts.items())
    )


if __name__ == "__main__":
    sys.exit(bool(main()))
