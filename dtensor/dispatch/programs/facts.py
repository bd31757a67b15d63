"""Facts: what is known of an operand in addition to its layout, and the passes that attach facts to tensors.

There are five facts (:class:`~dtensor.rules.disjoint_partial.OperandFacts`). Strategies are chosen with them. Each is derived
from an attribute of the tensor:

- **disjoint rows** (:class:`DisjointRows`): a ``Partial("sum")`` tensor in which each row is non-zero on one rank only. A grouped
  matrix product with sharded groups makes it: the rows of a group belong to the rank that has the group.
- **local indices** (:class:`LocalIndices`): an index tensor in which each rank has indices into its own shard only, as
  ``nonzero`` of a sharded mask makes it. Reads and writes by them need no communication.
- **preferred layout** (:class:`~.redistribution_cache.PreferredLayout`): consumers redistributed the tensor to this layout. An
  operator that extends the tensor (``cat``) writes its result in that layout. Otherwise a KV cache that is sharded by channel
  would be gathered completely for each generated token.
- **deferred reductions** (:class:`DeferredReductions`): an earlier operator left this partial tensor unreduced. A reduction of it
  is estimated at half of its cost, because a later operator may need it too.
- **cached reductions** (:func:`~.redistribution_cache.cached_reductions`): the redistribution cache has a reduced copy of this
  partial tensor.

Disjoint rows and local indices hold for the values that the tensor had: a write to it ends them, and where torch counts no
writes there are none. Dropping a fact is always safe. All of this follows from the program, so ranks agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from ...base.recorder_hooks import ACTIVE_RECORDERS, current_recorder, is_recorded_by, weak_recorder_ref
from ...base.torch_internals import tree_leaves
from ...base.tracing import is_tracing
from ...comm.map_ranks import communicator_of
from ...layout.layout import Layout
from ...layout.splits import Split
from ...propagation.make_call import ArgumentSlot
from ...propagation.op_schema import CallSignature, OperatorSchema
from ...propagation.owner_strategies import SUM
from ...propagation.propagate import CallPlan
from ...rules.disjoint_partial import DisjointResult, DisjointSplit, OperandFacts
from ...state import wrap
from ...state.version_counters import counted_versions, is_unwritten, is_written_once
from .frame import Args, Frame, Keywords, Pass, Step
from .redistribution_cache import (
    CACHED_COPIES,
    IN_DECOMPOSITION,
    PREFERRED_LAYOUT,
    PreferredLayout,
    active_recorder,
    cached_reductions,
    note_preferred_layout,
)

_DISJOINT_ROWS = "_disjoint_rows"  # the attribute of a tensor with its DisjointRows
_OWNERSHIPS = "_ownerships"  # the attribute of a tensor of group ends with the RowOwnerships made of it
_DEFERRED = "_deferred_reductions"  # the attribute of a partial tensor with its DeferredReductions
_LOCAL_INDICES = "_local_indices"  # the attribute of an index tensor with its LocalIndices


# --- disjoint rows ------------------------------------------------------------------------------------------------------
class NotSerialized:
    """Metadata that ``copy.deepcopy`` and pickling of a plain tensor leave out: it becomes an empty set."""

    __slots__ = ()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return set, ()


class RowOwnerships(NotSerialized, dict[Any, "RowOwnership"]):
    """The row ownerships that follow from one tensor of group ends, by how groups and rows are sharded."""

    __slots__ = ()


class RowOwnership(NotSerialized):
    """Owners of the rows of a tensor dim: the rows of a group belong to the rank that has the group.

    Attributes:
        ends: where each group ends, a tensor that is replicated.
        versions: the versions of ``ends``.
        split: how the groups are sharded.
        layout, dim: the layout of a tensor with these rows, and the tensor dim; other mesh dims may shard the rows.
        recorder: the capture that recorded it, weakly; a recording may use only facts that it contains.
    """

    __slots__ = ("_foreign", "dim", "ends", "layout", "recorder", "split", "versions")

    def __init__(self, ends: Any, split: Split, layout: Layout, dim: int) -> None:
        self.ends, self.split, self.layout, self.dim = ends, split, layout, dim
        self.versions, self.recorder = counted_versions(ends), weak_recorder_ref(current_recorder())
        self._foreign: Any = None

    def is_valid(self) -> bool:
        """Return True if ``ends`` was not written to, and this thread may use what the recorder recorded."""
        if not is_recorded_by(self.recorder, current_recorder()):
            return False
        return is_unwritten(self.versions, counted_versions(self.ends))

    def foreign_rows(self) -> Any:
        """Return for each rank a boolean mask of its local rows that another rank owns, computed at the first request."""
        if self._foreign is None:
            self._foreign = communicator_of(self.layout.mesh).map(self._foreign_rows_of, self.ends._local)
        return self._foreign

    def _foreign_rows_of(self, member: int, ends: torch.Tensor) -> torch.Tensor:
        """Return for each local row of one member whether another rank owns it.

        Rows behind the last group are in no group and zero on all ranks; the owner of the last group owns them.
        """
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


class DisjointRows:
    """The fact that the rows of a partial tensor along ``dim`` are non-zero on their owner only.

    Attributes:
        versions: the versions of the tensor for which the fact is valid.
        is_being_written: ``versions`` are those before the write that made the rows; torch counts that write when it has ended.
    """

    __slots__ = ("dim", "is_being_written", "ownership", "versions")

    def __init__(self, ownership: RowOwnership, dim: int, versions: Any, is_being_written: bool = False) -> None:
        self.ownership, self.dim, self.versions, self.is_being_written = ownership, dim, versions, is_being_written

    def is_valid(self, versions: tuple[int, ...] | None) -> bool:
        """Return True if the fact is valid for a tensor with these versions. One more write at the first look is its own."""
        if self.is_being_written and self.versions is not None and versions is not None:
            self.versions, self.is_being_written = versions if is_written_once(self.versions, versions) else None, False
        return is_unwritten(self.versions, versions) and self.ownership.is_valid()


def find_disjoint_rows(x: Any) -> DisjointRows | None:
    """Return the fact that the rows of ``x`` are non-zero on their owner only, if it is valid now; else None."""
    fact = x.__dict__.get(_DISJOINT_ROWS) if type(x) is wrap.TENSOR else None
    return fact if type(fact) is DisjointRows and fact.is_valid(counted_versions(x)) else None


def _get_or_make_ownership(ends: Any, disjoint: DisjointResult, layout: Layout) -> RowOwnership:
    """Return the row ownership of a grouped matrix product, cached on ``ends``, its tensor of group ends."""
    ownerships = ends.__dict__.get(_OWNERSHIPS)
    if type(ownerships) is not RowOwnerships:
        ownerships = ends.__dict__[_OWNERSHIPS] = RowOwnerships()
    assert disjoint.split is not None
    key = disjoint.split, layout.mesh, layout.splits[disjoint.dim], layout.shape[disjoint.dim], current_recorder()
    ownership: RowOwnership | None = ownerships.get(key)
    if ownership is None or not ownership.is_valid():
        ownership = ownerships[key] = RowOwnership(ends, disjoint.split, layout, disjoint.dim)
    return ownership


def read_row_ownership(plan: CallPlan, operator: OperatorSchema, signature: CallSignature) -> Step | None:
    """Make the step that reads the row ownership of operands that results inherit, before the call writes to anything."""
    if plan.chosen is None or not plan.chosen.disjoint_results:
        return None
    slots = [(name, plan.call.names[:i].count(name)) for i, name in enumerate(plan.call.names)]  # name, and index in its list
    inherited = [None if disjoint.operand is None else slots[disjoint.operand] for disjoint in plan.chosen.disjoint_results]

    def find_inherited(bound: Mapping[str, Any], name: str, index: int) -> DisjointRows | None:
        """Return the fact that the rows of one operand are disjoint, if it is valid now; else None."""
        value = bound[name]
        return find_disjoint_rows(value[index] if isinstance(value, (list, tuple)) else value)

    def read_inherited(frame: Frame) -> None:
        bound = operator.bind(frame.args, frame.kwargs)
        frame.ownerships = [None if slot is None else find_inherited(bound, *slot) for slot in inherited]

    return read_inherited


def attach_row_ownership(plan: CallPlan, operator: OperatorSchema, signature: CallSignature) -> Step | None:
    """Make the step that notes on each result with disjoint rows which rank owns each row.

    Where the plan asks for it, the rows of other ranks are set to zero.
    """
    if plan.chosen is None or not plan.chosen.disjoint_results:
        return None
    disjoint_results, layouts = plan.chosen.disjoint_results, [layout for layout in plan.chosen.results if layout is not None]
    is_written = bool(operator.mutated)

    def attach_ownerships(frame: Frame) -> None:
        """Attach the ownership of rows to disjoint results, and zero the rows of other ranks where the plan asks for it."""
        bound = operator.bind(frame.args, frame.kwargs)
        results = [x for x in tree_leaves(frame.output) if isinstance(x, torch.Tensor)]
        for disjoint, inherited in zip(disjoint_results, frame.ownerships, strict=True):
            x: Any = results[disjoint.result]
            if inherited is not None:
                ownership, versions = inherited.ownership, inherited.versions if operator.is_view else counted_versions(x)
            else:
                assert disjoint.operand is None  # the plan was made with the operand's fact, which is still valid
                ownership = _get_or_make_ownership(bound[disjoint.source], disjoint, layouts[disjoint.result])
                versions = counted_versions(x)
            if disjoint.masked:
                shape = [1] * x.ndim
                shape[disjoint.dim] = -1
                x._local.masked_fill_(ownership.foreign_rows().view(shape), 0)
            versions = None if is_written and IN_DECOMPOSITION.depth else versions
            x.__dict__[_DISJOINT_ROWS] = DisjointRows(ownership, disjoint.dim, versions, is_written)

    return attach_ownerships


# --- deferred reductions ------------------------------------------------------------------------------------------------
class DeferredReductions(frozenset[int]):
    """Mesh dims over which an operator computed a partial result from this partial tensor without reducing it."""

    __slots__ = ()


def mark_deferred_reductions(plan: CallPlan, operator: OperatorSchema, signature: CallSignature) -> Step | None:
    """Make the step that marks partial operands which the operator left unreduced, for the cost model of later calls."""
    if plan.chosen is None or operator.is_view or operator.mutated:
        return None
    marks = [(place, dims) for name, dims in _deferred_reductions(plan) if (place := signature.given(name)) is not None]
    if not marks:
        return None
    tensor = wrap.TENSOR

    def mark_operands(frame: Frame) -> None:
        """Note on each partial operand the mesh dims along which its reduction is deferred."""
        for place, dims in marks:
            if type(x := frame.given(place)) is tensor:
                x.__dict__[_DEFERRED] = dims

    return mark_operands


def _deferred_reductions(plan: CallPlan) -> Iterator[tuple[str, DeferredReductions]]:
    """Yield each argument with the mesh dims over which the operator leaves its partial sums unreduced in a result.

    Operands with disjoint rows are left out: the owners of the rows go on with them.
    """
    assert plan.chosen is not None
    disjoint_splits = plan.call.disjoint_splits
    for i, (name, layout) in enumerate(zip(plan.call.names, plan.call.operands, strict=True)):
        if not layout.is_partial or (disjoint_splits and disjoint_splits[i] is not None):
            continue
        dims = DeferredReductions(
            mesh_dim
            for mesh_dim, strategy in enumerate(plan.chosen.choice.strategies)
            if layout.partials[mesh_dim] == "sum" and strategy.operands[i] == SUM and SUM in strategy.results
        )
        if dims:
            yield name, dims


# --- local indices ------------------------------------------------------------------------------------------------------
class LocalIndices:
    """The fact that each rank has indices into its own shard only.

    Attributes:
        columns: for each column of the index tensor, how the indexed dim is sharded; None: indices may refer to any rank.
        versions: the versions of the index tensor for which the fact is valid.
    """

    __slots__ = ("columns", "versions")

    def __init__(self, columns: tuple[Split | None, ...], versions: Any) -> None:
        self.columns, self.versions = columns, versions


def find_local_indices(x: Any) -> LocalIndices | None:
    """Return the fact that ``x`` has indices into each rank's own shard only, if it is valid now; else None.

    Recordings and traced programs get None: they must be right for other values.
    """
    fact = x.__dict__.get(_LOCAL_INDICES) if type(x) is wrap.TENSOR else None
    if type(fact) is not LocalIndices or ACTIVE_RECORDERS or is_tracing():
        return None
    return fact if is_unwritten(fact.versions, counted_versions(x)) else None


def note_local_indices(x: Any, columns: tuple[Split | None, ...]) -> None:
    """Attach to an index tensor which of its columns have indices into each rank's own shard, if any."""
    if any(columns) and type(x) is wrap.TENSOR:
        x.__dict__[_LOCAL_INDICES] = LocalIndices(columns, counted_versions(x))


