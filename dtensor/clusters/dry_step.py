"""Dry step: a training step of one part of a model on one rank of a mesh without data, to measure time and memory.

It has three micro batches, of which the first gathers parameters and the last reduces their gradients, and an optimizer step.
The host time does not depend on the number of ranks.
"""

from __future__ import annotations

import time
from bisect import bisect
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from ..base.tensor_tree import tensor_leaves
from ..base.user_frames import NO_SOURCE_LINE
from ..comm.events import Event, listening
from ..cost.link import collective_seconds, get_device
from ..mesh.device_mesh import DeviceMesh
from ..parallel import MixedPrecisionPolicy, fully_shard
from ..placement import Shard
from ..recorders.memory_tracker import MemoryTracker
from ..recorders.operator_recorder import OperatorRecorder, RecordedLocalCall
from .cluster import MESH_DIMS
from .decoder_parts import DecoderLayer, EmbeddingPart, Experts, LossPart, rotary_tables, unwrap_dtensor
from .model_sizes import Transformer

_FSDP_DIMS, _EXPERT_FSDP_DIMS = ("dp", "ep", "cp"), ("dp", "cp")  # mesh dims that shard parameters, and parameters of experts
_DTYPE = torch.bfloat16
_PRECISION = MixedPrecisionPolicy(param_dtype=_DTYPE, reduce_dtype=torch.float32)


Sums = defaultdict[str, float]


@dataclass(slots=True)
class PeriodWork:
    """Seconds and received bytes of one rank in a period of a step, such as a forward pass.

    Attributes:
        seconds: of "products" and "elementwise" operations, and of collectives by mesh dim.
        nbytes: bytes received by mesh dim.
    """

    seconds: Sums = field(default_factory=lambda: Sums(float))
    nbytes: Sums = field(default_factory=lambda: Sums(float))

    def add_scaled(self, other: PeriodWork, times: float = 1) -> PeriodWork:
        """Return a new sum: this work plus ``times`` the other."""
        total = PeriodWork(self.seconds.copy(), self.nbytes.copy())
        for totals, counts in ((total.seconds, other.seconds), (total.nbytes, other.nbytes)):
            for kind, count in counts.items():
                totals[kind] += times * count
        return total


@dataclass(frozen=True, slots=True)
class DryStep:
    """Result of a dry step of one part: compute, communication and memory of one rank.

    Attributes:
        micro: forward and backward of a micro batch.
        once: work that a step does once: gathering parameters, reducing gradients, the optimizer.
        memory: bytes between micro batches, by kind: parameters, gradients, optimizer.
        saved: bytes that a forward pass saves for backward.
        most: greatest number of bytes beyond all of these.
        boundary: bytes that are passed to the next part.
    """

    micro: PeriodWork
    once: PeriodWork
    memory: dict[str, float]
    saved: float
    most: float
    boundary: float


def dry_step(part: str, model: Transformer, mesh: DeviceMesh, sequence: int, micro: int = 1, again: str = "nothing") -> DryStep:
    """Measure a dry training step of one part ("start", "layer" or "end") with micro batches of ``micro`` sequences.

    Args:
        mesh: a dry run with dims :data:`MESH_DIMS`.
        again: what a layer's backward recomputes, of :data:`~dtensor.clusters.decoder_parts.RECOMPUTATIONS`.
    """
    with torch.device(mesh.device_type):
        module, inputs = _make_part(part, model, mesh, sequence, micro, again)
    for inner in module.modules():
        if isinstance(inner, Experts):
            # shard rows of matrices, because a rank may have fewer experts than there are ranks to shard them
            others = mesh[_EXPERT_FSDP_DIMS].flatten("others")
            fully_shard(
                inner, mesh=others, shard_placement_fn=lambda _: Shard(1), reshard_after_forward=False, mp_policy=_PRECISION
            )
    fully_shard(module, mesh=mesh[_FSDP_DIMS].flatten("spread"), reshard_after_forward=False, mp_policy=_PRECISION)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
    observer, passes, positions = _StepObserver(mesh), [], [0]
    with observer.listening, observer.operators:
        for p in module.parameters():
            observer.holdings.record_operand(p)
        for last in (False, False, True):
            module.set_requires_gradient_sync(last)
            module.set_reshard_after_backward(last)
            output = module(*inputs)
            positions.append(observer.log_position())
            forward = observer.take_work()
            output.backward(torch.ones_like(output))
            boundary = output.numel() * output.element_size()
            del output
            for x in inputs:
                x.grad = None
            passes.append((forward, observer.take_work()))
            positions.append(observer.log_position())
        optimizer.step()
        positions.append(observer.log_position())
        stepped = observer.take_work()
    once = stepped.add_scaled(passes[0][0]).add_scaled(passes[1][0], -1).add_scaled(passes[2][1]).add_scaled(passes[1][1], -1)
    state = sum(
        x.numel() * x.element_size() for x in map(unwrap_dtensor, tensor_leaves(list(optimizer.state.values()))) if x.ndim
    )
    return _make_dry_step(observer.bytes_over_time(), positions, passes[1][0].add_scaled(passes[1][1]), once, state, boundary)


