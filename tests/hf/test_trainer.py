"""``Trainer`` under torchrun: losses and gradient norms equal those of one device."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import dtensor as dt
from dtensor.errors import MeshError
from dtensor.hf import prepared

PROGRAM = Path(__file__).parent / "trainer_program.py"
ROOT = Path(__file__).parents[2]


def logged(folder: Path, way: str, *launcher: str) -> list[list[float]]:
    command = [sys.executable, *launcher, str(PROGRAM), str(folder), way]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    (line,) = [line for line in ran.stdout.splitlines() if line.startswith("logged ")]
    found: list[list[float]] = json.loads(line.removeprefix("logged "))
    return found


@pytest.mark.gloo
@pytest.mark.slow
def test_trainer_on_processes_has_the_losses_of_one_device(tmp_path: Path) -> None:
    one = logged(tmp_path / "one", "fully")
    assert len(one) == 4
    for way, ranks in {"fully": 2, "by heads": 2, "both": 4}.items():
        several = logged(tmp_path / way, way, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks))
        for ours, theirs in zip(several, one, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-4), way


def test_trainer_mesh_with_dim_names_that_accelerate_lacks_raises() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    with pytest.raises(MeshError, match="dp_replicate, dp_shard, cp, tp"):
        prepared(None, mesh)
