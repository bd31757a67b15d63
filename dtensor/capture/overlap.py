"""The order of a tape chosen so that collectives run beside computations: issued as soon as what they send is there, waited for
at first use.

Only those move of which nobody waits for this rank's ``wait()`` (``at_once``), and their order among all sites stays, so ranks
need not agree. What is under way takes memory for what is sent and what is brought: no more than a bound of it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from ..comm import Pending
from .def_use import Uses
from .tape import Step, Var


def overlapped(steps: Sequence[Step], facts: Mapping[Var, Any], lasting: frozenset[int], most: int) -> list[Step]:
    """``steps`` in another order.

    Args:
        lasting: memory that the steps are given, of which at another call several may be one.
        most: bytes that collectives under way may send and bring.
    """
    if not any(map(_at_once, steps)):
        return list(steps)
    return _waited_for_late(_issued_early(steps, facts, lasting, most), facts, lasting, most)


def _at_once(step: Step) -> bool:
    return step.site and getattr(step.fn, "at_once", False)


def _waits(steps: Sequence[Step]) -> dict[Any, int]:
    """By what is under way, the place of the wait for it."""
    issued = {step.out for step in steps if _at_once(step)}
    found = ((step.args[0], place) for place, step in enumerate(steps) if step.fn is Pending.wait)
    return {pending: place for pending, place in found if pending in issued}


def _nbytes(issue: Step, wait: Step, facts: Mapping[Var, Any]) -> int:
    """Of what is sent and what is brought."""
    known = (facts[var] for var in {*issue.inputs, *wait.outputs} if var in facts)
    return sum(prod(shape) * dtype.itemsize for _, shape, _, dtype, *_ in known)


def _issued_early(steps: Sequence[Step], facts: Mapping[Var, Any], lasting: frozenset[int], most: int) -> list[Step]:
    uses, waits = Uses(steps, lasting), _waits(steps)
    keys = [(place, 1, place) for place in range(len(steps))]
    ahead: list[tuple[int, int]] = []  # what is issued before its place: that, and its bytes
    last = -1  # where the site before is
    for place, step in enumerate(steps):
        if not step.site or (step.fn is Pending.wait and step.args[0] in waits):
            continue
        at = place
        if step.out in waits:
            nbytes = _nbytes(step, steps[waits[step.out]], facts)
            ready, views = uses.ready(place)
            at = max(ready, last)
            ahead = [(until, size) for until, size in ahead if until > at]
            while ahead and nbytes + sum(size for _, size in ahead) > most:
                at = max(at, min(until for until, _ in ahead))
                ahead = [(until, size) for until, size in ahead if until > at]
            if at < place - 1 and nbytes <= most:
                ahead.append((place, nbytes))
                for moved in (place, *(view for view in views if view > at)):
                    keys[moved] = min(keys[moved], (at, 2, moved))
            else:
                at = place
        last = at
    return [step for _, step in sorted(zip(keys, steps, strict=True), key=lambda pair: pair[0])]


def _waited_for_late(steps: Sequence[Step], facts: Mapping[Var, Any], lasting: frozenset[int], most: int) -> list[Step]:
    uses, waits = Uses(steps, lasting), _waits(steps)
    under_way: dict[Step, tuple[int, int]] = {}  # the wait for each: until when it may come, bytes
    made: list[Step] = []
    for place, step in enumerate(steps):
        if step.out in waits and _at_once(step):
            nbytes = _nbytes(step, steps[waits[step.out]], facts)
            while under_way and nbytes + sum(size for _, size in under_way.values()) > most:
                made.append(oldest := next(iter(under_way)))
                del under_way[oldest]
        elif step.fn is Pending.wait and step.args[0] in waits:
            continue
        due = [wait for wait, (until, _) in under_way.items() if until <= place]
        for wait in due:
            made.append(wait)
            del under_way[wait]
        made.append(step)
        if step.out in waits and _at_once(step):
            wait = steps[waits[step.out]]
            under_way[wait] = uses.end(place, waits[step.out]), nbytes
    return [*made, *under_way]
