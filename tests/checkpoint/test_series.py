"""Checkpoints of a run: which are kept, which one is resumed from, whoever is killed when."""

from __future__ import annotations

from pathlib import Path

import checkpoint_faults
import pytest
import series_cases
from case_lists import on_four


@pytest.mark.parametrize("name", series_cases.CASES)
def test_case_in_one_process(name: str, tmp_path: Path) -> None:
    series_cases.CASES[name](tmp_path)


@pytest.mark.gloo
def test_all_cases_on_four_processes(tmp_path: Path) -> None:
    on_four(series_cases, str(tmp_path))


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_a_rank_is_killed_at_a_random_point(seed: int, tmp_path: Path) -> None:
    checkpoint_faults.kill_in_a_series(seed, tmp_path / "c")