def propagate_local_indices(plan: CallPlan, operator: OperatorSchema, signature: CallSignature) -> Step | None:
    """Make the step that gives views of an index tensor the fact that their indices are into this rank's own shard only."""
    if not operator.is_view or plan.how != "rule" or not plan.starts or plan.redistributions or plan.communicates:
        return None
    first = plan.call.operands[0]
    if first.dtype is not torch.int64 or not first.splits or first.splits[0] is None:
        return None
    rows = first.shape[0]
    layouts = [layout for layout in tree_leaves(plan.results) if isinstance(layout, Layout)]

    def note_on_views(frame: Frame) -> None:
        """Give each view that is one column of the index tensor the fact of that column."""
        base = frame.args[0]
        fact = find_local_indices(base) if _LOCAL_INDICES in base.__dict__ else None
        if fact is not None:
            for x, layout, start in zip(tree_leaves(frame.output), layouts, plan.starts, strict=True):
                if len(columns := _columns_of_view(fact.columns, layout, start // layout.dtype.itemsize, rows)) == 1:
                    note_local_indices(x, columns)

    return note_on_views


def _columns_of_view(columns: tuple[Split | None, ...], layout: Layout, start: int, rows: int) -> tuple[Split | None, ...]:
    """Return the column that a 1-d view of an index tensor has, () if it is not in one column.

    Args:
        start: the first element of the view in the memory of the index tensor, which has one column after the other.
    """
    if len(columns) == 1:
        return columns
    if not rows or layout.ndim != 1 or layout.stride != (1,) or start % rows + layout.shape[0] > rows:
        return ()
    return columns[start // rows : start // rows + 1]


# --- preferred layouts --------------------------------------------------------------------------------------------------
def _is_most_of(x: Any, joined: Any) -> bool:
    """Return True if ``x``, one of the tensors in the list ``joined``, has more than half of all their elements."""
    if type(x) is not wrap.TENSOR or not isinstance(joined, Sequence):
        return False
    return bool(2 * x._layout.numel > sum([y.numel() for y in joined]))


def _find_preferred_layout(x: Any) -> Layout | None:
    """Return the preferred layout of ``x``, or that of its base if ``x`` is a slice of it along an unsharded dim; else None."""
    base = None if PREFERRED_LAYOUT in x.__dict__ else x._base
    fact = (x if base is None else base).__dict__.get(PREFERRED_LAYOUT)
    if type(fact) is not PreferredLayout or not is_recorded_by(fact.recorder, active_recorder()):
        return None
    own, preferred = x._layout, fact.layout
    if base is None:
        return preferred if preferred.shape == own.shape else None
    if own.splits != base._layout.splits or own.partials != base._layout.partials:
        return None
    dims = zip((*own.splits, *preferred.splits), own.shape * 2, preferred.shape * 2, strict=True)
    if any(split is not None and size != preferred_size for split, size, preferred_size in dims):
        return None  # a dim that is sharded has another size
    return Layout.from_splits(own.mesh, preferred.splits, preferred.partials, own.shape, own.stride, own.dtype)


def propagate_preferred_layout(plan: CallPlan, operator: OperatorSchema, signature: CallSignature) -> Step | None:
    """Make the step that notes the result's layout as preferred, since it extends an operand with a preferred layout."""
    if plan.chosen is None or not any(
        known is not None and known.preferred_layout is not None for known in plan.call.operand_facts
    ):
        return None

    def note_on_result(frame: Frame) -> None:
        if type(result := frame.output) is wrap.TENSOR:
            note_preferred_layout(result, result._layout)

    return note_on_result


FACT_PASSES: tuple[Pass, ...] = (
    propagate_local_indices,
    attach_row_ownership,
    mark_deferred_reductions,
    propagate_preferred_layout,
)


# --- facts of a call ----------------------------------------------------------------------------------------------------
def facts_of_call(operator: OperatorSchema, bound: Mapping[str, Any]) -> dict[ArgumentSlot, OperandFacts]:
    """Return the facts of a call's operands, by argument slot; operands without a fact are left out."""
    facts: dict[ArgumentSlot, OperandFacts] = {}
    numbers: dict[int, int] = {}  # by identity of a row ownership: its number in this call
    for name in filter(operator.tensors.__contains__, operator.names):
        value = bound.get(name)
        is_list = isinstance(value, (list, tuple))
        for index, x in enumerate(value) if is_list else ((None, value),):  # type: ignore[arg-type]
            may_reduce = type(x) is wrap.TENSOR and not operator.is_view  # a view shows the memory as it is
            reductions = cached_reductions(x) if may_reduce else frozenset()
            deferred = x.__dict__.get(_DEFERRED) if may_reduce else None
            disjoint_rows = None
            if (rows := find_disjoint_rows(x)) is not None:
                ownership = rows.ownership
                source = next((other for other, y in bound.items() if y is ownership.ends), None)
                disjoint_rows = DisjointSplit(rows.dim, numbers.setdefault(id(ownership), len(numbers)), ownership.split, source)
            preferred = _find_preferred_layout(x) if operator.traits.concatenates and _is_most_of(x, value) else None
            indices = find_local_indices(x)
            column = indices.columns[0] if indices is not None and len(indices.columns) == 1 else None
            deferred_dims: frozenset[int] = deferred if type(deferred) is DeferredReductions else frozenset()
            if (
                disjoint_rows is not None
                or reductions
                or type(deferred) is DeferredReductions
                or column is not None
                or preferred is not None
            ):
                facts[name, index] = OperandFacts(disjoint_rows, reductions, deferred_dims, column, preferred)
    return facts


def depends_on_facts(plan: CallPlan, operator: OperatorSchema) -> bool:
    """Return True if the plan could be another one for operands with other facts."""
    if plan.chosen is None:
        return False
    joins = operator.traits.concatenates
    has_kernels = any(
        strategy.kernel is not None for strategy in plan.chosen.choice.factors.listed_strategies
    )  # some need no exchange
    return has_kernels or any("sum" in x.partials or (joins and any(x.splits)) for x in plan.call.operands)


def make_quick_facts_key(operator: OperatorSchema) -> Callable[[Args, Keywords], tuple[Any, ...]]:
    """Make the function that returns the facts of a call's operands as a key; () at once if no operand has an attribute of one.

    A view whose base was redistributed has facts without an attribute that says so: :func:`facts_key` finds these, too.

    A view whose base was redistributed has facts without an attribute that says so: :func:`facts_key` finds these, too.
    """
    tensor, joins = wrap.TENSOR, operator.traits.concatenates
    attributes = frozenset(
        (_DISJOINT_ROWS,) if operator.is_view else (_DISJOINT_ROWS, CACHED_COPIES, _DEFERRED, _LOCAL_INDICES, PREFERRED_LAYOUT)
    )

    def quick_facts_key(args: Args, kwargs: Keywords) -> tuple[Any, ...]:
        """Return the facts of the arguments as a key, () at once if no tensor among them has an attribute of a fact."""
        for value in (*args, *kwargs.values()) if kwargs else args:
            kind = type(value)
            if kind is tensor:
                has_facts = not attributes.isdisjoint(value.__dict__)
            else:
                is_list = (kind is list or kind is tuple) and tensor in map(type, value)
                elements = [x for x in value if type(x) is tensor] if is_list else ()
                has_facts = any(not attributes.isdisjoint(x.__dict__) or (joins and x._base is not None) for x in elements)
            if has_facts:
                return facts_key(operator, args, kwargs)
        return ()

    return quick_facts_key


def facts_key(operator: OperatorSchema, args: Args, kwargs: Keywords) -> tuple[Any, ...]:
    """Return the facts of a call's operands as a key that selects a variant of its program."""
    return tuple(facts_of_call(operator, operator.bind(args, kwargs)).items())
