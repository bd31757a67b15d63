"""Rank errors: errors and exits of one rank in hooks, recomputation, state dicts, replays and threads; and healthy
differences."""

from __future__ import annotations

import copy
import ctypes
import os
import pickle
import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from divergent_parallelism import WIDTH, Blocks, fsdp, nothing, scores, second
from divergent_programs import Program, R, Scene
from divergent_state_dicts import folder, saves
from divergent_surroundings import captured, training, when
from torch import nn
from torch.profiler import profile

from dtensor import checkpoint
from dtensor.debug import CommDebugMode
from dtensor.parallel import fully_shard, replicate

Action = Callable[[Scene], Any]


def _raise(at: Scene | None = None, *_: Any) -> None:
    raise ValueError("a reason of its own")


def _counted(act: Callable[[], Any], nth: int) -> Callable[[], Any]:
    count = 0

    def run() -> None:
        nonlocal count
        count += 1
        if count == nth:
            act()

    return run


def _hooked(register: Callable[[Any, Callable[..., Any]], Any], act: Callable[..., Any]) -> Action:
    return fsdp(lambda at, model, number: register(model, lambda *_: act(at)) if number == 1 else None)


def _optimized(register: str, act: Callable[..., Any]) -> Action:
    def run(at: Scene) -> Any:
        w = nn.Parameter(at.x.detach() / 64)
        optimizer = torch.optim.SGD([w], 0.1)
        getattr(optimizer, register)(lambda *_: act(at))
        for _ in range(2):
            (w * at.x).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return w.detach().sum().item()

    return run


def _replicas(act: Callable[..., Any]) -> Action:
    """Return a program with a hook on a reduced gradient."""

    def run(at: Scene) -> Any:
        model = replicate(Blocks(), at.mesh)
        for number in range(2):
            if number:
                for parameter in model.parameters():
                    parameter.register_post_accumulate_grad_hook(lambda _: act(at))
            model(torch.ones(2, WIDTH)).square().mean().backward()
        return float(at.x.sum())

    return run


class _Stateful:
    def __init__(self, at: Scene, act: Callable[..., Any]) -> None:
        self.at, self.act = at, act

    def state_dict(self) -> Any:
        self.act(self.at)
        return {"x": self.at.x}

    def load_state_dict(self, state: Any) -> None:
        self.act(self.at)


def _states(act: Callable[..., Any], load: bool = False) -> Action:
    def run(at: Scene) -> Any:
        if load:
            checkpoint.save({"s": _Stateful(at, nothing)}, folder("states"))
            kept = _Stateful(at, nothing)
            kept.load_state_dict = lambda state: act(at)  # type: ignore[method-assign]
            checkpoint.load({"s": kept}, folder("states"))
        else:
            checkpoint.save({"s": _Stateful(at, act)}, folder("states"))
        return at.x.sum().item()

    return run


def _thread(act: Action) -> Action:
    """Return a program whose thread raises in a collective; the main thread gets the error from the future."""

    def run(at: Scene) -> Any:
        def work() -> float:
            act(at)
            return float(at.x.sum())

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()

    return run


def _compiled_model(act: Callable[..., Any]) -> Action:
    def run(at: Scene) -> Any:
        torch._dynamo.reset()
        model = fully_shard(Blocks(), mesh=at.mesh)
        step = torch.compile(model, backend="aot_eager")
        for number in range(2):
            if number:
                act(at)
            step(torch.ones(2, WIDTH)).square().mean().backward()
        return at.x.sum().item()

    return run


_RAISING: dict[str, Callable[[Callable[..., Any]], Action]] = {
    "in a pre-hook of a unit": lambda act: _hooked(lambda model, run: model.layers[1].register_forward_pre_hook(run), act),
    "in a hook of a unit": lambda act: _hooked(lambda model, run: model.layers[1].register_forward_hook(run) and None, act),
    "in a backward hook of a unit": lambda act: _hooked(
        lambda model, run: model.layers[1].register_full_backward_hook(lambda *_: run()), act
    ),
    "when recomputed": lambda act: lambda at: fsdp(of=lambda: Blocks(recompute=False, act=_counted(lambda: act(at), 5)))(at),
    "when recomputed by reentry": lambda act: (
        lambda at: fsdp(of=lambda: Blocks(recompute=True, act=_counted(lambda: act(at), 5)))(at)
    ),
    "in a hook before a step": lambda act: _optimized("register_step_pre_hook", act),
    "in a hook after a step": lambda act: _optimized("register_step_post_hook", act),
    "after a gradient": _replicas,
    "in a state dict": _states,
    "while a state dict is loaded": lambda act: _states(act, load=True),
    "in a captured step": lambda act: captured(inside=act),
    "between replays": lambda act: captured(when(3, lambda at: act(at))),
    "in a captured training": lambda act: training(True, lambda at, number: act(at) if number == 3 else None),
    "in a thread": _thread,
    "between compiled steps": _compiled_model,
}
RAISING: dict[str, Program] = {
    f"ends/raises {name}": Program(of(nothing), of(_raise), k % 3) for k, (name, of) in enumerate(_RAISING.items())
}
RAISING |= {
    "ends/is interrupted in a captured step": Program(
        captured(when(3, nothing)), captured(when(3, lambda at: os.kill(os.getpid(), signal.SIGINT))), 1
    ),
    "ends/is interrupted while it saves": Program(_states(nothing), _states(lambda at: os.kill(os.getpid(), signal.SIGINT)), 2),
}

