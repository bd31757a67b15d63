"""Healthy programs in which groups of ranks do different work: a table of sets of ranks on meshes, times kinds of work. After
each program all four ranks compute on the full mesh and on both submeshes.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from divergent_programs import DTensor, R, Shard, dt
from torch import nn

from dtensor import DeviceMesh, checkpoint
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module, replicate

SIZE = 4


class Meshes:
    """Meshes of one world. Each rank makes its meshes at their first use."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.all = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        self.dp, self.tp = self.all.get_local_rank("dp"), self.all.get_local_rank("tp")
        self.world = dt.init_device_mesh("cpu", (SIZE,))
        self._of: dict[str, DeviceMesh] = {}

    def of(self, ranks: Any) -> DeviceMesh:
        found = self._of.get(repr(ranks))
        if found is None:
            found = self._of[repr(ranks)] = dt.DeviceMesh("cpu", ranks)
        return found

    @property
    def deep(self) -> DeviceMesh:
        """Return a mesh of the same ranks with a third mesh dim."""
        found = self._of.get("deep")
        if found is None:
            found = self._of["deep"] = dt.init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("pp", "tp", "cp"))
        return found


# --- which ranks work on which mesh, and how often ---
Works = list[tuple[DeviceMesh, int]]


def _if(condition: Any, mesh: Callable[[], DeviceMesh], times: int = 1) -> Works:
    return [(mesh(), times)] if condition else []


WORKERS: dict[str, Callable[[Meshes], Works]] = {
    "one replica": lambda at: _if(at.dp == 0, lambda: at.all["tp"]),
    "one column": lambda at: _if(at.tp == 1, lambda: at.all["dp"]),
    "replicas, one more often": lambda at: [(at.all["tp"], 1 + 2 * at.dp)],
    "one half": lambda at: _if(at.rank < 2, lambda: at.of([0, 1])),
    "two halves": lambda at: [(at.of([0, 1]), 1)] if at.rank < 2 else [(at.of([2, 3]), 3)],
    "a half in another order": lambda at: _if(at.rank < 2, lambda: at.of([1, 0])),
    "a half in two dims": lambda at: _if(at.rank > 1, lambda: at.of([[2], [3]])),
    "three of four": lambda at: _if(at.rank < 3, lambda: at.of([0, 1, 2])),
    "two that overlap": lambda at: [*_if(at.rank < 3, lambda: at.of([0, 1, 2])), *_if(at.rank, lambda: at.of([3, 2, 1]), 2)],
    "one rank": lambda at: _if(at.rank == 2, lambda: at.of([2])),
    "a slice of a slice": lambda at: _if(at.rank > 1, lambda: at.deep["tp", "cp"]["tp"]),
    "a flattened slice": lambda at: _if(at.rank < 2, lambda: at.deep["tp", "cp"].flatten()),
    "all, then one replica": lambda at: [(at.all, 1), *_if(at.dp == 1, lambda: at.all["tp"])],
    "one column, then all": lambda at: [*_if(at.tp == 0, lambda: at.all["dp"]), (at.all, 1)],
}


# --- what they do ---
def _value(mesh: DeviceMesh, *placements: Any) -> DTensor:
    placements = placements or (Shard(0), *[Shard(1)] * (mesh.ndim - 1))
    return dt.distribute_tensor(torch.arange(64.0).reshape(8, 8), mesh, placements, src_data_rank=None)


def _trained(model: nn.Module, optimizer: Any = torch.optim.SGD, steps: int = 2) -> None:
    stepping = optimizer(model.parameters(), 0.1)
    for _ in range(steps):
        model(torch.ones(2, 4)).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        stepping.step()
        stepping.zero_grad()


def _layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))


def _sharded(mesh: DeviceMesh) -> None:
    model = _layers()
    axes = mesh if mesh.ndim == 1 else mesh.flatten("both")
    fully_shard(model[0], mesh=axes)
    _trained(fully_shard(model, mesh=axes))


def _tensor_parallel(mesh: DeviceMesh) -> None:
    axes = mesh if mesh.ndim == 1 else mesh.flatten("both")
    _trained(parallelize_module(_layers(), axes, {"0": ColwiseParallel(), "2": RowwiseParallel()}), torch.optim.AdamW)


