"""explain: each collective has the line of the user, its module and phase; bytes equal those of CommDebugMode."""

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


def implicit_redistribution() -> None:
    a, b = put(value(5, 6), S0), put(value(5, 6), S1)
    (a + b).relu()  # aten::add forward


def explicit_redistribution() -> None:
    x = put(value(5, 6), S0).requires_grad_()
    y = x.redistribute(placements=[R])  # DTensor.redistribute forward
    y.to_local(grad_placements=[P]).sum().backward()


def full_tensor() -> None:
    put(value(5), S0).full_tensor()  # DTensor.full_tensor forward


def backward_of_redistribute() -> None:
    x = put(value(6, 4), S0).requires_grad_()
    y = x.redistribute(placements=[R]).to_local(grad_placements=[P])  # gradient backward
    z = y * 2
    z.sum().backward()


def backward_of_matmul() -> None:
    x, w = put(value(6, 4), S0).requires_grad_(), put(value(4, 4), R).requires_grad_()
    y = x @ w  # aten::mm forward
    z = y.sum()
    z.backward()


def gradient_of_a_leaf() -> None:
    x, w = put(value(6, 4), S0), put(value(4, 5), R).requires_grad_()
    y = x @ w  # gradient backward
    y.sum().backward()


def kernel_with_collectives() -> None:
    put(value(7), S0).cumsum(0)  # aten::cumsum forward