# --- ends -------------------------------------------------------------------------------------------------------------------
_ENDS: dict[str, Callable[..., Any]] = {
    "killed": lambda at, *_: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda at, *_: os.kill(os.getpid(), signal.SIGSTOP),
    "exits": lambda at, *_: os._exit(3),
    "terminated": lambda at, *_: os.kill(os.getpid(), signal.SIGTERM),
    "crashes": lambda at, *_: ctypes.string_at(0),
}
DEADLY: dict[str, Program] = {
    f"ends/{end} {place}": Program(_RAISING[place](nothing), _RAISING[place](action), (k + n) % 3)
    for k, place in enumerate(
        (
            "in a backward hook of a unit",
            "when recomputed by reentry",
            "in a state dict",
            "while a state dict is loaded",
            "between replays",
            "in a thread",
        )
    )
    for n, (end, action) in enumerate(_ENDS.items())
}


# --- what ranks may do ------------------------------------------------------------------------------------------------------
def _profiled(at: Scene) -> Any:
    """Profile on one rank."""
    with CommDebugMode() if at.rank == 1 else nullcontext(), profile() if at.rank == 2 else nullcontext():
        return at.x.softmax(0).sum().item()


def _printed(at: Scene) -> Any:
    """Print, copy and pickle a tensor on one rank."""
    if at.rank == 1:
        repr(at.x), str(at.x), copy.deepcopy(at.x), pickle.dumps(at.x.to_local())
    return at.x.sum().item()


def _of_threads(at: Scene) -> Any:
    """Compute on plain tensors in threads during collectives."""
    stop = threading.Event()

    def work() -> None:
        while not stop.is_set():
            torch.ones(100).sum()

    threads = [threading.Thread(target=work) for _ in range(2 * (at.rank == 1))]
    for thread in threads:
        thread.start()
    try:
        return sum(at.x.softmax(0).sum().item() for _ in range(20))
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def _retried(at: Scene) -> Any:
    """Catch an error of plain tensors on one rank, then do what all ranks do."""
    with suppress(IndexError):
        if at.rank == 1:
            torch.ones(3)[7]
    return at.x.sum().item()


def _polls(at: Scene) -> Any:
    """Waits for a file that another rank writes before its collective."""
    path = folder("polled")
    if at.rank == 0:
        time.sleep(4.0)
        with open(path, "w") as file:
            file.write("x")
    while at.rank == 1 and not os.path.exists(path):
        time.sleep(0.05)
    return at.x.sum().item()


def _asks_the_store(at: Scene) -> Any:
    """Waits at the store for a rank that is late."""
    store = dist.distributed_c10d._get_default_store()
    if at.rank == 0:
        time.sleep(4.0)
        store.set("mine", "1")
    elif at.rank == 1:
        store.wait(["mine"])
    return at.x.sum().item()


def _beside_pending(at: Scene) -> Any:
    """Wait for a redistribution early on one rank, and late on another."""
    pending = at.x.redistribute(placements=[R], async_op=True)
    if at.rank == 1:
        pending.to_local()
    found = float(at.x.sum())
    return found + 0 * float(pending.to_local().sum())


def _looser(at: Scene, change: Callable[[Scene, Any], Any]) -> Any:
    """Keep more cached copies on one rank, which changes no communication and no value."""
    found = fsdp(second(change) if at.rank == 1 else nothing)(at)
    assert found == fsdp()(at)
    return at.x.sum().item()


HEALTHY: dict[str, Program] = {
    f"healthy/{name}": Program(action, action, 0)
    for name, action in {
        "looked on by one": _profiled,
        "shown by one": _printed,
        "threads beside": _of_threads,
        "caught of plain tensors": _retried,
        "polls for a file": _polls,
        "asks the store": _asks_the_store,
        "waits early and late": _beside_pending,
        "fsdp of other rows": fsdp(rows=lambda at: 2 + at.rank),
        "recomputed": fsdp(of=partial(Blocks, recompute=False)),
        "recomputed by reentry": fsdp(of=partial(Blocks, recompute=True)),
        "not resharded by one": lambda at: _looser(at, lambda at, model: model.set_reshard_after_backward(False)),
        "no last pass of one": lambda at: _looser(at, lambda at, model: model.set_is_last_backward(False)),
        "trained by replays": training(True),
        "parallel losses": lambda at: scores(at.rank == 1)(at) * 0 + at.x.sum().item(),
        "saved in the background": saves(lambda at: {"x": at.x}, async_op=True),
    }.items()
}
ONLY_STRICT: frozenset[str] = frozenset()
