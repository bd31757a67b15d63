"""Demo and benchmark of the README: the demo in one process and under torchrun, and the dispatch benchmark."""

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
    """Run a command, check its exit status (and with ``quiet`` that stderr is empty), and return its output."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment.pop("TORCH_SHOW_CPP_STACKTRACES", None)  # torch's test cases set it and do not restore it
    ended = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=240, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert not (quiet and ended.stderr), ended.stderr
    return ended.stdout


def losses(printed: str) -> list[tuple[float, float]]:
    """Return the losses (mesh, one device) of each step."""
    return [(float(ours), float(theirs)) for _, ours, theirs in _LOSSES.findall(printed)]


def test_demo_model_imports_nothing_distributed() -> None:
    tree = ast.parse((DEMO.parent / "gpt_model.py").read_text())
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    modules |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert modules == {"__future__", "dataclasses", "torch", "torch.nn.functional"}


@pytest.mark.slow  # as `make demo`
def test_demo_in_one_process_has_the_losses_of_one_device() -> None:
    pairs = losses(printed_by(sys.executable, str(DEMO), *SHORT))
    assert len(pairs) == 3
    assert all(ours == pytest.approx(theirs, abs=1e-5) for ours, theirs in pairs)


@pytest.mark.gloo
def test_demo_under_torchrun_has_the_losses_of_one_process() -> None:
    here = losses(printed_by(sys.executable, str(DEMO), *SHORT))
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4")
    there = losses(printed_by(sys.executable, *launch, str(DEMO), *SHORT, quiet=False))
    assert [ours for ours, _ in there] == pytest.approx([ours for ours, _ in here], abs=1e-5)


@pytest.mark.slow
def test_dispatch_benchmark_measures_torch_pytorch_dtensor_and_this_library() -> None:
    script = str(ROOT / "benchmarks" / "dispatch.py")
    measured = json.loads(printed_by(sys.executable, script, "--quick", "--json", "--only", "add", "mm"))
    assert [row["name"] for row in measured["rows"]] == ["add", "mm"]
    assert all(isinstance(row[side], float) for row in measured["rows"] for side in ("plain", "peer", "ours"))
