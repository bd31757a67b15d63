"""Operator coverage: the share of PyTorch's operator database that is right under random placements, here or (``--peer``) in
torch.distributed.tensor.

    python benchmarks/op_coverage.py --ops 'linalg*' --samples 4 --mesh 4 --mesh 2,2 --json found.jsonl

Entries run in a worker process. An entry that kills it or takes longer than ``--timeout`` counts as an error, and a new worker
continues with the next entry.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import selectors
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
STATUSES = ("pass", "accepted", "refused", "wrong", "error")


def main() -> None:
    """Run all cases in worker processes, write them to ``--json``, and print the report."""
    options = parse_options()
    if options.worker:
        run_worker(options)
        return
    kept = open(options.json, "a" if options.append else "w") if options.json else None  # noqa: SIM115  open as long as the program
    found = []
    for case in run_all_cases(options):
        found.append(case)
        if kept is not None:
            kept.write(json.dumps(case) + "\n")
            kept.flush()
        if options.verbose and case["status"] not in ("pass", "void", "accepted"):
            print(describe_case(case), flush=True)
    print_report(found, options.causes)


def parse_options() -> argparse.Namespace:
    """Return the options of the command line, with defaults for mesh shapes and seeds."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="*", help="comma-separated patterns of entry names")
    parser.add_argument("--part", default="0/1", help="I/N: every N-th of these entries, from the I-th on")
    parser.add_argument("--mesh", action="append", help="mesh shape such as 2,2 (may be repeated); default 4 and 2,2")
    parser.add_argument("--seed", type=int, action="append", help="may be repeated; default 0")
    parser.add_argument("--samples", type=int, default=4, help="samples per entry, mesh and seed")
    parser.add_argument("--draw", default="mixed", choices=("mixed", "shard", "replicate", "partial"))
    parser.add_argument("--variant", default="function", choices=("function", "inplace", "out"))
    parser.add_argument("--dtype", default="float64", help="float64 falls back to what the entry has")
    parser.add_argument("--device", default="cpu", help="of the mesh and of the samples; not with --peer")
    parser.add_argument("--timeout", type=float, default=120, help="seconds per entry")
    parser.add_argument("--json", help="write one line per case to this file")
    parser.add_argument("--append", action="store_true", help="add to the file")
    parser.add_argument("--peer", action="store_true", help="run torch.distributed.tensor instead")
    parser.add_argument("--odd", action="store_true", help="change the samples: memory orders, sizes, shared and plain arguments")
    parser.add_argument("--wrong", action="store_true", help="make the samples wrong: sizes, dtypes, numbers of dims, numbers")
    parser.add_argument("--causes", type=int, default=40, help="how many causes to list")
    parser.add_argument("--verbose", action="store_true")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--skip", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    options.mesh = [tuple(int(n) for n in text.split(",")) for text in options.mesh or ("4", "2,2")]
    options.seed = options.seed or [0]
    return options


# --- the worker -----------------------------------------------------------------------------------------------------------
def run_worker(options: argparse.Namespace) -> None:
    """Run the entries from ``--skip`` on in this worker; print a JSON line before each entry and for each case."""
    sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "databases")]
    import torch

    torch.set_num_threads(1)
    import op_database

    cases_of = op_database.cases_of
    if options.peer:
        import op_database_pytorch

        cases_of = op_database_pytorch.cases_of
    elif options.odd:
        import op_database_unusual_calls

        cases_of = op_database_unusual_calls.cases_of
    elif options.wrong:
        import op_database_wrong_calls

        cases_of = op_database_wrong_calls.cases_of
    channel = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what operators print is not for the channel
    first, step = map(int, options.part.split("/"))
    for i, entry in enumerate(op_database.entries(options.ops)[first::step]):
        if i < options.skip:
            continue
        print(json.dumps({"begin": i, "entry": entry.formatted_name}), file=channel, flush=True)
        for mesh in options.mesh:
            for seed in options.seed:
                setting = op_database.Setting(
                    mesh, options.dtype, options.variant, options.samples, seed, options.device, options.draw
                )
                for case in cases_of(entry, setting):
                    print(json.dumps(dataclasses.asdict(case)), file=channel, flush=True)
                    if "AcceleratorError" in case.problem:  # nothing runs on this device in this process any more
                        os._exit(1)
    print(json.dumps({"end": True}), file=channel, flush=True)


