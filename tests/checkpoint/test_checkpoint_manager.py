"""Checkpoint manager: which checkpoints of a run are kept, and which one a run resumes from after a rank is killed."""

from __future__ import annotations

from pathlib import Path

import checkpoint_faults
import checkpoint_manager_cases
import pytest
from case_lists import make_case_tests

test_case_in_one_process, test_all_cases_on_four_processes = make_case_tests(checkpoint_manager_cases, folders=True)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_run_resumes_after_a_rank_is_killed_at_a_random_point(seed: int, tmp_path: Path) -> None:
    checkpoint_faults.kill_rank_in_series(seed, tmp_path / "c")
