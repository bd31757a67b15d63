"""Divergent training: steps in which one rank does something else at one stage."""

from __future__ import annotations

import functools
import os
import signal
import time
from collections.abc import Callable
from typing import Any

import torch
from divergent_programs import ACTIONS, Program, Scene, dt
from torch import nn

from dtensor import checkpoint
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module, replicate
from dtensor.watchdog.levels import CheckLevel

Act = Callable[[str], None]
STAGES = ("before forward", "inside forward", "before backward", "inside backward", "before optimizer", "inside optimizer")
FEATURES = 7  # over three ranks uneven


class _Acting(nn.Module):
    """Module that calls the program inside of forward and backward."""

    def __init__(self, act: Act) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.act("inside forward")
        x = x * 1
        if x.requires_grad:
            x.register_hook(lambda gradient: self.act("inside backward"))
        return x


def _blocks(act: Act) -> nn.Sequential:
    torch.manual_seed(0)
    first, second = (nn.Sequential(nn.Linear(FEATURES, 5), nn.GELU(), nn.Linear(5, FEATURES)) for _ in range(2))
    return nn.Sequential(first, _Acting(act), second)


def _sharded(at: Scene, act: Act) -> nn.Module:
    model = _blocks(act)
    for block in (model[0], model[2]):
        fully_shard(block, mesh=at.mesh)
    return fully_shard(model, mesh=at.mesh)


def _replicated(at: Scene, act: Act) -> nn.Module:
    return replicate(_blocks(act), at.mesh)


def _tensor_parallel(at: Scene, act: Act) -> nn.Module:
    styles = {f"{block}.{k}": style() for block in (0, 2) for k, style in ((0, ColwiseParallel), (2, RowwiseParallel))}
    return parallelize_module(_blocks(act), at.mesh, styles)


MODELS: dict[str, Callable[[Scene, Act], nn.Module]] = {
    "sharded": _sharded,
    "replicated": _replicated,
    "tensor-parallel": _tensor_parallel,
}


def trained(model_of: Callable[[Scene, Act], nn.Module], doing: Callable[[Scene, str, int], None]) -> Callable[[Scene], Any]:
    """Return a program of two steps that calls ``doing`` at each stage."""

    def run(at: Scene) -> Any:
        number = 0

        def act(stage: str) -> None:
            doing(at, stage, number)

        model = model_of(at, act)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        optimizer.register_step_pre_hook(lambda *_: act("inside optimizer"))
        for number in range(2):  # noqa: B007 - what acts reads it
            act("before forward")
            loss = model(torch.ones(2, FEATURES)).square().mean()
            act("before backward")
            loss.backward()
            act("before optimizer")
            optimizer.step()
            optimizer.zero_grad()
        return sum(float(parameter.detach().sum()) for parameter in model.parameters())

    return run


def _nothing(at: Scene, stage: str, number: int) -> None:
    pass


def at_stage(stage: str, action: Callable[[Scene], Any]) -> Callable[[Scene, str, int], None]:
    """Return a function that calls ``action`` at that stage of the second step."""

    def act(at: Scene, now: str, number: int) -> None:
        if (now, number) == (stage, 1):
            action(at)

    return act


def _raise(at: Scene) -> None:
    raise ValueError("a reason of its own")


DOING: dict[str, Callable[[Scene], Any]] = {
    "raises": _raise,
    "is killed": lambda at: os.kill(os.getpid(), signal.SIGKILL),
    "sums": lambda at: at.x.sum().item(),
    "is slow": lambda at: time.sleep(4.0),
    "redistributes": lambda at: at.x.redistribute(placements=[dt.Shard(1)]).to_local(),
}


_USUAL = {kind: trained(model, _nothing) for kind, model in MODELS.items()}


def _of(doing: str) -> dict[str, Program]:
    return {
        f"{kind}/{stage}/{doing}": Program(_USUAL[kind], trained(model, at_stage(stage, DOING[doing])), (k + n) % 3)
        for k, (kind, model) in enumerate(MODELS.items())
        for n, stage in enumerate(STAGES)
    }


def _saved(at: Scene) -> Any:
    checkpoint.save({"x": at.x, "w": at.w}, os.environ["POOL_FOLDER"] + "-saved")


def _drifting(at: Scene, of: str, ranks: tuple[int, ...] = (1,)) -> Any:
    """Compare replicas after each step, where one rank makes a change without a collective."""
    dt.check_ranks(CheckLevel.now, replicas=1)
    try:
        torch.manual_seed(0)
        w = nn.Parameter(dt.distribute_tensor(torch.rand(5, 3), at.mesh, [dt.Replicate()], src_data_rank=None))
        optimizer = torch.optim.Adam([{"params": [w], "param_names": ["w"]}])
        for number in range(3):
            (at.x.sum().redistribute(placements=[dt.Replicate()]) * dt.rand(5, 3, device_mesh=at.mesh) * w).sum().backward()
            optimizer.step()
            if number == 1 and at.rank in ranks:
                _change(of, w, optimizer)
        return float(w.detach().sum())
    finally:
        dt.check_ranks(CheckLevel.now)


def _change(of: str, w: Any, optimizer: torch.optim.Optimizer) -> None:
    if of == "parameter":
        w.detach().to_local()[4, 2] += 1e-6
    if of == "state":
        optimizer.state[w]["exp_avg"].to_local()[0, 0] += 1.0
    if of == "generator":
        torch.rand(1)


def _captured(at: Scene, factor: float = 2.0) -> Any:
    step = dt.capture(lambda x: (x.softmax(0) * factor).sum(0).redistribute(placements=[dt.Replicate()]))
    return [step(at.x).to_local().tolist() for _ in range(4)]


def _steps(at: Scene, ones: int, extra: bool = False) -> Any:
    model = _sharded(at, lambda stage: None)
    for number in range(ones):
        model(torch.ones(2, FEATURES)).square().mean().backward()
        if extra and number == 1:
            model(torch.ones(2, FEATURES))
    return [float(parameter.detach().sum()) for parameter in model.parameters()]


WHOLE: dict[str, Callable[[Scene], Any]] = {
    "three steps": lambda at: _steps(at, 3),
    "two steps": lambda at: _steps(at, 2),
    "an evaluation": lambda at: _steps(at, 3, extra=True),
    "saves": lambda at: _saved(at),
    "replicas": lambda at: _drifting(at, ""),
    "captured": lambda at: _captured(at),
    "captured otherwise": lambda at: _captured(at, 3.0),
}

DIFFERENT = _of("sums") | _of("redistributes")
for _name, (_usual, _other) in {
    "a step fewer": ("three steps", "two steps"),
    "a step more": ("two steps", "three steps"),
    "an evaluation more": ("three steps", "an evaluation"),
    "saves, others sum": ("sum", "saves"),
    "sums, others save": ("saves", "sum"),
    "another captured step": ("captured", "captured otherwise"),
    "sums, others replay": ("captured", "sum"),
}.items():
    _both = WHOLE | {"sum": ACTIONS["item"]}
    DIFFERENT[f"whole/{_name}"] = Program(_both[_usual], _both[_other], 1)
RAISING = _of("raises")
for _of_what in ("parameter", "state", "generator"):
    _action = functools.partial(_drifting, of=_of_what)
    RAISING[f"a {_of_what} drifts"] = Program(_action, _action, 1)
DEADLY = _of("is killed")
SLOW = {f"slow/{name}": program for name, program in _of("is slow").items()}
HEALTHY = {f"healthy/{name}": Program(action, action, 0) for name, action in (_USUAL | WHOLE).items()}
