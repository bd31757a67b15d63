"""Hugging Face models: which families run unmodified with distributed parameters, and the time of a tiny model's first step.

    python benchmarks/hf_models.py [--families gpt2,llama] [--plans replicated,everywhere] [--device cuda] [--json FILE]

Needs the extra ``hf``. One line per failure: family, placements, the error with the operator, or the first wrong value; then
the operators that gathered, with the families, and the slow families.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
import warnings
from collections import defaultdict
from pathlib import Path

import torch

import dtensor as dt
from dtensor.dispatch.programs import comm_report

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "hf"))
from families import FAMILIES
from training_step import PLANS, Different, check

SLOW = 30.0  # seconds


def find_raising_line(error: BaseException) -> str:
    """Return file, number and text of the last line in transformers' code of an error's traceback, or else of its last line."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if "transformers" in frame.filename] or frames
    return f"{Path(own[-1].filename).name}:{own[-1].lineno} `{own[-1].line}`"


def check_family(family: str, plan: str, mesh: dt.DeviceMesh) -> dict[str, object]:
    """Compare one training step of a family under a placement plan with one device; return the failure, gathered operators and
    seconds.
    """
    comm_report._WARNED.clear()
    started, failure, place = time.perf_counter(), "", ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("ignore")
        warnings.simplefilter("always", dt.errors.GatherWarning)
        try:
            check(FAMILIES[family], PLANS[plan], mesh)
        except Different as error:
            failure = str(error)
        except Exception as error:
            failure, place = (
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
                find_raising_line(error),
            )
    gathered = [str(w.message).split(" has no")[0] for w in caught if issubclass(w.category, dt.errors.GatherWarning)]
    seconds = time.perf_counter() - started
    return {"family": family, "plan": plan, "failure": failure, "where": place, "gathered": gathered, "seconds": seconds}


def main() -> None:
    """Check all families under all plans; print the failures and the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--plans", default=",".join(PLANS))
    parser.add_argument("--device", default="cpu", help="of the mesh, the model and what it eats")
    parser.add_argument("--json", help="append one line per run to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    mesh = dt.init_device_mesh(options.device, (2, 2), mesh_dim_names=("dp", "tp"))
    results = []
    for family in options.families.split(","):
        for plan in options.plans.split(","):
            result = check_family(family, plan, mesh)
            results.append(result)
            if result["failure"]:
                print(
                    f"{family:24} {plan:12} {result['seconds']:5.1f} s  {result['failure'][:300]}\n    {result['where']}",
                    flush=True,
                )
            if options.json:
                with Path(options.json).open("a") as file:
                    file.write(json.dumps(result) + "\n")
    print_report(results)


def print_report(results: list[dict[str, object]]) -> None:
    """Print the operators that gathered, the slow families, and how many steps and families are right."""
    gathering = defaultdict(set)
    for result in results:
        for name in result["gathered"]:
            gathering[name].add(result["family"])
    for name, families in sorted(gathering.items(), key=lambda item: -len(item[1])):
        print(f"gathers: {name} in {len(families)}: {', '.join(sorted(families))[:150]}")
    for result in results:
        if result["seconds"] > SLOW:
            print(f"slow: {result['family']} {result['plan']} {result['seconds']:.0f} s")
    families = {result["family"] for result in results}
    right = families - {result["family"] for result in results if result["failure"]}
    passed = sum(not result["failure"] for result in results)
    print(f"{passed} of {len(results)} steps equal one device; {len(right)} of {len(families)} families under all placements")


if __name__ == "__main__":
    main()
