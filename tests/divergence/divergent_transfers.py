"""Divergent transfers: failures during large messages, modules that some ranks skip, and loaders of different lengths."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from divergent_programs import ACTIONS, Program, R, Scene, Shard, dt, trained
from torch import nn

from dtensor import DTensor, Partial, checkpoint
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module, replicate

Action = Callable[[Scene], Any]

# --- ends amid large messages --------------------------------------------------------------------------------------------
WIDTH = 6
_LONG = 30_000_000  # numbers: a transfer of them takes tenths of a second


def _columns(x: DTensor) -> None:
    x.redistribute(placements=[Shard(1)]).redistribute(placements=[Shard(0)])


def _gathered(x: DTensor) -> None:
    x.redistribute(placements=[R])


def _summed(x: DTensor) -> None:
    DTensor.from_local(x.to_local(), x.device_mesh, [Partial()]).redistribute(placements=[R])


def _amid(act: Callable[[DTensor], None], sign: signal.Signals | None) -> Action:
    """Return a program of large messages, during which this rank gets a signal."""

    def run(at: Scene) -> Any:
        size = dist.get_world_size()
        x = DTensor.from_local(torch.ones(size, _LONG // size), at.mesh, [Shard(0)])
        act(x)
        if sign is not None:
            threading.Timer(0.25, os.kill, (os.getpid(), sign)).start()
        for _ in range(200):
            act(x)

    return run


_SIGNALS = {"killed": signal.SIGKILL, "stopped": signal.SIGSTOP, "is interrupted": signal.SIGINT}
_ENDED = {
    f"amid {name}/{what}": Program(_amid(act, None), _amid(act, sign), k % 3)
    for k, (name, act) in enumerate({"messages": _columns, "gathers": _gathered, "sums": _summed}.items())
    for what, sign in _SIGNALS.items()
}
DEADLY = {name: program for name, program in _ENDED.items() if "interrupted" not in name}


# --- what some ranks leave out, do twice or do in another order ---------------------------------------------------------------
class _Experts(nn.Module):
    """Two experts that run in the given order."""

    def __init__(self, at: Scene, order: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.order, self.first = order, nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleDict({name: fully_shard(nn.Linear(WIDTH, WIDTH), mesh=at.mesh) for name in "ab"})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for name in self.order:
            x = self.experts[name](x).relu()
        return x


def _experts(order: str) -> Action:
    def run(at: Scene) -> Any:
        model = fully_shard(_Experts(at, order), mesh=at.mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        return trained(model, optimizer, torch.ones(2, WIDTH))

    return run


def _trained(kind: str, change: Callable[[Scene, nn.Module, int], None], of: Any = torch.optim.SGD, layers: int = 2) -> Action:
    """Return a program of two steps, with ``change`` called on the model before each."""

    def run(at: Scene) -> Any:
        torch.manual_seed(0)
        model: nn.Module = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(layers)))
        if kind == "sharded":
            for layer in model:
                fully_shard(layer, mesh=at.mesh)
            model = fully_shard(model, mesh=at.mesh)
        elif kind == "replicated":
            model = replicate(model, at.mesh)
        else:
            model = parallelize_module(model, at.mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
        optimizer = of(model.parameters(), 0.1)
        for number in range(2):
            change(at, model, number)
            model(torch.ones(2, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [float(parameter.detach().double().sum()) for parameter in model.parameters()]

    return run


def _as_it_is(at: Scene, model: nn.Module, number: int) -> None:
    pass


def _at_second(act: Callable[[Scene, Any], Any]) -> Callable[[Scene, nn.Module, int], None]:
    return lambda at, model, number: act(at, model) if number else None


def _hook_that_reads(at: Scene, model: Any) -> None:
    model[0].register_forward_hook(lambda layer, *_: print(layer.weight.norm(), file=StringIO()))


_CHANGES: dict[str, tuple[Callable[[Scene, Any], Any], tuple[str, ...]]] = {
    "a hook that reads a norm": (_hook_that_reads, ("sharded", "tensor-parallel")),
    "no gradient sync": (lambda at, model: model.set_requires_gradient_sync(False), ("sharded", "replicated")),
    "a full state": (
        lambda at, model: {k: v.full_tensor() for k, v in model.state_dict().items()},
        ("sharded", "tensor-parallel"),
    ),
    "a norm of gradients": (
        lambda at, model: torch.nn.utils.get_total_norm([p.detach() for p in model.parameters()]).full_tensor(),
        ("sharded", "tensor-parallel"),
    ),
    "frozen in part": (lambda at, model: model[0].requires_grad_(False), ("sharded", "replicated")),
    "evaluated under no_grad": (lambda at, model: torch.no_grad()(model)(torch.ones(2, WIDTH)), ("sharded", "tensor-parallel")),
    "forward twice": (lambda at, model: model(torch.ones(2, WIDTH)), ("sharded", "tensor-parallel")),
    "a layer alone": (lambda at, model: model[1](torch.ones(2, WIDTH)), ("sharded",)),
    "saved alone": (
        lambda at, model: checkpoint.save({"model": model.state_dict()}, os.environ["POOL_FOLDER"] + "-alone"),
        ("sharded", "replicated"),
    ),
}
_OTHER: dict[str, tuple[Action, Action]] = {
    "experts in another order": (_experts("ab"), _experts("ba")),
    "an expert left out": (_experts("ab"), _experts("a")),
    "another expert": (_experts("a"), _experts("b")),
    "an expert twice": (_experts("ab"), _experts("abb")),
    **{
        f"{name} of one, {kind}": (_trained(kind, _as_it_is), _trained(kind, _at_second(act)))
        for name, (act, kinds) in _CHANGES.items()
        for kind in kinds
    },
    **{
        f"another optimizer, {kind}": (_trained(kind, _as_it_is), _trained(kind, _as_it_is, torch.optim.AdamW))
        for kind in ("sharded", "tensor-parallel")
    },
    **{
        f"a layer more, {kind}": (_trained(kind, _as_it_is), _trained(kind, _as_it_is, layers=3))
        for kind in ("sharded", "replicated")
    },
}


def _seeded(seed: int) -> Action:
    def run(at: Scene) -> Any:
        torch.manual_seed(0)
        F.dropout(at.x, 0.5)
        torch.manual_seed(seed)
        return F.dropout(at.x, 0.5).sum().item()

    return run


def _meshes(shape: Callable[[int], tuple[int, int]]) -> Action:
    def run(at: Scene) -> Any:
        mesh = dt.init_device_mesh("cpu", shape(dist.get_world_size()), mesh_dim_names=("a", "b"))
        return dt.distribute_tensor(torch.arange(12.0), mesh, [Shard(0), R], src_data_rank=None).sum().item()

    return run


def _times(number: torch.Tensor) -> Action:
    return lambda at: (at.x * number).sum().item()


def _given(value: torch.Tensor) -> Action:
    return lambda at: dt.distribute_tensor(value, at.mesh, [Shard(0)]).sum().item()


def _restored(loads: bool) -> Action:
    """Return a program in which one rank does not load the checkpoint."""

    def run(at: Scene) -> Any:
        folder = os.environ["POOL_FOLDER"] + "-restored"
        checkpoint.save({"x": at.x * 2}, folder)
        state = {"x": at.x * 0}
        if loads:
            checkpoint.load(state, folder)
        return state["x"].sum().item()

    return run


def _saved(comes: bool) -> Action:
    def run(at: Scene) -> Any:
        if comes:
            checkpoint.save({"x": at.x}, os.environ["POOL_FOLDER"] + "-saved")
        return at.x.sum().item()

    return run


def _fails(error: BaseException) -> Action:
    def run(at: Scene) -> Any:
        raise error

    return run


def _scaled(skips: bool) -> Action:
    """Return a program in which one rank has a NaN gradient and skips the step."""

    def run(at: Scene) -> Any:
        w = nn.Parameter(at.x.detach() / 64)
        optimizer = torch.optim.SGD([w], 0.1)
        for _ in range(2):
            (w * at.x).sum().backward()
            if not skips:
                optimizer.step()
            optimizer.zero_grad()
        return w.detach().sum().item()

    return run


def _until(bound: float) -> Action:
    """Return a program of steps until a local number is small enough."""

    def run(at: Scene) -> Any:
        mine, x = 1.0, at.x
        while mine > bound:
            x, mine = x.softmax(0) * 2, mine / 2
        return x.sum(0).full_tensor()

    return run


_OTHER |= {
    "another seed": (_seeded(0), _seeded(1)),
    "another shape of the mesh": (_meshes(lambda size: (size, 1)), _meshes(lambda size: (1, size))),
    "another number of no dims": (_times(torch.tensor(2.0)), _times(torch.tensor(3.0))),
    "another tensor of one element": (_times(torch.tensor([2.0])), _times(torch.tensor([3.0]))),
    "another dtype is given": (_given(torch.ones(6, 2)), _given(torch.ones(6, 2).double())),
    "a row more is given": (_given(torch.ones(6, 2)), _given(torch.ones(7, 2))),
    "a step left out": (_scaled(False), _scaled(True)),
    "a checkpoint not saved": (_saved(True), _saved(False)),
    "a checkpoint not loaded": (_restored(True), _restored(False)),
    "more rounds": (_until(0.3), _until(0.1)),
    "fewer rounds": (_until(0.1), _until(0.3)),
}
RAISING = {name: program for name, program in _ENDED.items() if "interrupted" in name}
RAISING |= {f"hostile/raises before a save of {odd}": Program(_saved(True), _fails(ValueError("mine")), odd) for odd in (0, 1)}
RAISING |= {"hostile/raises what ends a loop": Program(ACTIONS["sum0"], _fails(StopIteration()), 2)}
DIFFERENT = {f"hostile/{name}": Program(usual, other, k % 3) for k, (name, (usual, other)) in enumerate(_OTHER.items())}


# --- what ranks may do --------------------------------------------------------------------------------------------------------
def _busy(seconds: float, how: str) -> Action:
    """Make this rank slow in several ways."""

    def run(at: Scene) -> Any:
        end = time.monotonic() + seconds
        pending = at.x.redistribute(placements=[Shard(1)], async_op=True) if how == "with one under way" else None
        while time.monotonic() < end:
            if how == "keeps the interpreter":
                sum(range(30_000_000))  # one call of C, in which no other thread runs
            else:
                time.sleep(0.1)
        if pending is not None:
            return pending.to_local().sum().item() * 0 + at.x.sum().item()
        return at.x.sum().item()

    return run


def _last(at: Scene) -> Any:
    """End each rank as soon as it has its result."""
    time.sleep(0.3 * at.rank)
    return at.x.sum().item()


def _in_a_thread(at: Scene) -> Any:
    """Run all collectives in one thread while the main thread waits."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(lambda: at.x.sum().item() + at.x.sum(0).full_tensor().sum().item()).result()