def tensor_parallel_styles() -> None:
    model = parallelize_module(MLP(), line(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    model(torch.ones(2, 4, requires_grad=True)).sum().backward()  # dtensor.parallel nowhere


def recomputed_redistribution() -> None:
    a, b = put(value(5, 6), S0).requires_grad_(), put(value(5, 6), R)

    def inner(x: Any) -> Any:
        return x.redistribute(placements=[R]) * b  # DTensor.redistribute backward

    checkpoint(inner, a, use_reentrant=False).sum().backward()


def custom_backward() -> None:
    (Twice.apply(put(value(5, 6), S0).requires_grad_()) * put(value(5, 6), S0)).sum().backward()


def double_backward() -> None:
    x, w = put(value(6, 4), S0), put(value(4, 5), R).requires_grad_()
    y = x @ w
    z = y * y
    (grad,) = torch.autograd.grad(z.sum(), w, create_graph=True)
    (grad * grad).sum().backward()


def movements_of(program: Callable[[], Any]) -> list[tuple[str, str, str]]:
    report = dt.explain(program)
    assert all(str(movement.place).startswith(HERE) for movement in report.movements), report
    return [(movement.operator, movement.phase, movement.place.source) for movement in report.movements]


@pytest.mark.parametrize(
    "program",
    [
        implicit_redistribution,
        explicit_redistribution,
        full_tensor,
        backward_of_redistribute,
        gradient_of_a_leaf,
        kernel_with_collectives,
        recomputed_redistribution,
    ],
    ids=lambda fn: fn.__name__,
)
def test_explain_gives_each_collective_the_line_operator_and_phase_of_the_user(program: Callable[[], Any]) -> None:
    source = next(text for text in inspect.getsource(program).splitlines() if "# " in text)
    operator, phase = source.rpartition("# ")[2].split()
    found = movements_of(program)
    assert any(line == source.strip() and how == phase and name.startswith(operator) for name, how, line in found), found


def test_explain_attributes_backward_collectives_to_custom_backward_or_forward_lines() -> None:
    assert [(phase, source) for _, phase, source in movements_of(custom_backward)] == [
        ("backward", "return grad.redistribute(placements=[R]) * 2  # in backward")
    ]
    lines = {source for _, phase, source in movements_of(double_backward) if phase == "backward"}
    assert lines == {"y = x @ w"}  # the line of both backward passes


def test_explain_names_modules_in_forward_and_backward() -> None:
    model = parallelize_module(MLP(), line(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = torch.ones(2, 4, requires_grad=True)
    report = dt.explain(lambda: model(x).sum().backward())
    assert [(m.phase, m.module, m.place.source) for m in report.movements] == [
        ("forward", "MLP.down", "return self.down(self.up(x).relu())  # MLP"),
        ("backward", "MLP.up", "return self.down(self.up(x).relu())  # MLP"),
    ]
    model = fully_shard(MLP(), mesh=line())
    report = dt.explain(lambda: model(torch.ones(2, 4)).sum().backward())
    assert {m.event.kind for m in report.movements} == {"all_gather", "reduce_scatter"}
    assert all(str(m.place).startswith(HERE) for m in report.movements)


def test_explain_shows_strategies_and_a_redistribute_call_that_removes_the_collective() -> None:
    a, b = put(value(5, 6), S0), put(value(5, 6), S1)
    (one,) = dt.explain(lambda: a + b).lines
    text = str(one)
    (instead,) = (row for row in text.splitlines() if "write instead:" in row)
    fixed = eval(instead.partition("write instead: ")[2].partition(", once")[0], {**vars(dt), "self": a, "other": b})
    x, y = (fixed, b) if "self" in instead else (a, fixed)
    assert dt.explain(lambda: x + y).movements == ()
    assert text.count("* S(0), S(0) -> S(0)") + text.count("* S(1), S(1) -> S(1)") == 1
    assert "strategies on mesh dim 0 (" in text


def test_explain_restores_listeners_and_anomaly_mode() -> None:
    listeners_before, a, b = set(events.listeners), put(value(5, 6), S0), put(value(5, 6), S1)
    with pytest.raises(ZeroDivisionError):
        dt.explain(lambda: 1 / 0)
    assert not torch.is_anomaly_enabled()
    with torch.autograd.set_detect_anomaly(True):
        dt.explain(lambda: a + b)
        assert torch.is_anomaly_enabled()
        assert torch.is_anomaly_check_nan_enabled()
    assert not events.CAUSES.held
    assert events.listeners == listeners_before


def test_explain_attributes_a_replayed_capture_to_the_calling_line() -> None:
    x, w = put(value(6, 4), S0), put(value(4, 5), S0)
    step = dt.capture(lambda x, w: (x @ w).redistribute(placements=[R]))
    step(x, w)
    found = movements_of(lambda: step(x, w))  # the replay
    assert found
    assert {source.rpartition("# ")[2] for _, _, source in found} == {"the replay"}


def _explain_step() -> tuple[int, int, list[str]]:
    mesh = dt.init_device_mesh("cpu", (2,))
    x = dt.distribute_tensor(value(6, 4), mesh, [S0])
    w = dt.distribute_tensor(value(4, 5), mesh, [R]).requires_grad_()

    def step() -> None:
        y = x @ w
        y.sum().backward()
        torch.distributed.barrier()

    with CommDebugMode() as comm:
        report = dt.explain(step)
    return report.bytes, sum(comm.get_comm_bytes().values()), [movement.place.source for movement in report.movements]


@pytest.mark.gloo
def test_explain_on_two_processes_counts_bytes_and_names_lines() -> None:
    for ours, counted, lines in run_gloo(_explain_step, 2):
        assert ours == counted > 0
        assert lines == ["y = x @ w", "torch.distributed.barrier()"]


def test_explain_prints_a_loop_once_with_its_count() -> None:
    a = put(value(5, 6), S0)
    report = dt.explain(lambda: [a.redistribute(placements=[R]) for _ in range(3)])
    assert str(report).count("DTensor.redistribute") == 1
    assert "(3 times)" in str(report)
    assert len(report.movements) == 3


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # torch 2.11 warns at each profile
def test_torch_profiler_shows_redistributions_and_collectives() -> None:
    a, b = put(value(5, 6), S0), put(value(5, 6), S1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        a + b
        a.redistribute(placements=[R])
    names = {event.key for event in profile.key_averages() if event.key.startswith("dtensor::")}
    assert "dtensor::aten::add.Tensor" in names
    assert any(name.startswith("dtensor::all_gather over mesh dim 0: (S(0)) -> (R)") for name in names), names
    assert any(name.startswith("dtensor::all_gather over 0, ") for name in names), names


def test_explain_trace_budget_and_comm_debug_mode_count_equal_bytes_and_flops(tmp_path: Any) -> None:
    def step() -> None:
        x, w = put(value(6, 4), S0), put(value(4, 6), S1).requires_grad_()
        (x @ w).relu().sum().backward()

    with CommDebugMode() as comm, dt.trace(tmp_path / "trace.json"):
        step()
    received = sum(comm.get_comm_bytes().values())
    report = dt.explain(step)
    events_of = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    of_rank_0 = [one["args"] for one in events_of if one["ph"] == "X" and one["pid"] == 0]
    collectives = [one for one in of_rank_0 if "steps" in one]
    assert report.bytes == received == sum(one["bytes"] for one in collectives) > 0
    assert len(report.movements) == comm.get_total_counts() == len(collectives)
    assert report.flops == sum(one["flops"] for one in of_rank_0 if "flops" in one) > 0
    exact = {"bytes": received, "collectives": len(collectives), "flops": report.flops, "memory": report.memory.peak}
    assert report.memory.peak == dt.memory(step).peak
    with dt.budget(**exact):
        step()
    for name, limit in exact.items():
        with pytest.raises(BudgetError, match=r"\n\w+.py:\d+  "), dt.budget(**{name: limit - 1}):
            step()


@needs_whole
def test_explain_counts_the_flops_of_one_rank() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x, w = dt.ones(6, 4, device_mesh=mesh, placements=[S0]), dt.ones(4, 5, device_mesh=mesh)
    report = dt.explain(lambda: x @ w)
    with FlopCounterMode(display=False) as counter:
        torch.ones(3, 4) @ torch.ones(4, 5)
    assert report.flops == counter.get_total_flops() == 2 * 3 * 4 * 5
    (one,) = report.operations
    assert (one.operator, one.place.source, len(one.calls)) == ("aten::matmul", "report = dt.explain(lambda: x @ w)", 2)
    assert one.operands == (repr(x.layout), repr(w.layout))
    assert one.seconds > 0
    assert one.measured > 0


def test_explain_sums_bytes_and_flops_of_submodules() -> None:
    model = parallelize_module(MLP(), line(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    report = dt.explain(lambda: model(torch.ones(2, 4)).sum().backward())
    by_name = {module.name: module for module in report.modules}
    assert set(by_name) == {"MLP", "MLP.up", "MLP.down"}
    assert by_name["MLP"].bytes == by_name["MLP.up"].bytes + by_name["MLP.down"].bytes == report.bytes
    assert by_name["MLP"].flops == by_name["MLP.up"].flops + by_name["MLP.down"].flops == report.flops
