"""Divergent programs: a table of the usual calls of all ranks, and the calls of one odd rank."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

PEER = bool(os.environ.get("DTENSOR_CHAOS_PEER"))
if PEER:  # what the peer makes of the same programs
    import torch.distributed.tensor as dt
    from torch.distributed.tensor import DTensor, Replicate, Shard

    dt.init_device_mesh = dist.init_device_mesh
else:
    import dtensor as dt
    from dtensor import DTensor, Replicate, Shard
    from dtensor.comm.map_ranks import communicator_of
    from dtensor.watchdog import collective_hooks

R = Replicate()
Action = Callable[["Scene"], Any]


class Scene:
    """Tensors that the calls of a program use, equal on all ranks."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.mesh = dt.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        self.x = self.of(torch.arange(64.0).reshape(8, 8), Shard(0))
        self.w = self.of(torch.arange(64.0).reshape(8, 8) / 64, R)

    def of(self, value: torch.Tensor, placement: Any) -> DTensor:
        return dt.distribute_tensor(value, self.mesh, [placement], src_data_rank=None)


def warm_up(level: str) -> None:
    """Run first calls in one process, so that their imports are not measured."""
    if not hasattr(dt, "check_ranks"):
        return
    dt.check_ranks(level)
    mesh = dt.DeviceMesh("cpu", 2)
    x = dt.distribute_tensor(torch.arange(64.0).reshape(8, 8), mesh, [Shard(0)])
    (x @ x.t()).softmax(0).sum(0).full_tensor()


@dataclass(frozen=True)
class Program:
    """Program in which all ranks do ``usual``, but rank ``odd`` does ``other``, and then all sum ``x``."""

    usual: Action
    other: Action
    odd: int

    def run(self, rank: int, all_do: str = "") -> list[Any]:
        """Return the sum, the result of the call, the second sum, and the collectives of the call."""
        scene = Scene(rank)
        action = {"": self.other if rank == self.odd else self.usual, "usual": self.usual, "other": self.other}[all_do]
        found = [float(scene.x.sum())]
        value = action(scene)
        found += [value.tolist() if isinstance(value, torch.Tensor) else value]
        collectives = _collectives()
        found += [float(scene.x.sum()), collectives]
        return found


def _collectives() -> Any:
    """Return hashes of this rank's collectives, by group."""
    if DTensor.__module__.startswith("torch."):
        return None
    watcher = collective_hooks._ActiveWatchdog.watchdog
    return watcher and sorted((ranks, chain.hash) for ranks, chain in watcher.logs.items())


