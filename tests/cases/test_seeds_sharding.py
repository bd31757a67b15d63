"""Document 000, the RFC on model sharding, and the checkpoint rows of document 003: every row works."""

from __future__ import annotations

from pathlib import Path

import pytest
import sharding_cases
from case_lists import on_four


@pytest.mark.parametrize("name", sharding_cases.CASES)
def test_case_in_one_process(name: str, tmp_path: Path) -> None:
    sharding_cases.CASES[name](tmp_path)


@pytest.mark.gloo
def test_all_cases_on_four_processes(tmp_path: Path) -> None:
    on_four(sharding_cases, str(tmp_path))
