"""Divergent training loops: settings, numbers, pipelines, compiled and captured steps, and 2-D meshes that differ on one rank."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from divergent_programs import ACTIONS, Program, R, Scene, Shard, dt
from torch import nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from dtensor import checkpoint
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module, replicate

Action = Callable[[Scene], Any]
WIDTH = 6


# --- loops ---
def _blocks(dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.GELU(), nn.Dropout(dropout), nn.Linear(5, WIDTH))


def _model(at: Scene, kind: str, dropout: float = 0.0) -> nn.Module:
    model = _blocks(dropout)
    if kind == "sharded":
        return fully_shard(model, mesh=at.mesh)
    if kind == "replicated":
        return replicate(model, at.mesh)
    return parallelize_module(model, at.mesh, {"0": ColwiseParallel(), "3": RowwiseParallel()})


def loop(
    kind: str,
    rate: float = 0.1,
    clip: float = 1.0,
    rows: int = 2,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    lost: str = "",
    zero: bool = True,
    dropout: float = 0.0,
    reverse: bool = False,
    steps: int = 3,
    accumulated: bool = False,
    local: bool = False,
) -> Action:
    """Return a program that trains a model with these settings."""

    def run(at: Scene) -> Any:
        model = _model(at, kind, dropout)
        parameters = list(model.parameters())
        optimizer = torch.optim.AdamW(parameters[::-1] if reverse else parameters, rate)
        for number in range(steps):
            with around():
                x = torch.ones(rows if not local else rows + at.rank, WIDTH)
                loss = model(x).square().mean()
            if loss.requires_grad:
                loss.backward()
                if accumulated and number == 1:
                    continue
                if lost:
                    dict(model.named_parameters())[lost].grad = None
                torch.nn.utils.clip_grad_norm_(parameters, clip)
                optimizer.step()
            if zero or number != 1:
                optimizer.zero_grad()
        return [float(parameter.detach().double().sum()) for parameter in model.parameters()]

    return run


@contextmanager
def _doubles() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


def _autocast() -> AbstractContextManager[Any]:
    return torch.autocast("cpu", torch.bfloat16)


_SETTINGS: dict[str, dict[str, Any]] = {
    "another rate": {"rate": 0.2},
    "another clip": {"clip": 0.5},
    "more rows": {"rows": 3},
    "autocast": {"around": _autocast},
    "no grad": {"around": torch.no_grad},
    "a gradient lost": {"lost": "0.weight"},
    "no zero_grad": {"zero": False},
    "another order of parameters": {"reverse": True},
    "stops early": {"steps": 2},
    "accumulates": {"accumulated": True},
}
# Ranks of data parallelism have batches, and what is computed of them, of their own.
_OWN = {(name, kind) for name in ("more rows", "autocast") for kind in ("sharded", "replicated")}


# --- what is loaded, looked up and put in order ---
def _sums_in(order: int) -> Action:
    def run(at: Scene) -> Any:
        values = {"a": at.x, "b": at.x[:3], "c": at.x.double()}
        return {name: float(values[name].sum()) for name in ("abc", "cab")[order]}

    return run


def _mesh_in(order: int) -> Action:
    def run(at: Scene) -> Any:
        ranks = list(range(dist.get_world_size()))[::order]
        mesh = dt.DeviceMesh("cpu", ranks)
        return dt.distribute_tensor(torch.arange(12.0), mesh, [Shard(0)], src_data_rank=None).sum().item()

    return run


def _loaded(step: int) -> Action:
    def run(at: Scene) -> Any:
        folder = os.environ["POOL_FOLDER"] + "-steps"
        for number in range(2):
            checkpoint.save({"w": at.w * (number + 1)}, f"{folder}-{number}")
        state = {"w": at.w * 0}
        checkpoint.load(state, f"{folder}-{step}")
        return float((at.x * state["w"]).sum())

    return run


def _in_doubles(at: Scene) -> Any:
    with _doubles():
        return _made(at)


def _made(at: Scene) -> Any:
    return dt.ones(8, 3, device_mesh=at.mesh, placements=[Shard(0)]).sum().item()


def _autocast_product(at: Scene) -> Any:
    with _autocast():
        return (at.x.t() @ at.x).sum().item()


def _evaluated(at: Scene) -> Any:
    return _model(at, "tensor-parallel")(torch.ones(2, WIDTH)).sum().item()


# --- compiled and captured steps ---
def _graph(x: Any) -> Any:
    return x.softmax(0).sum(0).redistribute(placements=[R])


def _other_graph(x: Any) -> Any:
    return x.log_softmax(0).amax(0).redistribute(placements=[R])


def _compiled(function: Callable[[Any], Any], cut: int = 0, calls: int = 2) -> Action:
    def run(at: Scene) -> Any:
        torch._dynamo.reset()
        step, x = torch.compile(function, backend="aot_eager"), at.x
        for _ in range(calls):
            found = step(x).to_local().tolist()
            x = at.x if not cut else at.x.redistribute(placements=[Shard(cut)])
        return found

    return run


def _raising_graph(at: Scene) -> Any:
    _compiled(_graph, calls=1)(at)
    raise ValueError("a reason of its own")


def _captured(each_anew: bool) -> Action:
    def run(at: Scene) -> Any:
        step = dt.capture(_graph)
        for _ in range(4):
            step = dt.capture(_graph) if each_anew else step
            found = step(at.x).to_local().tolist()
        return found

    return run


def _eager(at: Scene) -> Any:
    return [_graph(at.x).to_local().tolist() for _ in range(4)][-1]


# --- two mesh dims, and a pipeline ---
def _on_grid(dims: str) -> Action:
    def run(at: Scene) -> Any:
        size, whole, found = dist.get_world_size(), torch.arange(64.0).reshape(8, 8), []
        cut: list[Any] = [Shard(0), Shard(1)]
        if size < 4 or size % 2:  # one mesh dim, along which the one or the other tensor dim is cut
            mesh, from_, to = at.mesh, {"a": cut[:1], "b": cut[1:]}, {"a": [R], "b": [R]}
        else:
            mesh = dt.init_device_mesh("cpu", (size // 2, 2), mesh_dim_names=("a", "b"))
            from_, to = {"a": cut, "b": cut}, {"a": [R, Shard(1)], "b": [Shard(0), R]}
        for letter in dims:
            x = dt.distribute_tensor(whole, mesh, from_[letter], src_data_rank=None)
            found.append(float(x.redistribute(placements=to[letter]).to_local().sum()))
        return found

    return run


def _piped(schedule: Any = ScheduleGPipe, raising: bool = False) -> Action:
    def run(at: Scene) -> Any:
        torch.manual_seed(0)
        size = dist.get_world_size()
        part = nn.Linear(WIDTH, WIDTH)
        if raising:
            part.register_forward_hook(lambda *_: _raise(at))
        group = at.mesh.get_group("dp")
        stage = PipelineStage(part, at.rank, size, torch.device("cpu"), group=group)
        pipeline = schedule(stage, 4, loss_fn=nn.functional.mse_loss)
        given = (torch.ones(12, WIDTH),) if at.rank == 0 else ()
        pipeline.step(*given, **({"target": torch.zeros(12, WIDTH)} if at.rank == size - 1 else {}))
        return float(part.weight.grad.sum())

    return run


# --- exits ---
def _raise(at: Scene) -> None:
    raise ValueError("a reason of its own")


def _interrupt(at: Scene) -> None:
    os.kill(os.getpid(), signal.SIGINT)


def _hooked(act: Action) -> Action:
    """Return a program that calls ``act`` in a backward hook."""

    def run(at: Scene) -> Any:
        w = at.x.detach().requires_grad_()
        w.register_hook(lambda gradient: act(at))
        (w * at.x).sum().backward()
        return w.grad.full_tensor().tolist()

    return run


class _Failing(torch.autograd.Function):
    """Function whose backward fails on demand."""

    @staticmethod
    def forward(ctx: Any, x: Any, act: Any) -> Any:
        ctx.act = act
        return x * 1

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        ctx.act()
        return gradient, None


def _in_function(act: Action) -> Action:
    def run(at: Scene) -> Any:
        w = at.x.detach().requires_grad_()
        _Failing.apply(w * at.x, lambda: act(at)).sum().backward()
        return w.grad.full_tensor().tolist()

    return run


def _nothing(at: Scene) -> None:
    pass


class _Falling:
    """Object that raises in ``__del__``, which Python only reports."""

    def __del__(self) -> None:
        raise ValueError("a reason of its own")


def _dropping(at: Scene) -> Any:
    unraisable, sys.unraisablehook = sys.unraisablehook, lambda _: None
    try:
        _Falling()
        return at.x.sum().item()
    finally:
        sys.unraisablehook = unraisable


def _in_a_loader(act: Action) -> Action:
    def run(at: Scene) -> Any:
        found = 0.0
        for number, _ in enumerate(torch.utils.data.DataLoader(range(3), num_workers=1, multiprocessing_context="fork")):
            found += at.x.sum().item()
            if number == 1:
                act(at)
        return found

    return run


def _saved_in_a_thread(at: Scene) -> Any:
    thread = threading.Thread(target=lambda: checkpoint.save({"x": at.x}, os.environ["POOL_FOLDER"] + "-thread"))
    thread.start()
    thread.join()
    return at.x.sum().item()


def _caught_twice(at: Scene) -> Any:
    for _ in range(2):
        try:
            try:
                _raise(at)
            except ValueError as error:
                raise KeyError("another") from error
        except KeyError:
            pass
    return at.x.sum().item()


DIFFERENT: dict[str, Program] = {}
HEALTHY: dict[str, Program] = {}
for _k, (_name, _said) in enumerate(_SETTINGS.items()):
    for _n, _kind in enumerate(("sharded", "replicated", "tensor-parallel")):
        if (_name, _kind) not in _OWN:
            DIFFERENT[f"{_kind} loop/{_name}"] = Program(loop(_kind), loop(_kind, **_said), (_k + _n) % 3)
_PAIRS: dict[str, tuple[Action, Action]] = {
    "another order of a set": (_sums_in(0), _sums_in(1)),
    "another order of ranks": (_mesh_in(1), _mesh_in(-1)),
    "another step is loaded": (_loaded(0), _loaded(1)),
    "another default dtype": (_made, _in_doubles),
    "autocast": (lambda at: (at.x.t() @ at.x).sum().item(), _autocast_product),
    "evaluates alone": (_nothing, _evaluated),
    "another graph": (_compiled(_graph), _compiled(_other_graph)),
    "a graph of other layouts": (_compiled(_graph), _compiled(_graph, cut=1)),
    "no graph": (_compiled(_graph), ACTIONS["item"]),
    "a graph alone": (_nothing, _compiled(_graph)),
    "a graph once more": (_compiled(_graph), _compiled(_graph, calls=3)),
    "compiled alone": (_eager, _compiled(_graph, calls=4)),
    "captured alone": (_eager, _captured(False)),
    "recorded anew": (_captured(False), _captured(True)),
    "two mesh dims, the other first": (_on_grid("ab"), _on_grid("ba")),
    "two mesh dims, one left out": (_on_grid("abab"), _on_grid("aba")),
    "two mesh dims, another between": (_on_grid("aabb"), _on_grid("abab")),
    "a pipeline left out": (_piped(), _nothing),
}
for _k, (_name, (_usual, _other)) in enumerate(_PAIRS.items()):
    DIFFERENT[f"loops/{_name}"] = Program(_usual, _other, _k % 3)
RAISING: dict[str, Program] = {
    "hook/is interrupted": Program(_hooked(_nothing), _hooked(_interrupt), 1),
    "hook/raises": Program(_hooked(_nothing), _hooked(_raise), 0),
    "function/raises": Program(_in_function(_nothing), _in_function(_raise), 2),
    "loader/raises": Program(_in_a_loader(_nothing), _in_a_loader(_raise), 1),
    "graph/raises": Program(_compiled(_graph), _raising_graph, 1),
    "pipeline/raises": Program(_piped(), _piped(raising=True), 1),
}
DEADLY: dict[str, Program] = {
    "item/leaves": Program(ACTIONS["item"], lambda at: sys.exit(0), 1),
    "item/leaves with an error": Program(ACTIONS["item"], lambda at: sys.exit(5), 2),
}
for _name, _action in {
    "batches of their own": loop("sharded", local=True),
    "replicated batches of their own": loop("replicated", local=True),
    "dropped with an error": _dropping,
    "saved in a thread": _saved_in_a_thread,
    "caught twice": _caught_twice,
    "a pipeline": _piped(),
    "a pipeline in turns": _piped(Schedule1F1B),
}.items():
    HEALTHY[f"healthy/{_name}"] = Program(_action, _action, 0)
# What copies are multiplied by, and what an optimizer does with them, is computed with copies alone: replicas= finds it.
ONLY_STRICT = frozenset(
    {f"replicated loop/{_name}" for _name in ("another rate", "a gradient lost", "no zero_grad", "another order of parameters")}
    | {f"{_kind} loop/another clip" for _kind in ("sharded", "replicated", "tensor-parallel")}
    | {"replicated loop/accumulates"}
)
for _kind in ("sharded", "replicated", "tensor-parallel"):
    HEALTHY[f"healthy/{_kind} loop"] = Program(loop(_kind, dropout=0.5), loop(_kind, dropout=0.5), 0)
