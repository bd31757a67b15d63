"""Import and export of sharded models in the Hugging Face layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors_cases
from gloo import run_gloo


@pytest.mark.parametrize("name", safetensors_cases.CASES)
def test_case_in_one_process(name: str, tmp_path: Path) -> None:
    safetensors_cases.CASES[name](tmp_path)


@pytest.mark.gloo
def test_all_cases_on_four_processes(tmp_path: Path) -> None:
    assert run_gloo(safetensors_cases.main, 4, str(tmp_path), timeout_s=200.0) == [list(safetensors_cases.CASES)] * 4
