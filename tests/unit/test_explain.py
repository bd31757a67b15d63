"""What a program moves, by the user's line: the same numbers as CommDebugMode's, and nothing of the program changes."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from case_lists import S0, S1, R, line, put, value
from gloo_processes import run_gloo
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torch_versions import needs_whole

import dtensor as dt
from dtensor.comm import events
from dtensor.debug import CommDebugMode
from dtensor.errors import BudgetError
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module

P = dt.Partial()
HERE = "test_explain.py"


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu())  # MLP


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad.redistribute(placements=[R]) * 2  # in backward


def implicit() -> None:
    a, b = put(value(5, 6), S0), put(value(5, 6), S1)
    (a + b).relu()  # aten::add forward


def explicit() -> None:
    x = put(value(5, 6), S0).requires_grad_()
    y = x.redistribute(placements=[R])  # DTensor.redistribute forward
    y.to_local(grad_placements=[P]).sum().backward()


def whole() -> None:
    put(value(5), S0).full_tensor()  # DTensor.full_tensor forward


def backward_of_a_move() -> None:
    x = put(value(6, 4), S0).requires_grad_()
    y = x.redistribute(placements=[R]).to_local(grad_placements=[P])  # gradient backward
    z = y * 2
    z.sum().backward()


def backward_of_an_operator() -> None:
    x, w = put(value(6, 4), S0).requires_grad_(), put(value(4, 4), R).requires_grad_()
    y = x @ w  # aten::mm forward
    z = y.sum()
    z.backward()


def a_leafs_gradient() -> None:
    x, w = put(value(6, 4), S0), put(value(4, 5), R).requires_grad_()
    y = x @ w  # gradient backward
    y.sum().backward()


def a_kernel() -> None:
    put(value(7), S0).cumsum(0)  # aten::cumsum forward


def a_style() -> None:
    model = parallelize_module(MLP(), line(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()  # dtensor.parallel nowhere


def recomputed() -> None:
    a, b = put(value(5, 6), S0).requires_grad_(), put(value(5, 6), R)

    def inner(x: Any) -> Any:
        return x.redistribute(placements=[R]) * b  # DTensor.redistribute backward

    checkpoint(inner, a, use_reentrant=False).sum().backward()


def the_users_own_backward() -> None:
    (Twice.apply(put(value(5, 6), S0).requires_grad_()) * put(value(5, 6), S0)).sum().backward()


def of_torch() -> None:
    x, w = put(value(6, 4), S0), put(value(4, 5), R).requires_grad_()
    y = x @ w
    z = y * y
    (grad,) = torch.autograd.grad(z.sum(), w, create_graph=True)
    (grad * grad).sum().backward()


def told_of(program: Callable[[], Any]) -> list[tuple[str, str, str]]:
    told = dt.explain(program)
    assert all(str(movement.place).startswith(HERE) for movement in told.movements), told
    return [(movement.operator, movement.phase, movement.place.source) for movement in told.movements]


@pytest.mark.parametrize(
    "program", [implicit, explicit, whole, backward_of_a_move, a_leafs_gradient, a_kernel, recomputed], ids=lambda fn: fn.__name__
)
def test_a_collective_has_the_users_line(program: Callable[[], Any]) -> None:
    source = next(text for text in inspect.getsource(program).splitlines() if "# " in text)
    operator, phase = source.rpartition("# ")[2].split()
    found = told_of(program)
    assert any(line == source.strip() and how == phase and name.startswith(operator) for name, how, line in found), found


def test_of_a_backward_pass_only_what_a_user_wrote_in_it_stands_there() -> None:
    assert [(phase, source) for _, phase, source in told_of(the_users_own_backward)] == [
        ("backward", "return grad.redistribute(placements=[R]) * 2  # in backward")
    ]
    lines = {source for _, phase, source in told_of(of_torch) if phase == "backward"}
    assert lines == {"y = x @ w"}  # of both passes


def test_modules_are_named_forward_and_backward() -> None:
    model = parallelize_module(MLP(), line(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = torch.ones(2, 4, requires_grad=True)
    told = dt.explain(lambda: model(x).sum().backward())
    assert [(m.phase, m.module, m.place.source) for m in told.movements] == [
        ("forward", "MLP.down", "return self.down(self.up(x).relu())  # MLP"),
        ("backward", "MLP.up", "return self.down(self.up(x).relu())  # MLP"),
    ]
    whole = fully_shard(MLP(), mesh=line())
    told = dt.explain(lambda: whole(torch.ones(2, 4)).sum().backward())
    assert {m.event.kind for m in told.movements} == {"all_gather", "reduce_scatter"}
    assert all(str(m.place).startswith(HERE) for m in told.movements)


def test_it_says_why_and_what_to_write_instead() -> None:
    a, b = put(value(5, 6), S0), put(value(5, 6), S1)
    (one,) = dt.explain(lambda: a + b).lines
    text = str(one)
    (instead,) = (row for row in text.splitlines() if "write instead:" in row)
    fixed = eval(instead.partition("write instead: ")[2].partition(", once")[0], {**vars(dt), "self": a, "other": b})
    x, y = (fixed, b) if "self" in instead else (a, fixed)
    assert dt.explain(lambda: x + y).movements == ()
    assert text.count("* S(0), S(0) -> S(0)") + text.count("* S(1), S(1) -> S(1)") == 1
    assert "strategies on mesh dim 0 (" in text


def test_nothing_stays_behind_and_nobody_pays() -> None:
    at_rest, a, b = set(events.listeners), put(value(5, 6), S0), put(value(5, 6), S1)
    with pytest.raises(ZeroDivisionError):
        dt.explain(lambda: 1 / 0)
    assert not torch.is_anomaly_enabled()
    with torch.autograd.set_detect_anomaly(True):
        dt.explain(lambda: a + b)
        assert torch.is_anomaly_enabled()
        assert torch.is_anomaly_check_nan_enabled()
    assert not events.CAUSES.held
    assert events.listeners == at_rest


def test_a_replayed_capture_is_told_by_the_line_that_calls_it() -> None:
    x, w = put(value(6, 4), S0), put(value(4, 5), S0)
    step = dt.capture(lambda x, w: (x @ w).redistribute(placements=[R]))
    step(x, w)
    found = told_of(lambda: step(x, w))  # the replay
    assert found
    assert {source.rpartition("# ")[2] for _, _, source in found} == {"the replay"}


def _on_a_process() -> tuple[int, int, list[str]]:
    mesh = dt.init_device_mesh("cpu", (2,))
    x = dt.distribute_tensor(value(6, 4), mesh, [S0])
    w = dt.distribute_tensor(value(4, 5), mesh, [R]).requires_grad_()

    def step() -> None:
        y = x @ w
        y.sum().backward()
        torch.distributed.barrier()

    with CommDebugMode() as comm:
        told = dt.explain(step)
    return told.bytes, sum(comm.get_comm_bytes().values()), [movement.place.source for movement in told.movements]


@pytest.mark.gloo
def test_on_processes_too() -> None:
    for ours, counted, lines in run_gloo(_on_a_process, 2):
        assert ours == counted > 0
        assert lines == ["y = x @ w", "torch.distributed.barrier()"]


def test_a_loop_is_told_once() -> None:
    a = put(value(5, 6), S0)
    told = dt.explain(lambda: [a.redistribute(placements=[R]) for _ in range(3)])
    assert str(told).count("DTensor.redistribute") == 1
    assert "(3 times)" in str(told)
    assert len(told.movements) == 3


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # torch 2.11 says so of each profile
def test_torchs_profiler_shows_what_moves() -> None:
    a, b = put(value(5, 6), S0), put(value(5, 6), S1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        a + b
        a.redistribute(placements=[R])
    names = {event.key for event in seen.key_averages() if event.key.startswith("dtensor::")}
    assert "dtensor::aten::add.Tensor" in names
    assert any(name.startswith("dtensor::all_gather over mesh dim 0: (S(0)) -> (R)") for name in names), names
    assert any(name.startswith("dtensor::all_gather over 0, ") for name in names), names


def test_every_view_has_the_same_numbers(tmp_path: Any) -> None:
    """And computing is counted as torch does on the program of one rank."""

    def step() -> None:
        x, w = put(value(6, 4), S0), put(value(4, 6), S1).requires_grad_()
        (x @ w).relu().sum().backward()

    with CommDebugMode() as comm, dt.trace(tmp_path / "trace.json"):
        step()
    moved = sum(comm.get_comm_bytes().values())
    told = dt.explain(step)
    events_of = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    mine = [one["args"] for one in events_of if one["ph"] == "X" and one["pid"] == 0]
    traced = [one for one in mine if "steps" in one]
    assert told.bytes == moved == sum(one["bytes"] for one in traced) > 0
    assert len(told.movements) == comm.get_total_counts() == len(traced)
    assert told.flops == sum(one["flops"] for one in mine if "flops" in one) > 0
    exact = {"bytes": moved, "collectives": len(traced), "flops": told.flops, "memory": told.memory.peak}
    assert told.memory.peak == dt.memory(step).peak
    with dt.budget(**exact):
        step()
    for name, limit in exact.items():
        with pytest.raises(BudgetError, match=r"\n\w+.py:\d+  "), dt.budget(**{name: limit - 1}):
            step()


@needs_whole
def test_flops_are_those_of_the_program_of_one_rank() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x, w = dt.ones(6, 4, device_mesh=mesh, placements=[S0]), dt.ones(4, 5, device_mesh=mesh)
    told = dt.explain(lambda: x @ w)
    with FlopCounterMode(display=False) as counter:
        torch.ones(3, 4) @ torch.ones(4, 5)
    assert told.flops == counter.get_total_flops() == 2 * 3 * 4 * 5
    (one,) = told.operations
    assert (one.operator, one.place.source, len(one.calls)) == ("aten::matmul", "told = dt.explain(lambda: x @ w)", 2)
    assert one.operands == (repr(x.layout), repr(w.layout))
    assert one.seconds > 0
    assert one.measured > 0


def test_modules_have_what_their_parts_do() -> None:
    model = parallelize_module(MLP(), line(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    told = dt.explain(lambda: model(torch.ones(2, 4)).sum().backward())
    by_name = {module.name: module for module in told.modules}
    assert set(by_name) == {"MLP", "MLP.up", "MLP.down"}
    assert by_name["MLP"].bytes == by_name["MLP.up"].bytes + by_name["MLP.down"].bytes == told.bytes
    assert by_name["MLP"].flops == by_name["MLP.up"].flops + by_name["MLP.down"].flops == told.flops
