"""Programs of several ranks in which one does something else: a table of what all do, and what the odd one does instead."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

if os.environ.get("DTENSOR_CHAOS_PEER"):  # what the peer makes of the same programs
    import torch.distributed.tensor as dt
    from torch.distributed.tensor import DTensor, Replicate, Shard

    dt.init_device_mesh = dist.init_device_mesh
else:
    import dtensor as dt
    from dtensor import DTensor, Replicate, Shard

R = Replicate()
Deed = Callable[["Scene"], Any]


class Scene:
    """What the deeds of a program work on: the same on all ranks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.mesh = dt.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        self.x = self.of(torch.arange(64.0).reshape(8, 8), Shard(0))
        self.w = self.of(torch.arange(64.0).reshape(8, 8) / 64, R)

    def of(self, value: torch.Tensor, placement: Any) -> DTensor:
        return dt.distribute_tensor(value, self.mesh, [placement], src_data_rank=None)


def warm_up(level: str) -> None:
    """Loads what first calls load, in one process, so that they are not measured."""
    if not hasattr(dt, "check_ranks"):
        return
    dt.check_ranks(level)
    mesh = dt.DeviceMesh("cpu", 2)
    x = dt.distribute_tensor(torch.arange(64.0).reshape(8, 8), mesh, [Shard(0)])
    (x @ x.t()).softmax(0).sum(0).full_tensor()


@dataclass(frozen=True)
class Program:
    """All ranks do ``usual``, the rank ``odd`` does ``other`` instead, then all sum ``x`` once more."""

    usual: Deed
    other: Deed
    odd: int

    def run(self, rank: int) -> list[Any]:
        scene = Scene(rank)
        found = [float(scene.x.sum())]
        value = (self.other if rank == self.odd else self.usual)(scene)
        found += [value.tolist() if isinstance(value, torch.Tensor) else value, float(scene.x.sum())]
        return found


# --- deeds ---------------------------------------------------------------------------------------------------------------------
DEEDS: dict[str, Deed] = {
    "sum0": lambda at: at.x.sum(0).full_tensor(),
    "sum1": lambda at: at.x.sum(1).full_tensor(),
    "max0": lambda at: at.x.amax(0).full_tensor(),
    "mean0": lambda at: at.x.mean(0).full_tensor(),
    "full": lambda at: at.x.full_tensor(),
    "to_columns": lambda at: at.x.redistribute(placements=[Shard(1)]).to_local(),
    "to_whole": lambda at: at.x.redistribute(placements=[R]).to_local(),
    "transposed": lambda at: at.x.t().full_tensor(),
    "rows_of_12": lambda at: at.of(torch.ones(12, 8), Shard(0)).full_tensor(),
    "rows_of_5": lambda at: at.of(torch.ones(5, 8), Shard(0)).full_tensor(),
    "sum_of_12": lambda at: at.of(torch.ones(8, 12), Shard(0)).sum(0).full_tensor(),
    "large": lambda at: at.of(torch.ones(1024, 1024), Shard(0)).full_tensor(),
    "large_sum": lambda at: at.of(torch.ones(8, 200_000), Shard(0)).sum(0).full_tensor(),
    "double": lambda at: at.x.double().sum(0).full_tensor(),
    "half": lambda at: at.x.half().sum(0).full_tensor(),
    "whole_numbers": lambda at: at.x.long().sum(0).full_tensor(),
    "sum_then_product": lambda at: [float(at.x.sum()), float((at.x / 64).prod())],
    "product_then_sum": lambda at: [float((at.x / 64).prod()), float(at.x.sum())],
    "sum_then_large_sum": lambda at: [float(at.x.sum()), float((at.x * 3).sum())],
    "sums_the_other_way": lambda at: [float((at.x * 3).sum()), float(at.x.sum())],
    "softmax": lambda at: at.x.softmax(0).full_tensor(),
    "normed": lambda at: F.layer_norm(at.x.redistribute(placements=[Shard(1)]), (8,)).full_tensor(),
    "product": lambda at: (at.x.redistribute(placements=[Shard(1)]) @ at.w).full_tensor(),
    "argmax": lambda at: at.x.argmax(0).full_tensor(),
    "cumsum": lambda at: at.x.cumsum(0).full_tensor(),
    "item": lambda at: at.x.sum().item(),
    "printed": lambda at: str(at.x.full_tensor()),
    "twice": lambda at: [at.x.sum(0).full_tensor().tolist(), at.x.sum(0).full_tensor().tolist()],
    "backward": lambda at: _gradient(at, 1.0),
    "backward_of_two": lambda at: _gradient(at, 2.0),
    "distributed": lambda at: dt.distribute_tensor(torch.ones(8, 8), at.mesh, [Shard(0)]).to_local(),
    "distributed_columns": lambda at: dt.distribute_tensor(torch.ones(8, 8), at.mesh, [Shard(1)]).to_local(),
    "many": lambda at: [each.to_local().tolist() for each in dt.redistribute_many([at.x, at.x + 1], [[R], [R]])],
    "pending": lambda at: at.x.redistribute(placements=[R], async_op=True).to_local(),
    "dropped": lambda at: at.x.redistribute(placements=[R], async_op=True) is None,
    "forked": lambda at: _in_a_child(at),
    "destroyed": lambda at: _destroyed(at),
    "nothing": lambda at: None,
    "barrier": lambda at: dist.barrier(),
    "plain_all_reduce": lambda at: dist.all_reduce(torch.ones(3)),
}


def _gradient(at: Scene, factor: float) -> torch.Tensor:
    w = at.w.detach().requires_grad_()
    (at.x @ w * factor).sum().backward()
    assert w.grad is not None
    grad: Any = w.grad if factor == 1.0 else w.grad.redistribute(placements=[Shard(0)])
    return grad.full_tensor()


