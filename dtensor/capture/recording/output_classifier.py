"""Output classifier: how a replay makes each tensor that the recorded run returned: computed, an input, or a view."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from ...base.recorder_hooks import CrossCallState
from ...comm import PerRank
from ...errors import CaptureError
from ...tensor.dtensor import DTensor
from ...tensor.local_tensors import local_tensors_of
from ...tensor.views.lazy_view import LazyView
from ..guards.object_model import VALUES
from ..replay.outputs import (
    CarriedOutput,
    ComputedOutput,
    ComputedTensor,
    ConstantOutput,
    InputRef,
    LocalOutput,
    Output,
    PerRankOutput,
    ViewOutput,
)
from ..tracing.float_provenance import TracedFloat, to_plain_float
from ..tracing.recorder import Recorder
from ..tracing.tape import Var


class OutputClassifier:
    """Classifier of the leaves that the recorded run returned: how a replay makes each. It collects the computed tensors.

    Args:
        recorder: of the run.
        inputs: the input tensors, by address.
        input_locals: the local values of input DTensors, by address.
        input_storages: storage numbers of the inputs.
        was_differentiated: returns True if a backward pass inside of the run has already used a tensor's history.

    Attributes:
        computed: the descriptions of the computed tensors.
        tensors: the tensors of the recorded run, one for each description.
    """

    def __init__(
        self,
        recorder: Recorder,
        inputs: dict[int, InputRef],
        input_locals: dict[int, InputRef],
        input_storages: set[int],
        was_differentiated: Callable[[torch.Tensor], bool],
    ) -> None:
        self.recorder, self.inputs, self.input_locals = recorder, inputs, input_locals
        self.input_storages, self.was_differentiated = input_storages, was_differentiated
        self.computed: list[ComputedTensor] = []
        self.tensors: list[Any] = []
        self._numbers: dict[int, int] = {}

    def classify(self, leaves: list[Any]) -> list[Output]:
        """Return for each returned leaf the description by which a replay makes it."""
        shared = self._shared_storages(leaves)
        return [self._classify_leaf(leaf, shared) for leaf in leaves]

    def add_rebound_local(self, x: Any) -> int:
        """Add ``x``, whose local tensor the run replaced, as a computed tensor, and return its number.

        Raises:
            CaptureError: its memory is also the memory of another tensor.
        """
        variables = self._vars_of(x)
        known = self.input_storages | {var.storage for tensor in self.computed for var in tensor.locals}
        if any(var.storage in known for var in variables):
            raise CaptureError(
                "capture: the function makes one of its variables share memory with another tensor (x.data = y); "
                "write to it in place: x.copy_(y)"
            )
        return self._add_computed(x, variables)

    def _shared_storages(self, leaves: list[Any]) -> set[int]:
        """Return the storages of the inputs, and those that several of the returned leaves share."""
        seen: dict[int, int] = {}
        shared = set(self.input_storages)
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and id(leaf) not in self.inputs:
                for var in self._vars_of(leaf):
                    if seen.setdefault(var.storage, id(leaf)) != id(leaf):
                        shared.add(var.storage)
        return shared

    def _vars_of(self, x: Any) -> tuple[Var, ...]:
        """Return the tape variables of a tensor's local tensors; raise if the recording has not computed them."""
        variables = tuple(map(self.recorder.find_var, local_tensors_of(x)))
        if any(var is None for var in variables):
            raise CaptureError(
                "capture: the function returns a tensor that is neither an argument nor computed by it; pass it as an argument"
            )
        return variables  # type: ignore[return-value]  # none is None

    def _classify_leaf(self, leaf: Any, shared: set[int]) -> Output:
        """Return the description by which a replay makes one returned leaf; raise if it cannot make it."""
        if type(leaf) is TracedFloat:
            self.computed.append(ComputedTensor((leaf.var,), None, False))
            self.tensors.append(to_plain_float(leaf))
            return ComputedOutput(len(self.computed) - 1)
        if not isinstance(leaf, torch.Tensor):
            if isinstance(leaf, VALUES) or leaf is Ellipsis:
                return ConstantOutput(leaf)
            raise CaptureError(
                f"capture: the function returns a {type(leaf).__name__}, and a replay cannot make a new one; "
                "return tensors, numbers and containers of them"
            )
        if id(leaf) in self.inputs:
            return self.inputs[id(leaf)]
        if id(leaf) in self.input_locals:
            return LocalOutput(self.input_locals[id(leaf)])
        variables = self._vars_of(leaf)
        aliases = isinstance(leaf, LazyView) or any(var.storage in shared for var in variables)
        if not aliases:
            if isinstance(leaf, PerRank):
                pairs = zip(leaf.shards, variables, strict=True)
                return PerRankOutput(tuple(self._add_computed(shard, (var,)) for shard, var in pairs))
            return ComputedOutput(self._add_computed(leaf, variables))
        root, chain = self._trace_view(leaf)
        if id(root) in self.inputs:
            return ViewOutput(self.inputs[id(root)], chain) if chain else self.inputs[id(root)]
        if any(var.storage in self.input_storages for var in self._vars_of(root)) or not isinstance(root, DTensor):
            raise CaptureError(
                f"capture: the function returns a tensor of shape {tuple(leaf.shape)} that shares its memory with an argument, a "
                "variable of the function or another result in a way that a replay cannot follow; return x.clone()"
            )
        computed = ComputedOutput(self._add_computed(root, self._vars_of(root)))
        return ViewOutput(computed, chain) if chain else computed

    def _trace_view(self, leaf: torch.Tensor) -> tuple[torch.Tensor, tuple[Any, ...]]:
        """Return the input or computed tensor that ``leaf`` is a view of, and the view operations in between."""
        chain: list[Any] = []
        while id(leaf) not in self.inputs and id(leaf) in self.recorder.views:
            _, (func, place), args, kwargs = self.recorder.views[id(leaf)]
            if leaf.requires_grad and not args[0].requires_grad:
                break  # a view that was made below autograd: a result of its own
            chain.append((func, place, args[1:], kwargs))
            leaf = args[0]
        return leaf, tuple(reversed(chain))

    def _add_computed(self, x: Any, variables: tuple[Var, ...]) -> int:
        """Return the number of ``x`` among the computed tensors; it is added if it is new."""
        number = self._numbers.setdefault(id(x), len(self.computed))
        if number == len(self.computed):
            layout = x._layout if isinstance(x, DTensor) else None
            self.computed.append(ComputedTensor(variables, layout, x.requires_grad and not self.was_differentiated(x)))
            self.tensors.append(x)
        return number


def describe_carried(
    states: Sequence[tuple[CrossCallState, list[Any], Any]], outputs: Iterator[Output]
) -> Iterator[CarriedOutput]:
    """Yield for each library state that the run changed how a replay makes its leaves, from ``outputs`` in order."""
    for state, leaves, tree in states:
        yield state, tuple([next(outputs) if isinstance(leaf, torch.Tensor) else ConstantOutput(leaf) for leaf in leaves]), tree
