"""Capture step cases: complete training steps to capture. Each takes a mesh and returns a step, its arguments, and the state that
it changes.
"""

from __future__ import annotations

import gc
import math
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from capture_cases import Block, assert_bitwise_equal, make_parameter, mesh_of, randn, shard_last_mesh_dim
from case_lists import CaseList
from torch.nn import functional as F

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.capture import Captured, capture
from dtensor.comm.events import listening
from dtensor.debug import CommDebugMode

Step = tuple[Callable[..., Any], Callable[[int], tuple[Any, ...]], list[torch.Tensor], list[Any]]  # parameters, optimizers
CASES = CaseList()
case = CASES.case
OPTIMIZERS: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, foreach=True),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.01),
    "adam_foreach": lambda params: torch.optim.Adam(params, lr=0.01, foreach=True, amsgrad=True),
    "nadam": lambda params: torch.optim.NAdam(params, lr=0.01, foreach=True),
    "adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, lr_decay=0.1),
    "adamw_fused": lambda params: torch.optim.AdamW(params, lr=0.01, fused=True),
}


def compare_steps(build: Callable[[], Step], calls: int = 6) -> Captured[Any, Any]:
    """Train with a step and with its capture, and assert results, parameters, gradients and optimizer state equal bit for bit."""
    torch.manual_seed(0)
    step, arguments, parameters, optimizers = build()
    torch.manual_seed(0)
    same, same_arguments, same_parameters, same_optimizers = build()
    captured = capture(same)
    sides = ((step, arguments, parameters, optimizers), (captured, same_arguments, same_parameters, same_optimizers))
    for i in range(calls):
        trails, states = [], []
        for run, args_of, params, opts in sides:
            torch.manual_seed(i)
            args = args_of(i)
            with CommDebugMode() as comm:
                out = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.detach, run(*args))
            state = [value for opt in opts for held in opt.state.values() for value in held.values()]
            trails.append((out, [x.detach() for x in params], [x.grad for x in params], state, list(args)))
            states.append((torch.get_rng_state(), comm))
        assert_bitwise_equal(*trails)
        assert torch.equal(states[0][0], states[1][0]), "the generator"
        assert states[1][1].get_total_counts() <= states[0][1].get_total_counts()
        assert sum(states[1][1].get_comm_bytes().values()) <= sum(states[0][1].get_comm_bytes().values())
    assert captured.cache_info().replayed >= calls - 4, captured.cache_info()
    return captured


@contextmanager
def hold_collective_frames() -> Iterator[None]:
    """Hold references to the frames that issue collectives, as a debugger does; autograd then copies gradients."""
    held: list[Any] = []

    def hold(_: Any) -> None:
        frame: Any = sys._getframe()
        while frame is not None:
            held.append(frame)
            frame = frame.f_back

    with listening(hold):
        yield


def count_recordings_with_held_frames(mesh: Any, held: Collection[int]) -> tuple[int, ...]:
    """Return how many of eight calls are recorded and replayed; frames are held in the calls ``held``."""
    torch.manual_seed(0)
    step, arguments, _, _ = make_transformer_step(mesh, "adamw")
    captured = capture(step, trusted=["sys"])  # of which who holds frames asks
    for i in range(8):
        args = arguments(i)
        with hold_collective_frames() if i in held else nullcontext():
            captured(*args)
    return captured.cache_info()[2:4]


def count_recordings_with_differing_rank(mesh: Any, here: bool) -> tuple[int, ...]:
    """Return how many calls are recorded and replayed if one rank's second call makes an additional copy, which no guard can
    detect.
    """
    w = make_parameter(mesh, 6, 7, at=Shard(1))
    opt = torch.optim.SGD([w], lr=0.1)

    def step(x: Any) -> float:
        loss = (x @ w).square().sum()
        loss.backward()
        opt.step()
        opt.zero_grad()
        return (x.to_local().clone() if gc.get_threshold()[2] == 77 else x.to_local()).sum().item() * 0 + loss.item()

    captured, usual = capture(step, trusted=["gc"]), gc.get_threshold()  # so that it is not refused
    for i in range(8):
        gc.set_threshold(*usual[:2], 77 if here and i == 1 else usual[2])
        captured(randn(5, 6, on=mesh, at=shard_last_mesh_dim(mesh, Replicate())))
    gc.set_threshold(*usual)
    return captured.cache_info()[2:4]


