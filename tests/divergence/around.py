"""What ranks do otherwise around a program: its settings, plans, units, files, threads and hooks."""

from __future__ import annotations

import os
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
import torch.nn.functional as F
from table import DEEDS, Program, R, Scene, Shard, dt
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint as recomputed

from dtensor import DTensor, Partial, checkpoint
from dtensor.parallel import (
    ColwiseParallel,
    MixedPrecisionPolicy,
    RowwiseParallel,
    SequenceParallel,
    context_parallel,
    fully_shard,
    loss_parallel,
    parallelize_module,
    replicate,
)

Deed = Callable[[Scene], Any]
WIDTH = 6


def _raise(at: Scene | None = None, *_: Any) -> None:
    raise ValueError("a reason of its own")


def _nothing(*_: Any) -> None:
    pass


# --- modules ----------------------------------------------------------------------------------------------------------------
class _Blocks(nn.Module):
    def __init__(self, recompute: Any = None, act: Callable[[], Any] = _nothing, order: int = 1, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.recompute, self.act, self.order, self.times = recompute, act, order, 0
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        if tied:
            self.layers[2].weight = self.layers[0].weight

    def _layer(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.act()
        return layer(x).relu()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in list(self.layers)[:: self.order]:
            x = (
                self._layer(layer, x)
                if self.recompute is None
                else recomputed(self._layer, layer, x, use_reentrant=self.recompute)
            )
        return x


def _fsdp(
    change: Callable[[Scene, Any, int], Any] = _nothing,
    wrapped: tuple[int, ...] = (0, 1, 2),
    policy: Any = None,
    reshard: bool = True,
    of: Callable[[], nn.Module] = _Blocks,
    rows: Callable[[Scene], int] = lambda at: 2,
) -> Deed:
    """Three steps of a fully sharded model; ``change`` acts before each."""

    def run(at: Scene) -> Any:
        model: Any = of()
        options = {"mesh": at.mesh, "reshard_after_forward": reshard} | ({} if policy is None else {"mp_policy": policy})
        for k in wrapped:
            fully_shard(model.layers[k], **options)
        fully_shard(model, **options)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number in range(3):
            change(at, model, number)
            model(torch.ones(rows(at), WIDTH).requires_grad_()).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return [float(parameter.detach().sum()) for parameter in model.parameters()]

    return run


def _second(act: Callable[[Scene, Any], Any]) -> Callable[[Scene, Any, int], Any]:
    return lambda at, model, number: act(at, model) if number == 1 else None


def _parallel(plan: Any, x: Any = lambda at: torch.ones(2, 3, WIDTH), around: Any = nullcontext) -> Deed:
    def run(at: Scene) -> Any:
        model = parallelize_module(_Blocks(), at.mesh, plan)
        with around():
            out = model(x(at))
            out.square().mean().backward()
        return [float(parameter.grad.sum()) for parameter in model.parameters()]

    return run


def _scores(parallel: bool) -> Deed:
    def run(at: Scene) -> Any:
        scores = at.of(torch.arange(36.0).reshape(3, 12), Shard(1)).requires_grad_()
        with loss_parallel() if parallel else nullcontext():
            loss = F.cross_entropy(scores, torch.tensor([0, 5, 11]))
            loss.backward()
        return float(loss.detach())

    return run


def _attention(causal: bool = False, backend: Any = None, width: int = 4) -> Deed:
    def run(at: Scene) -> Any:
        torch.manual_seed(0)
        q, k, v = (at.of(torch.rand(1, 2, 12, width), Shard(2)).requires_grad_() for _ in range(3))
        with nullcontext() if backend is None else sdpa_kernel(backend):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
        out.sum().backward()
        return float(q.grad.sum())

    return run


def _context(causal: bool = False, scale: float | None = None) -> Deed:
    """Context parallelism of plain tensors."""

    def run(at: Scene) -> Any:
        torch.manual_seed(0)
        size = dist.get_world_size()
        q, k, v = (torch.rand(1, 2, 4 * size, 4) for _ in range(3))
        with context_parallel(at.mesh, buffers=[q, k, v], buffer_seq_dims=[2] * 3):
            out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale)
        return float(at.x.sum()) + 0 * float(out.sum())

    return run


# --- states -----------------------------------------------------------------------------------------------------------------
def _folder(name: str) -> str:
    return f"{os.environ['POOL_FOLDER']}-{name}"


def _saves(
    state: Callable[[Scene], Any], name: Callable[[Scene], str] = lambda at: "saves", there: tuple[str, ...] = (), **options: Any
) -> Deed:
    def run(at: Scene) -> Any:
        for folder in there:
            os.makedirs(_folder(folder), exist_ok=True)
        pending = checkpoint.save(state(at), _folder(name(at)), **options)
        if pending is not None:
            pending.wait()
        return at.x.sum().item()

    return run


def _saves_then(again: bool | None) -> Deed:
    """Two saves in the background; then one more, in the background or not; or a load."""

    def run(at: Scene) -> Any:
        for _ in range(2):
            pending = checkpoint.save({"x": at.x}, _folder("then"), async_op=True)
            assert pending is not None
            pending.wait()
        if again is None:
            checkpoint.load({"x": at.x * 0}, _folder("then"))
        elif (pending := checkpoint.save({"x": at.x}, _folder("then"), async_op=again)) is not None:
            pending.wait()
        return at.x.sum().item()

    return run


def _loads(asked: Callable[[Scene], Any], **options: Any) -> Deed:
    def run(at: Scene) -> Any:
        checkpoint.save({"x": at.x * 2, "y": at.x * 3}, _folder("loads"))
        state = asked(at)
        checkpoint.load(state, _folder("loads"), **options)
        return at.x.sum().item()

    return run


def _state_dict(full: bool = True, offload: bool = True, give: Callable[[Scene], bool] = lambda at: True) -> Deed:
    def run(at: Scene) -> Any:
        model = fully_shard(_Blocks(), mesh=at.mesh)
        if give(at):
            found = get_model_state_dict(model, options=StateDictOptions(full_state_dict=full, cpu_offload=offload))
            if not full:
                set_model_state_dict(model, found)
        return at.x.sum().item()

    return run


# --- steps ------------------------------------------------------------------------------------------------------------------
def _step_of(at: Scene, act: Callable[[], Any] = _nothing) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        act()
        return x.softmax(0).sum(0).redistribute(placements=[R])

    return step


def _captured(change: Callable[[Scene, int], Any] = lambda at, number: None, calls: int = 4, inside: Any = _nothing) -> Deed:
    def run(at: Scene) -> Any:
        step = dt.capture(_step_of(at, lambda: inside(at)))
        found = None
        for number in range(calls):
            given = change(at, number)
            found = step(at.x if given is None else given).to_local().tolist()
        return found

    return run


def _at(number: int, act: Deed) -> Callable[[Scene, int], Any]:
    return lambda at, now: act(at) if now == number else None


def _training(captured: bool, act: Callable[[Scene, int], Any] = lambda at, number: None) -> Deed:
    def run(at: Scene) -> Any:
        torch.manual_seed(0)
        model = parallelize_module(_Blocks(), at.mesh, {"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()})
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


def _branching(bound: float) -> Deed:
    """A branch on a number of all ranks, which one compares with another bound."""

    def run(at: Scene) -> Any:
        x = at.x / 64
        if float(x.mean()) > bound:
            x = x.softmax(0)
        return x.sum(0).full_tensor()

    return run


def _masked(bound: float) -> Deed:
    return lambda at: at.x[at.x > bound].sum().item()


def _in_threads(order: int, at_once: bool = False) -> Deed:
    """Collectives of two threads: one after the other, in this order, or at once."""

    def run(at: Scene) -> Any:
        deeds = [lambda: float(at.x.sum()), lambda: float(at.x.double().sum(0).full_tensor().sum())][::order]
        with ThreadPoolExecutor(2) as pool:
            if at_once:
                return sum(work.result() for work in [pool.submit(deed) for deed in deeds])
            return sum(pool.submit(deed).result() for deed in deeds)

    return run


def _grids(shape: tuple[int, ...] | None, dim: str | None = None, flat: bool = False) -> Deed:
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


def _part(ranks: list[int] | None) -> Deed:
    def run(at: Scene) -> Any:
        mesh = at.mesh if ranks is None else dt.DeviceMesh("cpu", ranks)
        x = dt.distribute_tensor(torch.arange(12.0), mesh, [Shard(0)], src_data_rank=None)
        return x.redistribute(placements=[R]).to_local().sum().tolist()

    return run


def _distributed(**options: Any) -> Deed:
    return lambda at: dt.distribute_tensor(torch.ones(6, 2), at.mesh, [Shard(0)], **options).sum().item()


def _levels(level: str | None, when: int = 1) -> Deed:
    def run(at: Scene) -> Any:
        from dtensor.watch.levels import Level

        was = Level.now
        found = 0.0
        try:
            for number in range(2):
                if level is not None and number == when:
                    dt.check_ranks(level)
                found += float(at.x.sum())
        finally:
            if Level.now != was:
                Level.now = was
        return found

    return run


def _inference(mode: Any) -> Deed:
    def run(at: Scene) -> Any:
        with mode():
            x = at.x.detach().clone().requires_grad_() if mode is nullcontext else at.x.detach().clone()
            return (x.softmax(0) * 2).sum().item()

    return run


def _eval(trains: bool) -> Deed:
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


_PAIRS: dict[str, tuple[Deed, Deed]] = {
    # units of data parallelism
    "other units": (_fsdp(), _fsdp(wrapped=(0, 1))),
    "no units inside": (_fsdp(), _fsdp(wrapped=())),
    "units in another order": (_fsdp(), _fsdp(wrapped=(2, 1, 0))),
    "kept gathered": (_fsdp(), _fsdp(reshard=False)),
    "another precision": (_fsdp(), _fsdp(policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))),
    "gradients in another precision": (
        _fsdp(policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16)),
        _fsdp(policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)),
    ),
    "prefetched": (_fsdp(), _fsdp(_second(lambda at, model: model.layers[0].set_modules_to_forward_prefetch([model.layers[2]])))),
    "prefetched backward": (
        _fsdp(),
        _fsdp(_second(lambda at, model: model.layers[2].set_modules_to_backward_prefetch([model.layers[0]]))),
    ),
    "unsharded": (_fsdp(), _fsdp(_second(lambda at, model: model.layers[1].unshard()))),
    "unsharded and left": (_fsdp(), _fsdp(_second(lambda at, model: model.layers[1].unshard(async_op=True)))),
    "another divisor of gradients": (_fsdp(), _fsdp(_second(lambda at, model: model.layers[1].set_gradient_divide_factor(7.0)))),
    "other divisors of gradients": (
        _fsdp(_second(lambda at, model: model.layers[1].set_gradient_divide_factor(5.0))),
        _fsdp(_second(lambda at, model: model.layers[1].set_gradient_divide_factor(7.0))),
    ),
    "layers in another order": (_fsdp(), _fsdp(of=partial(_Blocks, order=-1))),
    "tied on one": (_fsdp(wrapped=()), _fsdp(wrapped=(), of=partial(_Blocks, tied=True))),
    "another type of model": (
        _fsdp(),
        _fsdp(of=lambda: _Blocks().bfloat16(), policy=MixedPrecisionPolicy(param_dtype=torch.float32)),
    ),
    "a layer that needs no gradient": (_fsdp(), _fsdp(lambda at, model, number: model.layers[1].requires_grad_(False))),
    # plans of tensor parallelism
    "another plan": (
        _parallel({"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}),
        _parallel({"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel(), "layers.2": SequenceParallel()}),
    ),
    "columns instead of rows": (
        _parallel({"layers.0": ColwiseParallel(output_layouts=R)}),
        _parallel({"layers.0": RowwiseParallel(input_layouts=R)}),
    ),
    "another layout of an output": (
        _parallel({"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}),
        _parallel({"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel(output_layouts=Shard(1))}),
    ),
    "no plan": (_parallel({"layers.0": ColwiseParallel(), "layers.1": RowwiseParallel()}), _parallel({})),
    # attention
    "causal": (_attention(), _attention(True)),
    "another kernel": (_attention(True), _attention(True, SDPBackend.MATH)),
    "causal context": (_context(), _context(True)),
    "another scale of a context": (_context(scale=0.5), _context(scale=0.7)),
    "no context": (_context(), DEEDS["item"]),
    # states
    "a key more is saved": (_saves(lambda at: {"x": at.x}), _saves(lambda at: {"x": at.x, "y": at.x})),
    "another key is saved": (_saves(lambda at: {"x": at.x}), _saves(lambda at: {"y": at.x})),
    "another number is saved": (_saves(lambda at: {"x": at.x, "step": 1}), _saves(lambda at: {"x": at.x, "step": 2})),
    "keys in another order": (_saves(lambda at: {"x": at.x, "y": at.x.sum(0)}), _saves(lambda at: {"y": at.x.sum(0), "x": at.x})),
    "another folder": (_saves(lambda at: {"x": at.x}), _saves(lambda at: {"x": at.x}, lambda at: "elsewhere")),
    "saves in the background alone": (_saves_then(False), _saves_then(True)),
    "waits for a save in the background": (_saves_then(True), _saves_then(False)),
    "saves, others load": (_saves_then(None), _saves_then(False)),
    "another folder that is there": (
        _saves(lambda at: {"x": at.x}, there=("saves", "elsewhere")),
        _saves(lambda at: {"x": at.x}, lambda at: "elsewhere", there=("saves", "elsewhere")),
    ),
    "in the background": (_saves(lambda at: {"x": at.x}), _saves(lambda at: {"x": at.x}, async_op=True)),
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
    # captured
    "another layout is captured": (_captured(), _captured(_at(3, lambda at: at.x.redistribute(placements=[Shard(1)])))),
    "another size is captured": (_captured(), _captured(_at(3, lambda at: at.of(torch.ones(12, 8), Shard(0))))),
    "a call more": (_captured(), _captured(calls=5)),
    "a sum between replays": (_captured(), _captured(_at(3, lambda at: at.x.sum().item() * 0 or None))),
    "trained by replays": (_training(False), _training(True)),
    "another kind of sum": (
        lambda at: DTensor.from_local(torch.ones(3, 2), at.mesh, [Partial()]).full_tensor(),
        lambda at: DTensor.from_local(torch.ones(3, 2), at.mesh, [Partial("max")]).full_tensor(),
    ),
    # control
    "another branch": (_branching(0.1), _branching(9.0)),
    "another mask": (_masked(30.0), _masked(90.0)),
    "threads in another order": (_in_threads(1), _in_threads(-1)),
    "in evaluation": (_eval(True), _eval(False)),
    "inference mode": (_inference(nullcontext), _inference(torch.inference_mode)),
    # meshes
    "another dim of a mesh": (_grids(None, "a"), _grids(None, "b")),
    "a flat mesh": (_grids(None), _grids(None, flat=True)),
    "part of the world": (_part(None), _part([0, 1])),
    "another part of the world": (_part([0, 1]), _part([1, 2])),
    # what is given
    "another source": (_distributed(), _distributed(src_data_rank=1)),
    "no source": (_distributed(), _distributed(src_data_rank=None)),
    # levels
    "checks more": (_levels(None), _levels("strict")),
    "checks less": (_levels(None), _levels("off")),
    # what looks local
    "asks whether equal": (_nothing, lambda at: torch.equal(at.x, at.x)),
    "asks for a list": (_nothing, lambda at: at.x.sum(0).tolist()),
    "asks for truth": (_nothing, lambda at: bool((at.x > 3).any())),
    "asks for places": (_nothing, lambda at: at.x.nonzero().shape[0]),
    "asks for an array": (_nothing, lambda at: at.x.full_tensor().numpy().sum().tolist()),
    "asks for unique numbers": (_nothing, lambda at: torch.unique(at.x).shape[0]),
}
DIFFERENT = {f"around/{name}": Program(usual, other, k % 3) for k, (name, (usual, other)) in enumerate(_PAIRS.items())}


# --- raises -----------------------------------------------------------------------------------------------------------------
def _counted(act: Callable[[], Any], nth: int) -> Callable[[], Any]:
    count = 0

    def run() -> None:
        nonlocal count
        count += 1
        if count == nth:
            act()

    return run


def _hooked(register: Callable[[Any, Callable[..., Any]], Any], act: Callable[..., Any]) -> Deed:
    return _fsdp(lambda at, model, number: register(model, lambda *_: act(at)) if number == 1 else None)


def _optimized(register: str, act: Callable[..., Any]) -> Deed:
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


def _replicas(act: Callable[..., Any]) -> Deed:
    """A hook of a gradient that has been added up."""

    def run(at: Scene) -> Any:
        model = replicate(_Blocks(), at.mesh)
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


def _states(act: Callable[..., Any], load: bool = False) -> Deed:
    def run(at: Scene) -> Any:
        if load:
            checkpoint.save({"s": _Stateful(at, _nothing)}, _folder("states"))
            kept = _Stateful(at, _nothing)
            kept.load_state_dict = lambda state: act(at)  # type: ignore[method-assign]
            checkpoint.load({"s": kept}, _folder("states"))
        else:
            checkpoint.save({"s": _Stateful(at, act)}, _folder("states"))
        return at.x.sum().item()

    return run


def _recursive(at: Scene, *_: Any) -> Any:
    return _recursive(at)


def _asserts(at: Scene, *_: Any) -> None:
    assert at.rank < 0, "a reason of its own"


def _of_no_file(at: Scene, *_: Any) -> None:
    open("/nowhere/at/all")  # noqa: SIM115


def _thread(act: Deed) -> Deed:
    """A collective of a thread, which raises there; the main thread is told by the future."""

    def run(at: Scene) -> Any:
        def work() -> float:
            act(at)
            return float(at.x.sum())

        with ThreadPoolExecutor(1) as pool:
            return pool.submit(work).result()

    return run


def _compiled_model(act: Callable[..., Any]) -> Deed:
    def run(at: Scene) -> Any:
        torch._dynamo.reset()
        model = fully_shard(_Blocks(), mesh=at.mesh)
        step = torch.compile(model, backend="aot_eager")
        for number in range(2):
            if number:
                act(at)
            step(torch.ones(2, WIDTH)).square().mean().backward()
        return at.x.sum().item()

    return run


_RAISING: dict[str, Callable[[Callable[..., Any]], Deed]] = {
    "in a pre-hook of a unit": lambda act: _hooked(lambda model, run: model.layers[1].register_forward_pre_hook(run), act),
    "in a hook of a unit": lambda act: _hooked(lambda model, run: model.layers[1].register_forward_hook(run) and None, act),
    "in a backward hook of a unit": lambda act: _hooked(
        lambda model, run: model.layers[1].register_full_backward_hook(lambda *_: run()), act
    ),
    "when recomputed": lambda act: lambda at: _fsdp(of=lambda: _Blocks(recompute=False, act=_counted(lambda: act(at), 5)))(at),
    "when recomputed by reentry": lambda act: (
        lambda at: _fsdp(of=lambda: _Blocks(recompute=True, act=_counted(lambda: act(at), 5)))(at)
    ),
    "in a hook before a step": lambda act: _optimized("register_step_pre_hook", act),
    "in a hook after a step": lambda act: _optimized("register_step_post_hook", act),
    "after a gradient": _replicas,
    "in a state dict": _states,
    "while a state dict is loaded": lambda act: _states(act, load=True),
    "in a captured step": lambda act: _captured(inside=act),
    "between replays": lambda act: _captured(_at(3, lambda at: act(at))),
    "in a captured training": lambda act: _training(True, lambda at, number: act(at) if number == 3 else None),
    "in a thread": _thread,
    "between compiled steps": _compiled_model,
}
RAISING: dict[str, Program] = {
    f"around/raises {name}": Program(of(_nothing), of(_raise), k % 3) for k, (name, of) in enumerate(_RAISING.items())
}
RAISING |= {
    "around/is interrupted in a captured step": Program(
        _captured(_at(3, _nothing)), _captured(_at(3, lambda at: os.kill(os.getpid(), signal.SIGINT))), 1
    ),
    "around/is interrupted while it saves": Program(
        _states(_nothing), _states(lambda at: os.kill(os.getpid(), signal.SIGINT)), 2
    ),
}

# --- ends -------------------------------------------------------------------------------------------------------------------
_ENDS: dict[str, Callable[..., Any]] = {
    "killed": lambda at, *_: os.kill(os.getpid(), signal.SIGKILL),
    "stopped": lambda at, *_: os.kill(os.getpid(), signal.SIGSTOP),
    "exits": lambda at, *_: os._exit(3),
}
DEADLY: dict[str, Program] = {
    f"around/{end} {place}": Program(_RAISING[place](_nothing), _RAISING[place](deed), (k + n) % 3)
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
    for n, (end, deed) in enumerate(_ENDS.items())
}


# --- what ranks may do ------------------------------------------------------------------------------------------------------
def _profiled(at: Scene) -> Any:
    """Looks on, on one rank."""
    from torch.profiler import profile

    from dtensor.debug import CommDebugMode

    with CommDebugMode() if at.rank == 1 else nullcontext(), profile() if at.rank == 2 else nullcontext():
        return at.x.softmax(0).sum().item()


def _printed(at: Scene) -> Any:
    """A tensor is shown on one rank, copied and pickled."""
    if at.rank == 1:
        import copy
        import pickle

        repr(at.x), str(at.x), copy.deepcopy(at.x), pickle.dumps(at.x.to_local())
    return at.x.sum().item()


def _of_threads(at: Scene) -> Any:
    """Threads that compute on plain tensors beside collectives."""
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
    """An error of plain tensors that one rank catches, before it does what all do."""
    with suppress(IndexError):
        if at.rank == 1:
            torch.ones(3)[7]
    return at.x.sum().item()


def _polls(at: Scene) -> Any:
    """Waits for a file that another rank writes before its collective."""
    path = _folder("polled")
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
    """A move that is waited for early on one rank, and late on another."""
    pending = at.x.redistribute(placements=[R], async_op=True)
    if at.rank == 1:
        pending = pending + 0 if False else pending
        pending.to_local()
    found = float(at.x.sum())
    return found + 0 * float(pending.to_local().sum())


def _looser(at: Scene, change: Callable[[Scene, Any], Any]) -> Any:
    """One rank keeps more than the others, which changes neither what is sent nor a number."""
    found = _fsdp(_second(change) if at.rank == 1 else _nothing)(at)
    assert found == _fsdp()(at)
    return at.x.sum().item()


HEALTHY: dict[str, Program] = {
    f"healthy/{name}": Program(deed, deed, 0)
    for name, deed in {
        "looked on by one": _profiled,
        "shown by one": _printed,
        "threads beside": _of_threads,
        "caught of plain tensors": _retried,
        "polls for a file": _polls,
        "asks the store": _asks_the_store,
        "waits early and late": _beside_pending,
        "fsdp of other rows": _fsdp(rows=lambda at: 2 + at.rank),
        "recomputed": _fsdp(of=partial(_Blocks, recompute=False)),
        "recomputed by reentry": _fsdp(of=partial(_Blocks, recompute=True)),
        "not resharded by one": lambda at: _looser(at, lambda at, model: model.set_reshard_after_backward(False)),
        "no last pass of one": lambda at: _looser(at, lambda at, model: model.set_is_last_backward(False)),
        "trained by replays": _training(True),
        "parallel losses": lambda at: _scores(at.rank == 1)(at) * 0 + at.x.sum().item(),
        "saved in the background": _saves(lambda at: {"x": at.x}, async_op=True),
    }.items()
}
ONLY_STRICT: frozenset[str] = frozenset()
