"""A training step of one part of a model, run without data on one rank of a mesh: what it computes, sends and holds.

Three micro batches, of which the first gathers parameters and the last reduces their gradients, and an optimizer's step. What one
rank does costs the same whatever the number of ranks.
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

from ..base.tensor_tree import tensors
from ..base.user_frames import NOWHERE
from ..comm.events import Event, listening
from ..cost.link import collective_seconds, device_of
from ..debug.memory_tracker import Holdings
from ..debug.operators import LocalCall, Operators
from ..mesh.device_mesh import DeviceMesh
from ..parallel import MixedPrecisionPolicy, fully_shard
from ..placement import Shard
from .cluster import DIMS
from .decoder_parts import Block, End, Experts, Start, angles, local
from .model_sizes import Transformer

_SPREAD, _OTHERS = ("dp", "ep", "cp"), ("dp", "cp")  # over which parameters are spread, and those of experts
_HALF = torch.bfloat16
_MASTER = MixedPrecisionPolicy(param_dtype=_HALF, reduce_dtype=torch.float32)


Sums = defaultdict[str, float]


@dataclass(slots=True)
class Work:
    """What is done in a while.

    Attributes:
        seconds: of "products" and of what is "elementwise", and by mesh dim those of collectives.
        nbytes: mesh dim -> bytes received.
    """

    seconds: Sums = field(default_factory=lambda: Sums(float))
    nbytes: Sums = field(default_factory=lambda: Sums(float))

    def plus(self, other: Work, times: float = 1) -> Work:
        """This and, so many times, another."""
        made = Work(self.seconds.copy(), self.nbytes.copy())
        for mine, more in ((made.seconds, other.seconds), (made.nbytes, other.nbytes)):
            for kind, count in more.items():
                mine[kind] += times * count
        return made


@dataclass(frozen=True, slots=True)
class DryStep:
    """A step of a part, on one rank.

    Attributes:
        micro: forward and backward of a micro batch.
        once: what a step does once: parameters are gathered, gradients reduced, the optimizer runs.
        memory: kind -> bytes held between micro batches: parameters, gradients, optimizer.
        saved: bytes that a forward pass leaves for backward.
        most: bytes that are held beyond all of these, at most.
        boundary: bytes of what the next part is given.
    """

    micro: Work
    once: Work
    memory: dict[str, float]
    saved: float
    most: float
    boundary: float


def dry_step(part: str, model: Transformer, mesh: DeviceMesh, sequence: int, micro: int = 1, again: str = "nothing") -> DryStep:
    """A step of "start" (the embedding), "layer" or "end" (the head and the loss), with micro batches of so many sequences.

    Args:
        mesh: a dry run of dims :data:`DIMS`.
        again: what a layer's backward computes anew, of :data:`~dtensor.clusters.decoder_parts.AGAIN`.
    """
    with torch.device(mesh.device_type):
        module, given = _part(part, model, mesh, sequence, micro, again)
    for inner in module.modules():
        if isinstance(inner, Experts):
            # rows of matrices: a rank may have fewer experts than there are ranks to spread them over
            others = mesh[_OTHERS].flatten("others")
            fully_shard(inner, mesh=others, shard_placement_fn=lambda _: Shard(1), reshard_after_forward=False, mp_policy=_MASTER)
    fully_shard(module, mesh=mesh[_SPREAD].flatten("spread"), reshard_after_forward=False, mp_policy=_MASTER)
    optimizer = torch.optim.AdamW(module.parameters(), foreach=True)
    seen, ran, at = _Seen(mesh), [], [0]
    with seen.listening, seen.operators:
        for p in module.parameters():
            seen.holdings.record_operand(p)
        for last in (False, False, True):
            module.set_requires_gradient_sync(last)
            module.set_reshard_after_backward(last)
            made = module(*given)
            at.append(seen.moment())
            forward = seen.done()
            made.backward(torch.ones_like(made))
            boundary = made.numel() * made.element_size()
            del made
            for x in given:
                x.grad = None
            ran.append((forward, seen.done()))
            at.append(seen.moment())
        optimizer.step()
        at.append(seen.moment())
        stepped = seen.done()
    once = stepped.plus(ran[0][0]).plus(ran[1][0], -1).plus(ran[2][1]).plus(ran[1][1], -1)
    state = sum(x.numel() * x.element_size() for x in map(local, tensors(list(optimizer.state.values()))) if x.ndim)
    return _told(seen.held(), at, ran[1][0].plus(ran[1][1]), once, state, boundary)


def _told(held: Sequence[int], at: Sequence[int], micro: Work, once: Work, state: float, boundary: float) -> DryStep:
    """``at``: moments at the beginning, after each forward and backward pass, and after the optimizer's step."""
    gathered, first, forward = (held[moment] for moment in at[1:4])
    saved = forward - first
    memory = {"parameters": gathered - saved, "gradients": first + saved - gathered, "optimizer": state}
    most = max(held[at[2] : at[6]]) - forward
    return DryStep(micro, once, {kind: float(count) for kind, count in memory.items()}, saved, most, boundary)


