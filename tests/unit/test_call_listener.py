"""Call listener: which operator calls a listener gets, and how it runs them."""

from __future__ import annotations

from typing import Any

import torch

import dtensor as dt
from dtensor.propagation.select_strategy import select_strategies
from dtensor.tensor.call_listener import CallListener, OperatorCall


class Listener(CallListener):
    """Logs the names of calls on DTensors and on plain tensors."""

    def __init__(self, ignored: str = "", sees_locals: bool = False) -> None:
        super().__init__()
        self.ignored, self.sees_locals = ignored, sees_locals
        self.on_dtensors: list[str] = []
        self.on_plain: list[str] = []

    def is_listening(self, call: OperatorCall) -> bool:
        return call.func.name() != self.ignored

    def on_dtensor_call(self, call: OperatorCall) -> Any:
        self.on_dtensors.append(call.operator.name)
        return call.run_under(self) if self.sees_locals else call.run()

    def on_plain_call(self, call: OperatorCall) -> Any:
        self.on_plain.append(call.func.name())
        return call.run()


def make_operand() -> dt.DTensor:
    return dt.ones(4, 6, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])


def test_listener_gets_calls_on_dtensors_separately_from_calls_on_plain_tensors() -> None:
    x, plain = make_operand(), torch.ones(3)
    with Listener() as listener:
        result = torch.cat([x, x])  # operands in a list
        plain.exp()
    assert listener.on_dtensors == ["aten::cat"]
    assert listener.on_plain == ["aten::exp"]
    assert result.full_tensor().equal(torch.ones(8, 6))


def test_run_under_passes_the_calls_on_local_tensors_to_the_listener() -> None:
    x = make_operand()
    x.exp()  # plans the call
    with Listener(sees_locals=True) as listener:
        x.exp()
    assert listener.on_dtensors == ["aten::exp"]
    assert listener.on_plain == ["aten::exp"] * 2  # one for each rank


def test_listener_runs_calls_unchanged_that_it_does_not_listen_to() -> None:
    x = make_operand()
    with Listener(ignored="aten::exp") as listener:
        assert x.exp().placements == (dt.Shard(0),)
        x.neg()
    assert listener.on_dtensors == ["aten::neg"]


def test_listener_can_plan_and_run_a_call_with_given_strategies() -> None:
    calls: list[OperatorCall] = []

    class Planner(CallListener):
        def on_dtensor_call(self, call: OperatorCall) -> Any:
            calls.append(call)
            return call.run_with_strategies(select_strategies)

    x = make_operand()
    with Planner():
        result = x.sum(1)
    (call,) = calls
    assert call.bound["self"] is x
    assert call.bound["dim"] == [1]
    assert call.make_plan(select_strategies).operands == (x.layout,)
    assert not call.bypasses_rules
    assert result.full_tensor().equal(torch.full((4,), 6.0))


def test_call_on_two_meshes_bypasses_rules() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    x, scale = dt.ones(4, device_mesh=mesh["a"]), dt.ones((), device_mesh=mesh["b"])
    seen: list[bool] = []

    class Inspector(CallListener):
        def on_dtensor_call(self, call: OperatorCall) -> Any:
            seen.append(call.bypasses_rules)
            return call.run()

    with Inspector():
        x * scale
    assert seen == [True]
