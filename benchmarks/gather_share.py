"""Gather share: the share of PyTorch's operator database that runs without the gather fallback when one tensor dim is sharded.

    python benchmarks/gather_share.py --json shares.jsonl
    python benchmarks/gather_share.py --ops 'nn_functional_*' --samples 2 --mesh 2,2

For every entry and sample, each tensor argument in turn is sharded along each of its dims over all mesh dims, and the others are
replicated. Forward and backward run; operators that fall back are listed, the most used first (by how often ``torch``'s own
Python sources call the entry).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "databases")]

import op_database as db  # noqa: E402  its folder is known from here on
import torch  # noqa: E402

import dtensor as dt  # noqa: E402
from dtensor.base.tensor_tree import fill_tensors, iter_tree_leaves, map_tensors, tensor_leaves  # noqa: E402
from dtensor.placement import Replicate, Shard  # noqa: E402
from dtensor.testing.scatter import scatter  # noqa: E402


def main() -> None:
    """Measure the entries that the options choose, or read earlier results, and print the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default="*", help="comma-separated patterns of entry names")
    parser.add_argument("--mesh", action="append", help="mesh shape such as 2,2 (may be repeated); default 4 and 2,2")
    parser.add_argument("--samples", type=int, default=4, help="samples per entry")
    parser.add_argument("--part", default="0/1", help="k/n: every n-th entry, from the k-th on")
    parser.add_argument("--json", help="add one line per entry and mesh to this file")
    parser.add_argument("--report", nargs="+", help="only report what these files hold")
    options = parser.parse_args()
    if options.report:
        found = [json.loads(line) for name in options.report for line in Path(name).read_text().splitlines()]
        print_report(found)
        return
    meshes = [tuple(int(n) for n in text.split(",")) for text in options.mesh or ("4", "2,2")]
    first, step = map(int, options.part.split("/"))
    found = []
    for entry in db.entries(options.ops)[first::step]:
        for mesh in meshes:
            found.append(measure_entry(entry, mesh, options.samples))
            if options.json:
                with open(options.json, "a") as kept:
                    kept.write(json.dumps(found[-1]) + "\n")
    print_report(found)


def measure_entry(entry: Any, mesh: tuple[int, ...], samples: int) -> dict[str, Any]:
    """Run all cases of one entry on one mesh; return their number, the operators that gather, and the errors."""
    torch.manual_seed(0)
    line: dict[str, Any] = {"entry": entry.formatted_name, "mesh": list(mesh), "cases": 0, "forward": {}, "backward": {}}
    line |= {"errors": [], "seconds": 0.0}
    began = time.monotonic()
    for _, sample in list_samples(entry, mesh, samples):
        for args, kwargs, where in yield_sharded_arguments(sample, mesh, list_differentiable(sample)):
            run_case(sample.fn, args, kwargs, where, line)
    return line | {"seconds": round(time.monotonic() - began, 2)}


def list_samples(entry: Any, mesh: tuple[int, ...], samples: int) -> list[tuple[int, db.Sample]]:
    """Return the numbered samples of an entry that plain torch accepts."""
    try:
        given = db.samples_of(entry, db.Setting(mesh, samples=samples))
    except Exception:  # the database's own
        return []
    return [(i, sample) for i, sample in given if _plain_runs(sample)]


def _plain_runs(sample: db.Sample) -> bool:
    """Return whether plain torch runs the sample, with strided tensors as inputs and results."""
    if any(x.layout is not torch.strided or x.is_quantized for x in tensor_leaves(sample.given)):
        return False
    try:
        with db.quiet():
            args, kwargs = map_tensors(torch.clone, sample.given)
            made = sample.fn(*args, **kwargs)
    except Exception:  # what plain torch does not take is not asked for
        return False
    return all(not isinstance(x, torch.Tensor) or x.layout is torch.strided for x in iter_tree_leaves(made))


def list_differentiable(sample: db.Sample) -> list[bool]:
    """Return for each tensor of a sample whether plain torch accepts that it alone requires a gradient."""
    given = tensor_leaves(sample.given)
    found = []
    for i, chosen in enumerate(given):
        allowed = chosen.dtype.is_floating_point or chosen.dtype.is_complex
        if allowed:
            args, kwargs = fill_tensors(sample.given, [x.detach().clone().requires_grad_(k == i) for k, x in enumerate(given)])
            try:
                with db.quiet():
                    sample.fn(*args, **kwargs)
            except Exception:
                allowed = False
        found.append(allowed)
    return found