def _own_data(at: Scene) -> Any:
    """Read and count local data."""
    counts = torch.bincount(torch.arange(at.rank + 2))
    local = at.x.to_local()
    if at.rank == 1:
        local = local + counts.sum()
        local.sum().item()
    return at.x.sum().item()


def _part_of_world(at: Scene) -> Any:
    """Use a mesh of some ranks."""
    mesh = dt.DeviceMesh("cpu", [0, 1])
    x = dt.distribute_tensor(torch.arange(6.0), mesh, [Shard(0)], src_data_rank=None)
    if at.rank < 2:
        x.sum().item()
    return at.x.sum().item()


HEALTHY = {
    **{
        f"slow/{how}": Program(ACTIONS["item"], _busy(seconds, how), 1)
        for how, seconds in {"sleeps for long": 14.0, "keeps the interpreter": 6.0, "with one under way": 5.0}.items()
        if how != "with one under way"
    },
    "slow/with one under way": Program(_busy(0.0, "with one under way"), _busy(5.0, "with one under way"), 2),
    **{
        f"healthy/{name}": Program(action, action, 0)
        for name, action in {
            "ends one after the other": _last,
            "in a thread": _in_a_thread,
            "own data": _own_data,
            "a part of the world": _part_of_world,
        }.items()
    },
}
# What is computed with copies alone.
ONLY_STRICT: frozenset[str] = frozenset()
