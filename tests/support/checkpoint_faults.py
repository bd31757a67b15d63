"""Checkpoint faults: save and load while ranks are killed, disks are full, folders are read-only, or other ranks save too.

python tests/support/checkpoint_faults.py 100  # 100 kills in saves and 100 in loads at random points; prints failing seeds
"""

from __future__ import annotations

import contextlib
import os
import random
import resource
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from killable_processes import DEAD, CallCounter, run_killable

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.checkpoint import Manager, load, read_tree, save
from dtensor.errors import CheckpointError

RANKS = 4


def make_state(step: int) -> dict[str, Any]:
    """Return a state of tensors in several layouts, all filled with ``step``."""
    grid, line = dt.init_device_mesh("cpu", (2, 2)), dt.init_device_mesh("cpu", (RANKS,))
    big = dt.full((300, 700), float(step), device_mesh=grid, placements=[Shard(0), Shard(1)])
    few = dt.full((7, 3), step, dtype=torch.int32, device_mesh=line, placements=[Shard(0)])
    same = dt.full((50,), float(step), device_mesh=grid, placements=[Replicate(), Shard(0)])
    return {"big": big, "few": few, "same": same, "plain": torch.full((20,), float(step)), "step": step}


def read_step(folder: Path) -> int:
    """Load a checkpoint in this process and return its step; assert that all tensors are filled with this step."""
    step = int(read_tree(folder)["step"])
    state = {"big": torch.zeros(300, 700), "few": torch.zeros(7, 3, dtype=torch.int32), "same": torch.zeros(50)}
    whole: dict[str, Any] = {**state, "plain": torch.zeros(20), "step": -1}
    load(whole, folder)
    assert whole["step"] == step
    for name in ("big", "few", "same", "plain"):
        assert bool((whole[name] == step).all()), name
    return step


# --- on the ranks ----------------------------------------------------------------------------------------------------------
def save_with_kill(folder: str, step: int, victim: int, point: int | None, in_background: bool = False) -> tuple[str, Any]:
    """Save on this rank, killed at the call number ``point`` if it is the victim. Return ("done", number of calls) or ("error",
    message).
    """
    state = make_state(step)
    points = CallCounter(point if dist.get_rank() == victim else None)
    try:
        save(state, f"{folder}-warm")  # imports are a thousand times as many calls
        with points:
            pending = save(state, folder, async_op=in_background)
            if pending is not None:
                pending.wait()
    except CheckpointError as error:
        return "error", str(error)
    return "done", points.count


def load_with_kill(folder: str, step: int, victim: int, point: int | None) -> tuple[str, Any]:
    """Load on this rank, killed at call ``point`` if it is the victim; assert that everything or nothing was loaded."""
    state = make_state(0)
    points = CallCounter(point if dist.get_rank() == victim else None)
    try:
        load(make_state(0), folder)  # as above
        with points:
            load(state, folder)
        outcome: tuple[str, Any] = "done", points.count
    except CheckpointError as error:
        outcome = "error", str(error)
    expected = step if outcome[0] == "done" else 0
    assert state["step"] == expected
    for name in ("big", "few", "same", "plain"):
        local = state[name].to_local() if isinstance(state[name], dt.DTensor) else state[name]
        assert bool((local == expected).all()), name
    return outcome


# --- one fault -------------------------------------------------------------------------------------------------------------
def kill_rank_during(what: str, seed: int, folder: Path) -> str:
    """Kill one rank at a random time of a save or load, and assert that a complete checkpoint is left. Return a line about the
    result. ``folder`` has a checkpoint of step 1.
    """
    dice = random.Random(f"{what} {seed}")
    victim, from_outside = dice.randrange(RANKS), dice.random() < 0.3
    run = save_with_kill if what == "save" else load_with_kill
    args: tuple[Any, ...] = (str(folder), 2 if what == "save" else 1, victim)
    if what == "save" and dice.random() < 0.3:
        calls, extra = count_calls("save", folder), (True,)
    else:
        calls, extra = count_calls(what, folder), ()
    if from_outside:
        outcomes = run_killable(run, RANKS, *args, None, *extra, kill=(victim, dice.random() * 0.4))
    else:
        outcomes = run_killable(run, RANKS, *args, dice.randrange(1, calls[victim]), *extra)
    left = [outcome for outcome in outcomes if outcome != DEAD]
    kinds = {kind for kind, _ in left}
    told = {words for kind, words in left if kind == "error"}
    step = read_step(folder)
    assert len(left) >= RANKS - 1
    assert step in (1, 2)
    if victim != 0:  # the first rank tells all that are left the same
        assert len(kinds) == 1, outcomes
        assert len(told) <= 1, outcomes
    if what == "load" or ("error" in kinds and victim != 0):
        assert step == 1, outcomes
    if "done" in kinds and what == "save":
        assert step == 2
    assert all("lost" in words for words in told), told
    shutil.rmtree(f"{folder}-warm", ignore_errors=True)
    save(make_state(3), folder)  # whatever was left behind is in nobody's way
    assert read_step(folder) == 3
    save(make_state(1), folder)
    assert len(list(folder.glob("*.distcp"))) <= 2, list(folder.iterdir())
    return f"{what} {seed}: rank {victim} killed, {len(left)} left: {sorted(kinds)}, step {step}"


_CALLS: dict[str, list[int]] = {}


def count_calls(what: str, folder: Path) -> list[int]:
    """Return about how many Python calls each rank makes in a save or load; measured once for each."""
    if what not in _CALLS:
        with tempfile.TemporaryDirectory() as other:
            shutil.copytree(folder, f"{other}/c")
            run = save_with_kill if what == "save" else load_with_kill
            _CALLS[what] = [count for _, count in run_killable(run, RANKS, f"{other}/c", 1, 0, None)]
    return _CALLS[what]