def make_transformer_step(mesh: Any, optimizer: str, *, clear: bool = True) -> Step:
    """Return a training step of a transformer with the named optimizer, its arguments and its state."""
    block = Block(8, 2, mesh, p=0.1)
    head = make_parameter(mesh, 8, 11, at=Shard(1))
    parameters = [*block.parameters(), head]
    opt = OPTIMIZERS[optimizer](parameters)

    def step(x: Any, labels: Any) -> Any:
        loss = F.cross_entropy((block(x) @ head).flatten(0, 1), labels.flatten())
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        opt.step()
        if clear:
            opt.zero_grad()
        return loss, norm

    def arguments(i: int) -> Any:
        labels = dt.distribute_tensor(torch.randint(0, 11, (2, 5)), mesh, shard_last_mesh_dim(mesh, Replicate()))
        return randn(2, 5, 8, on=mesh, at=shard_last_mesh_dim(mesh, Replicate())), labels

    return step, arguments, parameters, [opt]


for _name in OPTIMIZERS:
    CASES[_name] = lambda mesh, name=_name: make_transformer_step(mesh, name)


@case
def gradients_cleared_at_the_start_of_the_step(mesh: Any) -> Step:
    step, arguments, parameters, opts = make_transformer_step(mesh, "momentum", clear=False)

    def cleared_first(*args: Any) -> Any:
        for x in parameters:
            x.grad = None
        return step(*args)

    return cleared_first, arguments, parameters, opts


@case
def another_learning_rate_at_each_step(mesh: Any) -> Step:
    step, arguments, parameters, opts = make_transformer_step(mesh, "adamw")

    def scheduled(i: int) -> Any:
        opts[0].param_groups[0]["lr"] = 0.01 / (1 + i)
        return arguments(i)

    return step, scheduled, parameters, opts


@case
def losses_as_floats(mesh: Any) -> Step:
    w = make_parameter(mesh, 6, 7, at=Shard(1))
    opt = torch.optim.SGD([w], lr=0.05)

    def step(x: Any) -> Any:
        loss = torch.tanh(x @ w).square().mean()
        loss.backward()
        opt.step()
        opt.zero_grad()
        value = loss.item()
        return {"loss": value, "perplexity": math.exp(value), "half": [1 - value**2 / 2, -value]}

    return step, (lambda i: (randn(5, 6, on=mesh, at=shard_last_mesh_dim(mesh, Replicate())),)), [w], [opt]


@case
def gradients_zeroed_in_place(mesh: Any) -> Step:
    w, v = make_parameter(mesh, 6, 8, at=Shard(1)), make_parameter(mesh, 8, 6, at=Shard(0))
    opt = torch.optim.SGD([w, v], lr=0.05)

    def step(x: Any) -> Any:
        opt.zero_grad(set_to_none=False)
        loss = (F.gelu(x @ w) @ v).square().sum()
        loss.backward()
        opt.step()
        return loss.detach()

    return step, (lambda i: (randn(5, 6, on=mesh, at=shard_last_mesh_dim(mesh, Replicate())),)), [w, v], [opt]