# --- actions ---------------------------------------------------------------------------------------------------------------
ACTIONS: dict[str, Action] = {
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
    "sum of 2": lambda at: (at.x * 2).sum(0).full_tensor(),
    "sum of 3": lambda at: (at.x * 3).sum(0).full_tensor(),
    "sum kept": lambda at: at.x.sum(0, keepdim=True).full_tensor(),
    "amin": lambda at: at.x.amin(0).full_tensor(),
    "amin of all": lambda at: at.x.amin().full_tensor(),
    "var": lambda at: at.x.var(0).full_tensor(),
    "std": lambda at: at.x.std(0).full_tensor(),
    "norm": lambda at: at.x.norm().full_tensor(),
    "norm of 1": lambda at: at.x.norm(1).full_tensor(),
    "logsumexp": lambda at: at.x.logsumexp(0).full_tensor(),
    "log_softmax": lambda at: at.x.log_softmax(0).full_tensor(),
    "any": lambda at: (at.x > 70).any(0).full_tensor(),
    "all": lambda at: (at.x > -1).all(0).full_tensor(),
    "sorted": lambda at: at.x.sort(0).values.full_tensor(),
    "sorted down": lambda at: at.x.sort(0, descending=True).values.full_tensor(),
    "top 2": lambda at: at.x.topk(2, 0).values.full_tensor(),
    "top 3": lambda at: at.x.topk(3, 0).values.full_tensor(),
    "flipped": lambda at: at.x.flip(0).full_tensor(),
    "rolled by 1": lambda at: at.x.roll(1, 0).full_tensor(),
    "rolled by 2": lambda at: at.x.roll(2, 0).full_tensor(),
    "halves": lambda at: at.x[:4].full_tensor(),
    "other halves": lambda at: at.x[4:].full_tensor(),
    "added": lambda at: (at.x + at.w).full_tensor(),
    "added twice": lambda at: at.x.add(at.w, alpha=2).full_tensor(),
    "joined": lambda at: torch.cat([at.x, at.x]).full_tensor(),
    "stacked": lambda at: torch.stack([at.x, at.x]).full_tensor(),
    "triangle": lambda at: at.x.tril().full_tensor(),
    "reshaped": lambda at: at.x.reshape(4, 16).full_tensor(),
    "product of rows": lambda at: (at.x @ at.x.t()).full_tensor(),
    "bfloat16": lambda at: at.x.bfloat16().sum(0).float().full_tensor(),
    "short": lambda at: at.x.short().sum(0).full_tensor(),
    "complex": lambda at: at.x.to(torch.complex64).sum(0).abs().full_tensor(),
    "columns": lambda at: at.of(torch.arange(64.0).reshape(8, 8), Shard(1)).sum(0).full_tensor(),
    "columns whole": lambda at: at.of(torch.arange(64.0).reshape(8, 8), Shard(1)).full_tensor(),
    "replicated sum": lambda at: at.w.sum(0).full_tensor(),
    "terms": lambda at: at.x.sum(0).redistribute(placements=[Shard(0)]).to_local(),
    "blocks": lambda at: DTensor.from_local(torch.ones(at.rank + 1, 2), at.mesh, [Shard(0)]).full_tensor(),
    "longer blocks": lambda at: DTensor.from_local(torch.ones(2 * at.rank + 1, 2), at.mesh, [Shard(0)]).full_tensor(),
    "wide blocks": lambda at: DTensor.from_local(torch.ones(at.rank + 1, 3), at.mesh, [Shard(0)]).full_tensor(),
    "whole blocks": lambda at: DTensor.from_local(torch.ones(at.rank + 1, 2).long(), at.mesh, [Shard(0)]).full_tensor(),
    "terms of local": lambda at: DTensor.from_local(torch.ones(3, 2), at.mesh, [dt.Partial()]).full_tensor(),
    "random": lambda at: _seeded(at, 0),
    "another seed": lambda at: _seeded(at, 1),
    "drawn before": lambda at: _seeded(at, 0, torch.rand(5).numel()),
    "dropped out": lambda at: F.dropout(at.x, 0.5).sum().full_tensor() * 0,
    "dropped out less": lambda at: F.dropout(at.x, 0.25).sum().full_tensor() * 0,
    "all to all": lambda at: _sent(at, 0),
    "all to all of others": lambda at: _sent(at, 1),
    "written to a file": lambda at: _written(at),
    "loaded by a worker": lambda at: _loaded(at),
    "barrier": lambda at: dist.barrier(),
    "copies": lambda at: (at.w * 2).norm().item(),
    "gradients held": lambda at: _held(at),
    "plain_all_reduce": lambda at: dist.all_reduce(torch.ones(3)),
}


def _gradient(at: Scene, factor: float) -> torch.Tensor:
    w = at.w.detach().requires_grad_()
    (at.x @ w * factor).sum().backward()
    grad: Any = w.grad if factor == 1.0 else w.grad.redistribute(placements=[Shard(0)])
    return grad.full_tensor()


def _held(at: Scene) -> torch.Tensor:
    """Keep references to gradients on one rank, as a debugger does, so that autograd copies them."""
    w, held = at.x.detach().requires_grad_(), list[Any]()
    w.register_hook(lambda gradient: held.append(gradient) if at.rank == 1 else None)
    for _ in range(2):
        (w * at.x).sum().backward()
    return w.grad.full_tensor()


def _seeded(at: Scene, seed: int, drawn: int = 0) -> torch.Tensor:
    """Draw on synchronized ranks, after ``drawn`` numbers on each rank."""
    torch.manual_seed(seed)
    x = at.x + torch.nn.functional.dropout(at.x, 0.5)
    torch.rand(drawn)
    return (x + dt.rand(8, 8, device_mesh=at.mesh, placements=[Shard(0)])).sum(0).full_tensor()


def _sent(at: Scene, more: int) -> Any:
    """Exchange ``lengths[k]`` numbers with rank k, and ``more`` with the last rank."""
    comm, lengths = communicator_of(at.mesh), [1, 2, 3, 2][: dist.get_world_size()]
    lengths[-1] += more
    chunks = [torch.full((lengths[k],), float(at.rank)) for k in range(dist.get_world_size())]
    came = comm.all_to_all(chunks, (0,), lambda source, target: (lengths[target],)).wait()
    return [piece.tolist() for piece in came]


def _written(at: Scene) -> int:
    with tempfile.TemporaryFile() as file:
        torch.save(at.x.full_tensor(), file)
        return file.tell()


def trained(model: torch.nn.Module, optimizer: Any, x: torch.Tensor) -> list[float]:
    """Train two steps and return the sums of the parameters."""
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [float(parameter.detach().sum()) for parameter in model.parameters()]


