"""Import and export of sharded models in the Hugging Face layout."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors_cases
from case_lists import on_four


@pytest.mark.parametrize("name", safetensors_cases.CASES)
def test_case_in_one_process(name: str, tmp_path: Path) -> None:
    safetensors_cases.CASES[name](tmp_path)


@pytest.mark.gloo
def test_all_cases_on_four_processes(tmp_path: Path) -> None:
    on_four(safetensors_cases, str(tmp_path))
