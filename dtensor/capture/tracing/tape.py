"""Tape: the recorded operations on local tensors, in order, and the def-use chains of the memory that they touch."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from ...base.memory_order import contiguous_stride
from ...comm import Communicator

ALL_REDUCE: Any = getattr(Communicator.all_reduce, "__wrapped__")  # noqa: B009  the function that a recorded step has


@dataclass(frozen=True, slots=True)
class Var:
    """A variable of the tape: a local tensor, a float or a pending collective.

    ``storage`` numbers the memory. Variables that share memory have the same number.
    """

    index: int
    storage: int


@dataclass(frozen=True, slots=True)
class PerRankVars:
    """The variables of a ``PerRank``: one for each rank of an in-process mesh."""

    items: tuple[Var, ...]


class LocalMetadata(NamedTuple):
    """The metadata of a local tensor at recording time; ``is_conj`` and ``is_neg`` are torch's lazy conjugation and negation."""

    offset: int | torch.SymInt
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    is_conj: bool
    is_neg: bool

    @property
    def is_row_major(self) -> bool:
        """Return True if the tensor starts its storage and is contiguous, as the outputs of joined collectives are."""
        return not (self.offset or self.is_conj or self.is_neg) and all(
            size == 1 or own == step
            for size, own, step in zip(self.shape, self.stride, contiguous_stride(tuple(self.shape)), strict=True)
        )