class _Items(torch.utils.data.Dataset[float]):
    """Data set that uses collectives."""

    def __init__(self, x: DTensor) -> None:
        self.x = x

    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> float:
        return float(self.x.sum())


def _loaded(at: Scene) -> str:
    loader = torch.utils.data.DataLoader(_Items(at.x), num_workers=1, multiprocessing_context="fork")
    try:
        return str(list(loader))
    except RuntimeError as error:
        return "refused" if "forked" in str(error) else str(error)


def _in_a_child(at: Scene) -> str:
    """Use a collective in a forked child, as in a DataLoader worker."""
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


def _interrupted(action: Action) -> Action:
    """Return a program that gets Ctrl-C on this rank while it waits."""

    def run(at: Scene) -> Any:
        threading.Timer(0.5, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
        return action(at)

    return run


def _after(seconds: float, action: Action) -> Action:
    def late(at: Scene) -> Any:
        time.sleep(seconds)
        return action(at)

    return late


# One rank's data make its operation fail: the others raise the same.
def _indices(at: Scene, good: int, bad: int) -> DTensor:
    """Return sharded integers, of which the last one is ``bad``."""
    values = torch.full((8,), good)
    values[-1] = bad
    return at.of(values, Shard(0))


def _matrices(at: Scene, last: float) -> DTensor:
    """Return sharded 2 x 2 matrices, of which the last one is invalid."""
    values = torch.eye(2).repeat(8, 1, 1)
    values[-1] = last
    return at.of(values, Shard(0))


def _last(at: Scene) -> bool:
    return at.rank == dist.get_world_size() - 1


def _failing_backward(at: Scene) -> None:
    x = at.x.detach().requires_grad_()
    x.register_hook(lambda gradient: F.embedding(_indices(at, 1, 99), at.w))
    (x * 2).sum().backward()


_FAILING: dict[str, Action] = {
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
    "scatter_add": lambda at: (
        at.w.redistribute(placements=[Shard(0)])
        .scatter_add(1, _indices(at, 1, 99).reshape(8, 1), at.of(torch.ones(8, 1), Shard(0)))
        .sum()
    ),
    "index": lambda at: at.w[_indices(at, 1, 99)].sum(),
    "index_add": lambda at: at.w.index_add(0, _indices(at, 1, 99), at.of(torch.ones(8, 8), Shard(0))).sum(),
    "index_copy": lambda at: at.w.index_copy(0, _indices(at, 1, 99), at.of(torch.ones(8, 8), Shard(0))).sum(),
    "index_fill": lambda at: at.w.index_fill(0, _indices(at, 1, 99), 1.0).sum(),
    "index_put": lambda at: at.w.index_put((_indices(at, 1, 99),), at.of(torch.ones(8, 8), Shard(0))).sum(),
    "take": lambda at: at.w.take(_indices(at, 1, 99)).sum(),
    "repeat_interleave": lambda at: at.x.repeat_interleave(_indices(at, 1, -1), 0).sum(),
    "bincount": lambda at: torch.bincount(_indices(at, 1, -1)).sum(),
    "embedding_bag": lambda at: F.embedding_bag(_indices(at, 1, 99).reshape(8, 1), at.w).sum(),
    "multi_margin": lambda at: F.multi_margin_loss(at.x, _indices(at, 1, 99)),
    "cholesky": lambda at: torch.linalg.cholesky(_matrices(at, -1.0)).sum(),
    "inverse": lambda at: torch.linalg.inv(_matrices(at, 0.0)).sum(),
    "solve": lambda at: torch.linalg.solve(_matrices(at, 0.0), at.of(torch.ones(8, 2, 1), Shard(0))).sum(),
    "svd of NaN": lambda at: torch.linalg.svdvals(_matrices(at, float("nan"))).sum(),
    "bernoulli": lambda at: torch.bernoulli(_indices(at, 0, 2).float()).sum(),
    "multinomial": lambda at: torch.multinomial(_indices(at, 1, -1).float().reshape(8, 1), 1).sum(),
    "normal": lambda at: torch.normal(0.0, _indices(at, 1, -1).float()).sum(),
    "modulus": lambda at: torch.fmod(_indices(at, 3, 1), _indices(at, 1, 0)).sum(),
    "an item of several": lambda at: at.x.item(),
    "bool subtraction": lambda at: (at.of(torch.ones(2).bool(), Shard(0)) - at.of(torch.ones(2).bool(), Shard(0))).sum(),
    "convolution of whole numbers": lambda at: F.conv1d(
        at.of(torch.ones(2, 3, 5).long(), Shard(0)), at.of(torch.ones(4, 3, 3), R)
    ).sum(),
    "mean of whole numbers": lambda at: at.of(torch.ones(2, 3).long(), Shard(0)).mean(),
    "another dtype": lambda at: (at.of(torch.ones(2, 3), Shard(0)) @ at.of(torch.ones(3, 3).double(), R)).sum(),
    "a block of another shape": lambda at: DTensor.from_local(
        torch.ones(3 + _last(at), 2), at.mesh, [Shard(0)], shape=(3 * dist.get_world_size(), 2), stride=(2, 1)
    ).full_tensor(),
    "blocks of several widths": lambda at: DTensor.from_local(torch.ones(3, 2 + _last(at)), at.mesh, [Shard(0)]).full_tensor(),
    "backward": lambda at: _failing_backward(at),
    "bool product": lambda at: (at.of(torch.ones(2, 3).bool(), Shard(0)) @ at.of(torch.ones(3, 3).bool(), R)).sum(),
    "softmax of whole numbers": lambda at: at.of(torch.ones(2, 3).long(), Shard(0)).softmax(1).sum(),
}


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
_OTHERS = [
    ("sum of 2", "sum of 3"),
    ("sum0", "sum kept"),
    ("norm", "norm of 1"),
    ("sorted", "sorted down"),
    ("top 2", "top 3"),
    ("rolled by 1", "rolled by 2"),
    ("halves", "other halves"),
    ("added", "added twice"),
    ("amin", "amin of all"),
    ("blocks", "wide blocks"),
    ("blocks", "whole blocks"),
    ("random", "drawn before"),
    ("dropped out", "dropped out less"),
    ("all to all", "all to all of others"),
    ("nothing", "written to a file"),
    ("nothing", "destroyed"),
    ("nothing", "dropped"),
    ("nothing", "copies"),
    ("sum0", "dropped"),
]
_MIXED = [
    "sum0",
    "amin",
    "var",
    "norm",
    "logsumexp",
    "log_softmax",
    "any",
    "sorted",
    "flipped",
    "halves",
    "added",
    "joined",
    "stacked",
    "triangle",
    "reshaped",
    "bfloat16",
    "short",
    "complex",
    "columns",
    "terms",
    "blocks",
    "random",
    "product",
    "softmax",
    "cumsum",
    "argmax",
    "backward",
    "many",
    "distributed",
    "large",
]
_OTHERS += [(_one, _MIXED[(5 * _k + 7 * _n) % len(_MIXED)]) for _n in (1, 2) for _k, _one in enumerate(_MIXED)]
_ENDS: dict[str, Action] = {
    "killed": lambda at: os.kill(os.getpid(), signal.SIGKILL),
    "aborted": lambda at: os.abort(),
    "exits": lambda at: os._exit(3),
    "stopped": lambda at: os.kill(os.getpid(), signal.SIGSTOP),
}

DIFFERENT: dict[str, Program] = {}
for _usual, _others in _PAIRS:
    for _k, _other in enumerate(_others.split()):
        DIFFERENT[f"{_usual}/{_other}"] = Program(ACTIONS[_usual], ACTIONS[_other], _k % 3)
for _k, (_usual, _other) in enumerate(_OTHERS):
    if _usual != _other:
        DIFFERENT.setdefault(f"{_usual}/{_other}", Program(ACTIONS[_usual], ACTIONS[_other], _k % 3))
RAISING: dict[str, Program] = {
    f"{_usual}/is interrupted": Program(_after(1.5, ACTIONS[_usual]), _interrupted(ACTIONS[_usual]), 1)
    for _usual in ("item", "sum0")
}
for _usual in ("sum0", "full", "large", "to_columns", "softmax", "distributed"):
    for _k, (_name, _action) in enumerate({"raises": _raise, "raises and goes on": _caught}.items()):
        RAISING[f"{_usual}/{_name}"] = Program(ACTIONS[_usual], _action, _k)
DEADLY: dict[str, Program] = {
    f"{usual}/{name}": Program(ACTIONS[usual], action, k % 3)
    for usual in ("sum0", "full", "large")
    for k, (name, action) in enumerate(_ENDS.items())
}
HEALTHY = {f"healthy/{name}": Program(action, action, 0) for name, action in ACTIONS.items()}
SLOW = {f"slow/{name}": Program(ACTIONS[name], _after(5.0, ACTIONS[name]), 1) for name in ("sum0", "large", "softmax")}
FAILING = {f"failing/{name}": Program(action, action, 2) for name, action in _FAILING.items()}
PROGRAMS = DIFFERENT | RAISING | DEADLY | HEALTHY | SLOW | FAILING
ONLY_STRICT = frozenset({"nothing/copies"})  # what one rank computes with its copies alone: only "strict" compares it
