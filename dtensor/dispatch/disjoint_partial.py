"""Tensors in terms whose rows are parted: the fact stands on the tensor, beside its layout, and plans are made with it.

A product of groups says which group each row belongs to, and its plan how the groups are cut: that is an :class:`Ownership`. What
follows from it row by row has the same one. It holds for the tensor as it was made: a write, to it or to what says whose the rows
are, ends it, and where nobody counts writes there is none. All of this follows from the program, so it is the same on all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from ..base.recorder_hooks import current, recorded_by, weakly
from ..base.torch_internals import tree_leaves
from ..comm import communicator_of
from ..layout.layout import Layout
from ..layout.splits import Split
from ..propagation.disjoint_partial_strategies import SUM
from ..propagation.make_call import Slot
from ..propagation.op_schema import Form, Operator
from ..propagation.propagate import Plan
from ..rules.disjoint_partial import Known, Left, Parted
from . import wrap
from .cached_redistribute import NESTED, counted_versions, sums_of
from .frame import Args, Frame, Keywords, Step
from .local_indices import NAMES, names_of
from .preferred_layout import grown, wanted_of
from .redistribution_cache import FORMS, WANTED

_FACT = "_parted"  # the attribute of a tensor whose rows are parted
_OWNERSHIPS = "_ownerships"  # of one that says whose rows are whose
_PASSED = "_passed"  # of one whose terms an operator has passed on


class Passed(frozenset[int]):
    """Mesh dims over which an operator has left terms of a tensor's terms."""

    __slots__ = ()


class OfThisRun:
    """What neither copies nor files take along of a plain tensor that has it."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return set, ()


class Ownerships(OfThisRun, dict[Any, "Ownership"]):
    """Of products of groups, by how these are cut and which rows there are."""

    __slots__ = ()


class Ownership(OfThisRun):
    """Whose the rows of a dim are: those of a group belong to who holds the group.

    Attributes:
        ends: where each group ends, a tensor that is the same on all ranks; ``versions``: of it.
        split: how the groups are cut.
        layout, dim: of a tensor with these rows; other mesh dims may cut them.
        recorder: who recorded it, weakly. A recording may use only what is in it.
    """

    __slots__ = ("_own", "dim", "ends", "layout", "recorder", "split", "versions")

    def __init__(self, ends: Any, split: Split, layout: Layout, dim: int) -> None:
        self.ends, self.split, self.layout, self.dim = ends, split, layout, dim
        self.versions, self.recorder = counted_versions(ends), weakly(current())
        self._own: Any = None

    def holds(self) -> bool:
        """Whether it may be relied on, here and now."""
        return (
            recorded_by(self.recorder, current()) and self.versions is not None and self.versions == counted_versions(self.ends)
        )

    def others(self) -> Any:
        """On each rank whether a row of its block is another's."""
        if self._own is None:
            self._own = communicator_of(self.layout.mesh).map(self._others, self.ends._local)
        return self._own

    def _others(self, member: int, ends: torch.Tensor) -> torch.Tensor:
        """Rows behind the last group are its owner's: zeros, like all that is in no group."""
        coordinate = self.layout.mesh.coordinates[member]
        start, size = self.layout.local_offset(coordinate)[self.dim], self.layout.local_shape(coordinate)[self.dim]
        rows = torch.arange(start, start + size, device=ends.device)
        leaf = 0
        for mesh_dim in self.split.mesh_dims:
            leaf = leaf * self.layout.mesh.shape[mesh_dim] + coordinate[mesh_dim]
        first, count = self.split.offsets[leaf], self.split.sizes[leaf]
        if not count:
            return torch.ones_like(rows, dtype=torch.bool)
        before = rows < ends[first - 1] if first else torch.zeros_like(rows, dtype=torch.bool)
        return before if first + count == ends.shape[0] else before | (rows >= ends[first + count - 1])


