"""Checkpoint manager cases: ``checkpoint.Manager`` in one process and on four."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from case_lists import CaseList
from checkpoint_cases import run_on_first_rank

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.checkpoint import Manager, load
from dtensor.errors import CheckpointError

CASES = CaseList()
case = CASES.case


def make_state(step: float) -> dict[str, Any]:
    """Return a state filled with ``step``, with a partial tensor and one that is not row-major."""
    mesh = dt.init_device_mesh("cpu", (4,))
    x = dt.full((7, 5), float(step), device_mesh=mesh, placements=[Shard(0)])
    few = dt.full((3,), int(step), dtype=torch.int16, device_mesh=mesh, placements=[Replicate()])
    return {"x": x, "t": dt.full((4, 6), float(step), device_mesh=mesh, placements=[Shard(1)]).t(), "few": few, "step": step}


def assert_filled_with(state: dict[str, Any], step: float) -> None:
    assert state["step"] == step
    for name in ("x", "t", "few"):
        local = state[name].to_local()
        for piece in local.shards if isinstance(local, dt.PerRank) else (local,):
            assert bool((piece == step).all()), (name, piece, step)


@case
def the_last_and_the_best_checkpoints_are_not_deleted(folder: Path) -> None:
    for best, kept in (("min", [4, 8, 10]), ("max", [6, 8, 10]), (None, [8, 10])):
        metrics = {2: 5.0, 4: torch.tensor(1.0), 6: 9, 8: math.nan, 10: None}
        path = folder / str(best)
        with Manager(path, every=2, keep=2, best=best) as manager:
            saved = [step for step in range(11) if manager.save(step, make_state(step), metric=metrics.get(step))]
            assert saved == [2, 4, 6, 8, 10]
        assert manager.steps() == kept
        assert manager.best_step() == (None if best is None else kept[0])
        assert Manager(path, best=best).best_step() == manager.best_step()
        assert sorted(p.name for p in path.iterdir() if p.is_dir()) == [f"step-{step:09d}" for step in kept]
        state = make_state(0)
        load(state, path / f"step-{kept[0]:09d}")
        assert_filled_with(state, kept[0])


@case
def an_asynchronous_save_stores_the_values_of_its_call(folder: Path) -> None:
    with Manager(folder, keep=9) as manager:
        state = make_state(0)
        for step in range(1, 6):
            for name in ("x", "t", "few"):
                state[name] += 1
            state["step"] = step
            manager.save(step, state)
    for step in range(1, 6):
        found = make_state(0)
        assert manager.resume(found, step=step) == step
        assert_filled_with(found, step)


@case
def staging_memory_is_allocated_once(folder: Path) -> None:
    with Manager(folder) as manager:
        manager.save(1, make_state(1))
        places = [copy.data_ptr() for copy in manager._staging.buffers.values()]
        manager.save(2, make_state(2))
        assert places == [copy.data_ptr() for copy in manager._staging.buffers.values()]
        manager.save(3, {"x": make_state(3)["x"], "step": 3})
        assert {name for name, _ in manager._staging.buffers} <= {"x"}


@case
def resuming_loads_the_last_complete_checkpoint(folder: Path) -> None:
    state = make_state(0)
    assert Manager(folder / "none").resume(state) == 0
    assert_filled_with(state, 0)
    with Manager(folder, keep=5) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, make_state(step))

    def harm() -> None:
        (folder / "step-000000004" / "manifest.json").unlink()  # as a save that was killed leaves it
        stored = next((folder / "step-000000003").glob("*.distcp"))
        stored.write_bytes(stored.read_bytes()[:-1])

    run_on_first_rank(harm)
    with Manager(folder, keep=2) as manager:
        with pytest.warns(UserWarning, match="truncated"):
            assert manager.resume(state) == 2
        assert_filled_with(state, 2)
        manager.save(3, make_state(3))  # over the damaged one
        manager.wait()
        assert manager.resume(state) == 3
    assert sorted(p.name for p in folder.glob("step-*")) == ["step-000000002", "step-000000003"]


@case
def resuming_raises_if_every_checkpoint_is_damaged(folder: Path) -> None:
    with Manager(folder) as manager:
        manager.save(1, make_state(1))
    run_on_first_rank(lambda: (folder / "step-000000001" / "manifest.json").write_text("{"))
    state = make_state(0)
    with pytest.raises(CheckpointError, match=r"damaged \(JSONDecodeError"):
        Manager(folder).resume(state)
    assert_filled_with(state, 0)


@case
def saving_below_a_later_step_requires_resuming_first(folder: Path) -> None:
    with Manager(folder, keep=9) as manager:
        for step in (1, 2, 3):
            manager.save(step, make_state(step))
    with Manager(folder, keep=9) as manager:
        manager.save(2, make_state(5))
        with pytest.raises(CheckpointError, match="a later checkpoint, of step 3: resume"):
            manager.wait()
        state = make_state(0)
        with pytest.raises(CheckpointError, match="no complete checkpoint of step 7"):
            manager.resume(state, step=7)
        assert manager.resume(state, step=1) == 1
        manager.save(2, make_state(2.5))
        manager.wait()
        assert manager.steps() == [1, 2]
        assert manager.resume(state) == 2
        assert state["step"] == 2.5


@case
def two_managers_cannot_save_into_one_folder(folder: Path) -> None:
    first = Manager(folder, async_op=False)
    first.save(1, make_state(1))
    other = Manager(folder, async_op=False)
    with pytest.raises(CheckpointError, match="another process saves into"):
        other.save(2, make_state(2))
    first.close()
    other.save(2, make_state(2))
    other.close()
    first.save(3, make_state(3), force=True)
    first.close()
    assert first.steps() == [3]


@case
def a_failed_save_raises_at_the_next_call(folder: Path) -> None:
    manager = Manager(folder)
    manager.save(1, {"f": run_on_first_rank})
    with pytest.raises(CheckpointError, match="'f' is a function"):
        manager.save(2, make_state(2))
    manager.save(2, make_state(2))
    manager.close()
    assert manager.steps() == [2]
    for wrong in ({"every": 0}, {"keep": 0}, {"best": "least"}):
        with pytest.raises(CheckpointError, match="at least 1"):
            Manager(folder, **wrong)