def yield_sharded_arguments(sample: db.Sample, mesh: tuple[int, ...], wanted: list[bool]) -> Iterator[tuple[Any, Any, str]]:
    """Yield the arguments with one dim of one tensor sharded, and a text that names both, for each tensor and dim."""
    device_mesh = dt.init_device_mesh("cpu", mesh)
    given = tensor_leaves(sample.given)
    for i, chosen in enumerate(given):
        for dim in range(chosen.ndim):
            made = [
                scatter(x, device_mesh, [Shard(dim) if k == i else Replicate()] * len(mesh)).requires_grad_(wanted[k])
                for k, x in enumerate(given)
            ]
            args, kwargs = fill_tensors(sample.given, made)
            yield args, kwargs, f"tensor {i} of {[tuple(x.shape) for x in given]} along dim {dim}"


def run_case(fn: Any, args: Any, kwargs: Any, where: str, line: dict[str, Any]) -> None:
    """Run forward and backward of one case, and add the operators that gather and the errors to ``line``."""
    line["cases"] += 1
    try:
        with db.quiet(), db.gathers() as forward:
            results = fn(*args, **kwargs)
    except Exception as error:
        line["errors"].append(f"{where}: {_first_line(error)}")
        return
    for name in forward:
        line["forward"].setdefault(name, where)
    outputs = [x for x in iter_tree_leaves(results) if isinstance(x, torch.Tensor) and x.requires_grad]
    try:
        with db.quiet(), db.gathers() as backward:
            if outputs:
                torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
    except Exception as error:
        if not _plain_backward_raises(fn, args, kwargs):
            line["errors"].append(f"{where}, backward: {_first_line(error)}")
    for name in backward:
        line["backward"].setdefault(name, where)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}"


def _plain_backward_raises(fn: Any, args: Any, kwargs: Any) -> bool:
    """Return whether forward and backward of a case also raise with plain tensors."""

    def plain(x: Any) -> Any:
        return x.full_tensor().detach().requires_grad_(x.requires_grad) if isinstance(x, dt.DTensor) else x

    try:
        with db.quiet():
            args, kwargs = map_tensors(plain, (args, kwargs))
            outputs = [x for x in iter_tree_leaves(fn(*args, **kwargs)) if isinstance(x, torch.Tensor) and x.requires_grad]
            torch.autograd.backward(outputs, [torch.ones_like(x) for x in outputs])
    except Exception:
        return True
    return False


# --- the report -----------------------------------------------------------------------------------------------------------
def print_report(found: list[dict[str, Any]]) -> None:
    """Print the share of entries that never gather, the operators that gather, and the entries that gather, most used first."""
    tried = [line for line in found if line["cases"]]
    names = {line["entry"] for line in tried}
    for label, sides in (("forward", ("forward",)), ("forward and backward", ("forward", "backward"))):
        gather = {line["entry"] for line in tried if any(line[side] for side in sides)}
        print(f"{label}: {len(names) - len(gather)} of {len(names)} entries ({_format_share(names, gather)}) never gather")
        for mesh in sorted({tuple(line["mesh"]) for line in tried}):
            here = {line["entry"] for line in tried if tuple(line["mesh"]) == mesh}
            some = {line["entry"] for line in tried if tuple(line["mesh"]) == mesh and any(line[side] for side in sides)}
            print(f"    mesh {mesh}: {len(here) - len(some)} of {len(here)} ({_format_share(here, some)})")
    print(f"{sum(line['cases'] for line in tried)} cases, {sum(len(line['errors']) for line in tried)} errors")
    remaining: dict[str, dict[str, str]] = defaultdict(dict)
    for line in tried:
        for side in ("forward", "backward"):
            for name, where in line[side].items():
                remaining[line["entry"]].setdefault(name, f"{side}, {where}")
    operators = Counter(name for inner in remaining.values() for name in inner)
    print("\noperators that gather (entries): " + ", ".join(f"{name} {n}" for name, n in operators.most_common()))
    uses = count_calls_in_torch(list(remaining))
    print("\nentries that gather, most used first (calls in torch's Python sources):")
    for entry in sorted(remaining, key=lambda entry: (-uses[entry], entry)):
        print(f"  {uses[entry]:5d} {entry}: " + "; ".join(f"{name} ({where})" for name, where in remaining[entry].items()))
    for line in tried:
        for error in line["errors"][:1]:
            print(f"error: {line['entry']} on {tuple(line['mesh'])}: {error}")


def _format_share(names: set[str], gather: set[str]) -> str:
    return f"{100 * (1 - len(gather) / max(1, len(names))):.1f}%"


def count_calls_in_torch(entries: list[str]) -> dict[str, int]:
    """Count the calls of each entry's name in torch's own Python sources, tests excluded."""
    calls: Counter[str] = Counter()
    for path in Path(torch.__file__).parent.rglob("*.py"):
        if "testing" not in path.parts:
            calls.update(re.findall(r"\.(\w+)\(", path.read_text(errors="ignore")))
    bare = {entry: entry.removeprefix("nn_functional_").removeprefix("linalg_").removeprefix("special_") for entry in entries}
    return {entry: calls[bare[entry]] for entry in entries}


if __name__ == "__main__":
    main()
