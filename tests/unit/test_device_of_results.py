"""Nothing is made on the CPU that belongs on the device of the mesh, shown without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "support" / "other_device.py"


def outcome(part: int, parts: int, cases: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, PROGRAM, str(part), str(parts), str(cases)], capture_output=True, text=True, check=False
    )


@pytest.mark.slow
def test_some_rules_stay_on_the_device() -> None:
    done = outcome(0, 16, 2)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.slow
def test_offloaded_shards_travel_through_pinned_memory() -> None:
    program = PROGRAM.with_name("offload_device.py")
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]


@pytest.mark.slow
def test_all_rules_stay_on_the_device() -> None:
    done = outcome(0, 1, 6)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