@dataclass(slots=True, eq=False)
class Step:
    """A recorded call on local tensors.

    Attributes:
        fn: a torch function, an overload, or a function of the library that is recorded as one step.
        args, kwargs: the arguments, with :class:`Var` and :class:`PerRankVars` in place of tensors.
        out: the result, in the same form.
        writes: storage numbers of the memory that the step writes to.
        required: the step runs at each replay, in this order, even if its results are unused. Each rank optimizes its own tape.
            So a collective must stay on all ranks, although one rank may not need its result.
        is_library_op: ``fn`` is a function of the library: a collective or the generation of a random block.
        operator: the DTensor operator that ran the step, "" for an operation on plain tensors.
        stores_grad: autograd ran the step to store a gradient. It copies only if other code (a debugger) refers to the tensor.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    out: Any
    writes: frozenset[int] = frozenset()
    required: bool = False
    is_library_op: bool = False
    operator: str = ""
    stores_grad: bool = False

    @property
    def inputs(self) -> Iterator[Var]:
        yield from iter_vars(self.args)
        yield from iter_vars(self.kwargs)

    @property
    def outputs(self) -> Iterator[Var]:
        yield from iter_vars(self.out)


@dataclass(slots=True, eq=False)
class Tape:
    """Steps with their input variables and their result variables; ``constants`` are tensors made of Python numbers."""

    inputs: tuple[Var, ...]
    steps: list[Step]
    results: tuple[Var, ...]
    constants: dict[Var, Any] = field(default_factory=dict)


def iter_vars(value: Any) -> Iterator[Var]:
    """Yield the variables in a nested argument or output of a step, in order."""
    kind = type(value)
    if kind is Var:
        yield value
    elif kind is PerRankVars:
        yield from value.items
    elif kind is tuple or kind is list or isinstance(value, (tuple, list)):
        for item in value:
            yield from iter_vars(item)
    elif kind is dict:
        for item in value.values():
            yield from iter_vars(item)
    elif kind is slice:
        yield from iter_vars((value.start, value.stop, value.step))


def map_step_values(value: Any, fn: Callable[[Any], Any]) -> Any:
    """Return a nested value with ``fn(x)`` for each ``x`` in it that is no list, tuple, dict or slice."""
    if isinstance(value, (list, tuple)):
        items = [map_step_values(item, fn) for item in value]
        return items if isinstance(value, list) else type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, dict):
        return {key: map_step_values(item, fn) for key, item in value.items()}
    if isinstance(value, slice):
        return slice(*[map_step_values(part, fn) for part in (value.start, value.stop, value.step)])
    return fn(value)


class DefUse:
    """Def-use chains of the steps of a tape. A *place* is the index of a step.

    Args:
        steps: the steps of a tape.
        external: storage numbers of memory that the tape gets. At another call, several of them may be one memory.

    Attributes:
        defined_at: for each variable, the place of the step that makes it.
        write_places: for each storage, the places of the steps that make or write it.
        use_places: for each storage, the places of the steps that use it in any way.
        available_by: for a storage that a collective delivers, or that is computed from this alone: the place at which it must be
            available. Before, it may be pending.
    """

    def __init__(self, steps: Sequence[Step], external: frozenset[int]) -> None:
        self.steps, self.external = steps, external
        self.defined_at: dict[Var, int] = {}
        self.write_places: dict[int, list[int]] = {}
        self.use_places: dict[int, list[int]] = {}
        self.available_by: dict[int, int] = {}
        known: set[Var] = set()
        for place, step in enumerate(steps):
            known.update(step.inputs)
            rewritten = {var.storage for var in step.outputs if var in known}  # by an in-place operation, or the wait for one
            for var in step.outputs:
                if var not in known:
                    known.add(var)
                    self.defined_at[var] = place
            for storage in self._written_storages(step) | rewritten:
                self.write_places.setdefault(storage, []).append(place)
            for storage in self._touched_storages(step) | rewritten:
                self.use_places.setdefault(storage, []).append(place)

    def _written_storages(self, step: Step) -> frozenset[int]:
        return step.writes if step.writes.isdisjoint(self.external) else step.writes | self.external

    def _touched_storages(self, step: Step) -> set[int]:
        return {var.storage for var in step.inputs} | self._written_storages(step)

    def is_sent(self, storage: int) -> bool:
        """Return True if a library operation, such as a collective, takes some of this memory."""
        return any(self.steps[place].is_library_op for place in self.use_places.get(storage, ()))

    def find_tail(self, place: int, memory: set[int]) -> tuple[list[int], set[int], int]:
        """Return ``(tail, memory, needed_at)``: the steps after ``place`` that use only memory that is new there.

        ``tail``: places of the steps after ``place`` that use only this memory and what they make of it. ``memory``: the given
        storages and the storages that the tail makes. ``needed_at``: the place of the first step that uses the memory otherwise.
        """
        tail: list[int] = []
        following = [other for storage in memory for other in self.use_places.get(storage, ()) if other > place]
        heapq.heapify(following)
        while following:
            if (at := heapq.heappop(following)) in tail[-1:]:
                continue
            step = self.steps[at]
            if step.required or step.is_library_op or not self._touched_storages(step) <= memory:
                return tail, memory, at
            tail.append(at)
            for storage in {var.storage for var in step.outputs} - memory:
                memory.add(storage)
                for other in self.use_places.get(storage, ()):
                    if other > at:
                        heapq.heappush(following, other)
        return tail, memory, len(self.steps)

    def find_ready(self, place: int) -> tuple[int, list[int]]:
        """Return ``(ready, views)``: the last step that the library operation at ``place`` needs, and views that move with it.

        ``ready``: the place of the last step that the operation needs, -1 for none. ``views``: the places of the steps that make
        views of the memory that it sends. They can move together with the operation.
        """
        sent = list(self.steps[place].inputs)
        views = [at for var in sent for at in self.view_places(var)]
        moved = {var for at in views for var in (*self.steps[at].outputs, *self.steps[at].inputs)} | set(sent)
        made = [self.defined_at[var] for var in moved if var in self.defined_at and self.defined_at[var] not in views]
        writes = [at for storage in {var.storage for var in sent} for at in self.write_places.get(storage, ()) if at < place]
        writes += [at for storage in self.steps[place].writes for at in self.use_places.get(storage, ()) if at < place]
        delivered = [self.available_by[var.storage] - 1 for var in moved if var.storage in self.available_by]
        return max([*made, *writes, *delivered], default=-1), views

    def find_first_use(self, issue: int, wait: int) -> int:
        """Return the place of the first step that uses a collective's result, or writes to its input."""
        delivered = {var.storage for var in self.steps[wait].outputs}
        used = (place for storage in delivered for place in self.use_places.get(storage, ()) if place > wait)
        return min(self.find_overwrite(issue, wait), min(used, default=len(self.steps)))

    def find_overwrite(self, issue: int, wait: int) -> int:
        """Return the place of the first step after ``issue``, except ``wait``, that writes to the collective's input."""
        sent = {var.storage for var in self.steps[issue].inputs}
        written = (place for storage in sent for place in self.write_places.get(storage, ()) if place > issue and place != wait)
        return min(written, default=len(self.steps))

    def view_places(self, var: Var) -> Iterator[int]:
        """Yield the places of the view operations that make ``var``, the last one first."""
        place = self.defined_at.get(var)
        while place is not None:
            step = self.steps[place]
            sources = list(step.inputs)
            if step.required or step.is_library_op or step.writes or len(sources) != 1 or sources[0].storage != var.storage:
                return
            yield place
            var = sources[0]
            place = self.defined_at.get(var)