def _backward(mesh: DeviceMesh) -> None:
    w = _value(mesh).requires_grad_()
    (w * w).sum().backward()
    assert w.grad is not None
    w.grad.full_tensor()


def _caught(mesh: DeviceMesh) -> None:
    with suppress(IndexError, RuntimeError):
        _value(mesh).sum(5)


def _fails_at_data(mesh: DeviceMesh) -> None:
    indices = torch.tensor([0, 99])
    with suppress(IndexError, RuntimeError):
        _value(mesh)[indices]
    _value(mesh).sum().item()


def _captured(mesh: DeviceMesh) -> None:
    step = dt.capture(lambda x: (x.softmax(0) * 2).sum().full_tensor())
    for _ in range(3):
        step(_value(mesh))


def _captured_with_plain(mesh: DeviceMesh) -> None:
    step = dt.capture(lambda x, y: x.sum().full_tensor() + y.sum())
    for _ in range(3):
        step(_value(mesh), torch.ones(3))


def _captured_step(mesh: DeviceMesh) -> None:
    w = _value(mesh).requires_grad_()
    optimizer = torch.optim.SGD([w], 0.1)

    def step(x: Any) -> None:
        (w * x).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    captured = dt.capture(step)
    for _ in range(3):
        captured(_value(mesh))


def _drawn(mesh: DeviceMesh) -> None:
    dt.manual_seed(mesh.ndim, mesh)
    dt.rand(8, 3, device_mesh=mesh, placements=[Shard(0), *[R] * (mesh.ndim - 1)]).sum().item()


def _dropout(mesh: DeviceMesh) -> None:
    dt.manual_seed(3, mesh)
    nn.functional.dropout(_value(mesh), 0.5).sum().item()


def _counted(mesh: DeviceMesh) -> None:
    dt.manual_seed(3, mesh)
    with dt.random_mode("counter"):
        dt.randn(8, 3, device_mesh=mesh, placements=[Shard(0), *[R] * (mesh.ndim - 1)]).sum().item()


def _saved(mesh: DeviceMesh) -> None:
    group = mesh.get_group()
    folder = f"{os.environ['POOL_FOLDER']}-{'-'.join(map(str, dist.get_process_group_ranks(group)))}"
    state = {"x": _value(mesh)}
    checkpoint.save(state, folder, process_group=group)
    checkpoint.load(state, folder, process_group=group)


def _threads(mesh: DeviceMesh) -> None:
    works = [threading.Thread(target=lambda: _value(mesh).mul(3).sum(0).to_local()) for _ in range(2)]
    for work in works:
        work.start()
    for work in works:
        work.join()


def _groups(mesh: DeviceMesh) -> None:
    group = mesh.get_group() if mesh.ndim == 1 else mesh.flatten("both").get_group()
    dist.all_reduce(torch.ones(3), group=group)
    dist.barrier(group=group)


def _many_numbers(mesh: DeviceMesh) -> None:
    x = _value(mesh)
    for k in range(5):
        x = x * (k + 0.5)
    x.clamp(0.0, 1.0)


def _written(mesh: DeviceMesh) -> None:
    x = _value(mesh)
    x.mul_(2.0).add_(x, alpha=3)
    x[0].zero_()


def _looped(mesh: DeviceMesh) -> None:
    x = _value(mesh) / 64
    for _ in range(4):
        x = (x @ x).tanh()
        if x.amax().item() < 0:
            break


def _strided(mesh: DeviceMesh) -> None:
    _value(mesh).t().reshape(-1)[3:40].sum().item()


def _places(mesh: DeviceMesh) -> None:
    x = _value(mesh)
    (x > 20).nonzero().full_tensor()
    x.sort(0).values.topk(2, 0)


def _replicated(mesh: DeviceMesh) -> None:
    axes = mesh if mesh.ndim == 1 else mesh.flatten("both")
    _trained(replicate(_layers(), axes))