# --- the parent -----------------------------------------------------------------------------------------------------------
def run_all_cases(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield all cases, with a new worker after one that dies or hangs."""
    skip = 0
    while skip is not None:
        skip = yield from run_cases_in_worker(options, skip)


def run_cases_in_worker(options: argparse.Namespace, skip: int) -> Any:
    """Yield the cases of one worker; return the number of the next worker's first entry, or None after the last."""
    argv = [*sys.argv, "--worker", "--skip", str(skip)]
    # glibc fills memory with a pattern that is no value of any sample: what a kernel leaves unwritten is then seen
    environment = os.environ | {"OMP_NUM_THREADS": "1", "GLIBC_TUNABLES": "glibc.malloc.tcache_count=0:glibc.malloc.perturb=128"}
    worker = subprocess.Popen([sys.executable, *argv], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment)
    assert worker.stdout is not None
    current: dict[str, Any] | None = None
    deadline = time.monotonic() + 300  # to import torch and the database
    try:
        for line in read_lines_until(worker.stdout, lambda: deadline):  # noqa: B023  the deadline of the moment is meant
            message = json.loads(line)
            if "end" in message:
                return None
            if "begin" in message:
                current, deadline = message, time.monotonic() + options.timeout
            else:
                yield message
        reason = "takes too long" if time.monotonic() > deadline else f"the worker died ({worker.poll()})"
    finally:
        worker.kill()
        worker.wait()
    if current is None:
        raise RuntimeError(f"the worker does not start: {reason}")
    setting = {"mesh": list(options.mesh[0])}
    yield {
        "entry": current["entry"],
        "setting": setting,
        "sample": -1,
        "status": "error",
        "problem": reason,
        "placements": [],
        "shapes": [],
        "gathered": [],
    }
    return current["begin"] + 1


def read_lines_until(stream: Any, deadline: Any) -> Iterator[str]:
    """Yield the lines of a stream that arrive before the deadline or the end of the stream."""
    selector = selectors.DefaultSelector()
    selector.register(stream, selectors.EVENT_READ)
    rest = b""
    while selector.select(max(0.0, deadline() - time.monotonic())):
        data = os.read(stream.fileno(), 1 << 16)
        if not data:
            return
        *whole, rest = (rest + data).split(b"\n")
        for line in whole:
            yield line.decode()


# --- the report -----------------------------------------------------------------------------------------------------------
def print_report(found: list[dict[str, Any]], causes: int) -> None:
    """Print counts per case and per entry (by its worst case), the share that gathers, and the causes of other failures."""
    cases = [case for case in found if case["status"] != "void"]
    worst: dict[str, str] = {}
    gathers: set[str] = set()
    for case in cases:
        name = case["entry"]
        worst[name] = max(worst.get(name, "pass"), case["status"], key=STATUSES.index)
        if case["gathered"]:
            gathers.add(name)
    counts, entries = Counter(case["status"] for case in cases), Counter(worst.values())
    print(f"\n{len(cases)} cases:   " + ", ".join(f"{counts[status]} {status}" for status in STATUSES))
    print(f"{len(worst)} entries: " + ", ".join(f"{entries[status]} {status}" for status in STATUSES))
    print(f"served without gathering: {len(worst) - len(gathers)} entries ({100 * (1 - len(gathers) / max(1, len(worst))):.1f}%)")
    operators = Counter(
        name for entry in sorted(gathers) for name in {op for case in cases if case["entry"] == entry for op in case["gathered"]}
    )
    print("gathering operators (entries): " + ", ".join(f"{name} {n}" for name, n in operators.most_common(causes)))
    groups: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for case in cases:
        if case["status"] != "pass":
            groups[case["status"], strip_numbers(case["problem"])].append(case)
    ordered = sorted(groups.items(), key=lambda item: -len({case["entry"] for case in item[1]}))
    for (status, text), members in ordered[:causes]:
        names = list(dict.fromkeys(case["entry"] for case in members))
        print(f"\n{len(names)} entries, {len(members)} cases, {status}: {text}")
        print(f"  {', '.join(names[:12])}\n  {describe_case(members[0])}")


def strip_numbers(problem: str) -> str:
    """Return the text of a problem without numbers and brackets, to group equal causes."""
    return re.sub(r"\d+", "#", re.sub(r"[\[(][^\[\]()]*[\])]", "()", problem))[:110]


def describe_case(case: dict[str, Any]) -> str:
    where = f"{case['entry']} on {tuple(case['setting']['mesh'])} sample {case['sample']}"
    tensors = ", ".join(f"{tuple(shape)} {placed}" for shape, placed in zip(case["shapes"], case["placements"], strict=True))
    return f"{where}: {case['status']}: {case['problem'][:300]} | {tensors}"


if __name__ == "__main__":
    main()
