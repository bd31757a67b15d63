"""Cost ablations: switch off one part of the cost model at a time, and list the rows of ``program_cost.py`` that change.

    python benchmarks/cost_ablations.py [PARTS...] [--families llama,gpt2,...] [--layouts tp,fsdp,dp,tp_dp] [--out rows.jsonl]
    python benchmarks/cost_ablations.py --every [--layouts tp,fsdp,tp_dp]      # the rows of every_family.py instead

A part is a function or an expression of ``dtensor/propagation``. Its ablation is a replacement in the source text, so the package
needs no switches. A part whose text is no longer in the module raises an error that names it.

Each cell is the bytes (or the matrix FLOPs) without the part, over those with it. Rows that change by less than ``--least``
(0.05) are not printed. These are counts, so they do not depend on the load of the machine. Each part runs in its own process.
"""

from __future__ import annotations
import __future__

import argparse
import ast
import inspect
import json
import subprocess
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import every_family
import torch
from costing.families import FAMILIES, USUAL, Size, build_model
from costing.styles import PLANS
from costing.untuned_models import MORE
from program_cost import make_step, measure_step, prepare_model

from dtensor.propagation import select_strategy, strategy_cost

# part -> (module, text in its source, replacement). An empty text replaces the function that the replacement defines.
PARTS: dict[str, tuple[ModuleType, str, str]] = {
    "free strategies first": (strategy_cost, "", "def select_free_strategies(*_):\n    return None"),
    "a reduce-scatter costs an all-reduce": (
        strategy_cost,
        "return link.all_reduce.seconds(ranks, 2 * nbytes)\n        case (int(), int())",
        "return link.all_reduce.seconds(ranks, (1 if isinstance(target, int) else 2) * nbytes)\n        case (int(), int())",
    ),
    "deferred reductions cost half": (
        strategy_cost,
        "return cost / 2 if call.is_reduction_deferred(i, mesh_dim) else cost",
        "return cost",
    ),
    "cached reductions are free": (strategy_cost, "cost = min([cost, *copies])", "cost = cost"),
    "deferred cost of partial results": (strategy_cost, "        return reduction\n", "        return 0.0\n"),
    "deferred cost of new shardings": (
        strategy_cost,
        "return resharding if is_resharded or has_owners else 0.0",
        "return resharding if has_owners else 0.0",
    ),
    "latency of resharding": (
        strategy_cost,
        "resharding_latency = link.exchange.seconds(ranks, 0) if keeps_sharded else 0.0",
        "resharding_latency = 0.0",
    ),
    "partial results that grow are gathered": (strategy_cost, "", "def _grows_results(*_):\n    return False"),
    "the larger operand decides": (
        strategy_cost,
        "    if not unchanged or not changed:\n        return not unchanged\n",
        "    return not unchanged\n",
    ),
    "disjoint results defer like sharded ones": (strategy_cost, "", "def _has_row_owners(*_):\n    return False"),
    "factors of one position are ignored": (strategy_cost, "", "def _shards_single_position(*_):\n    return False"),
    "seconds of products": (strategy_cost, "        if is_compute_bound:\n", "        if False:\n"),
    "unsharded values stay unsharded": (
        strategy_cost,
        "(seconds if ranks > 1 else 0.0, introduces_sharding, changed",
        "(seconds if ranks > 1 else 0.0, False, changed",
    ),
    "fewer operands change": (
        strategy_cost,
        "introduces_sharding, changed_operands, result_bytes",
        "introduces_sharding, 0, result_bytes",
    ),
    "smaller results": (strategy_cost, "", "def _result_bytes_per_rank(*_):\n    return 0.0"),
    "one rank's share on other mesh dims": (
        strategy_cost,
        "sizes = [size / max(shard_counts, default=1) for size in nbytes]",
        "sizes = list(nbytes)",
    ),
    "preferred layouts pay the way back": (
        strategy_cost,
        "    if target != source and call.has_preferred_layout(i):\n",
        "    if False:\n",
    ),
    "even blocks if operands disagree": (
        select_strategy,
        "            or any(factor_split != full_splits[0] for factor_split in full_splits)\n",
        "",
    ),
    "even blocks if results outgrow": (select_strategy, "", "def _result_outgrows_operands(*_):\n    return False"),
    "single owner": (select_strategy, "", "def select_single_owner(*_):\n    return None"),
    "disjoint strategies": (select_strategy, "", "def iter_disjoint_strategies(*_):\n    return iter(())"),
}


