"""Divergent state dicts: checkpoints and state dicts that one rank saves, loads or reads differently."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from divergent_parallelism import Blocks
from divergent_programs import Program, Scene, Shard
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

from dtensor import checkpoint
from dtensor.parallel import fully_shard

Action = Callable[[Scene], Any]


def folder(name: str) -> str:
    return f"{os.environ['POOL_FOLDER']}-{name}"


def saves(
    state: Callable[[Scene], Any], name: Callable[[Scene], str] = lambda at: "saves", there: tuple[str, ...] = (), **options: Any
) -> Action:
    def run(at: Scene) -> Any:
        for place in there:
            os.makedirs(folder(place), exist_ok=True)
        pending = checkpoint.save(state(at), folder(name(at)), **options)
        if pending is not None:
            pending.wait()
        return at.x.sum().item()

    return run


def _saves_then(again: bool | None) -> Action:
    """Return a program of two background saves, then another save or a load."""

    def run(at: Scene) -> Any:
        for _ in range(2):
            pending = checkpoint.save({"x": at.x}, folder("then"), async_op=True)
            assert pending is not None
            pending.wait()
        if again is None:
            checkpoint.load({"x": at.x * 0}, folder("then"))
        elif (pending := checkpoint.save({"x": at.x}, folder("then"), async_op=again)) is not None:
            pending.wait()
        return at.x.sum().item()

    return run


def _loads(asked: Callable[[Scene], Any], **options: Any) -> Action:
    def run(at: Scene) -> Any:
        checkpoint.save({"x": at.x * 2, "y": at.x * 3}, folder("loads"))
        state = asked(at)
        checkpoint.load(state, folder("loads"), **options)
        return at.x.sum().item()

    return run


def _state_dict(full: bool = True, offload: bool = True, give: Callable[[Scene], bool] = lambda at: True) -> Action:
    def run(at: Scene) -> Any:
        model = fully_shard(Blocks(), mesh=at.mesh)
        if give(at):
            found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=full, cpu_offload=offload))
            if not full:
                set_model_state_dict(model, found)
        return at.x.sum().item()

    return run


def _exported(name: str | None) -> Action:
    def run(at: Scene) -> Any:
        if name is not None:
            checkpoint.save_safetensors({name: at.x}, folder("exported"))
        return at.x.sum().item()

    return run


def _run(steps: int, resumes: bool = True, every: int = 2) -> Action:
    """Return a program that saves checkpoints of a run and resumes from them."""

    def run(at: Scene) -> Any:
        state = {"x": at.x}
        with checkpoint.Manager(folder("run"), every=every) as manager:
            for step in range(steps):
                manager.save(step + 1, state)
            manager.wait()
            if resumes:
                manager.resume(state)
        return at.x.sum().item()

    return run


_PAIRS: dict[str, tuple[Action, Action]] = {
    "a key more is saved": (saves(lambda at: {"x": at.x}), saves(lambda at: {"x": at.x, "y": at.x})),
    "another key is saved": (saves(lambda at: {"x": at.x}), saves(lambda at: {"y": at.x})),
    "another number is saved": (saves(lambda at: {"x": at.x, "step": 1}), saves(lambda at: {"x": at.x, "step": 2})),
    "keys in another order": (saves(lambda at: {"x": at.x, "y": at.x.sum(0)}), saves(lambda at: {"y": at.x.sum(0), "x": at.x})),
    "another folder": (saves(lambda at: {"x": at.x}), saves(lambda at: {"x": at.x}, lambda at: "elsewhere")),
    "saves in the background alone": (_saves_then(False), _saves_then(True)),
    "waits for a save in the background": (_saves_then(True), _saves_then(False)),
    "saves where others load": (_saves_then(None), _saves_then(False)),
    "another folder that is there": (
        saves(lambda at: {"x": at.x}, there=("saves", "elsewhere")),
        saves(lambda at: {"x": at.x}, lambda at: "elsewhere", there=("saves", "elsewhere")),
    ),
    "in the background": (saves(lambda at: {"x": at.x}), saves(lambda at: {"x": at.x}, async_op=True)),
    "exported by all but one": (_exported("x"), _exported(None)),
    "exported under another name": (_exported("x"), _exported("y")),
    "resumed by all but one": (_run(4), _run(4, resumes=False)),
    "a run of another length": (_run(4), _run(2)),
    "saved more often": (_run(4), _run(4, every=1)),
    "a key more is loaded": (_loads(lambda at: {"x": at.x * 0}, strict=False), _loads(lambda at: {"x": at.x * 0, "y": at.x * 0})),
    "loaded leniently": (
        _loads(lambda at: {"x": at.x * 0}, strict=False),
        _loads(lambda at: {"x": at.x * 0, "z": at.x * 0}, strict=False),
    ),
    "loaded in another dtype": (
        _loads(lambda at: {"x": at.x * 0, "y": at.x}, convert=True),
        _loads(lambda at: {"x": at.x.double(), "y": at.x}, convert=True),
    ),
    "loaded in another layout": (
        _loads(lambda at: {"x": at.x * 0}, strict=False),
        _loads(lambda at: {"x": at.x.redistribute(placements=[Shard(1)])}, strict=False),
    ),
    "a state dict not asked for": (_state_dict(), _state_dict(give=lambda at: False)),
    "a state dict of pieces": (_state_dict(), _state_dict(full=False)),
}
DIFFERENT = {f"states/{name}": Program(usual, other, k % 3) for k, (name, (usual, other)) in enumerate(_PAIRS.items())}
