"""Passes over a tape: dead-code elimination, common-subexpression elimination, copy elision and binding of collectives.

A tape belongs to one rank, so a pass may use all that the recording knows of its local tensors. Only local work is removed.
Ranks may use the result of a collective differently, so no rank may decide from its own tape to drop the collective.

In all passes ``external`` is a set of storage numbers: memory that exists outside of the tape (inputs and results).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping
from typing import Any

import torch

from ..base.torch_internals import TensorBase
from .tape import ALL_REDUCE, DefUse, LocalMetadata, PerRankVars, Step, Tape, Var, map_leaves

_COPY, _CLONE = TensorBase.copy_, torch.clone


def optimize_tape(tape: Tape, metadata: Mapping[Var, LocalMetadata], external: frozenset[int]) -> Tape:
    """Return a tape with the same effects and bit-identical results, and fewer steps."""
    tape = eliminate_dead_code(eliminate_common_subexpressions(tape, external), external)
    tape = eliminate_dead_code(elide_copies(tape, metadata, external), external)
    return bind_collectives(tape, metadata, external)


def eliminate_dead_code(tape: Tape, external: frozenset[int]) -> Tape:
    """Remove the steps with unused results that write to no memory that is read later."""
    needed = set(tape.results)
    read = {var.storage for var in tape.results} | set(external)  # memory with contents that later steps or the caller read
    live: list[Step] = []
    for step in reversed(tape.steps):
        if step.required or any(var in needed for var in step.outputs) or not step.writes.isdisjoint(read):
            live.append(step)
            for var in step.inputs:
                needed.add(var)
                read.add(var.storage)
    live.reverse()
    constants = {var: value for var, value in tape.constants.items() if var in needed}
    return Tape(tuple(var for var in tape.inputs if var in needed), live, tape.results, constants)


def eliminate_common_subexpressions(tape: Tape, external: frozenset[int]) -> Tape:
    """Remove the second of two equal steps on equal values, unless its result is written to or outlives the tape."""
    written = {storage for step in tape.steps for storage in step.writes}
    if not written.isdisjoint(external):  # two inputs may share their memory at another call
        written |= external
    fixed = written | external | {var.storage for var in tape.results}
    first_steps: dict[Hashable, Step] = {}
    replacements: dict[Var, Var] = {}
    steps = []
    for step in tape.steps:
        args, kwargs = rename_vars(step.args, replacements), rename_vars(step.kwargs, replacements)
        step = Step(step.fn, args, kwargs, step.out, step.writes, step.required, step.is_library_op, step.operator)
        key = _expression_key(step, fixed, written)
        first = None if key is None else first_steps.setdefault(key, step)
        if first is not None and first is not step:
            replacements.update(zip(step.outputs, first.outputs, strict=True))
        else:
            steps.append(step)
    return Tape(tape.inputs, steps, tape.results, tape.constants)


def _expression_key(step: Step, fixed: set[int] | frozenset[int], written: set[int]) -> Hashable:
    """Return a key that is equal for equal expressions; None for a step that must stay."""
    if step.required or step.is_library_op or step.writes or any(var.storage in written for var in step.inputs):
        return None
    if any(var.storage in fixed for var in step.outputs):
        return None
    try:
        key = (id(step.fn), _hashable_key(step.args), _hashable_key(step.kwargs))
        hash(key)
    except TypeError:
        return None
    return key


def _hashable_key(value: Any) -> Hashable:
    """Return a key of an argument that contains the types, because ``1 == 1.0 == True``."""
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_hashable_key, value))
    if isinstance(value, dict):
        return tuple((key, _hashable_key(item)) for key, item in value.items())
    if isinstance(value, (Var, PerRankVars)):
        return value
    return type(value), repr(value) if isinstance(value, float) else value


def rename_vars(value: Any, replacements: Mapping[Var, Var]) -> Any:
    """Return a nested value with some variables replaced."""

    def rename_leaf(x: Any) -> Any:
        if isinstance(x, PerRankVars):
            return PerRankVars(tuple(replacements.get(var, var) for var in x.items))
        return replacements.get(x, x) if isinstance(x, Var) else x

    return map_leaves(value, rename_leaf) if replacements else value


def elide_copies(tape: Tape, metadata: Mapping[Var, LocalMetadata], external: frozenset[int]) -> Tape:
    """Replace a copy by its source, if the source is never used again."""
    memory = _TapeMemory(tape, external)
    replacements: dict[Var, Var] = {}
    steps = []
    for place, step in enumerate(tape.steps):
        pair = _copy_and_source(step)
        if pair is not None and metadata.get(pair[0]) == metadata.get(pair[1]) and memory.can_replace(place, *pair):
            copy, source = pair
            replacements[copy] = replacements.get(source, source)
        else:
            steps.append(step)
    for step in steps if replacements else ():
        step.args, step.kwargs = rename_vars(step.args, replacements), rename_vars(step.kwargs, replacements)
    return Tape(tape.inputs, steps, tuple(replacements.get(var, var) for var in tape.results), tape.constants)


def _copy_and_source(step: Step) -> tuple[Var, Var] | None:
    """Return the copy that a step makes and its source; None if the step is no copy."""
    if step.fn is _COPY and len(step.args) == 2 and not step.kwargs:
        copy, source = step.args
    elif step.fn is _CLONE and len(step.args) == 1 and set(step.kwargs) <= {"memory_format"}:
        copy, source = step.out, step.args[0]
    else:
        return None
    return (copy, source) if isinstance(copy, Var) and isinstance(source, Var) else None


def bind_collectives(tape: Tape, metadata: Mapping[Var, LocalMetadata], external: frozenset[int]) -> Tape:
    """Bind each all-reduce to its group and algorithm. It runs in place if nothing uses its input afterwards."""
    memory = _TapeMemory(tape, external)
    steps: list[Step] = []
    for place, step in enumerate(tape.steps):
        x = step.args[1] if step.fn is ALL_REDUCE and len(step.args) == 4 else None
        if isinstance(x, Var) and x in metadata:
            comm, _, mesh_dims, op = step.args
            bound = comm.bind_all_reduce(mesh_dims, op, metadata[x].dtype)
            in_place = bound.taking is not None and metadata[x].is_row_major and memory.is_only_sent_at(place, x)
            writes = frozenset((x.storage,) if in_place else ())
            step = dataclasses.replace(step, fn=bound.taking if in_place else bound.run, args=(x,), writes=writes)
        steps.append(step)
    return Tape(tape.inputs, steps, tape.results, tape.constants)


class _TapeMemory(DefUse):
    """Def-use chains that also know which memory the tape itself allocates."""

    def __init__(self, tape: Tape, external: frozenset[int]) -> None:
        super().__init__(tape.steps, external)
        self._fixed = external | {var.storage for var in (*tape.inputs, *tape.constants)}
        self._results = {var.storage for var in tape.results}

    def _is_allocation(self, var: Var) -> bool:
        """Return True if a step of the tape allocates this memory, and ``var`` is the first variable of it."""
        return var.index == var.storage and var.storage not in self._fixed

    def can_replace(self, place: int, copy: Var, source: Var) -> bool:
        """Return True if ``source`` can replace the copy made at ``place``: no later step uses both or writes to one of them."""
        if not (self._is_allocation(copy) and self._is_allocation(source)) or source.storage in self._results:
            return False
        if self.is_sent(copy.storage) or self.is_sent(source.storage):
            return False
        if any(at < place for at in self.use_places.get(copy.storage, ())):
            return False
        return max(self.use_places[source.storage]) == place and all(
            at == place for at in self.write_places.get(copy.storage, ())
        )

    def is_only_sent_at(self, place: int, var: Var) -> bool:
        """Return True if the step at ``place`` is the last use of this memory, and the only library operation on it."""
        used = self.use_places.get(var.storage, ())
        library_ops = [other for other in used if self.steps[other].is_library_op]
        is_own = var.storage not in self._fixed and var.storage not in self._results
        return is_own and library_ops == [place] and max(used) == place