# --- the parts ------------------------------------------------------------------------------------------------------------
def _part(part: str, model: Transformer, mesh: DeviceMesh, sequence: int, micro: int, again: str) -> tuple[Any, list[Tensor]]:
    """A part, and what it is given: what the one before it made, beside tokens or tables of positions."""
    tokens = torch.zeros(micro, sequence // mesh["cp"].size(), dtype=torch.int64)
    if part == "start":
        return Start(model, mesh), [tokens]
    made = torch.ones(micro, sequence // mesh["cp", "tp"].size(), model.hidden, dtype=_HALF, requires_grad=True)
    if part == "end":
        return End(model, mesh), [made, tokens]
    return Block(model, mesh, sequence, again), [made, *angles(tokens.shape[1], model.head_dim, _HALF)]


# --- what is seen ---------------------------------------------------------------------------------------------------------
class _Seen:
    """What is done while it listens, and what is held."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.device, self.holdings = device_of(mesh), Holdings()
        self._work, self.listening = Work(), listening(self._heard)
        self._barriers: list[int] = []
        self.operators = Operators(self.holdings, lambda: (NOWHERE, "", ""), lambda: True)

    def _heard(self, event: Event) -> None:
        mesh = event.mesh
        assert mesh is not None
        dim = "dp" if event.over in ("spread", "others") else DIMS[min(mesh.group_id(event.mesh_dims))]  # what reaches furthest
        self._barriers.append(time.perf_counter_ns())
        self._work.nbytes[dim] += event.bytes
        self._work.seconds[dim] += collective_seconds(mesh, event.mesh_dims, event.kind, event.bytes)

    def done(self) -> Work:
        """What was done since this was asked before."""
        done, self._work = self._work, Work()
        calls = sorted((call for one in self.operators.operations for call in one.calls), key=lambda call: call.start)
        self.operators.operations.clear()
        kept = self._kept(calls)
        for call in calls:
            if call.flops:
                done.seconds["products"] += call.seconds(self.device)
            elif nbytes := sum(size for number, size in (*call.reads, *call.writes) if number in kept):
                done.seconds["elementwise"] += self.device.seconds(0, nbytes, call.dtype)
        self._barriers.clear()
        return done

    def _kept(self, calls: Sequence[LocalCall]) -> set[int]:
        """The stores that are written to memory, and read from there: where programs are compiled, not what elementwise operators
        alone make and use, one after the other with no product or collective between them.
        """
        barriers = sorted([*self._barriers, *(call.start for call in calls if call.flops)])
        kept, made = set[int](), dict[int, int]()
        for call in calls:
            after = bisect(barriers, call.start)
            for number, _ in call.writes:
                if number not in made and not call.flops:
                    made[number] = after
            for number, _ in (*call.reads, *call.writes):
                if call.flops or made.get(number) != after or self.holdings.stores[number].nbytes:
                    kept.add(number)
        return kept

    def moment(self) -> int:
        """Now, in the log of what is held."""
        return len(self.holdings.log)

    def held(self) -> list[int]:
        """Bytes held at each moment."""
        before = sum(store.before for store in self.holdings.stores)
        return [*accumulate((more for _, _, more in self.holdings.log), initial=before)]