def _in_a_child(at: Scene) -> str:
    """What a forked child gets that takes part in a collective, as a DataLoader's worker may."""
    child = os.fork()
    if not child:
        try:
            at.x.sum().item()
        except RuntimeError as error:
            os._exit(7 if "forked" in str(error) else 8)
        os._exit(9)
    return f"exit code {os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])}"


def _destroyed(at: Scene) -> Any:
    """A mesh keeps its groups."""
    dist.destroy_process_group()
    return at.x.sum().item()


def _raise(at: Scene) -> None:
    raise ValueError("a reason of its own")


def _caught(at: Scene) -> None:
    try:
        _raise(at)
    except ValueError:
        dist.barrier()


# One rank's data make its operation fail: the others raise the same.
def _indices(at: Scene, good: int, bad: int) -> DTensor:
    """Whole numbers, sharded, of which the last rank's last one is ``bad``."""
    values = torch.full((8,), good)
    values[-1] = bad
    return at.of(values, Shard(0))


_FAILING: dict[str, Deed] = {
    "embedding": lambda at: F.embedding(_indices(at, 1, 99), at.w).sum(),
    "gather": lambda at: at.w.redistribute(placements=[Shard(0)]).gather(1, _indices(at, 1, 99).reshape(8, 1)).sum(),
    "floor division": lambda at: (_indices(at, 3, 1) // _indices(at, 1, 0)).sum(),
    "remainder": lambda at: (_indices(at, 3, 1) % _indices(at, 1, 0)).sum(),
    "cross entropy": lambda at: F.cross_entropy(at.x, _indices(at, 1, 99)),
    "nll": lambda at: F.nll_loss(at.x, _indices(at, 1, 99)),
    "one hot": lambda at: F.one_hot(_indices(at, 1, -1)).sum(),
    "binary cross entropy": lambda at: F.binary_cross_entropy(_indices(at, 0, 2).float(), at.of(torch.ones(8), Shard(0))),
    "index_select": lambda at: at.w.index_select(0, _indices(at, 1, 99)).sum(),
    "scatter": lambda at: at.w.redistribute(placements=[Shard(0)]).scatter(1, _indices(at, 1, 99).reshape(8, 1), 1.0).sum(),
    "bool product": lambda at: (at.of(torch.ones(2, 3).bool(), Shard(0)) @ at.of(torch.ones(3, 3).bool(), R)).sum(),
    "softmax of whole numbers": lambda at: at.of(torch.ones(2, 3).long(), Shard(0)).softmax(1).sum(),
}


def _slow(deed: Deed, seconds: float) -> Deed:
    def slow(at: Scene) -> Any:
        time.sleep(seconds)
        return deed(at)

    return slow


# What all do, and what one does instead.
_PAIRS = [
    (
        "sum0",
        "sum1 max0 mean0 full to_columns double half whole_numbers nothing barrier rows_of_12 sum_of_12 large softmax twice",
    ),
    ("full", "sum0 sum1 to_columns transposed rows_of_12 rows_of_5 large large_sum nothing plain_all_reduce cumsum item"),
    ("to_columns", "to_whole sum0 full nothing large argmax"),
    ("large", "full sum0 large_sum nothing to_columns barrier"),
    ("large_sum", "sum_of_12 large sum0 nothing"),
    ("rows_of_12", "rows_of_5 full large"),
    ("sum_then_product", "product_then_sum item nothing"),
    ("sum_then_large_sum", "item nothing twice"),
    ("softmax", "normed sum0 nothing cumsum"),
    ("product", "full argmax nothing"),
    ("backward", "backward_of_two sum0 nothing"),
    ("distributed", "distributed_columns full nothing"),
    ("many", "full pending nothing"),
    ("pending", "sum0 many nothing large"),
    ("nothing", "sum0 full item printed barrier large distributed backward"),
    ("twice", "sum0 nothing"),
    ("argmax", "max0 cumsum item"),
]
_ENDS: dict[str, Deed] = {
    "killed": lambda at: os.kill(os.getpid(), signal.SIGKILL),
    "aborted": lambda at: os.abort(),
    "exits": lambda at: os._exit(3),
    "stopped": lambda at: os.kill(os.getpid(), signal.SIGSTOP),
}

DIFFERENT: dict[str, Program] = {}
for _usual, _others in _PAIRS:
    for _k, _other in enumerate(_others.split()):
        DIFFERENT[f"{_usual}/{_other}"] = Program(DEEDS[_usual], DEEDS[_other], _k % 3)
RAISING: dict[str, Program] = {}
for _usual in ("sum0", "full", "large", "to_columns", "softmax", "distributed"):
    for _k, (_name, _deed) in enumerate({"raises": _raise, "raises and goes on": _caught}.items()):
        RAISING[f"{_usual}/{_name}"] = Program(DEEDS[_usual], _deed, _k)
DEADLY: dict[str, Program] = {
    f"{usual}/{name}": Program(DEEDS[usual], deed, k % 3)
    for usual in ("sum0", "full", "large")
    for k, (name, deed) in enumerate(_ENDS.items())
}
HEALTHY = {f"healthy/{name}": Program(deed, deed, 0) for name, deed in DEEDS.items()}
SLOW = {f"slow/{name}": Program(DEEDS[name], _slow(DEEDS[name], 5.0), 1) for name in ("sum0", "large", "softmax")}
FAILING = {f"failing/{name}": Program(deed, deed, 2) for name, deed in _FAILING.items()}
PROGRAMS = DIFFERENT | RAISING | DEADLY | HEALTHY | SLOW | FAILING
