"""Changed training: state that changes between calls of a captured step has the effect that it has uncaptured, bit for bit."""

from __future__ import annotations

import copy
import os
import random
import warnings
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

import dtensor as dt
from dtensor.errors import CaptureError
from dtensor.testing.placements import get_or_make_mesh

START = int(os.environ.get("DTENSOR_SEED", "0"))
MESH = get_or_make_mesh(2)
SCALE = 1.0


def halved(p: Any) -> None:
    p.grad.mul_(0.5)


class Doubled(nn.Module):
    by = 2.0

    def forward(self, w: Any) -> Any:
        return w * self.by


class Net(nn.Module):
    rate = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)
        self.norm, self.drop = nn.BatchNorm1d(4), nn.Dropout(0.25)
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("shift", torch.zeros(4))
        self.act: Any = F.relu
        self.factors: list[Any] = [1.0, np.float64(1.0)]

    @property
    def factor(self) -> float:
        return self.rate * self.factors[0] * float(self.factors[1])

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            self.get_buffer("seen").add_(1)
        y = self.down(self.drop(self.act(self.up(x)))) * self.factor
        return self.norm(y) + self.shift + x


class TrainingRun:
    """Training run with methods that change its state; two runs with one seed are equal."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        at: Any = draw.choice([[dt.Shard(0)], [dt.Replicate()]])
        self.net: Any = Net()
        for module in (self.net.up, self.net.down):
            for name, p in list(module.named_parameters()):
                setattr(module, name, nn.Parameter(dt.distribute_tensor(p.detach(), MESH, at)))
        for name, p in list(self.net.norm.named_parameters()):
            setattr(self.net.norm, name, nn.Parameter(dt.distribute_tensor(p.detach(), MESH, [dt.Replicate()])))
        for owner in self.net.modules():
            for name, b in list(owner.named_buffers(recurse=False)):
                setattr(owner, name, dt.distribute_tensor(b, MESH, [dt.Replicate()]))
        self.opt: Any = self._optimizer(draw.choice(["sgd", "momentum", "adamw", "adam", "foreach"]))
        self.schedule = torch.optim.lr_scheduler.ExponentialLR(self.opt, 0.9)
        self.context: dict[str, Any] = {
            "autocast": False,
            "grad": True,
            "scale": SCALE,
            "config": SimpleNamespace(w=1.0, on=True),
        }
        self.handles: list[Any] = []
        self.clip = draw.random() < 0.5
        self.batch_at: Any = draw.choice([[dt.Shard(0)], [dt.Replicate()]])

    def _optimizer(self, kind: str) -> Any:
        params = list(self.net.parameters())
        if kind == "sgd":
            return torch.optim.SGD(params, lr=0.1)
        if kind == "momentum":
            return torch.optim.SGD(params, lr=0.1, momentum=0.9, nesterov=True)
        if kind == "adamw":
            return torch.optim.AdamW(params, lr=0.1, fused=True)
        if kind == "adam":
            return torch.optim.Adam(params, lr=0.1, amsgrad=True, foreach=False)
        return torch.optim.AdamW(params, lr=0.1, foreach=True)

    def loss(self, x: Any) -> Any:
        config = self.context["config"]
        y = self.net(x) * (config.w if config.on else 1.0)
        return y.square().mean() * self.context["scale"] * SCALE

    def step(self, x: Any) -> Any:
        loss = self.loss(x)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0) if self.clip else loss
        self.opt.step()
        self.opt.zero_grad()
        return loss.detach(), norm.detach()

    def closed(self, x: Any) -> Any:
        def closure() -> Any:
            self.opt.zero_grad()
            loss = self.loss(x)
            loss.backward()
            return loss

        return self.opt.step(closure).detach()

    # --- changes -------------------------------------------------------------------------------------------------------
    def parameters(self) -> list[Any]:
        return [x for x in self.net.parameters() if x.is_leaf]

    def change(self, draw: random.Random) -> str:
        """Apply a random change and return its name."""
        changes = [getattr(TrainingRun, name) for name in sorted(vars(TrainingRun)) if name.startswith("do_")]
        chosen = draw.choice(changes)
        chosen(self, draw)
        return str(chosen.__name__)

    def do_train(self, draw: random.Random) -> None:
        draw.choice([self.net, self.net.drop, self.net.norm]).train(draw.random() < 0.5)

    def do_freeze(self, draw: random.Random) -> None:
        draw.choice(self.parameters()).requires_grad_(draw.random() < 0.5)

    def do_forward_hook(self, draw: random.Random) -> None:
        by = draw.choice([2.0, 0.5])
        self.handles.append(draw.choice([self.net, self.net.up]).register_forward_hook(lambda m, args, out: out * by))

    def do_pre_hook(self, draw: random.Random) -> None:
        by = draw.choice([2.0, 0.5])
        self.handles.append(self.net.down.register_forward_pre_hook(lambda m, args: (args[0] * by,)))

    def do_backward_hook(self, draw: random.Random) -> None:
        by = draw.choice([2.0, 0.5])
        self.handles.append(self.net.down.register_full_backward_hook(lambda m, grads, out: tuple(g * by for g in grads)))

    def do_tensor_hook(self, draw: random.Random) -> None:
        by = draw.choice([2.0, 0.5])
        x = draw.choice([x for x in self.parameters() if x.requires_grad] or [None])
        if x is not None:
            self.handles.append(x.register_hook(lambda g: g * by))

    def do_after_hook(self, draw: random.Random) -> None:
        x = draw.choice([x for x in self.parameters() if x.requires_grad] or [None])
        if x is not None:
            self.handles.append(x.register_post_accumulate_grad_hook(halved))

    def do_optimizer_hook(self, draw: random.Random) -> None:
        def halve(opt: Any, *_: Any) -> None:
            for group in opt.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(0.5)

        self.handles.append(self.opt.register_step_pre_hook(halve))

    def do_global_hook(self, draw: random.Random) -> None:
        by = draw.choice([2.0, 0.5])
        self.handles.append(
            nn.modules.module.register_module_forward_hook(lambda m, args, out: out * by if m is self.net.up else None)
        )

    def do_unhook(self, draw: random.Random) -> None:
        if self.handles:
            self.handles.pop(draw.randrange(len(self.handles))).remove()

    def do_schedule(self, draw: random.Random) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.schedule.step()

    def do_rate(self, draw: random.Random) -> None:
        self.opt.param_groups[0]["lr"] = draw.choice([0.1, 0.05, 1, np.float64(0.2)])

    def do_decay(self, draw: random.Random) -> None:
        self.opt.param_groups[0]["weight_decay"] = draw.choice([0.0, 0.1, 0.01])

    def do_maximize(self, draw: random.Random) -> None:
        self.opt.param_groups[0]["maximize"] = draw.random() < 0.5

    def do_momentum(self, draw: random.Random) -> None:
        group = self.opt.param_groups[0]
        if "momentum" in group:
            group["momentum"] = draw.choice([0.9, 0.5, 0.8])
            if group["momentum"] == 0:
                group["nesterov"] = False
        elif "betas" in group:
            group["betas"] = draw.choice([(0.9, 0.999), (0.8, 0.99)])

    def do_forget_state(self, draw: random.Random) -> None:
        self.opt.state.clear()

    def do_reload_optimizer(self, draw: random.Random) -> None:
        self.opt.load_state_dict(copy.deepcopy(self.opt.state_dict()))

    def do_other_group(self, draw: random.Random) -> None:
        params = self.opt.param_groups[0]["params"]
        if len(params) > 2 and len(self.opt.param_groups) < 3:
            p = params.pop(draw.randrange(len(params)))
            self.opt.add_param_group({"params": [p], "lr": 0.01})

    def do_state_in_place(self, draw: random.Random) -> None:
        for state in self.opt.state.values():
            for value in state.values():
                if isinstance(value, torch.Tensor) and value.ndim:
                    value.mul_(0.5)
                    return

    def do_write(self, draw: random.Random) -> None:
        with torch.no_grad():
            draw.choice(self.parameters()).mul_(0.5)

    def do_data(self, draw: random.Random) -> None:
        x = draw.choice(self.parameters())
        x.data = x.data * 1.5

    def do_reload(self, draw: random.Random) -> None:
        self.net.load_state_dict(
            {k: v.detach() * 0.75 for k, v in self.net.state_dict().items() if v.dtype.is_floating_point},
            strict=False,
            assign=False,
        )

    def do_grads(self, draw: random.Random) -> None:
        for x in self.parameters():
            if x.requires_grad and draw.random() < 0.5:
                x.grad = torch.ones_like(x).detach() * 0.25

    def do_buffer(self, draw: random.Random) -> None:
        self.net.shift.add_(0.5)

    def do_new_buffer(self, draw: random.Random) -> None:
        self.net.shift = self.net.shift + 0.125

    def do_buffer_dtype(self, draw: random.Random) -> None:
        self.net.shift = self.net.shift.to(draw.choice([torch.float32, torch.float64]))

    def do_norm_momentum(self, draw: random.Random) -> None:
        self.net.norm.momentum = draw.choice([0.1, 0.5, None])

    def do_eps(self, draw: random.Random) -> None:
        self.net.norm.eps = draw.choice([1e-5, 1e-3])

    def do_probability(self, draw: random.Random) -> None:
        self.net.drop.p = draw.choice([0.0, 0.25, 0.5])

    def do_module(self, draw: random.Random) -> None:
        self.net.drop = draw.choice([nn.Dropout(0.5), nn.Identity(), nn.Tanh()])

    def do_act(self, draw: random.Random) -> None:
        if isinstance(self.net.act, nn.Module):  # no function may stand in its place
            del self.net.act
        self.net.act = draw.choice([F.relu, F.gelu, torch.tanh, nn.SiLU()])

    def do_nested(self, draw: random.Random) -> None:
        old = self.net.up
        if isinstance(old, nn.Linear):
            self.net.up = nn.Sequential(old, nn.Tanh())
        else:
            self.net.up = old[0]

    def do_parametrize(self, draw: random.Random) -> None:
        target: Any = self.net.down
        if parametrize.is_parametrized(target):
            if draw.random() < 0.5:
                parametrize.remove_parametrizations(target, "weight")
            else:
                target.parametrizations.weight[0].by = draw.choice([1.5, 2.0])
        else:
            parametrize.register_parametrization(target, "weight", Doubled())

    def do_untie(self, draw: random.Random) -> None:
        up = self.net.up
        if type(up) is nn.Linear:
            bias: Any = None if up.bias is not None else nn.Parameter(self.net.shift.new_zeros(6))
            up.bias = bias

    def do_attribute(self, draw: random.Random) -> None:
        self.net.rate = draw.choice([1.0, 2.0, 0.5])

    def do_own_dict(self, draw: random.Random) -> None:
        vars(self.net)["rate"] = draw.choice([1.0, 1.5])

    def do_the_class(self, draw: random.Random) -> None:
        self.net.__class__ = type("Net", (Net,), {"rate": draw.choice([1.0, 0.75])})

    def do_attribute_of_the_class(self, draw: random.Random) -> None:
        vars(self.net).pop("rate", None)

    def do_factor(self, draw: random.Random) -> None:
        self.net.factors[draw.randrange(2)] = draw.choice([1.0, 0.5, np.float32(0.25), np.float64(0.75), 2])

    def do_config(self, draw: random.Random) -> None:
        self.context["config"].w = draw.choice([1.0, 0.5, True])

    def do_config_on(self, draw: random.Random) -> None:
        self.context["config"].on = draw.random() < 0.5

    def do_new_config(self, draw: random.Random) -> None:
        self.context["config"] = SimpleNamespace(w=0.75, on=True)

    def do_scale(self, draw: random.Random) -> None:
        self.context["scale"] = draw.choice([1.0, 2.0, np.float64(0.5)])

    def do_clip(self, draw: random.Random) -> None:
        self.clip = not self.clip

    def do_method(self, draw: random.Random) -> None:
        down: Any = self.net.down
        by = draw.choice([0.5, 2.0])
        if "forward" in vars(down):
            del down.forward
        else:
            down.forward = lambda x: F.linear(x, down.weight, down.bias) * by


Modes = dict[str, Any]


def around(draw: random.Random, modes: Modes) -> None:
    """Switch a random global mode of both runs."""
    name = draw.choice(["autocast", "deterministic", "default", "mkldnn", "bare"])
    modes[name] = not modes.get(name, False)


def called(fn: Callable[[Any], Any], x: Any, modes: Modes) -> Any:
    torch.use_deterministic_algorithms(modes.get("deterministic", False))
    torch.set_default_dtype(torch.float64 if modes.get("default") else torch.float32)
    try:
        with (
            warnings.catch_warnings(action="ignore"),
            torch.backends.mkldnn.flags(enabled=not modes.get("mkldnn", False)),
            torch.autocast("cpu", torch.bfloat16, enabled=modes.get("autocast", False)),
            torch.autograd.set_multithreading_enabled(not modes.get("bare", False)),
        ):
            return fn(x)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_default_dtype(torch.float32)


def named_state(training_run: TrainingRun) -> list[Any]:
    state = [*training_run.net.named_parameters(), *training_run.net.named_buffers()]
    grads = [(name + ".grad", x.grad) for name, x in training_run.net.named_parameters()]
    kept = [
        (f"state {k} {name}", value)
        for k, p in enumerate(p for group in training_run.opt.param_groups for p in group["params"])
        for name, value in sorted(training_run.opt.state.get(p, {}).items())
    ]
    return [*state, *grads, *kept]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) != isinstance(other, torch.Tensor):
        return False
    if not isinstance(one, torch.Tensor):
        return bool(one == other) if not isinstance(one, (tuple, list)) else len(one) == len(other) and all(map(same, one, other))
    if one.dtype != other.dtype or one.shape != other.shape or isinstance(one, dt.DTensor) != isinstance(other, dt.DTensor):
        return False
    if isinstance(one, dt.DTensor) and isinstance(other, dt.DTensor):
        if one.placements != other.placements:
            return False
        one, other = one.full_tensor(), other.full_tensor()
    return torch.equal(one.detach().nan_to_num(), other.detach().nan_to_num())


def find_difference(seed: int, calls: int = 14) -> tuple[str | None, int]:
    """Return the first difference from eager, or None, and the number of replayed calls."""
    global SCALE
    draw = random.Random(seed)
    kind = draw.choice(["step", "step", "closed", "loss"])
    training_runs = TrainingRun(seed), TrainingRun(seed)
    plain, fn = getattr(training_runs[0], kind), dt.capture(getattr(training_runs[1], kind), limit=200)
    modes: Modes = {}
    done: list[str] = []
    handles = [training_run.handles for training_run in training_runs]
    try:
        for call in range(calls):
            if draw.random() < 0.6:
                again = draw.randrange(1 << 30)
                pair = [training_run.change(random.Random(again)) for training_run in training_runs]
                done.append(pair[0])
            elif draw.random() < 0.2:
                around(draw, modes)
                done.append(f"modes {modes}")
            elif draw.random() < 0.1:
                SCALE = draw.choice([1.0, 0.5])
            done.append(f"call {call}")
            x = dt.distribute_tensor(
                torch.randn(6, 4, generator=torch.Generator().manual_seed(call)), MESH, training_runs[0].batch_at
            )
            found = []
            for run in (plain, fn):
                torch.manual_seed(call)
                try:
                    result = called(run, x, modes)
                    if kind == "loss" and result.requires_grad:
                        result.backward()
                    found.append(result)
                except CaptureError as error:
                    return f"refused: {str(error)[:150]}", fn.cache_info().replayed
                except Exception as error:
                    found.append(error)
            errors = [isinstance(one, Exception) for one in found]
            if any(errors):
                if all(errors) and type(found[0]) is type(found[1]):
                    return f"refused: both raise {type(found[0]).__name__} {str(found[0])[:100]}", fn.cache_info().replayed
                return f"{kind} {seed}: {found} after {done}", fn.cache_info().replayed
            if kind == "loss":
                found = [one.detach() for one in found]
            if not same(found[0], found[1]):
                return f"{kind} {seed}: results {found} after {done}", fn.cache_info().replayed
            for (name, one), (_, other) in zip(*map(named_state, training_runs), strict=True):
                if not same(one, other):
                    return f"{kind} {seed}: {name} {one} {other} after {done}", fn.cache_info().replayed
    finally:
        SCALE = 1.0
        for held in handles:
            for handle in held:
                handle.remove()
    return None, fn.cache_info().replayed


def check(seeds: Iterable[int], calls: int) -> None:
    found = [find_difference(START + seed, calls) for seed in seeds]
    wrong = [problem for problem, _ in found if problem is not None and not problem.startswith("refused")]
    assert not wrong, wrong[0]
    assert sum(replayed for _, replayed in found) > len(found)


@pytest.mark.slow
@pytest.mark.parametrize("block", range(30))
def test_random_training_state_changes_between_calls_have_the_eager_effect(block: int) -> None:
    check(range(block * 10, block * 10 + 10), 14)
