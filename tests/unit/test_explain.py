"""explain: each collective has the line of the user, its module and phase; bytes equal those of CommDebugMode."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from case_lists import S0, S1, R, distribute_values, get_line_mesh, make_values
from gloo_processes import run_gloo
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from torch_version_marks import needs_undecomposed_linear

import dtensor as dt
from dtensor.__main__ import main
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
    a, b = distribute_values(make_values(5, 6), S0), distribute_values(make_values(5, 6), S1)
    (a + b).relu()  # aten::add forward


def explicit_redistribution() -> None:
    x = distribute_values(make_values(5, 6), S0).requires_grad_()
    y = x.redistribute(placements=[R])  # DTensor.redistribute forward
    y.to_local(grad_placements=[P]).sum().backward()


def full_tensor() -> None:
    distribute_values(make_values(5), S0).full_tensor()  # DTensor.full_tensor forward


def backward_of_redistribute() -> None:
    x = distribute_values(make_values(6, 4), S0).requires_grad_()
    y = x.redistribute(placements=[R]).to_local(grad_placements=[P])  # gradient backward
    z = y * 2
    z.sum().backward()


def gradient_of_a_leaf() -> None:
    x, w = distribute_values(make_values(6, 4), S0), distribute_values(make_values(4, 5), R).requires_grad_()
    y = x @ w  # gradient backward
    y.sum().backward()


def kernel_with_collectives() -> None:
    distribute_values(make_values(7), S0).cumsum(0)  # aten::cumsum forward


def recomputed_redistribution() -> None:
    a, b = distribute_values(make_values(5, 6), S0).requires_grad_(), distribute_values(make_values(5, 6), R)

    def inner(x: Any) -> Any:
        return x.redistribute(placements=[R]) * b  # DTensor.redistribute backward

    checkpoint(inner, a, use_reentrant=False).sum().backward()


def custom_backward() -> None:
    (
        Twice.apply(distribute_values(make_values(5, 6), S0).requires_grad_()) * distribute_values(make_values(5, 6), S0)
    ).sum().backward()


def double_backward() -> None:
    x, w = distribute_values(make_values(6, 4), S0), distribute_values(make_values(4, 5), R).requires_grad_()
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
    model = parallelize_module(MLP(), get_line_mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    x = torch.ones(2, 4, requires_grad=True)
    report = dt.explain(lambda: model(x).sum().backward())
    assert [(m.phase, m.module, m.place.source) for m in report.movements] == [
        ("forward", "MLP.down", "return self.down(self.up(x).relu())  # MLP"),
        ("backward", "MLP.up", "return self.down(self.up(x).relu())  # MLP"),
    ]
    model = fully_shard(MLP(), mesh=get_line_mesh())
    report = dt.explain(lambda: model(torch.ones(2, 4)).sum().backward())
    assert {m.event.kind for m in report.movements} == {"all_gather", "reduce_scatter"}
    assert all(str(m.place).startswith(HERE) for m in report.movements)


def test_explain_shows_strategies_and_a_redistribute_call_that_removes_the_collective() -> None:
    a, b = distribute_values(make_values(5, 6), S0), distribute_values(make_values(5, 6), S1)
    (one,) = dt.explain(lambda: a + b).lines
    text = str(one)
    (instead,) = (row for row in text.splitlines() if "write instead:" in row)
    fixed = eval(instead.partition("write instead: ")[2].partition(", once")[0], {**vars(dt), "self": a, "other": b})
    x, y = (fixed, b) if "self" in instead else (a, fixed)
    assert dt.explain(lambda: x + y).movements == ()
    assert text.count("* S(0), S(0) -> S(0)") + text.count("* S(1), S(1) -> S(1)") == 1
    assert "strategies on mesh dim 0 (" in text


def test_explain_restores_listeners_and_anomaly_mode() -> None:
    listeners_before, a, b = (
        set(events.listeners),
        distribute_values(make_values(5, 6), S0),
        distribute_values(make_values(5, 6), S1),
    )
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
    x, w = distribute_values(make_values(6, 4), S0), distribute_values(make_values(4, 5), S0)
    step = dt.capture(lambda x, w: (x @ w).redistribute(placements=[R]))
    step(x, w)
    found = movements_of(lambda: step(x, w))  # the replay
    assert found
    assert {source.rpartition("# ")[2] for _, _, source in found} == {"the replay"}


def _explain_step() -> tuple[int, int, list[str]]:
    mesh = dt.init_device_mesh("cpu", (2,))
    x = dt.distribute_tensor(make_values(6, 4), mesh, [S0])
    w = dt.distribute_tensor(make_values(4, 5), mesh, [R]).requires_grad_()

    def step() -> None:
        y = x @ w
        y.sum().backward()
        torch.distributed.barrier()

    with CommDebugMode() as comm:
        report = dt.explain(step)
    return report.bytes, sum(comm.get_comm_bytes().values()), [movement.place.source for movement in report.movements]


@pytest.mark.gloo
def test_explain_on_two_processes_counts_bytes_and_names_lines() -> None:
    for explained, counted, lines in run_gloo(_explain_step, 2):
        assert explained == counted > 0
        assert lines == ["y = x @ w", "torch.distributed.barrier()"]


def test_explain_prints_a_loop_once_with_its_count() -> None:
    a = distribute_values(make_values(5, 6), S0)
    report = dt.explain(lambda: [a.redistribute(placements=[R]) for _ in range(3)])
    assert str(report).count("DTensor.redistribute") == 1
    assert "(3 times)" in str(report)
    assert len(report.movements) == 3


@pytest.mark.filterwarnings("ignore:.*Profiler clears events:UserWarning")  # torch 2.11 warns at each profile
def test_torch_profiler_shows_redistributions_and_collectives() -> None:
    a, b = distribute_values(make_values(5, 6), S0), distribute_values(make_values(5, 6), S1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        a + b
        a.redistribute(placements=[R])
    names = {event.key for event in profile.key_averages() if event.key.startswith("dtensor::")}
    assert "dtensor::aten::add.Tensor" in names
    assert any(name.startswith("dtensor::all_gather over mesh dim 0: (S(0)) -> (R)") for name in names), names
    assert any(name.startswith("dtensor::all_gather over 0, ") for name in names), names


def test_explain_trace_budget_and_comm_debug_mode_count_equal_bytes_and_flops(tmp_path: Any) -> None:
    def step() -> None:
        x, w = distribute_values(make_values(6, 4), S0), distribute_values(make_values(4, 6), S1).requires_grad_()
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


@needs_undecomposed_linear
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
    model = parallelize_module(MLP(), get_line_mesh(), {"up": ColwiseParallel(), "down": RowwiseParallel()})
    report = dt.explain(lambda: model(torch.ones(2, 4)).sum().backward())
    by_name = {module.name: module for module in report.modules}
    assert set(by_name) == {"MLP", "MLP.up", "MLP.down"}
    assert by_name["MLP"].bytes == by_name["MLP.up"].bytes + by_name["MLP.down"].bytes == report.bytes
    assert by_name["MLP"].flops == by_name["MLP.up"].flops + by_name["MLP.down"].flops == report.flops


PREAMBLE = """
import torch
import torch.nn.functional as F
import dtensor as dt
from torch import nn
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
R, S0, S1 = dt.Replicate(), dt.Shard(0), dt.Shard(1)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8, bias=False), nn.Linear(8, 4, bias=False)

    def forward(self, x):
        h = self.up(x).relu()
        return self.down(h)


