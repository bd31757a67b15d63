"""Redistribution cache: a tensor keeps the redistributed copies that operators needed, and later operators use them again.

An operator that needs a value in another layout redistributes it. The copy is cached with the tensor, for operators that need
the same layout, or one that costs less to reach from the copy: the next operator, or the backward pass. The tensor itself does
not change. No copy is cached of

- a parameter: the copy would live as long as the parameter (but see :func:`~dtensor.base.modes.remember`);
- a tensor with exposed local tensors (``from_local``, ``to_local``, ``data``): user code writes to them uncounted;
- any tensor inside a decomposition, where torch counts no writes.

Copies of a tensor that was written to, under any of its views, are stale and not used. Copies are dropped with their tensor, or
earlier by [Note: Budget of cached copies]. All of this follows from the program, so ranks agree.

[Note: Cached copies in memory order]
Layouts and copies are stored with their dims in the order of memory, outermost first, so that a matrix and its transpose share
copies. A layout without a sharded dim is stored as one dim of all elements, so that all reshapes of one buffer share copies.

[Note: Budget of cached copies]
Ranks must drop the same copies at the same point of the program. When a tensor is freed is no fact of the program, so the cache
cannot count the bytes that are held. It counts the bytes of copies since their last use instead, freed or not: on each mesh and
thread, a copy is dropped once the copies that were made or used since, with it, have more than ``DTENSOR_CACHED_COPIES_BYTES``
(bytes of the largest local tensor, 8 GiB by default, equal on all ranks). Uses are tracked while more than half of the budget is
taken, so that a hit below costs nothing. Copies in recordings are not counted: the passes of a recording free them.
Of tensors that may live long (sharded, without a gradient node: inputs, gradients, buffers), only the last four copies are kept.
"""

from __future__ import annotations

import os
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from itertools import count
from threading import local as per_thread
from typing import Any, NamedTuple

import torch

from ...base.caches import memoize, register_cache
from ...base.memory_order import dims_outermost_first, memory_order
from ...base.mode_stack import ModeStack
from ...base.modes import REMEMBER
from ...base.recorder_hooks import ACTIVE_RECORDERS, current_recorder, is_recorded_by, weak_recorder_ref
from ...base.tracing import is_tracing
from ...errors import ArgumentError
from ...layout.layout import Layout
from ...placement import Replicate
from ...redistribute import Exchange, Plan, execute, execute_many
from ...redistribute import plan as plan_redistribution
from ...state import wrap
from ...state.shared_memory import cache_owner, version_owner
from ...state.version_counters import counted_versions
from .grad_redistribute import register_grad_redistribute

FRESH_CACHE: ModeStack[object] = ModeStack("afresh")  # inside, copies that were made before are not used
PREFERRED_LAYOUT = "_preferred_layout"  # the attribute of a tensor with its PreferredLayout
CACHED_COPIES = "_cached_copies"  # the attribute of a tensor with the CachedCopies of all of its memory
CACHED_PARTS = "_cached_parts"  # the attribute of a base with the CachedCopies of parts of its memory, which views are
BUDGET_VARIABLE = "DTENSOR_CACHED_COPIES_BYTES"
_LEAF_COPY_LIMIT = 4  # cached copies on one mesh, of tensors that may live long
_COPY_NUMBERS = count()


def read_budget() -> int:
    """Return the budget of cached copies on one mesh, in bytes of one rank, from the environment.

    Raises:
        ArgumentError: the variable is not a whole number.
    """
    text = os.environ.get(BUDGET_VARIABLE, str(8 << 30))
    if not text.isdecimal():
        raise ArgumentError(f"{BUDGET_VARIABLE}={text!r} is no whole number of bytes; for 1 GB set {BUDGET_VARIABLE}=1000000000")
    return int(text)


class _DecompositionDepth(per_thread):
    """Count how many decompositions this thread is inside of: torch does not count the writes of their operators."""

    depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


