"""Faults while checkpoints are saved and loaded: killed ranks, full disks and read-only folders (see ``checkpoint_faults``)."""

from __future__ import annotations

from pathlib import Path

import checkpoint_faults
import pytest
from gloo_processes import run_gloo

from dtensor.checkpoint import save


@pytest.mark.gloo
@pytest.mark.parametrize(("operation", "seed"), [("save", 0), ("load", 0)])
def test_complete_checkpoint_remains_after_a_rank_is_killed_during_save_or_load(
    operation: str, seed: int, tmp_path: Path
) -> None:
    save(checkpoint_faults.make_state(1), tmp_path)
    checkpoint_faults.kill_rank_during(operation, seed, tmp_path)


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("operation", ["save", "load"])
def test_complete_checkpoint_remains_after_ranks_are_killed_at_random_points(operation: str, tmp_path: Path) -> None:
    save(checkpoint_faults.make_state(1), tmp_path)
    for seed in range(1, 21):
        checkpoint_faults.kill_rank_during(operation, seed, tmp_path)


@pytest.mark.gloo
def test_full_disk_raises_on_all_ranks(tmp_path: Path) -> None:
    messages = run_gloo(checkpoint_faults.save_on_full_disk, 4, str(tmp_path / "c"))
    assert messages == [messages[0]] * 4
    assert [("rank 2" in text, "rank 0" in text) for text in messages[0][:2]] == [(True, False), (False, True)]
    assert len(messages[0]) == 3


@pytest.mark.gloo
def test_read_only_folder_raises_on_all_ranks(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    for parent in list(tmp_path.parents)[:3]:  # the third one under pytest-xdist
        if parent.name.startswith(("pytest-", "popen-")):
            parent.chmod(0o755)
    messages = run_gloo(checkpoint_faults.save_to_unwritable_folders, 4, str(tmp_path / "c"))
    assert messages == [messages[0]] * 4
    assert [any(reason in text for reason in ("Permission denied", "Not a directory")) for text in messages[0]] == [True] * 3


@pytest.mark.gloo
def test_concurrent_saves_to_one_folder_do_not_mix(tmp_path: Path) -> None:
    outcomes = run_gloo(checkpoint_faults.save_concurrently, 4, str(tmp_path / "c"), 2.0)
    assert outcomes[0] == outcomes[1]
    assert outcomes[2] == outcomes[3]
    assert all(saved and loaded for saved, _, loaded in outcomes)
