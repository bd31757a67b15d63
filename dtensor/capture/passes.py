"""Steps of a tape made cheaper, with the same bits: no copies of what nobody needs any more, collectives looked up once.

A tape is one rank's own, so what is known of its local tensors (``facts``) may be used freely, as long as its collectives stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

import torch

from ..base.torch_internals import TensorBase
from .graph import ALL_REDUCE, Step, Tape, Var, is_row_major
from .optimize import renamed

Fact: TypeAlias = tuple[Any, ...]  # offset, shape, stride, dtype, lazily conjugated, lazily negated
_COPY, _CLONE = TensorBase.copy_, torch.clone


def without_copies(tape: Tape, facts: Mapping[Var, Fact], lasting: frozenset[int]) -> Tape:
    """A copy of memory that is never used again is that memory. ``lasting``: memory that is not the tape's own."""
    uses = _Uses(tape, lasting)
    same: dict[Var, Var] = {}
    steps = []
    for place, step in enumerate(tape.steps):
        pair = _copy(step)
        if pair is not None and facts.get(pair[0]) == facts.get(pair[1]) and uses.replaceable(place, *pair):
            made, source = pair
            same[made] = same.get(source, source)
        else:
            steps.append(step)
    for step in steps if same else ():
        step.args, step.kwargs = renamed(step.args, same), renamed(step.kwargs, same)
    return Tape(tape.inputs, steps, tuple(same.get(var, var) for var in tape.results), tape.constants)


def _copy(step: Step) -> tuple[Var, Var] | None:
    """The copy that a step makes, and what of."""
    if step.fn is _COPY and len(step.args) == 2 and not step.kwargs:
        made, source = step.args
    elif step.fn is _CLONE and len(step.args) == 1 and set(step.kwargs) <= {"memory_format"}:
        made, source = step.out, step.args[0]
    else:
        return None
    return (made, source) if isinstance(made, Var) and isinstance(source, Var) else None


def with_bound_collectives(tape: Tape, facts: Mapping[Var, Fact], lasting: frozenset[int]) -> Tape:
    """All-reductions whose group and algorithm are looked up once; in place where nobody needs what goes in."""
    uses = _Uses(tape, lasting)
    steps: list[Step] = []
    for place, step in enumerate(tape.steps):
        x = step.args[1] if step.fn is ALL_REDUCE and len(step.args) == 4 else None
        if isinstance(x, Var) and x in facts:
            comm, _, mesh_dims, op = step.args
            bound = comm.bind_all_reduce(mesh_dims, op, facts[x][3])
            taken = bound.taking is not None and is_row_major(facts[x]) and uses.last_of(place, x)
            writes = frozenset((x.storage,) if taken else ())
            step = dataclasses.replace(step, fn=bound.taking if taken else bound.run, args=(x,), writes=writes)
        steps.append(step)
    return Tape(tape.inputs, steps, tape.results, tape.constants)


class _Uses:
    """Where the memory of a tape is read and written."""

    def __init__(self, tape: Tape, lasting: frozenset[int]) -> None:
        self.steps = tape.steps
        self.fixed = lasting | {var.storage for var in tape.inputs} | {var.storage for var in tape.constants}
        self.results = [var.storage for var in tape.results]
        self.read: dict[int, list[int]] = {}
        self.written: dict[int, list[int]] = {}
        self.sites: set[int] = set()
        for place, step in enumerate(tape.steps):
            for var in step.inputs:
                self.read.setdefault(var.storage, []).append(place)
            for storage in step.writes:
                self.written.setdefault(storage, []).append(place)
            if step.site:
                self.sites |= {var.storage for var in step.inputs}

    def _own(self, var: Var) -> bool:
        """Whether a variable is memory that a step of the tape has made, and all that is known of it at first."""
        return var.index == var.storage and var.storage not in self.fixed

    def _after(self, place: int, found: Mapping[int, list[int]], storage: int) -> Iterator[int]:
        return (other for other in found.get(storage, ()) if other > place)

    def replaceable(self, place: int, made: Var, source: Var) -> bool:
        """Whether ``source`` can be what the step at ``place`` copies it to: from there on nobody uses both, or writes to one."""
        if not (self._own(made) and self._own(source)) or source.storage in self.results or made.storage in self.sites:
            return False
        if any(other < place for other in self.read.get(made.storage, ())) or source.storage in self.sites:
            return False
        writes = [*self.written.get(made.storage, ()), *self._after(place, self.written, source.storage)]
        return all(other == place for other in writes) and not any(self._after(place, self.read, source.storage))

    def last_of(self, place: int, var: Var) -> bool:
        """Whether the site at ``place`` is the last that sees the memory of ``var``, and the only site."""
        seen = self.read.get(var.storage, ())
        sites = [other for other in seen if self.steps[other].site]
        ours = var.storage not in self.fixed and var.storage not in self.results
        return ours and sites == [place] and max(seen) == place
