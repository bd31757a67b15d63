"""Device of results: rules create tensors on the device of the mesh, checked with a simulated device."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "other_device.py"


def run_cases(part: int, parts: int, cases: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PROGRAM, str(part), str(parts), str(cases)], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_some_rules_create_tensors_on_the_device_of_the_mesh() -> None:
    done = run_cases(0, 16, 2)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.slow
def test_offloaded_shards_are_copied_through_pinned_memory() -> None:
    program = PROGRAM.with_name("offload_device.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.slow
def test_all_rules_create_tensors_on_the_device_of_the_mesh() -> None:
    done = run_cases(0, 1, 6)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