class Fact:
    """That the rows of a tensor along ``dim`` are parted, as long as its versions are these.

    Attributes:
        being_written: they are those before the write that left the rows so, which torch counts when it has ended.
    """

    __slots__ = ("being_written", "dim", "ownership", "versions")

    def __init__(self, ownership: Ownership, dim: int, versions: Any, being_written: bool = False) -> None:
        self.ownership, self.dim, self.versions, self.being_written = ownership, dim, versions, being_written

    def holds(self, versions: tuple[int, ...] | None) -> bool:
        """Whether it does for a tensor of these versions. One write more, when it is asked for the first time, is its own."""
        if self.being_written and self.versions is not None and versions is not None:
            more = [now - before for now, before in zip(versions, self.versions, strict=False)]
            alike = len(versions) == len(self.versions) and sorted(more) == [0] * (len(more) - 1) + [1] and not more[0]
            self.versions, self.being_written = versions if alike else None, False
        return self.versions is not None and self.versions == versions and self.ownership.holds()


def fact_of(x: Any) -> Fact | None:
    """What is known of the rows of a tensor now."""
    found = x.__dict__.get(_FACT) if type(x) is wrap.TENSOR else None
    return found if type(found) is Fact and found.holds(counted_versions(x)) else None


def facts_of_call(operator: Operator, bound: Mapping[str, Any]) -> dict[Slot, Known]:
    """What is known of the operands of a call."""
    found: dict[Slot, Known] = {}
    numbers: dict[int, int] = {}
    for name in filter(operator.tensors.__contains__, operator.names):
        value = bound.get(name)
        listed = isinstance(value, (list, tuple))
        for index, x in enumerate(value) if listed else ((None, value),):  # type: ignore[arg-type]
            settles = type(x) is wrap.TENSOR and not operator.is_view  # which shows the memory as it is
            parted, sums = None, sums_of(x) if settles else frozenset()
            passed = x.__dict__.get(_PASSED) if settles else None
            if (fact := fact_of(x)) is not None:
                own = fact.ownership
                source = next((other for other, y in bound.items() if y is own.ends), None)
                parted = Parted(fact.dim, numbers.setdefault(id(own), len(numbers)), own.split, source)
            wanted = wanted_of(x) if operator.facts.joins and grown(x, value) else None
            known = names_of(x)
            names = known.columns[0] if known is not None and len(known.columns) == 1 else None
            if parted is not None or sums or type(passed) is Passed or names is not None or wanted is not None:
                found[name, index] = Known(parted, sums, passed if type(passed) is Passed else frozenset(), names, wanted)
    return found


# --- planning and running with facts ------------------------------------------------------------------------------------
def depends_on_facts(plan: Plan, operator: Operator) -> bool:
    """Return True if other facts of the operands may give another plan."""
    joins = operator.facts.joins
    return plan.chosen is not None and (
        _asks_names(plan) or any("sum" in x.partials or (joins and any(x.splits)) for x in plan.call.operands)
    )


def quick_facts(operator: Operator) -> Callable[[Args, Keywords], tuple[Any, ...]]:
    """Make the function that returns the facts of a call's operands as a key; () at once if no operand carries any.

    A view whose base was redistributed has facts without an attribute that says so: :func:`all_facts` finds these, too.
    """
    tensor, joins = wrap.TENSOR, operator.facts.joins
    attributes = frozenset((_FACT,) if operator.is_view else (_FACT, FORMS, _PASSED, NAMES, WANTED))

    def facts(args: Args, kwargs: Keywords) -> tuple[Any, ...]:
        for value in (*args, *kwargs.values()) if kwargs else args:
            kind = type(value)
            if kind is tensor:
                known = not attributes.isdisjoint(value.__dict__)
            else:
                listed = (kind is list or kind is tuple) and tensor in map(type, value)
                some = [x for x in value if type(x) is tensor] if listed else ()
                known = any(not attributes.isdisjoint(x.__dict__) or (joins and x._base is not None) for x in some)
            if known:
                return all_facts(operator, args, kwargs)
        return ()

    return facts


def all_facts(operator: Operator, args: Args, kwargs: Keywords) -> tuple[Any, ...]:
    """Return the facts of a call's operands as a key."""
    return tuple(facts_of_call(operator, operator.bind(args, kwargs)).items())


def _asks_names(plan: Plan) -> bool:
    """Whether it would be another plan if ranks were known to name what they have."""
    assert plan.chosen is not None
    return any(row.kernel is not None for row in plan.chosen.choice.factors.rows)


