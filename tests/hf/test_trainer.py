"""``Trainer`` under torchrun: losses and norms of gradients are those of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parent / "trainer_program.py"
ROOT = Path(__file__).parents[2]


def logged(folder: Path, *launcher: str) -> list[list[float]]:
    command = [sys.executable, *launcher, str(PROGRAM), str(folder)]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("logged ")]
    found: list[list[float]] = json.loads(line.removeprefix("logged "))
    return found


@pytest.mark.gloo
@pytest.mark.slow
def test_a_fully_sharded_model_trains_on_processes(tmp_path: Path) -> None:
    one = logged(tmp_path / "one")
    two = logged(tmp_path / "two", "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    assert len(one) == 4
    for ours, theirs in zip(two, one, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4)
