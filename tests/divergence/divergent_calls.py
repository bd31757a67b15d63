"""Divergent calls: ``torch.distributed`` calls by some ranks only, and errors on one rank that its program catches."""

from __future__ import annotations

import gc
import resource
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from divergent_loops import loop
from divergent_programs import ACTIONS, Program, R, Scene, Shard, dt

from dtensor import DTensor

Action = Callable[[Scene], Any]


# --- calls of torch.distributed, by one rank or by all but one, beside what all do with us ------------------------------------
def _group(at: Scene, of: str) -> Any:
    return at.mesh.get_group() if of == "mesh" else dist.group.WORLD


def _next(at: Scene) -> int:
    return (at.rank + 1) % dist.get_world_size()


def _exchanged(at: Scene, group: Any) -> None:
    """Exchange in the way of gloo reductions of 8 numbers."""
    size = dist.get_world_size()
    lengths = [0 if k == at.rank else 8 for k in range(size)]
    dist.all_to_all_single(torch.empty(8 * size - 8), torch.full((8 * size - 8,), 7.0), lengths, lengths, group=group)


def _batched(at: Scene, group: Any) -> None:
    ops = [dist.P2POp(dist.isend, torch.ones(8), _next(at), group), dist.P2POp(dist.irecv, torch.ones(8), _next(at), group)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()


def _begun(at: Scene, group: Any) -> None:
    work = dist.all_reduce(torch.full((8,), 7.0), group=group, async_op=True)
    work.wait()


_CALLS: dict[str, Callable[[Scene, Any], Any]] = {
    "all_reduce": lambda at, group: dist.all_reduce(torch.full((8,), 7.0), group=group),
    "all_to_all": _exchanged,
    "broadcast": lambda at, group: dist.broadcast(torch.full((8,), 7.0), 0, group=group),
    "barrier": lambda at, group: dist.barrier(group=group),
    "send": lambda at, group: dist.send(torch.ones(8), _next(at), group=group),
    "recv": lambda at, group: dist.recv(torch.ones(8), _next(at), group=group),
    "batch_isend_irecv": _batched,
    "async all_reduce": _begun,
}


_ALONE = ("send", "recv", "batch_isend_irecv")  # of which all ranks cannot do one thing


def _own(call: str, of: str = "world", then: Action = ACTIONS["sum0"], before: Action = ACTIONS["sum0"]) -> Action:
    """Return a program with its own collective between calls of all ranks."""

    def run(at: Scene) -> Any:
        before(at)
        if call:
            _CALLS[call](at, _group(at, of))
        return then(at)

    return run


def _both(at: Scene, one: str, other: str) -> Any:
    """Run mismatched ``torch.distributed`` calls, whose result the next collective shows."""
    with suppress(RuntimeError):
        if call := one if at.rank == 1 else other:
            _CALLS[call](at, dist.group.WORLD)
    return at.x.sum().item()


def _of_stages(at: Scene) -> Any:
    """Wait in a pipeline stage for messages that no stage sends."""
    with suppress(RuntimeError):
        work = dist.irecv(torch.ones(8), 0) if at.rank == 1 else None
        if work is not None:
            work.wait()
    return at.x.sum().item()


_PRODUCT: Action = lambda at: (at.x @ at.x.t()).redistribute(placements=[R]).to_local()  # noqa: E731
_OWN: dict[str, tuple[Action, Action]] = {
    **{f"{call} of one": (_own(""), _own(call)) for call in _CALLS if call not in _ALONE},
    **{
        f"{call} of one on the mesh": (_own("", "mesh"), _own(call, "mesh")) for call in ("all_reduce", "all_to_all", "broadcast")
    },
    **{f"{call} of all but one": (_own(call), _own("")) for call in ("all_reduce", "all_to_all", "barrier", "async all_reduce")},
    "all_reduce instead of a sum": (ACTIONS["sum0"], lambda at: dist.all_reduce(torch.full((8,), 7.0))),
    "all_to_all instead of a sum": (ACTIONS["sum0"], lambda at: _exchanged(at, at.mesh.get_group())),
    "all_reduce beside a product": (_own("", then=_PRODUCT), _own("all_reduce", then=_PRODUCT)),
    "all_to_all beside a move": (
        _own("", then=ACTIONS["to_columns"], before=ACTIONS["to_columns"]),
        _own("all_to_all", then=ACTIONS["to_columns"], before=ACTIONS["to_columns"]),
    ),
    **{
        f"all_reduce beside a {kind} model": (_own("", then=loop(kind)), _own("all_reduce", "mesh", loop(kind)))
        for kind in ("sharded", "replicated", "tensor-parallel")
    },
}


# --- an error that one rank's program catches: what it goes on with has the form of what it missed ---------------------------
def _indices(at: Scene, index: int) -> DTensor:
    """Return indices that are all ``index`` on this rank."""
    return at.of(torch.full((8,), index), Shard(0))


def _looked_up(index: int) -> Action:
    def run(at: Scene) -> Any:
        rows = at.x
        with suppress(IndexError):
            rows = F.embedding(_indices(at, index), at.w)
        return rows.sum().item()

    return run


def _written_in_place(index: int) -> Action:
    def run(at: Scene) -> Any:
        rows, indices = at.x.clone(), _indices(at, index).reshape(8, 1)
        with suppress(IndexError, RuntimeError):
            rows.scatter_(1, indices, 1.0)
        return rows.sum().item()

    return run


def _divided(by: int) -> Action:
    def run(at: Scene) -> Any:
        found, divisor = _indices(at, 3), _indices(at, by)
        with suppress(RuntimeError, ZeroDivisionError):
            found = found // divisor
        return found.sum().item()

    return run


def _summed_twice(by: int) -> Action:
    """Sum in a loop that skips a failed step."""

    def run(at: Scene) -> Any:
        total = at.x.long()
        for _ in range(2):
            with suppress(RuntimeError, ZeroDivisionError):
                total = total + _indices(at, 3).reshape(8, 1) // _indices(at, by).reshape(8, 1)
        return total.sum(0).full_tensor()

    return run


def _backward(index: int) -> Action:
    def run(at: Scene) -> Any:
        x = at.x.detach().requires_grad_()
        x.register_hook(lambda gradient: F.embedding(_indices(at, index), at.w))
        try:
            (x * 2).sum().backward()
        except IndexError:
            x.grad = at.w.redistribute(placements=[Shard(0)])
        return x.grad.sum().item()

    return run


@contextmanager
def _no_memory() -> Iterator[None]:
    """Make allocations of large tensors fail."""
    gc.collect()  # what is dropped while they cannot would leave room for one
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + (1 << 23), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


_LONG = 30_000_000  # numbers: as many bytes as are asked of the system, and more than other threads give back meanwhile


def _out_of_memory(short: bool, act: Callable[[Any], Any]) -> Action:
    def run(at: Scene) -> Any:
        x = DTensor.from_local(torch.ones(dist.get_world_size(), _LONG // dist.get_world_size()), at.mesh, [Shard(0)])
        found = x
        try:
            with _no_memory() if short else nullcontext():
                found = act(x)
        except RuntimeError:
            pass
        return found.sum().item()

    return run


def _doubled(x: Any) -> Any:
    return x * 2


def _columns(x: Any) -> Any:
    return x.redistribute(placements=[Shard(1)]).redistribute(placements=[Shard(0)])


def _mapped(fails: bool) -> Action:
    """Return a program whose function of local tensors fails on one rank."""

    def own(x: torch.Tensor) -> torch.Tensor:
        if fails:
            raise ValueError("a reason of its own")
        return x * 2

    def run(at: Scene) -> Any:
        found = at.x
        with suppress(ValueError):
            found = dt.local_map(own, [Shard(0)], ([Shard(0)],))(at.x)
        return found.sum().item()

    return run


def _without_data(meta: bool, made: Callable[[Scene, torch.Tensor], Any]) -> Action:
    """Return a program with meta tensors on one rank, which torch does not send."""

    def run(at: Scene) -> Any:
        made(at, torch.ones(6, 4, device="meta" if meta else "cpu"))
        return at.x.sum(1).full_tensor()

    return run


def _summed(at: Scene, x: torch.Tensor) -> Any:
    return DTensor.from_local(x, at.mesh, [Shard(0)], shape=(6 * dist.get_world_size(), 4), stride=(4, 1)).sum(0).full_tensor()


_CAUGHT: dict[str, tuple[Action, Action]] = {
    "embedding": (_looked_up(1), _looked_up(99)),
    "scatter in place": (_written_in_place(1), _written_in_place(99)),
    "division": (_divided(1), _divided(0)),
    "division in a loop": (_summed_twice(1), _summed_twice(0)),
    "backward": (_backward(1), _backward(99)),
    "out of memory": (_out_of_memory(False, _doubled), _out_of_memory(True, _doubled)),
    "out of memory to send": (_out_of_memory(False, _columns), _out_of_memory(True, _columns)),
    "a function of local tensors": (_mapped(False), _mapped(True)),
}
DIFFERENT: dict[str, Program] = {
    f"own calls/{name}": Program(usual, other, k % 3) for k, (name, (usual, other)) in enumerate(_OWN.items())
}
RAISING: dict[str, Program] = {
    f"own calls/{name} goes on": Program(action, action, 1)
    for name, action in {
        **{f"{call} of one": partial(_both, one=call, other="") for call in ("recv", "batch_isend_irecv")},
        "recv beside barrier": partial(_both, one="recv", other="barrier"),
        "recv beside async all_reduce": partial(_both, one="recv", other="async all_reduce"),
        "irecv of one": _of_stages,
    }.items()
}
DIFFERENT |= {f"caught/{name}": Program(usual, other, k % 3) for k, (name, (usual, other)) in enumerate(_CAUGHT.items())}


# --- what ranks may do --------------------------------------------------------------------------------------------------------
def _of_copies(at: Scene) -> Any:
    """Raise an error of replicated tensors, which one rank can catch alone."""
    with suppress(IndexError):
        F.embedding(at.of(torch.full((2,), 99), R), at.w)


def _caught_by_all(at: Scene) -> Any:
    """Catch errors on all ranks, with different texts."""
    found = 0
    for index in (_indices(at, 99), _indices(at, 99 + at.rank)):
        try:
            F.embedding(index, at.w)
        except IndexError:
            found += 1
    return found + at.x.sum().item()


def _all_out_of_memory(at: Scene) -> Any:
    return _out_of_memory(True, _columns)(at)


_META: dict[str, Callable[[Scene, torch.Tensor], Any]] = {
    "a tensor is distributed": lambda at, x: dt.distribute_tensor(x, at.mesh, [Shard(0)]),
    "a tensor is replicated": lambda at, x: dt.distribute_tensor(x, at.mesh, [R]),
    "local tensors": _summed,
}
for _k, (_name, _made) in enumerate(_META.items()):
    DIFFERENT[f"meta/{_name}"] = Program(_without_data(False, _made), _without_data(True, _made), 1 + _k % 2)


def _called_by_all(at: Scene) -> Any:
    """Call ``torch.distributed`` between collectives of dtensor, on both groups."""
    found = 0.0
    for of in ("world", "mesh"):
        for call, act in _CALLS.items():
            if call not in ("send", "recv", "batch_isend_irecv"):
                act(at, _group(at, of))
                found += at.x.sum().item()
    return found


def _left_pending(at: Scene) -> Any:
    """Begin a call on one rank that no rank waits for."""
    if at.rank == 1:
        at.begun = dist.all_reduce(torch.full((8,), 7.0), async_op=True)
    return at.x.sum(0).full_tensor()


DIFFERENT["caught/of copies alone"] = Program(lambda at: None, _of_copies, 1)
ONLY_STRICT = frozenset({"caught/of copies alone"})
HEALTHY: dict[str, Program] = {
    f"healthy/{action.__name__.strip('_').replace('_', ' ')}": Program(action, action, 0)
    for action in (_caught_by_all, _all_out_of_memory, _called_by_all, _left_pending)
}
