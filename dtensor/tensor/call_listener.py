"""Call listener: a dispatch mode that sees every operator call below autograd, and runs, records or changes those on DTensors."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from ..base.torch_internals import OpOverload, TorchDispatchMode
from ..dispatch import bypasses_rules, plan_call, run_with_strategies
from ..propagation.op_schema import OperatorSchema, operator_schema_of
from ..propagation.propagate import CallPlan
from ..propagation.select_strategy import StrategySelector
from .dtensor import DTensor


class OperatorCall:
    """An operator call as a dispatch mode gets it.

    Attributes:
        func: the overload, or a higher-order operator.
        types: the tensor subclasses among the operands, a derived class before its base.
        args, kwargs: the arguments.
    """

    def __init__(self, func: Any, types: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.types, self.args, self.kwargs = func, types, args, kwargs

    @property
    def is_on_dtensors(self) -> bool:
        """Whether an operand is a DTensor."""
        return any(issubclass(kind, DTensor) for kind in self.types)

    @cached_property
    def operator(self) -> OperatorSchema:
        """The schema of the overload."""
        return operator_schema_of(self.func)

    @cached_property
    def bound(self) -> dict[str, Any]:
        """The arguments by name."""
        return self.operator.bind(self.args, self.kwargs)

    @property
    def bypasses_rules(self) -> bool:
        """Whether dispatch runs the call without a rule: on several meshes, on written plain tensors, on constants of torch."""
        return bypasses_rules(self.operator, self.bound)

    def make_plan(self, choose: StrategySelector) -> CallPlan:
        """Plan the call with the strategies that ``choose`` selects; nothing runs."""
        return plan_call(self.operator, self.bound, choose)

    def run(self) -> Any:
        """Run the call unchanged, unseen by the mode that got it."""
        return self.func(*self.args, **self.kwargs)

    def run_with_strategies(self, choose: StrategySelector) -> Any:
        """Run the call with the strategies that ``choose`` selects."""
        return run_with_strategies(self.func, self.args, self.kwargs, choose)

    def run_under(self, mode: TorchDispatchMode) -> Any:
        """Run the call by its DTensor class, with ``mode`` active, so that the mode sees the calls on local tensors."""
        kinds = [kind for kind in self.types if issubclass(kind, DTensor)]
        most_derived = max(kinds, key=lambda kind: len(kind.__mro__))  # as torch asks
        with mode:
            return most_derived.__torch_dispatch__(self.func, self.types, self.args, self.kwargs)


class CallListener(TorchDispatchMode):
    """Base of dispatch modes that listen to operator calls. By default each call runs unchanged."""

    of_dtensors = True  # the mode sees DTensor operators (see base/tracing.py)

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        call = OperatorCall(func, types, args, kwargs or {})
        if not isinstance(func, OpOverload) or not self.is_listening(call):
            return call.run()
        return self.on_dtensor_call(call) if call.is_on_dtensors else self.on_plain_call(call)

    def is_listening(self, call: OperatorCall) -> bool:
        """Return True if the mode handles a call now."""
        return True

    def on_dtensor_call(self, call: OperatorCall) -> Any:
        """Run a call with DTensors among its operands, and return its result."""
        return call.run()

    def on_plain_call(self, call: OperatorCall) -> Any:
        """Run a call without DTensors, and return its result."""
        return call.run()
