"""``python -m dtensor``: help, ``explain script.py`` and ``doctor``."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from dtensor.__main__ import main
from dtensor.debug import doctor

SCRIPT = """
import sys
import dtensor as dt
assert __name__ == "__main__"
x = dt.ones(5, 6, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
y = x.full_tensor()  # moves
sys.exit(int(sys.argv[1]))
"""


def test_without_a_command_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    said = capsys.readouterr().out
    assert all(command in said for command in ("explain", "doctor", "verify", "calibrate", "ops"))


@pytest.mark.parametrize("status", [0, 3])
def test_a_script_is_run_and_explained(status: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script, before = tmp_path / "train.py", (list(sys.path), list(sys.argv))
    script.write_text(SCRIPT)
    assert main(["explain", str(script), str(status)]) == status
    said = capsys.readouterr().out
    assert "1 collective, 72 B received per rank" in said
    assert "train.py:6  y = x.full_tensor()  # moves: 1 collective, 72 B" in said
    assert (sys.path, sys.argv) == before


def test_what_a_failing_script_moved_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT.replace("sys.exit", "1 / 0, sys.exit"))
    with pytest.raises(ZeroDivisionError):
        main(["explain", str(script), "0"])
    assert "1 collective, 72 B" in capsys.readouterr().out
    assert main(["explain", str(tmp_path / "other.py")]) == 2


def test_the_doctor_names_what_is_there() -> None:
    said = "\n".join(doctor.report())
    assert "torch 2." in said
    assert "gloo" in said
    assert "_foreach_supported_types" in said


@pytest.mark.gloo
def test_the_doctor_tries_processes() -> None:
    assert doctor.self_test(120.0) == ""
