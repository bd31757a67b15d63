"""XLA: rows of the table for the same Llama in jax, partitioned by XLA for CPU devices and read from the compiled program."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from .families import Size, all_reduce_bytes

RANKS = {"tp": (4,), "fsdp": (4,), "dp": (4,), "tp_dp": (2, 2)}


def measure_layouts(size: Size, layouts: Sequence[str], python: str = "") -> Iterator[str]:
    """Yield a line of the table for each layout, or a line that says why jax could not run it."""
    python = python or sys.executable
    if subprocess.run([python, "-c", "import jax"], capture_output=True, check=False).returncode:
        yield f"xla: skipped, {python} has no jax (python -m venv elsewhere, pip install jax, --jax-python elsewhere/bin/python)"
        return
    numbers = [size.layers, size.width, size.batch, size.length, size.vocabulary, size.heads[0], size.hidden]
    for layout in layouts:
        if layout not in RANKS:
            continue
        program = [python, str(Path(__file__).with_name("jax_llama.py")), layout, *map(str, numbers)]
        run = subprocess.run(program, capture_output=True, text=True, check=False)
        if run.returncode:
            yield f"xla: {layout} failed: {run.stderr.strip().splitlines()[-1]}"
            continue
        found = json.loads(run.stdout.splitlines()[-1])
        hand = _count_hand_written_bytes(layout, size, found["parameters"])
        kinds = found["collectives"]
        yield (
            f"{'llama':10} {layout:9} {'xla':9} {int(found['bytes']):12,} {found['bytes'] / hand:9.2f} {found['flops']:15.2f} "
            f"{sum(kinds.values()):14}          {kinds}"
        )


def _count_hand_written_bytes(layout: str, size: Size, parameters: int) -> float:
    """Return the bytes of the hand-written program for the parameters of the jax model."""
    ranks = RANKS[layout]
    n, dp = ranks[-1], ranks[0] if len(ranks) > 1 else 1
    if layout in ("fsdp", "dp"):
        return {"fsdp": 3 * (n - 1) / n * parameters, "dp": all_reduce_bytes(parameters, n)}[layout]
    places = size.batch // dp * size.length
    moved = (4 * size.layers + 2) * all_reduce_bytes(places * size.width * 4, n) + 3 * all_reduce_bytes(4 * places, n)
    norms = (2 * size.layers + 1) * size.width * 4
    return moved + (all_reduce_bytes((parameters - norms) / n + norms, dp) if dp > 1 else 0)
