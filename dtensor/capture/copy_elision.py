"""Steps of a tape made cheaper, with the same bits: no copies of what nobody needs any more, collectives looked up once.

A tape is one rank's own, so what is known of its local tensors (``facts``) may be used freely, as long as its collectives stay.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

import torch

from ..base.torch_internals import TensorBase
from .dce_cse import renamed
from .def_use import Uses
from .tape import ALL_REDUCE, Step, Tape, Var, is_row_major

Fact: TypeAlias = tuple[Any, ...]  # offset, shape, stride, dtype, lazily conjugated, lazily negated
_COPY, _CLONE = TensorBase.copy_, torch.clone


def without_copies(tape: Tape, facts: Mapping[Var, Fact], lasting: frozenset[int]) -> Tape:
    """A copy of memory that is never used again is that memory. ``lasting``: memory that is not the tape's own."""
    uses = _Own(tape, lasting)
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
    uses = _Own(tape, lasting)
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


class _Own(Uses):
    """What of a tape's memory is its own, and who uses it."""

    def __init__(self, tape: Tape, lasting: frozenset[int]) -> None:
        super().__init__(tape.steps, lasting)
        self._fixed = lasting | {var.storage for var in (*tape.inputs, *tape.constants)}
        self._results = {var.storage for var in tape.results}

    def _whole(self, var: Var) -> bool:
        """Whether a variable is memory that a step of the tape has made, and all that is known of it at first."""
        return var.index == var.storage and var.storage not in self._fixed

    def replaceable(self, place: int, made: Var, source: Var) -> bool:
        """Whether ``source`` can be what the step at ``place`` copies it to: from there on nobody uses both, or writes to one."""
        if not (self._whole(made) and self._whole(source)) or source.storage in self._results:
            return False
        if self.sent(made.storage) or self.sent(source.storage) or any(at < place for at in self.used.get(made.storage, ())):
            return False
        return max(self.used[source.storage]) == place and all(at == place for at in self.written.get(made.storage, ()))

    def last_of(self, place: int, var: Var) -> bool:
        """Whether the site at ``place`` is the last that sees the memory of ``var``, and the only site."""
        seen = self.used.get(var.storage, ())
        sites = [other for other in seen if self.steps[other].site]
        ours = var.storage not in self._fixed and var.storage not in self._results
        return ours and sites == [place] and max(seen) == place
