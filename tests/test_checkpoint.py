"""Checkpoints: any layout to any other, here and on processes, and nothing lost or changed when something is wrong."""

from __future__ import annotations

from pathlib import Path

import checkpoint_cases
import pytest
from gloo import run_gloo


@pytest.mark.parametrize("name", checkpoint_cases.CASES)
def test_case_in_one_process(name: str, tmp_path: Path) -> None:
    checkpoint_cases.CASES[name](tmp_path)


@pytest.mark.gloo
def test_all_cases_on_four_processes(tmp_path: Path) -> None:
    assert run_gloo(checkpoint_cases.main, 4, str(tmp_path), timeout_s=250.0) == [list(checkpoint_cases.CASES)] * 4