def read_row_ownership(plan: Plan, operator: Operator, form: Form) -> Step | None:
    """Read, before the call writes to anything, the row ownership of operands that results inherit."""
    if plan.chosen is None or not plan.chosen.left:
        return None
    slots = _slots(plan)
    inherited = [None if left.operand is None else slots[left.operand] for left in plan.chosen.left]

    def step(frame: Frame) -> None:
        bound = operator.bind(frame.args, frame.kwargs)
        frame.ownerships = [None if slot is None else fact_of(_at(bound, *slot)) for slot in inherited]

    return step


def attach_row_ownership(plan: Plan, operator: Operator, form: Form) -> Step | None:
    """Attach to each result that the plan predicts to have disjoint rows which rank owns each row.

    Where the plan says so, the rows of other ranks are set to zero.
    """
    if plan.chosen is None or not plan.chosen.left:
        return None
    lefts, layouts = plan.chosen.left, [layout for layout in plan.chosen.results if layout is not None]
    written = bool(operator.mutated)

    def step(frame: Frame) -> None:
        bound = operator.bind(frame.args, frame.kwargs)
        results = [x for x in tree_leaves(frame.output) if isinstance(x, torch.Tensor)]
        for left, fact in zip(lefts, frame.ownerships, strict=True):
            x = results[left.result]
            if fact is not None:
                own, versions = fact.ownership, fact.versions if operator.is_view else counted_versions(x)
            else:
                assert left.operand is None  # the plan was made with the operand's fact, which still holds
                own, versions = _ownership(bound[left.source], left, layouts[left.result]), counted_versions(x)
            if left.masked:
                _mask(x, left.dim, own.others())
            x.__dict__[_FACT] = Fact(own, left.dim, None if written and NESTED.depth else versions, written)

    return step


def _slots(plan: Plan) -> list[tuple[str, int]]:
    """Return for each operand the name of its argument and its position among the operands of that name."""
    return [(name, plan.call.names[:i].count(name)) for i, name in enumerate(plan.call.names)]


def mark_deferred_reductions(plan: Plan, operator: Operator, form: Form) -> Step | None:
    """Mark partial operands that this operator left unreduced; the cost model expects a later reduction of the result."""
    if plan.chosen is None or operator.is_view or operator.mutated:
        return None
    given = [(place, passed) for name, passed in _passed(plan) if (place := form.given(name)) is not None]
    if not given:
        return None
    tensor = wrap.TENSOR

    def step(frame: Frame) -> None:
        for place, passed in given:
            if type(x := frame.given(place)) is tensor:
                x.__dict__[_PASSED] = passed

    return step


def _passed(plan: Plan) -> Iterator[tuple[str, Passed]]:
    """By argument the mesh dims over which its terms become terms; rows that are parted have owners, who go on with them."""
    assert plan.chosen is not None
    parted = plan.call.parted
    for i, (name, layout) in enumerate(zip(plan.call.names, plan.call.operands, strict=True)):
        if not layout.is_partial or (parted and parted[i] is not None):
            continue
        passed = Passed(
            m
            for m, row in enumerate(plan.chosen.choice.rows)
            if layout.partials[m] == "sum" and row.operands[i] == SUM and SUM in row.results
        )
        if passed:
            yield name, passed


def _at(bound: Mapping[str, Any], name: str, index: int) -> Any:
    value = bound[name]
    return value[index] if isinstance(value, (list, tuple)) else value


def _ownership(ends: Any, left: Left, layout: Layout) -> Ownership:
    """That of a product of groups: one for all that are made of the same."""
    made = ends.__dict__.get(_OWNERSHIPS)
    if type(made) is not Ownerships:
        made = ends.__dict__[_OWNERSHIPS] = Ownerships()
    assert left.split is not None
    key = left.split, layout.mesh, layout.splits[left.dim], layout.shape[left.dim], current()
    found: Ownership | None = made.get(key)
    if found is None or not found.holds():
        found = made[key] = Ownership(ends, left.split, layout, left.dim)
    return found


def _mask(x: Any, dim: int, others: Any) -> None:
    """Zeros where rows are other ranks'."""
    shape = [1] * x.ndim
    shape[dim] = -1
    x._local.masked_fill_(others.view(shape), 0)
