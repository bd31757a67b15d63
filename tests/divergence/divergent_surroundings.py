"""Divergent surroundings: replays, branches, threads, meshes, check levels and seemingly local queries that differ between
ranks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from divergent_parallelism import WIDTH, Blocks, nothing
from divergent_programs import Program, R, Scene, Shard, dt
from torch import nn

from dtensor import DTensor, Partial
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dtensor.watchdog.levels import CheckLevel

Action = Callable[[Scene], Any]


def _step_of(at: Scene, act: Callable[[], Any] = nothing) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        act()
        return x.softmax(0).sum(0).redistribute(placements=[R])

    return step


def captured(change: Callable[[Scene, int], Any] = lambda at, number: None, calls: int = 4, inside: Any = nothing) -> Action:
    def run(at: Scene) -> Any:
        step = dt.capture(_step_of(at, lambda: inside(at)))
        found = None
        for number in range(calls):
            given = change(at, number)
            found = step(at.x if given is None else given).to_local().tolist()
        return found

    return run


def when(number: int, act: Action) -> Callable[[Scene, int], Any]:
    return lambda at, now: act(at) if now == number else None


def training(captured: bool, act: Callable[[Scene, int], Any] = lambda at, number: None) -> Action:
    def run(at: Scene) -> Any:
        torch.manual_seed(0)
        model = parallelize_module(Blocks(), at.mesh, {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})
        optimizer = torch.optim.AdamW(model.parameters(), 0.1)

        def step(x: torch.Tensor) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        run_step = dt.capture(step) if captured else step
        for number in range(4):
            act(at, number)
            run_step(torch.ones(2, WIDTH))
        return [float(parameter.detach().sum()) for parameter in model.parameters()]

    return run


def _branching(bound: float) -> Action:
    """Return a program that branches on a global number, with another bound on one rank."""

    def run(at: Scene) -> Any:
        x = at.x / 64
        if float(x.mean()) > bound:
            x = x.softmax(0)
        return x.sum(0).full_tensor()

    return run


def _masked(bound: float) -> Action:
    return lambda at: at.x[at.x > bound].sum().item()


def _in_threads(order: int, at_once: bool = False) -> Action:
    """Return a program of collectives in two threads, in this order or concurrently."""

    def run(at: Scene) -> Any:
        actions = [lambda: float(at.x.sum()), lambda: float(at.x.double().sum(0).full_tensor().sum())][::order]
        with ThreadPoolExecutor(2) as pool:
            if at_once:
                return sum(work.result() for work in [pool.submit(action) for action in actions])
            return sum(pool.submit(action).result() for action in actions)

    return run


def _grids(shape: tuple[int, ...] | None, dim: str | None = None, flat: bool = False) -> Action:
    def run(at: Scene) -> Any:
        size = dist.get_world_size()
        mesh = dt.init_device_mesh("cpu", (size, 1) if shape is None else shape, mesh_dim_names=("a", "b"))
        if flat:
            mesh = mesh.flatten("all")
        elif dim is not None:
            mesh = mesh[dim]
        x = dt.distribute_tensor(torch.arange(12.0), mesh, [Shard(0)] * mesh.ndim, src_data_rank=None)
        return float(x.sum())

    return run


def _part(ranks: list[int] | None) -> Action:
    def run(at: Scene) -> Any:
        mesh = at.mesh if ranks is None else dt.DeviceMesh("cpu", [rank % dist.get_world_size() for rank in ranks])
        x = dt.distribute_tensor(torch.arange(12.0), mesh, [Shard(0)], src_data_rank=None)
        return x.redistribute(placements=[R]).to_local().sum().tolist()

    return run


def _distributed(**options: Any) -> Action:
    return lambda at: dt.distribute_tensor(torch.ones(6, 2), at.mesh, [Shard(0)], **options).sum().item()


def _levels(level: str | None, when: int = 1) -> Action:
    def run(at: Scene) -> Any:

        was = CheckLevel.now
        found = 0.0
        try:
            for number in range(2):
                if level is not None and number == when:
                    dt.check_ranks(level)
                found += float(at.x.sum())
        finally:
            if CheckLevel.now != was:
                CheckLevel.now = was
        return found

    return run


def _inference(mode: Any) -> Action:
    def run(at: Scene) -> Any:
        with mode():
            x = at.x.detach().clone().requires_grad_() if mode is nullcontext else at.x.detach().clone()
            return (x.softmax(0) * 2).sum().item()

    return run


def _eval(trains: bool) -> Action:
    def run(at: Scene) -> Any:
        torch.manual_seed(0)
        model = parallelize_module(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)),
            at.mesh,
            {"0": ColwiseParallel(use_local_output=False), "2": RowwiseParallel()},
        )
        model.train(trains)
        return float(model(torch.ones(2, WIDTH)).detach().sum())

    return run


def _registered(dim: int) -> Action:
    """Return a program with its own sharding rule, which communicates."""

    def run(at: Scene) -> Any:
        dt.register_sharding(torch.ops.aten.hardswish.default)(lambda x: [(Shard(dim), Shard(dim))])
        try:
            return F.hardswish(at.x / 64).redistribute(placements=[R]).to_local().sum().item()
        finally:
            dt.unregister_sharding(torch.ops.aten.hardswish.default)

    return run


def _drawn(mode: str) -> Action:
    def run(at: Scene) -> Any:
        torch.manual_seed(0)
        with dt.random_mode(mode):
            return (F.dropout(at.x, 0.5) * 0).sum().item()

    return run


def _world_of(fewer: int) -> Action:
    """Return a program that counts some ranks."""

    def run(at: Scene) -> Any:
        mesh = dt.init_device_mesh("cpu", (dist.get_world_size() - fewer,))
        return dt.ones(6, device_mesh=mesh, placements=[Shard(0)]).redistribute(placements=[R]).to_local().sum().item()

    return run


def _norm(kind: float) -> Action:
    def run(at: Scene) -> Any:
        w = nn.Parameter(at.x.detach())
        (w * at.x).sum().backward()
        return torch.nn.utils.get_total_norm([w.grad], kind).full_tensor()

    return run


_PAIRS: dict[str, tuple[Action, Action]] = {
    "another layout is captured": (captured(), captured(when(3, lambda at: at.x.redistribute(placements=[Shard(1)])))),
    "another size is captured": (captured(), captured(when(3, lambda at: at.of(torch.ones(12, 8), Shard(0))))),
    "a call more": (captured(), captured(calls=5)),
    "a sum between replays": (captured(), captured(when(3, lambda at: at.x.sum().item() * 0 or None))),
    "trained by replays": (training(False), training(True)),
    "another kind of sum": (
        lambda at: DTensor.from_local(torch.ones(3, 2), at.mesh, [Partial()]).full_tensor(),
        lambda at: DTensor.from_local(torch.ones(3, 2), at.mesh, [Partial("max")]).full_tensor(),
    ),
    "a rule of its own": (_registered(0), _registered(1)),
    "another way to draw": (_drawn("exact"), _drawn("counter")),
    "a smaller world": (_world_of(0), _world_of(1)),
    "another norm": (_norm(2.0), _norm(1.0)),
    "another branch": (_branching(0.1), _branching(9.0)),
    "another mask": (_masked(30.0), _masked(90.0)),
    "threads in another order": (_in_threads(1), _in_threads(-1)),
    "in evaluation": (_eval(True), _eval(False)),
    "inference mode": (_inference(nullcontext), _inference(torch.inference_mode)),
    "another dim of a mesh": (_grids(None, "a"), _grids(None, "b")),
    "a flat mesh": (_grids(None), _grids(None, flat=True)),
    "part of the world": (_part(None), _part([0, 1])),
    "another part of the world": (_part([0, 1]), _part([1, 2])),
    "another source": (_distributed(), _distributed(src_data_rank=1)),
    "no source": (_distributed(), _distributed(src_data_rank=None)),
    "checks more": (_levels(None), _levels("strict")),
    "checks less": (_levels(None), _levels("off")),
    "asks whether equal": (nothing, lambda at: torch.equal(at.x, at.x)),
    "asks for a list": (nothing, lambda at: at.x.sum(0).tolist()),
    "asks for truth": (nothing, lambda at: bool((at.x > 3).any())),
    "asks for places": (nothing, lambda at: at.x.nonzero().shape[0]),
    "asks for an array": (nothing, lambda at: at.x.full_tensor().numpy().sum().tolist()),
    "asks for unique numbers": (nothing, lambda at: torch.unique(at.x).shape[0]),
}
ONLY_STRICT = frozenset({"around/a rule of its own"})  # on two ranks: its collectives are the same, of another result
DIFFERENT = {f"around/{name}": Program(usual, other, k % 3) for k, (name, (usual, other)) in enumerate(_PAIRS.items())}