def switch_off_cost_part(part: str) -> None:
    """Redefine the function that holds a part, without the part, in its module and in all modules that imported it."""
    module, text, replacement = PARTS[part]
    source = inspect.getsource(module)
    if text:
        functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
        segments = {node.name: ast.get_source_segment(source, node) or "" for node in functions}
        holders = [name for name, segment in segments.items() if text.strip() in segment]
        if len(holders) != 1 or source.count(text) != 1:
            raise SystemExit(
                f"cost_ablations: {module.__name__} has the text of {part!r} {source.count(text)} times: update PARTS"
            )
        name, code = holders[0], segments[holders[0]].replace(text.strip(), replacement.strip())
    else:
        name, code = replacement.partition("(")[0].removeprefix("def "), replacement
    original = getattr(module, name, None)
    if original is None:
        raise SystemExit(f"cost_ablations: {module.__name__} has no {name} (part {part!r}): update PARTS")
    exec(compile(code, f"<without {part}>", "exec", __future__.annotations.compiler_flag), vars(module))
    for importer in [m for key, m in sys.modules.items() if key.startswith("dtensor.")]:
        if vars(importer).get(name) is original:
            setattr(importer, name, vars(module)[name])


def measure_model_rows(families: list[str], layouts: list[str]) -> Iterator[dict[str, Any]]:
    """Yield bytes, FLOPs and collectives of the rows of ``program_cost.py``."""
    size = Size(2, 256)
    FAMILIES.update(MORE)
    for name in families:
        one = measure_step(make_step(build_model(FAMILIES[name], size), FAMILIES[name].inputs(size)))
        for layout in layouts:
            if layout.startswith("styles") and (name, layout) not in PLANS:
                continue
            model, inputs, _ = prepare_model(layout, name, size)
            cost = measure_step(make_step(model, inputs))
            equal = abs(cost.loss - one.loss) < 1e-4 * abs(one.loss)
            yield {
                "row": f"{name} {layout}",
                "bytes": cost.nbytes,
                "flops": cost.flops,
                "collectives": cost.count,
                "equal": equal,
            }


def measure_family_rows(families: list[str], layouts: list[str]) -> Iterator[dict[str, Any]]:
    """Yield ratios of bytes and of FLOPs, and collectives, of the rows of ``every_family.py``."""
    for name in families or [name for name in every_family.CONFIG_MAPPING if every_family.classes_of(name)]:
        try:
            for row in every_family.measure_family(name, layouts):
                yield {"row": f"{name} {row['layout']}", **{key: row[key] for key in ("bytes", "flops", "collectives", "equal")}}
        except Exception as error:  # a model, its inputs or a layout may raise
            yield {"row": name, "error": f"{type(error).__name__}: {error}"[:120]}


def print_changes(part: str, rows: list[dict[str, Any]], complete: Mapping[str, dict[str, Any]], least: float) -> None:
    """Print the rows that change without the part, and a summary."""
    changed = []
    for row in rows:
        base = complete.get(row["row"], {})
        ratios = [row[key] / base[key] for key in ("bytes", "flops") if base.get(key) and key in row]
        if (
            "error" in row
            or (ratios and max(abs(ratio - 1) for ratio in ratios) >= least)
            or row.get("equal") != base.get("equal")
        ):
            changed.append(f"    {row['row']:24} " + (row.get("error") or " ".join(f"{ratio:6.2f}" for ratio in ratios)))
    print(f"{part}: {len(changed)} of {len(rows)} rows change", *changed, sep="\n", flush=True)


def main() -> None:
    """Run the rows without each part in a child process, and print which rows change."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", help="default: all")
    parser.add_argument("--families", default="", help="default: the usual ones, or with --every all")
    parser.add_argument("--layouts", default="tp,fsdp,dp,tp_dp,styles")
    parser.add_argument("--every", action="store_true", help="the rows of every_family.py")
    parser.add_argument("--least", type=float, default=0.05)
    parser.add_argument("--out", type=Path, default=Path("build/cost_ablations.jsonl"), help="rows that it has are not run again")
    parser.add_argument("--without", help=argparse.SUPPRESS)  # the child's part
    options = parser.parse_args()
    families, layouts = [name for name in options.families.split(",") if name], options.layouts.split(",")
    if options.without is not None:
        torch.set_num_threads(1)
        warnings.simplefilter("ignore")
        if options.without:
            switch_off_cost_part(options.without)
        rows = measure_family_rows(families, layouts) if options.every else measure_model_rows(families or list(USUAL), layouts)
        for row in rows:
            print(json.dumps(row), flush=True)
        return
    options.out.parent.mkdir(parents=True, exist_ok=True)
    known = [json.loads(line) for line in options.out.read_text().splitlines()] if options.out.exists() else []
    done = {record["part"]: record["rows"] for record in known if record["arguments"] == [options.every, families, layouts]}
    for part in ["", *(options.parts or PARTS)]:
        if part not in done:
            command = [sys.executable, __file__, "--without", part, "--layouts", options.layouts, "--families", options.families]
            child = subprocess.run([*command, *(["--every"] * options.every)], stdout=subprocess.PIPE, text=True, check=True)
            done[part] = [json.loads(line) for line in child.stdout.splitlines() if line.startswith("{")]
            record = {"part": part, "arguments": [options.every, families, layouts], "rows": done[part]}
            with options.out.open("a") as file:
                file.write(json.dumps(record) + "\n")
        if part:
            print_changes(part, done[part], {row["row"]: row for row in done[""]}, options.least)


if __name__ == "__main__":
    main()
