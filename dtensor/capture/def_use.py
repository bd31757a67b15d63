"""Where the memory of steps is made, written and used: what may move, be joined or left out follows from it."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence

from .tape import Step, Var


class Uses:
    """By memory, the places of the steps that make or write it, and of those that use it in any way.

    Args:
        lasting: memory that the steps are given, of which at another call several may be one.
    """

    def __init__(self, steps: Sequence[Step], lasting: frozenset[int]) -> None:
        self.steps, self.lasting = steps, lasting
        self.made: dict[Var, int] = {}
        self.written: dict[int, list[int]] = {}
        self.used: dict[int, list[int]] = {}
        self.late: dict[int, int] = {}  # what sites bring, and is made of that alone: until when it may not be there yet
        known: set[Var] = set()
        for place, step in enumerate(steps):
            for var in step.inputs:
                known.add(var)
            again = {var.storage for var in step.outputs if var in known}  # by an operation in place, or the wait for one
            for var in step.outputs:
                if var not in known:
                    known.add(var)
                    self.made[var] = place
            for storage in self._writes(step) | again:
                self.written.setdefault(storage, []).append(place)
            for storage in self._touches(step) | again:
                self.used.setdefault(storage, []).append(place)

    def _writes(self, step: Step) -> frozenset[int]:
        return step.writes if step.writes.isdisjoint(self.lasting) else step.writes | self.lasting

    def _touches(self, step: Step) -> set[int]:
        return {var.storage for var in step.inputs} | self._writes(step)

    def sent(self, storage: int) -> bool:
        """Whether a site is given some of it."""
        return any(self.steps[place].site for place in self.used.get(storage, ()))

    def after(self, place: int, memory: set[int]) -> tuple[list[int], set[int], int]:
        """The steps after ``place`` that work on this memory alone, which is new there, and what they make; the memory that
        they know; and the place of the first step that uses some of it otherwise."""
        tail: list[int] = []
        coming = [other for storage in memory for other in self.used.get(storage, ()) if other > place]
        heapq.heapify(coming)
        while coming:
            if (at := heapq.heappop(coming)) in tail[-1:]:
                continue
            step = self.steps[at]
            if step.keep or step.site or not self._touches(step) <= memory:
                return tail, memory, at
            tail.append(at)
            for storage in {var.storage for var in step.outputs} - memory:
                memory.add(storage)
                for other in self.used.get(storage, ()):
                    if other > at:
                        heapq.heappush(coming, other)
        return tail, memory, len(self.steps)

    def ready(self, place: int) -> tuple[int, list[int]]:
        """The last step that the site at ``place`` needs; and those that may come along, as they make views of what it sends."""
        sent = list(self.steps[place].inputs)
        views = [at for var in sent for at in self.views(var)]
        moved = {var for at in views for var in (*self.steps[at].outputs, *self.steps[at].inputs)} | set(sent)
        made = [self.made[var] for var in moved if var in self.made and self.made[var] not in views]
        writes = [at for storage in {var.storage for var in sent} for at in self.written.get(storage, ()) if at < place]
        writes += [at for storage in self.steps[place].writes for at in self.used.get(storage, ()) if at < place]
        brought = [self.late[var.storage] - 1 for var in moved if var.storage in self.late]
        return max([*made, *writes, *brought], default=-1), views

    def end(self, issue: int, wait: int) -> int:
        """The first step that uses what a site brings, or writes to what it sends."""
        brought = {var.storage for var in self.steps[wait].outputs}
        used = (place for storage in brought for place in self.used.get(storage, ()) if place > wait)
        return min(self.overwritten(issue, wait), min(used, default=len(self.steps)))

    def overwritten(self, issue: int, wait: int) -> int:
        """The first step that writes to what a site sends, but for the wait for it."""
        sent = {var.storage for var in self.steps[issue].inputs}
        written = (place for storage in sent for place in self.written.get(storage, ()) if place > issue and place != wait)
        return min(written, default=len(self.steps))

    def views(self, var: Var) -> Iterator[int]:
        """The steps that make ``var`` of memory that is there already, last one first."""
        place = self.made.get(var)
        while place is not None:
            step = self.steps[place]
            sources = list(step.inputs)
            if step.keep or step.site or step.writes or len(sources) != 1 or sources[0].storage != var.storage:
                return
            yield place
            var = sources[0]
            place = self.made.get(var)