def _make_dry_step(
    bytes_held: Sequence[int], positions: Sequence[int], micro: PeriodWork, once: PeriodWork, state: float, boundary: float
) -> DryStep:
    """Return the result of a dry step, with memory by kind from the bytes that were allocated at log positions.

    Args:
        positions: log positions at the beginning, after each forward and backward pass, and after the optimizer step.
    """
    gathered, first, forward = (bytes_held[moment] for moment in positions[1:4])
    saved = forward - first
    memory = {"parameters": gathered - saved, "gradients": first + saved - gathered, "optimizer": state}
    most = max(bytes_held[positions[2] : positions[6]]) - forward
    return DryStep(micro, once, {kind: float(count) for kind, count in memory.items()}, saved, most, boundary)


# --- parts ----------------------------------------------------------------------------------------------------------------
def _make_part(
    part: str, model: Transformer, mesh: DeviceMesh, sequence: int, micro: int, again: str
) -> tuple[Any, list[Tensor]]:
    """Return the module of a part and example inputs: output of the part before it, and tokens or rotary tables."""
    tokens = torch.zeros(micro, sequence // mesh["cp"].size(), dtype=torch.int64)
    if part == "start":
        return EmbeddingPart(model, mesh), [tokens]
    activations = torch.ones(micro, sequence // mesh["cp", "tp"].size(), model.hidden, dtype=_DTYPE, requires_grad=True)
    if part == "end":
        return LossPart(model, mesh), [activations, tokens]
    return DecoderLayer(model, mesh, sequence, again), [activations, *rotary_tables(tokens.shape[1], model.head_dim, _DTYPE)]


# --- observation ----------------------------------------------------------------------------------------------------------
class _StepObserver:
    """Observer of a dry step: records collectives and operators as work, and the allocated memory."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.device, self.holdings = get_device(mesh), MemoryTracker()
        self._work, self.listening = PeriodWork(), listening(self._record_event)
        self._barriers: list[int] = []
        self.operators = OperatorRecorder(self.holdings, lambda: (NO_SOURCE_LINE, "", ""), lambda: True)

    def _record_event(self, event: Event) -> None:
        """Add the bytes and the estimated time of a collective to the work of its mesh dim."""
        mesh = event.mesh
        assert mesh is not None
        outermost_dim = MESH_DIMS[min(mesh.group_id(event.mesh_dims))]
        dim = "dp" if event.dims_text in ("spread", "others") else outermost_dim
        self._barriers.append(time.perf_counter_ns())
        self._work.nbytes[dim] += event.bytes
        self._work.seconds[dim] += collective_seconds(mesh, event.mesh_dims, event.kind, event.bytes)

    def take_work(self) -> PeriodWork:
        """Return the compute and communication since the last call, and start a new period."""
        work, self._work = self._work, PeriodWork()
        calls = sorted((call for one in self.operators.operations for call in one.calls), key=lambda call: call.start)
        self.operators.operations.clear()
        stores = self._memory_stores(calls)
        for call in calls:
            if call.flops:
                work.seconds["products"] += call.seconds(self.device)
            elif nbytes := sum(size for number, size in (*call.reads, *call.writes) if number in stores):
                work.seconds["elementwise"] += self.device.seconds(0, nbytes, call.dtype)
        self._barriers.clear()
        return work

    def _memory_stores(self, calls: Sequence[RecordedLocalCall]) -> set[int]:
        """Return the numbers of the tensors' storages that a compiled program would write to memory and read back.

        Compiled programs fuse elementwise operators. So a store does not count that only elementwise operators make and use,
        without a product or collective between them.
        """
        barriers = sorted([*self._barriers, *(call.start for call in calls if call.flops)])
        stores, made_after = set[int](), dict[int, int]()
        for call in calls:
            after = bisect(barriers, call.start)
            for number, _ in call.writes:
                if number not in made_after and not call.flops:
                    made_after[number] = after
            for number, _ in (*call.reads, *call.writes):
                if call.flops or made_after.get(number) != after or self.holdings.tracked_storages[number].nbytes:
                    stores.add(number)
        return stores

    def log_position(self) -> int:
        """Return the number of entries in the memory log now, an index into :meth:`bytes_over_time`."""
        return len(self.holdings.log)

    def bytes_over_time(self) -> list[int]:
        """Return the bytes that are allocated at each position of the memory log."""
        before = sum(store.before for store in self.holdings.tracked_storages)
        return [*accumulate((more for _, _, more in self.holdings.log), initial=before)]