def model(up, down):
    block = Block()
    for layer, place in ((block.up, up), (block.down, down)):
        layer.weight = nn.Parameter(dt.distribute_tensor(layer.weight.detach(), mesh, [place]))
    return block


x = dt.ones(6, 4, device_mesh=mesh)
"""


class ExtraCollective(NamedTuple):
    """A program with an unneeded collective on the line ``# here``, its printed ``fix``, and the edit ``old`` -> ``new``."""

    program: str
    why: str
    fix: str
    old: str
    new: str


PROGRAMS = {
    "activations": ExtraCollective(
        """
scale = dt.ones(6, 8, device_mesh=mesh, placements=[S0])
h = model(S0, S1).up(x)
y = h * scale  # here
""",
        "forward aten::mul.Tensor: all_to_all over tp, 2 ranks, 48 B",
        "or: make other float32[6, 8] on (tp=S(0)) with placements=[Shard(dim=1)]; then nothing is redistributed",
        "placements=[S0])\nh =",
        "placements=[S1])\nh =",
    ),
    "activations, explicit redistribution": ExtraCollective(
        """
scale = dt.ones(6, 8, device_mesh=mesh, placements=[S0])
h = model(S0, S1).up(x)
y = h * scale  # here
""",
        "forward aten::mul.Tensor: all_to_all over tp, 2 ranks, 48 B",
        "write instead: self.redistribute(placements=[Shard(dim=0)]), once, before this line",
        "y = h * scale",
        "h = h.redistribute(placements=[dt.Shard(dim=0)])\ny = h * scale",
    ),
    "weights": ExtraCollective(
        "\ny = model(S0, S0)(x)\n",
        "forward aten::linear in Block.down: all_gather over tp, 2 ranks, 96 B",
        "or: make weight float32[4, 8] on (tp=S(0)) with placements=[Shard(dim=1)]; then nothing is redistributed",
        "model(S0, S0)",
        "model(S0, S1)",
    ),
    "a loss": ExtraCollective(
        """
target = dt.ones(6, 8, device_mesh=mesh, placements=[S1])
logits = dt.ones(6, 8, device_mesh=mesh, placements=[S0])
loss = F.mse_loss(logits, target)  # here
""",
        "forward aten::mse_loss: all_to_all over tp, 2 ranks, 48 B",
        "or: make self float32[6, 8] on (tp=S(0)) with placements=[Shard(dim=1)]; then nothing is redistributed",
        "logits = dt.ones(6, 8, device_mesh=mesh, placements=[S0])",
        "logits = dt.ones(6, 8, device_mesh=mesh, placements=[S1])",
    ),
    "a redistribution": ExtraCollective(
        """
block = model(S0, S1)
h = block.up(x).relu()
h = h.redistribute(placements=[R])  # here
y = block.down(h)
""",
        "forward DTensor.redistribute: all_gather over tp, 2 ranks, 96 B",
        "float32[6, 8] on (tp=S(1)) -> (tp=R)",
        "h = h.redistribute(placements=[R])  # here\n",
        "",
    ),
    "a hook": ExtraCollective(
        """
block = model(S0, S1)
def look(module, given, made):
    print(made.full_tensor().norm() > 0)  # here
handle = block.up.register_forward_hook(look)
y = block(x)
""",
        "forward DTensor.full_tensor in Block.up: all_gather over tp, 2 ranks, 96 B",
        "float32[6, 8] on (tp=S(1)) -> (tp=R)",
        "made.full_tensor().norm() > 0",
        "made.to_local().shape",
    ),
    "a style": ExtraCollective(
        """
block = parallelize_module(Block(), mesh, {"up": ColwiseParallel(output_layouts=R)})
h = block.up(torch.ones(6, 4))  # here
""",
        "forward dtensor.parallel.tensor.style in Linear: all_gather over tp, 2 ranks, 96 B",
        "float32[6, 8] on (tp=S(1)) -> (tp=R)",
        "output_layouts=R",
        "",
    ),
    "a gradient": ExtraCollective(
        """
w = nn.Parameter(dt.ones(4, 5, device_mesh=mesh, placements=[R]))
y = dt.ones(6, 4, device_mesh=mesh, placements=[S0]) @ w  # here
y.sum().backward()
""",
        "backward gradient (AccumulateGrad): all_reduce over tp, 2 ranks, 80 B",
        "float32[4, 5] on (tp=P(sum)) -> (tp=R)",
        "placements=[S0]) @ w",
        "placements=[R]) @ w",
    ),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_undecomposed_linear) if name == "weights" else name for name in PROGRAMS]
)
def test_explain_prints_line_reason_and_fix_of_an_extra_collective(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    case, script = PROGRAMS[name], tmp_path / "model.py"
    text = PREAMBLE + case.program
    script.write_text(text)
    assert main(["explain", str(script)]) == 0
    output = capsys.readouterr().out
    marked = "# here" if "# here" in case.program else "return self.down(h)"
    at = next(number for number, row in enumerate(text.splitlines(), 1) if marked in row)
    line = next(row for row in output.splitlines() if row.startswith("model.py:") and "collective" in row)
    assert line.startswith(f"model.py:{at}  {text.splitlines()[at - 1].strip()}: 1 collective, "), output
    for expected in (case.why, case.fix):
        assert any(row.strip().startswith(expected) for row in output.splitlines()), output
    assert case.old in text
    script.write_text(text.replace(case.old, case.new))
    assert main(["explain", str(script)]) == 0
    output = capsys.readouterr().out
    if "redistribute" in case.new:  # the implicit collective is now an explicit one
        assert "1 collective, 48 B" in output
        assert "DTensor.redistribute" in output
    else:
        assert "0 collectives, 0 B received per rank" in output, output


def test_explain_accepts_a_per_rank_tensor_with_a_view_on_one_rank() -> None:
    one = torch.ones(2, 3)
    mixed = dt.per_rank([one.clone(), one[:]])  # the second tensor is a view
    assert dt.explain(lambda: mixed + 1).result.shards[1].shape == (2, 3)
