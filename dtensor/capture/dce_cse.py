"""The tape made shorter: steps without effect removed, pure steps done once.

Only local work is touched. What a rank does with a collective's result is its own affair (one keeps a value, another makes zeros
of its shape), so no rank may decide from its tape to leave a collective out.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

from .tape import Ranks, Step, Tape, Var, substituted


def optimized(tape: Tape, lasting: frozenset[int]) -> Tape:
    """The same effects and results. ``lasting``: memory that is seen after the tape has run (of inputs and results)."""
    return without_unused(_done_once(tape, lasting), lasting)


def without_unused(tape: Tape, lasting: frozenset[int]) -> Tape:
    """Steps whose results nobody reads and which write to nothing that is read later."""
    needed = set(tape.results)
    read = {var.storage for var in tape.results} | set(lasting)  # memory whose content matters from here on
    kept: list[Step] = []
    for step in reversed(tape.steps):
        if step.keep or any(var in needed for var in step.outputs) or not step.writes.isdisjoint(read):
            kept.append(step)
            for var in step.inputs:
                needed.add(var)
                read.add(var.storage)
    kept.reverse()
    constants = {var: value for var, value in tape.constants.items() if var in needed}
    return Tape(tuple(var for var in tape.inputs if var in needed), kept, tape.results, constants)


def _done_once(tape: Tape, lasting: frozenset[int]) -> Tape:
    """Of two equal steps on the same values the second gives what the first gave; not if it is written to or outlives the "
    "tape."""
    written = {storage for step in tape.steps for storage in step.writes}
    if not written.isdisjoint(lasting):  # two inputs may share their memory at another call
        written |= lasting
    fixed = written | lasting | {var.storage for var in tape.results}
    found: dict[Hashable, Step] = {}
    same: dict[Var, Var] = {}
    steps = []
    for step in tape.steps:
        args, kwargs = renamed(step.args, same), renamed(step.kwargs, same)
        step = Step(step.fn, args, kwargs, step.out, step.writes, step.keep, step.site, step.within)
        key = _key(step, fixed, written)
        first = None if key is None else found.setdefault(key, step)
        if first is not None and first is not step:
            same.update(zip(step.outputs, first.outputs, strict=True))
        else:
            steps.append(step)
    return Tape(tape.inputs, steps, tape.results, tape.constants)


def _key(step: Step, fixed: set[int] | frozenset[int], written: set[int]) -> Hashable:
    """What two steps must have in common; None for those that stay."""
    if step.keep or step.site or step.writes or any(var.storage in written for var in step.inputs):
        return None
    if any(var.storage in fixed for var in step.outputs):
        return None
    try:
        key = (id(step.fn), _hashable(step.args), _hashable(step.kwargs))
        hash(key)
    except TypeError:
        return None
    return key


def _hashable(value: Any) -> Hashable:
    """With types, for 1 == 1.0 == True."""
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_hashable, value))
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in value.items())
    if isinstance(value, (Var, Ranks)):
        return value
    return type(value), repr(value) if isinstance(value, float) else value


def renamed(value: Any, same: dict[Var, Var]) -> Any:
    """``value`` with other variables for some."""

    def one(x: Any) -> Any:
        if isinstance(x, Ranks):
            return Ranks(tuple(same.get(var, var) for var in x.items))
        return same.get(x, x) if isinstance(x, Var) else x

    return substituted(value, one) if same else value