IN_DECOMPOSITION = _DecompositionDepth()


def run_in_decomposition(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the runner of a decomposition so that the operators inside cache no copies."""

    def run_nested(*args: Any) -> Any:
        with IN_DECOMPOSITION:
            return run(*args)

    return run_nested


# --- storage ------------------------------------------------------------------------------------------------------------
class CachedCopies:
    """The cached copies of one memory, or of one part of it.

    Attributes:
        copies: source layout -> target layout -> local value; see [Note: Cached copies in memory order].
        redistributes_grad: the gradient of the tensor that was redistributed first is redistributed to its placements; the
            gradient of a later view of the same part may pass through it.
        recorder: the capture that recorded the copies, weakly; a recording may use only copies that it contains.
        versions: the versions of the memory when the copies were made.
        number: identifies this object, also after it was freed.
        recent: the table of recent copies that lists the copies; None before there is one, and in recordings.
    """

    __slots__ = ("__weakref__", "copies", "number", "recent", "recorder", "redistributes_grad", "versions")

    def __init__(self, recorder: Any, versions: Any) -> None:
        self.recorder, self.versions, self.redistributes_grad = weak_recorder_ref(recorder), versions, False
        self.number = next(_COPY_NUMBERS)
        self.recent: _RecentCopies | None = None
        self.copies: dict[Layout, dict[Layout, Any]] = {}

    def drop_copy(self, source: Layout, target: Layout) -> None:
        """Drop the cached copy that was made from layout ``source`` to layout ``target``."""
        targets = self.copies.get(source, {})
        targets.pop(target, None)
        if not targets:
            self.copies.pop(source, None)


class _RecentCopies:
    """The copies that were made or used last on one mesh by one thread; see [Note: Budget of cached copies].

    Attributes:
        budget: the most bytes of copies, of one rank.
        nbytes: the bytes of the copies listed here, freed or not; each counts as at least 1/16384 of the budget.
        copies: the listed copies by key, least recently used first: a weak reference to their owner, and their bytes.
        leaf_keys: the keys of copies of tensors that may live long, oldest first.
    """

    __slots__ = ("__weakref__", "budget", "copies", "leaf_keys", "nbytes")

    def __init__(self, budget: int) -> None:
        self.budget, self.nbytes = budget, 0
        self.copies: OrderedDict[Any, tuple[weakref.ref[CachedCopies], int]] = OrderedDict()
        self.leaf_keys: deque[Any] = deque()

    def add_copy(self, cached: CachedCopies, source: Layout, target: Layout, is_leaf: bool, is_counted: bool) -> None:
        """List a new copy, and drop the copies that exceed the limits, perhaps the new one.

        Args:
            is_leaf: it belongs to a tensor that may live long.
            is_counted: its bytes count; False in recordings.
        """
        key = cached.number, source, target
        self._remove_copy(key)
        nbytes = max(target.max_local_nbytes, self.budget >> 14, 1) if is_counted else 0
        self.copies[key] = weakref.ref(cached), nbytes
        self.nbytes += nbytes
        if is_counted:
            cached.recent = self
        while self.nbytes > self.budget:
            self._remove_copy(next(iter(self.copies)), drop=True)
        if is_leaf:
            self.leaf_keys.append(key)
            if len(self.leaf_keys) > _LEAF_COPY_LIMIT:
                self._remove_copy(self.leaf_keys.popleft(), drop=True)

    def mark_used(self, cached: CachedCopies, source: Layout, target: Layout) -> None:
        """Make a copy the most recently used one, if it is listed."""
        if (key := (cached.number, source, target)) in self.copies:
            self.copies.move_to_end(key)

    def _remove_copy(self, key: Any, drop: bool = False) -> None:
        """Take one copy off this list, with its bytes. With ``drop`` its :class:`CachedCopies` drops it too."""
        ref, nbytes = self.copies.pop(key, (None, 0))
        self.nbytes -= nbytes
        if drop and ref is not None and (cached := ref()) is not None:
            cached.drop_copy(*key[1:])

    def held_bytes(self) -> int:
        """Return the bytes of the listed copies that are not freed, of one rank."""
        held = 0
        for (_, source, target), (ref, nbytes) in list(self.copies.items()):
            cached = ref()
            if nbytes and cached is not None and target in cached.copies.get(source, ()):
                held += target.max_local_nbytes
        return held


class _RecentByMesh(per_thread):
    """The recent copies of this thread, by mesh."""

    def __init__(self) -> None:
        self.by_mesh: weakref.WeakKeyDictionary[Any, _RecentCopies] = weakref.WeakKeyDictionary()

    def get_or_make(self, mesh: Any) -> _RecentCopies:
        """Return the recent copies on ``mesh``; the first request reads the budget from the environment."""
        recent = self.by_mesh.get(mesh)
        if recent is None:
            recent = self.by_mesh[mesh] = _RecentCopies(read_budget())
            _RECENT_OF_ALL_THREADS.add(recent)
        return recent


_RECENT = _RecentByMesh()
_RECENT_OF_ALL_THREADS: weakref.WeakSet[_RecentCopies] = weakref.WeakSet()


def cached_bytes_and_budget() -> tuple[int, int]:
    """Return the bytes of cached copies of one rank, of all meshes and threads, and the budget of one mesh."""
    return sum(recent.held_bytes() for recent in list(_RECENT_OF_ALL_THREADS)), read_budget()


register_cache("dispatch.cached_copies_bytes", cached_bytes_and_budget)


def active_recorder() -> Any:
    """Return what keeps copies of this thread separate: its recorder, else its ``FRESH_CACHE`` scope, else None."""
    if ACTIVE_RECORDERS and (recorder := current_recorder()) is not None:
        return recorder
    return FRESH_CACHE.last(None) if FRESH_CACHE.held else None


def get_or_make_copies(owner: Any, part: Any, recorder: Any, versions: Any) -> CachedCopies:
    """Return the cached copies of a part of the memory of ``owner`` (None: of all), a new empty holder for stale ones."""
    cached = find_copies(owner, part, recorder, versions)
    if cached is None:
        cached = CachedCopies(recorder, versions)
        if part is None:
            owner.__dict__[CACHED_COPIES] = cached
        else:
            parts = owner.__dict__.get(CACHED_PARTS) or {}
            valid = {key: other for key, other in parts.items() if other.versions == versions and other.copies}
            owner.__dict__[CACHED_PARTS] = {**valid, part: cached}
    return cached


def find_copies(owner: Any, part: Any, recorder: Any, versions: Any) -> CachedCopies | None:
    """Return the cached copies that this recorder may use and that have these versions; None if there are none."""
    cached: CachedCopies | None = (
        owner.__dict__.get(CACHED_COPIES) if part is None else (owner.__dict__.get(CACHED_PARTS) or {}).get(part)
    )
    if cached is None or cached.versions != versions or not is_recorded_by(cached.recorder, recorder):
        return None
    return cached


class PreferredLayout:
    """The layout that a tensor was last redistributed to, and the recorder of that, weakly."""

    __slots__ = ("layout", "recorder")

    def __init__(self, layout: Layout, recorder: Any) -> None:
        self.layout, self.recorder = layout, weak_recorder_ref(recorder)


def note_preferred_layout(x: Any, layout: Layout) -> None:
    """Note on ``x`` that an operator needed it in ``layout``; not if one is partial (see :func:`cached_reductions`)."""
    if not (x._layout.is_partial or layout.is_partial):
        x.__dict__[PREFERRED_LAYOUT] = PreferredLayout(layout, active_recorder())


# --- redistribution through the cache -----------------------------------------------------------------------------------
Request = tuple[Any, Plan, Any]  # a tensor (None: do not cache), the redistribution that it needs, its local value


def redistribute_cached(x: Any, plan: Plan, local: Any) -> Any:
    """Return ``local``, the local value of ``x``, redistributed by ``plan``: a cached copy, or a new one that is cached."""
    remaining, value, slot = _lookup_or_plan(x, plan, local)
    if remaining is None:
        return value
    return execute(remaining, value) if slot is None else slot.store_copy(execute(remaining, value))


def redistribute_cached_many(requests: Sequence[Request]) -> list[Any]:
    """Redistribute operands of one call together, each through the cache; small ones share a collective.

    A recording gets them one by one, since its passes batch the collectives of more than one call; it does not batch exchanges.
    """
    if is_tracing() or (
        ACTIVE_RECORDERS
        and current_recorder() is not None
        and any(type(step) is not Exchange for _, plan, _ in requests if plan.communicates for step in plan.steps)
    ):
        return redistribute_cached_each(requests)
    lookups = [_lookup_or_plan(x, plan, local) for x, plan, local in requests]
    memories = [id(slot.targets) for _, _, slot in lookups if slot]
    if len(set(memories)) < len(memories):  # the copy that one request makes may serve another
        return redistribute_cached_each(requests)
    values = [value for _, value, _ in lookups]
    pending = [(k, slot, *_in_memory_order(plan, value)) for k, (plan, value, slot) in enumerate(lookups) if plan is not None]
    if not pending:
        return values
    arrived = execute_many([plan for *_, plan, _, _ in pending], [value for *_, value, _ in pending], large_alone=True).wait()
    for (k, slot, *_, back), value in zip(pending, arrived, strict=True):
        values[k] = slot.store_copy(value) if slot else value.permute(back) if back else value
    return values


def redistribute_cached_each(requests: Sequence[Request]) -> list[Any]:
    """Redistribute operands of one call one after the other, each through the cache."""
    return [redistribute_cached(x, plan, local) for x, plan, local in requests]


def _in_memory_order(plan: Plan, local: Any) -> tuple[Plan, Any, tuple[int, ...]]:
    """Return ``plan`` and ``local`` with dims in memory order, so that packing copies nothing, and the permutation back."""
    ends = _stored_ends(plan.src, plan.dst) if plan.communicates else None
    return (plan, local, ()) if ends is None or not ends.order else (ends.plan, local.permute(ends.order), ends.back)


class _StoredEnds(NamedTuple):
    """A redistribution with dims in memory order: see [Note: Cached copies in memory order].

    Attributes:
        order, back: the permutation of dims into memory order, and back; () if dims are in memory order.
        source, target: the two layouts, permuted.
        source_key, target_key: the layouts that the copy is stored under.
        plan: the redistribution from source to target.
        is_reduced: the source is not partial.
    """

    order: tuple[int, ...]
    back: tuple[int, ...]
    source: Layout
    target: Layout
    source_key: Layout
    target_key: Layout
    plan: Plan
    is_reduced: bool


class _Slot(NamedTuple):
    """Slot of the cache in which a copy that is made now is stored.

    Attributes:
        targets: target layout -> copy, the part of ``cached`` for the source layout.
        may_live_long: the tensor has no gradient node and is no parameter.
        is_counted: the bytes of the copy count.
    """

    cached: CachedCopies
    targets: dict[Layout, Any]
    ends: _StoredEnds
    may_live_long: bool
    is_counted: bool

    def store_copy(self, value: Any) -> Any:
        """Store ``value``, which has its dims in memory order; return it with the dims of the target layout."""
        ends = self.ends
        targets = self.cached.copies.setdefault(ends.source_key, self.targets)  # dropped there while it was empty
        targets[ends.target_key] = value if ends.target_key is ends.target else value.reshape(-1)
        if self.may_live_long or self.is_counted:
            recent = _RECENT.get_or_make(ends.source.mesh)
            recent.add_copy(self.cached, ends.source_key, ends.target_key, self.may_live_long, self.is_counted)
        return value.permute(ends.back) if ends.back else value


def _lookup_or_plan(x: Any, plan: Plan, local: Any) -> tuple[Plan | None, Any, _Slot | None]:
    """Look up the cached copy of ``x`` in the target layout; on a miss find the cheapest start and the slot for the result.

    Also registers the redistribution of the gradient of ``x``, and notes the target as its preferred layout.

    Returns:
        ``(None, copy, None)`` on a hit. On a miss ``(plan, start, slot)``: run ``plan`` on ``start``, the cheapest source, and
        store the result in ``slot``; ``slot`` is None if it must not be cached.
    """
    if not plan.communicates or type(x) is not wrap.TENSOR or IN_DECOMPOSITION.depth:
        return plan, local, None
    owner, versions = version_owner(x), _cacheable_versions(x)
    if versions is None:
        return plan, local, None
    (holder, part), recorder = cache_owner(x, owner), active_recorder()
    note_preferred_layout(x, plan.dst)
    is_parameter, is_all = owner.is_leaf and owner.requires_grad, holder is owner and part is None
    if is_parameter and not (is_all and _may_cache_leaf(owner, recorder, versions)):
        register_grad_redistribute(owner if is_all else x, not is_all)
        return plan, local, None
    cached, ends = get_or_make_copies(holder, part, recorder, versions), _stored_ends(plan.src, plan.dst)
    redistributes = part is not None and cached.redistributes_grad
    cached.redistributes_grad = redistributes or register_grad_redistribute(owner if is_all else x, not is_all)
    if part is not None:
        x.__dict__[CACHED_COPIES] = cached  # the quick check for facts of operands looks at the view itself
    targets = cached.copies.setdefault(ends.source_key, {})
    copy = targets.get(ends.target_key)
    if copy is None:
        cheapest, start = _cheapest_start(targets, ends, local.permute(ends.order) if ends.order else local)
        may_live_long = ends.is_reduced and owner.grad_fn is None and not is_parameter
        is_counted = recorder is None and not ends.target_key.has_symbols
        return cheapest, start, _Slot(cached, targets, ends, may_live_long, is_counted)
    if (recent := cached.recent) is not None and recent.nbytes > recent.budget >> 1:
        recent.mark_used(cached, ends.source_key, ends.target_key)
    if ends.target_key is not ends.target:
        copy = copy.view(ends.target.shape)
    return None, copy.permute(ends.back) if ends.order else copy, None


def cached_reductions(x: Any) -> frozenset[tuple[int, int | None]]:
    """Return pairs (partial mesh dim of ``x``, tensor dim that a cached reduced copy shards there, None: replicated)."""
    layout = x._layout
    partial_dims = [i for i, op in enumerate(layout.partials) if op is not None]
    if not partial_dims or IN_DECOMPOSITION.depth:
        return frozenset()
    owner = version_owner(x)
    may_be_part = x is owner or not owner.__dict__.keys().isdisjoint((CACHED_PARTS, CACHED_COPIES))  # finding the part takes long
    holder, part = cache_owner(x, owner) if may_be_part else (x, None)
    cached = find_copies(holder, part, active_recorder(), _cacheable_versions(x))
    if cached is None:
        return frozenset()
    order = _memory_order_of(layout)[0] or tuple(range(len(layout.shape)))
    reductions: set[tuple[int, int | None]] = set()
    for target in tuple(cached.copies.get(_stored_key(layout), ())):
        for i in partial_dims:
            placed = target.placement_along(i)
            if isinstance(placed, Replicate):
                reductions.add((i, None))
            elif isinstance(placed, int) and target.shape == tuple([layout.shape[d] for d in order]):  # not a view's copy
                reductions.add((i, order[placed]))
    return frozenset(reductions)


def _cacheable_versions(x: Any) -> tuple[int, ...] | None:
    """Return the version counters that cached copies of ``x`` depend on; None if copies must not be cached."""
    return None if REMEMBER.held and REMEMBER.last("") == "nothing" else counted_versions(x)


def _may_cache_leaf(leaf: Any, recorder: Any, versions: Any) -> bool:
    """Return True if copies of a parameter may be cached: from a forward pass that allows it until the gradient arrives."""
    layout_cell = leaf.__dict__.get("_grad_layout")
    if layout_cell is None:
        return False
    if not (REMEMBER.held and REMEMBER.last("") == "parameters" and torch.is_grad_enabled()):
        return len(layout_cell) > 1 and layout_cell[1] is get_or_make_copies(leaf, None, recorder, versions)
    layout_cell[1:] = [get_or_make_copies(leaf, None, recorder, versions)]
    return True


def _cheapest_start(copies: dict[Layout, Any], ends: _StoredEnds, local: Any) -> tuple[Plan, Any]:
    """Return the cheapest redistribution to the target, and the value to start from: ``local`` or a cached copy."""
    reshaped = [_reshape_copy(layout, copy, ends.source) for layout, copy in tuple(copies.items())]  # other threads add copies
    starts = [(ends.plan, local), *[(plan_redistribution(layout, ends.target), copy) for layout, copy in filter(None, reshaped)]]
    return min(starts, key=lambda start: start[0].cost)


@memoize(4096)
def _stored_ends(source: Layout, target: Layout) -> _StoredEnds:
    """Return a redistribution in memory order: both layouts, the keys that its copy is stored under, and its plan."""
    order, back = _memory_order_of(source)
    turned_source, turned_target = _permute_layout(source, order), _permute_layout(target, order)
    plan = plan_redistribution(turned_source, turned_target)
    is_reduced = all(op is None for op in source.partials)
    return _StoredEnds(
        order, back, turned_source, turned_target, _stored_key(source), _flatten_unsharded(turned_target), plan, is_reduced
    )


@memoize(1024)
def _stored_key(layout: Layout) -> Layout:
    """Return the layout that keys the cached copies of a tensor with this layout: in memory order, flat if unsharded."""
    return _flatten_unsharded(_permute_layout(layout, _memory_order_of(layout)[0]))


def _memory_order_of(layout: Layout) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the permutation of dims into memory order, and back; () for dims that are in memory order or have none."""
    order = tuple(dims_outermost_first(layout.stride))
    order = () if order == tuple(range(len(order))) else order
    return order, tuple(sorted(range(len(order)), key=order.__getitem__))


def _permute_layout(layout: Layout, order: tuple[int, ...]) -> Layout:
    """Return the layout that a tensor has after its dims are permuted by ``order``."""
    if not order:
        return layout
    splits, shape = [layout.splits[d] for d in order], [layout.shape[d] for d in order]
    return Layout.from_splits(layout.mesh, splits, layout.partials, shape, [layout.stride[d] for d in order], layout.dtype)


def _flatten_unsharded(layout: Layout) -> Layout:
    """Return the 1-d layout of the same memory if it is unsharded and contiguous, else ``layout``."""
    if any(layout.splits) or memory_order(layout.shape, layout.stride) != ():
        return layout
    return Layout.from_splits(layout.mesh, (None,), layout.partials, (layout.numel,), None, layout.dtype)


def _reshape_copy(layout: Layout, copy: Any, like: Layout) -> tuple[Layout, Any] | None:
    """Return a cached 1-d copy as a view in the shape of ``like``, and its layout; None if there is no such view."""
    if layout.shape == like.shape:
        return layout, copy
    if len(layout.shape) != 1 or any(layout.splits):
        return None
    reshaped = Layout.from_splits(layout.mesh, (None,) * len(like.shape), layout.partials, like.shape, None, layout.dtype)
    return reshaped, copy.view(like.shape)