# --- a series of checkpoints ------------------------------------------------------------------------------------------------
def save_steps_with_kill(folder: str, victim: int, point: int | None) -> tuple[str, Any]:
    """Save steps 1 to 4 with a manager, killed at ``point`` if this rank is the victim. Return ("error", last complete step) or
    ("done", number of calls).
    """
    save(make_state(1), f"{folder}-warm")
    points, complete = CallCounter(point if dist.get_rank() == victim else None), 0
    try:
        with points, Manager(folder, keep=2, best="min") as manager:
            for step in range(1, 5):
                manager.save(step, make_state(step), metric=float(step))
                manager.wait()
                complete = step
    except CheckpointError:
        return "error", complete
    return "done", points.count


def kill_rank_in_series(seed: int, folder: Path) -> None:
    """Kill a rank at a random time of a series of saves; assert that resuming finds the last complete step or the next one."""
    dice = random.Random(f"series {seed}")
    victim = 0 if dice.random() < 0.6 else dice.randrange(RANKS)
    if "series" not in _CALLS:
        with tempfile.TemporaryDirectory() as other:
            _CALLS["series"] = [count for _, count in run_killable(save_steps_with_kill, RANKS, f"{other}/c", 0, None)]
    outcomes = run_killable(save_steps_with_kill, RANKS, str(folder), victim, dice.randrange(1, _CALLS["series"][victim]))
    complete = max((step for kind, step in (o for o in outcomes if o != DEAD) if kind == "error"), default=4)
    state = make_state(0)
    with Manager(folder, keep=2, best="min") as manager:
        found = manager.resume(state)
        assert complete <= found <= complete + 1, outcomes
        if found:
            assert read_step(folder / f"step-{found:09d}") == state["step"] == found
        assert manager.save(7, make_state(7), metric=0.0)
    assert len(list(folder.iterdir())) <= 3  # the lock and two checkpoints


# --- disks and rivals ------------------------------------------------------------------------------------------------------
def save_on_full_disk(folder: str) -> list[str]:
    """Save while one rank's file size is limited; assert that the old checkpoint is kept, and return the error messages. The
    first rank writes the manifest.
    """
    told = []
    save(make_state(1), folder)
    for rank, most in ((2, 100_000), (0, 150_000), (0, 300)):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        if dist.get_rank() == rank:
            resource.setrlimit(resource.RLIMIT_FSIZE, (most, before[1]))
        try:
            save(make_state(2), folder)
        except CheckpointError as error:
            told.append(str(error))
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        state = make_state(0)
        load(state, folder)
        assert state["step"] == 1
        dist.barrier()
        assert len({path.name.split("_")[3] for path in Path(folder).glob("*.distcp")}) <= 2
    save(make_state(3), folder)
    return told


def save_to_unwritable_folders(folder: str) -> list[str]:
    """Save to folders that cannot be written or created; assert that the old checkpoint loads, and return the error messages."""
    save(make_state(1), folder)
    dist.barrier()
    if dist.get_rank() == 0:
        os.chmod(folder, 0o555)
    dist.barrier()
    user = os.geteuid()
    if user == 0:
        os.seteuid(65534)
    told = []
    for place in (folder, f"{folder}/below", f"{folder}/manifest.json/x"):
        try:
            save(make_state(2), place)
        except CheckpointError as error:
            told.append(str(error))
    state = make_state(0)
    load(state, folder)
    assert state["step"] == 1
    if user == 0:
        os.seteuid(0)
    dist.barrier()
    os.chmod(folder, 0o755)
    return told


def save_concurrently(folder: str, seconds: float) -> tuple[int, int, int]:
    """Let two pairs of ranks save into one folder and load from it repeatedly; return this rank's numbers of saves, refusals and
    loads. On a busy machine a pair may be refused, and its files replaced, for all ``seconds``. Each pair continues until one
    save and one load succeed, at the latest when the other pair has ended.
    """
    groups = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = dist.get_rank() // 2
    mesh = dt.DeviceMesh("cpu", [2 * mine, 2 * mine + 1])
    tried = saved = refused = loaded = 0
    end = time.monotonic() + seconds
    step = mine
    while True:
        go = [time.monotonic() < end or not (saved and loaded)]
        dist.broadcast_object_list(go, 2 * mine, groups[mine])
        if not go[0]:
            break
        step, tried = step + 2, tried + 1
        state = {"x": dt.full((999, 50), float(step), device_mesh=mesh, placements=[Shard(0)]), "step": step}
        try:
            save(state, folder, process_group=groups[mine])
            saved += 1
        except CheckpointError as error:
            refused += "under way" in str(error)
        found = {"x": dt.zeros(999, 50, device_mesh=mesh, placements=[Shard(1)]), "step": -1}
        with contextlib.suppress(CheckpointError):  # its files may be replaced while it reads: an error, never a mixture
            load(found, folder, process_group=groups[mine])
            loaded += 1
            assert bool((found["x"].to_local() == found["step"]).all())
    assert saved + refused == tried
    return saved, refused, loaded


def main(count: int, first: int = 0) -> None:
    """Kill ranks in ``count`` saves and ``count`` loads with seeds from ``first`` on, and print a line for each."""
    with tempfile.TemporaryDirectory() as folder:
        save(make_state(1), Path(folder) / "c")
        for seed in range(first, first + count):
            for what in ("save", "load"):
                print(kill_rank_during(what, seed, Path(folder) / "c"), flush=True)
    print(f"{count} kills during save and {count} during load: every one left a complete checkpoint, and no rank waiting")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
