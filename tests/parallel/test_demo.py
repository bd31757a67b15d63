"""What a stranger runs first: the demo, in one process and under torchrun, and the benchmark."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "docs" / "examples" / "train_gpt.py"
SHORT = ("--steps", "3", "--batch", "4")
_LOSSES = re.compile(r"^ +(\d+) +(\d+\.\d+) +(\d+\.\d+) +\S+e\S+$", re.MULTILINE)


def printed_by(*command: str, quiet: bool = True) -> str:
    """What a command prints; it must end well, and ``quiet`` without a word of warning."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("TORCH_SHOW_CPP_STACKTRACES", None)  # torch's own test cases set it, and never take it back
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=240, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not (quiet and ended.stderr), ended.stderr
    return ended.stdout


def losses(printed: str) -> list[tuple[float, float]]:
    """(mesh, one device) at every step."""
    return [(float(ours), float(theirs)) for _, ours, theirs in _LOSSES.findall(printed)]


def test_the_model_of_the_demo_imports_nothing_distributed() -> None:
    tree = ast.parse((DEMO.parent / "gpt_model.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert modules == {"__future__", "dataclasses", "torch", "torch.nn.functional"}


@pytest.mark.slow  # as `make demo`
def test_the_demo_trains_in_one_process_like_one_device() -> None:
    pairs = losses(printed_by(sys.executable, str(DEMO), *SHORT))
    assert len(pairs) == 3
    assert all(ours == pytest.approx(theirs, abs=1e-5) for ours, theirs in pairs)


@pytest.mark.gloo
def test_the_demo_gives_the_same_losses_under_torchrun() -> None:
    here = losses(printed_by(sys.executable, str(DEMO), *SHORT))
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    there = losses(printed_by(sys.executable, *launch, str(DEMO), *SHORT, quiet=False))
    assert [ours for ours, _ in there] == pytest.approx([ours for ours, _ in here], abs=1e-5)


@pytest.mark.slow
def test_the_benchmark_measures_all_three_sides() -> None:
    script = str(ROOT / "benchmarks" / "dispatch.py")
    measured = json.loads(printed_by(sys.executable, script, "--quick", "--json", "--only", "add", "mm"))
    assert [row["name"] for row in measured["rows"]] == ["add", "mm"]
    assert all(isinstance(row[side], float) for row in measured["rows"] for side in ("plain", "peer", "ours"))