@case
def gradients_accumulated_over_two_batches(mesh: Any) -> Step:
    w = make_parameter(mesh, 6, 7, at=Shard(1))
    opt = torch.optim.AdamW([w], lr=0.05, fused=True)

    def step(x: Any, y: Any) -> Any:
        losses = []
        for part in (x, y):
            loss = torch.tanh(part @ w).square().mean() / 2
            loss.backward()
            losses.append(loss)
        opt.step()
        opt.zero_grad()
        return losses

    at = [Shard(0)] * mesh.ndim
    return step, (lambda i: (randn(5, 6, on=mesh, at=at), randn(3, 6, on=mesh, at=at))), [w], [opt]


@case
def buffers_and_averages(mesh: Any) -> Step:
    norm = dt.distribute_module(torch.nn.BatchNorm1d(6), mesh)
    w = make_parameter(mesh, 6, 6, at=Shard(1))
    average = [w.detach().clone()]
    opt = torch.optim.SGD([w, *norm.parameters()], lr=0.1, momentum=0.5)

    def step(x: Any) -> Any:
        norm(x @ w).square().mean().backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            average[0].lerp_(w, 0.1)
        return None

    params = [w, *norm.parameters(), *norm.buffers(), *average]
    return step, (lambda i: (randn(5, 6, on=mesh, at=[Shard(0)] * mesh.ndim),)), params, [opt]


@case
def a_generator_against_a_discriminator(mesh: Any) -> Step:
    makes = [make_parameter(mesh, 4, 8, at=Shard(1)), make_parameter(mesh, 8, 6, at=Shard(0))]
    tells = [make_parameter(mesh, 6, 8, at=Shard(1)), make_parameter(mesh, 8, 1, at=Shard(0))]
    opts = [torch.optim.AdamW(tells, lr=0.02), torch.optim.SGD(makes, lr=0.1, momentum=0.9)]

    def told(x: Any) -> Any:
        return F.leaky_relu(x @ tells[0]) @ tells[1]

    def step(real: Any, noise: Any) -> Any:
        fake = torch.tanh(noise @ makes[0]) @ makes[1]
        opts[0].zero_grad()
        seen = F.softplus(-told(real)).mean() + F.softplus(told(fake.detach())).mean()
        seen.backward()
        opts[0].step()
        opts[1].zero_grad()
        fooled = F.softplus(-told(fake)).mean()
        fooled.backward()
        opts[1].step()
        return seen, fooled

    at = [Shard(0)] * mesh.ndim
    return step, (lambda i: (randn(5, 6, on=mesh, at=at), randn(5, 4, on=mesh, at=at))), makes + tells, opts


@case
def a_student_and_its_averaged_teacher(mesh: Any) -> Step:
    student = [make_parameter(mesh, 6, 8, at=Shard(1)), make_parameter(mesh, 8, 5, at=Shard(0))]
    teacher = [w.detach().clone() for w in student]
    opt = torch.optim.AdamW(student, lr=0.02, fused=True)

    def step(x: Any) -> Any:
        with torch.no_grad():
            wanted = torch.softmax(F.gelu(x @ teacher[0]) @ teacher[1], dim=-1)
        loss = F.cross_entropy(F.gelu(x @ student[0]) @ student[1], wanted)
        loss.backward()
        opt.step()
        opt.zero_grad()
        with torch.no_grad():
            torch._foreach_lerp_(teacher, [w.detach() for w in student], 0.1)
        return loss

    return step, (lambda i: (randn(6, 6, on=mesh, at=[Shard(0)] * mesh.ndim),)), student + teacher, [opt]


def main() -> list[str]:
    """Run every step on a 1-D and on a 2-D mesh of the processes; a copy made by one rank alone does not change the program."""
    assert count_recordings_with_held_frames(mesh_of(4), {1} if dist.get_rank() == 2 else ()) == (3, 5)
    for mesh in (mesh_of(4), mesh_of(2, 2)):
        assert count_recordings_with_differing_rank(mesh, dist.get_rank() == 2) == (4, 4)
    for mesh in (mesh_of(4), mesh_of(2, 2)):
        for build in CASES.values():
            compare_steps(lambda build=build, mesh=mesh: build(mesh))
    return list(CASES)