ACTIONS: dict[str, Callable[[DeviceMesh], Any]] = {
    "computes without a collective": lambda mesh: (_value(mesh) * 2).relu(),
    "reads a sum": lambda mesh: _value(mesh).sum().item(),
    "gathers": lambda mesh: _value(mesh).full_tensor(),
    "prints": lambda mesh: str(_value(mesh).sum(0)),
    "redistributes": lambda mesh: _value(mesh).redistribute(placements=[Shard(1), *[R] * (mesh.ndim - 1)]).sum(),
    "gathers later": lambda mesh: _value(mesh).redistribute(placements=[R] * mesh.ndim, async_op=True).sum(),
    "gathers many": lambda mesh: dt.redistribute_many([_value(mesh), _value(mesh) + 1], [[R] * mesh.ndim] * 2),
    "distributes": lambda mesh: dt.distribute_tensor(torch.ones(5, 7), mesh, [Shard(0)] * mesh.ndim).sum(),
    "computes with copies": lambda mesh: (_value(mesh, *[R] * mesh.ndim) * 3).sum().item(),
    "computes with numbers": _many_numbers,
    "writes in place": _written,
    "loops by a value": _looped,
    "takes views": _strided,
    "finds places": _places,
    "goes backward": _backward,
    "catches an error": _caught,
    "catches an error of data": _fails_at_data,
    "trains a sharded model": _sharded,
    "trains a replicated model": _replicated,
    "trains a tensor-parallel model": _tensor_parallel,
    "captures": _captured,
    "captures with a plain tensor": _captured_with_plain,
    "captures a training step": _captured_step,
    "draws random numbers": _drawn,
    "drops out": _dropout,
    "draws by places": _counted,
    "moves its generator": lambda mesh: (torch.rand(3), _value(mesh).sum()),
    "saves and loads": _saved,
    "computes in threads": _threads,
    "talks over its group": _groups,
}


def _together(at: Meshes) -> list[float]:
    """Compute on all ranks after a program: on the full mesh and on each submesh."""
    x = dt.distribute_tensor(torch.arange(64.0).reshape(8, 8), at.all, [Shard(0), Shard(1)])  # it communicates before it computes
    found = [float((x * 2).sum())]
    found += [float(_value(at.all[name]).sum(0).full_tensor().sum()) for name in ("tp", "dp")]
    found += [float(x.redistribute(placements=[R, Shard(1)]).sum().full_tensor()), float(_value(at.world).amax())]
    return found


RIGHT = [4032.0, 2016.0, 2016.0, 2016.0, 63.0]


@dataclass(frozen=True)
class Healthy:
    """Program in which some ranks work on their mesh, and then all ranks compute together."""

    workers: str
    action: str

    def go(self, at: Meshes) -> list[float]:
        for mesh, times in WORKERS[self.workers](at):
            for _ in range(times):
                ACTIONS[self.action](mesh)
        return _together(at)


# A checkpoint is of one process group: a mesh of several dims has several.
_NOT_OF = {
    "saves and loads": (
        "a half in two dims",
        "all, then one replica",
        "one column, then all",
    )
}
PROGRAMS = {
    f"{workers}/{action}": Healthy(workers, action)
    for workers in WORKERS
    for action in ACTIONS
    if workers not in _NOT_OF.get(action, ())
}


@dataclass(frozen=True)
class InOneWorld:
    """Programs that run one after the other in one world; ``run`` returns how many ended, and the error of the next one."""

    names: tuple[str, ...]

    def run(self, rank: int, all_do: str = "") -> tuple[int, str]:
        at = Meshes()
        for number, name in enumerate(self.names):
            try:
                found = PROGRAMS[name].go(at)
            except Exception as error:
                return number, f"{type(error).__name__}: {error}"
            if found != RIGHT:
                return number, f"{found}, right is {RIGHT}"
        return len(self.names), ""


def alarms(pool: Any, names: list[str], at_once: int = 1000) -> Iterator[str]:
    """Yield the programs among ``names`` in which a rank raised or got a wrong number, with the words. A new world follows each.

    ``at_once``: how many programs run in one world.
    """
    while names:
        found = pool.run_program(InOneWorld(tuple(names[:at_once])), timeout_s=120.0)
        ended = [outcome.value if outcome.kind == "result" else (0, str(outcome)) for outcome in found]
        if any(words for _, words in ended):
            number = min(count for count, words in ended if words)
            yield f"{names[number]}: {sorted({words for _, words in ended if words})}"
        else:
            number = min(len(names), at_once) - 1
        names = names[number + 1 :]
