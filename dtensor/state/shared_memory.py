"""Shared memory: which tensors are the same memory, and clones of local tensors that must not be the memory of an operand.

Torch counts the writes to a tensor and its views in one version counter. Tensors that have the same memory without being views
of each other (``x.data``, ``x.detach()`` under inference mode, ``x.set_(y)``) have counters of their own. Such tensors form an
alias group here, and the writes to all of them are added up. All of this follows from the program, so ranks agree.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from itertools import count
from typing import Any

import torch

from ..base.memory_order import dims_outermost_first, memory_order
from ..base.torch_internals import CreationMeta, DispatchKey, creation_meta, is_key_excluded
from ..base.tracing import has_no_values, has_symbolic_sizes
from ..comm import PerRank, shards_of

MEMORY_STATE = "_memory_state"  # the attribute of a tensor with its MemoryState
_GROUP_NUMBERS = count()


class MemoryState:
    """State that a tensor, its views and its detached aliases share: they have one version counter of torch.

    Attributes:
        exposed: user code holds the local tensors; torch does not count what it writes to them.
        counter: the version counter, if the tensor is in an alias group.
        group: the alias group: other tensors with the same memory, with counters of their own.
    """

    __slots__ = ("__weakref__", "counter", "exposed", "group")

    def __init__(self) -> None:
        self.exposed = False
        self.counter: _Counter | None = None
        self.group: _AliasGroup | None = None


class _Counter:
    """The version counter of one member of an alias group.

    Attributes:
        get_tensor: returns a tensor that has the counter; None once that tensor was freed.
        last: the count at the last look.
    """

    __slots__ = ("get_tensor", "last")

    def __init__(self, get_tensor: Callable[[], Any]) -> None:
        self.get_tensor, self.last = get_tensor, 0


_Members = tuple[tuple[weakref.ref[MemoryState], _Counter], ...]


class _AliasGroup:
    """Tensors that have the same memory without being views of each other, and how often all of them were written to.

    The writes to members that were freed stay counted. When a member is freed is no fact of the program: one rank may keep it.

    Attributes:
        number: identifies this group.
        state: the writes to freed members, and the living members.
    """

    __slots__ = ("number", "state")

    def __init__(self, freed_writes: int, members: _Members) -> None:
        self.number, self.state = next(_GROUP_NUMBERS), (freed_writes, members)

    def count_writes(self) -> int | None:
        """Return the number of writes to all members; None if one of them is an inference tensor, which has no counter."""
        freed_writes, members = self.state
        total, living = freed_writes, []
        for ref, counter in members:
            x = counter.get_tensor()
            if x is not None and x.is_inference():
                return None
            counter.last = counter.last + 1 if x is None else x._version
            total += counter.last
            if x is None or ref() is None:
                freed_writes += counter.last
            else:
                living.append((ref, counter))
        self.state = freed_writes, tuple(living)
        return total

    def living_states(self) -> list[MemoryState]:
        """Return the memory states of the members that are alive."""
        return [state for ref, _ in self.state[1] if (state := ref()) is not None]


def memory_state_of(x: Any) -> MemoryState:
    """Return the memory state of ``x``, made at the first call; a view has that of its base."""
    state: MemoryState | None = x.__dict__.get(MEMORY_STATE)
    if state is None:
        state = x.__dict__[MEMORY_STATE] = MemoryState() if x._base is None else memory_state_of(x._base)
    return state


def mark_local_exposed(x: Any) -> Any:
    """Mark the local tensors of ``x`` (a DTensor) as exposed to user code, and return ``x``.

    Torch does not count writes to them. So from now on nothing that is derived from ``x``, or from its aliases, is cached.
    """
    state = memory_state_of(x)
    state.exposed = True
    for other in state.group.living_states() if state.group else ():
        other.exposed = True
    return x


def share_versions(view: Any, base: Any) -> None:
    """Count writes to ``view`` and ``base`` together: ``view`` is the same memory, and autograd does not record it as a view."""
    view.__dict__[MEMORY_STATE] = memory_state_of(base)


def named_version_owner(x: Any) -> Any:
    """Return the tensor that counts writes to the memory of ``x``: ``x``, or its ``_version_owner``; None if that is freed."""
    owner = x.__dict__.get("_version_owner", x)
    return owner() if isinstance(owner, weakref.ref) else owner


def version_owner(x: Any) -> Any:
    """Return the tensor that counts writes to the memory of ``x``: its base or ``x``, or the ``_version_owner`` of that."""
    root = x if x._base is None else x._base
    owner = named_version_owner(root)
    return root if owner is None else owner


# --- alias groups -------------------------------------------------------------------------------------------------------
def join_alias_groups(x: torch.Tensor, y: torch.Tensor) -> None:
    """Count writes to ``x`` and ``y`` together from now on: they have one memory, but version counters of their own.

    ``x.data``, ``x.data = y`` and ``x.set_(y)`` make such tensors.
    """
    roots = [t if t._base is None else t._base for t in (x, y)]
    states = [memory_state_of(root) for root in roots]
    if states[0] is states[1]:
        return
    for state, root in zip(states, roots, strict=True):
        if state.group is None:
            state.counter = _Counter(_make_counter_access(root))
            state.group = _AliasGroup(0, ((weakref.ref(state), state.counter),))
    groups = dict.fromkeys(state.group for state in states if state.group)
    for group in groups:
        group.count_writes()  # moves freed members to the count of freed writes
    halves = [group.state for group in groups]
    joined = _AliasGroup(sum(freed for freed, _ in halves), tuple(member for _, members in halves for member in members))
    exposed = any(state.exposed for state in joined.living_states())
    for state in joined.living_states():
        state.exposed, state.group = exposed, joined


def move_memory_state(x: Any, root: torch.Tensor) -> None:
    """Move the memory state of ``x`` to ``root``, which has swapped its identity with ``x`` and is the base of it now."""
    state: MemoryState | None = x.__dict__.pop(MEMORY_STATE, None)
    if state is not None:
        root.__dict__[MEMORY_STATE] = state
        if state.counter is not None and state.counter.get_tensor() is x:
            state.counter.get_tensor = weakref.ref(root)


def _make_counter_access(root: Any) -> Callable[[], Any]:
    """Return a function that returns a tensor with the version counter of ``root``, for its alias group.

    Usually that is a detached tensor without local tensors, so ``root`` may be freed. It is ``root`` itself, weakly, if that is
    a view that is computed when it is read, or below autograd, where torch gives a detached tensor a new counter.
    """
    if isinstance(type(root)._local, property) or is_key_excluded(DispatchKey.ADInplaceOrView):
        return weakref.ref(root)
    detached: Any = torch.Tensor.detach(root)
    detached.__dict__.clear()  # no reference cycle: a garbage collector runs at other times on each rank
    del detached._local
    return lambda: detached


# --- views of a base ----------------------------------------------------------------------------------------------------
def cache_owner(x: Any, owner: Any) -> tuple[Any, Any]:
    """Return the tensor that stores cached copies of the memory of ``x``, and which part of its memory ``x`` is.

    The part is None if ``x`` is all of that memory. Views of one part, in any order of dims, are one value. Their base stores
    it: one rank may keep a view longer than others do, so the lifetime of a view is no fact of the program.

    Args:
        owner: the :func:`version_owner` of ``x``.
    """
    if _has_all_elements(x, owner):
        return owner, None
    part = _key_of_elements(x) if owner is x._base else None
    return (x, None) if part is None else (owner, part)


def _key_of_elements(x: Any) -> Any:
    """Return a hashable key of the elements of its base that the view ``x`` has; None if they are not known."""
    layout, plain_view = x._layout, view_in_plain_torch(x._base, x)
    if plain_view is None or layout.dtype is not x._base._layout.dtype or layout.is_complex:
        return None
    order = dims_outermost_first(layout.stride)
    return int(plain_view.storage_offset()), *[(layout.shape[d], layout.stride[d]) for d in order]


def _has_all_elements(x: Any, owner: Any) -> bool:
    """Return True if ``x`` has all elements of ``owner`` in its dtype, so that no key must say which it has."""
    layout, owner_layout = x._layout, owner._layout
    return x is owner or (
        layout.dtype is owner_layout.dtype
        and not layout.is_complex
        and layout.numel == owner_layout.numel
        and all(memory_order(each.shape, each.stride) is not None for each in (layout, owner_layout))
    )


def view_in_plain_torch(root: Any, view: Any) -> torch.Tensor | None:
    """Return ``view`` as it would be in plain torch, a view of ``root``: a meta tensor with its sizes and storage offset.

    None if autograd cannot tell: it did not record the view, ``root`` is now seen in another way, or one of the two got other
    memory.
    """
    if "_has_new_memory" in root.__dict__ or (
        creation_meta(view) == CreationMeta.MULTI_OUTPUT_NODE and has_symbolic_sizes() and has_no_values(root._local)
    ):
        return None  # torch 2.13 has moved the size of a split, if it is a symbol, into the first of its views
    like = torch.empty_strided(root.shape, root.stride(), dtype=root.dtype, device="meta")
    try:
        plain_view = view._view_func_unsafe(like)
    except (RuntimeError, IndexError):
        return None
    agrees = plain_view is not None and plain_view.shape == view.shape and plain_view.stride() == view.stride()
    return plain_view if agrees else None


# --- results that share no memory with an operand ------------------------------------------------------------------------
def clone_if_aliased(local: Any, addresses: Collection[int]) -> Any:
    """Return the local value ``local``, cloned on ranks where its storage starts at one of ``addresses``."""
    if not isinstance(local, torch.Tensor) or set(storage_addresses(local)).isdisjoint(addresses):
        return local
    if isinstance(local, PerRank):
        shards = zip(local.shards, storage_addresses(local), strict=True)
        return PerRank(x.clone() if address in addresses else x for x, address in shards)
    return local.clone()


def storage_addresses(local: torch.Tensor) -> list[int]:
    """Return the address of the storage of each shard; 0 for tensors without one (fake, meta and sparse tensors)."""
    shards = (local,) if type(local) is torch.Tensor else shards_of(local)
    return [x.untyped_storage().data_ptr() if type(x) is torch.Tensor and x.layout is torch.strided else 0 for x in shards]
