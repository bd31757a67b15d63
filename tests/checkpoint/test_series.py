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
def test_ranks_are_killed_at_random_points(tmp_path: Path) -> None:
    for seed in range(6):
        checkpoint_faults.kill_in_a_series(seed, tmp_path / str(seed))
