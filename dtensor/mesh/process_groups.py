"""Process groups of mesh dims: of the user, the world, or made here once. On gloo, the library communicates over second groups.

[Note: Names of process groups]
Every member of a mesh asks for the same groups in the same order, because plans do not depend on the rank. But a mesh may cover
a part of the world. Processes outside of it make no call, so a group is made among its own members only. Torch names such a
group by its ranks and *the number of groups of this process*. Members with different numbers (one of them is in two meshes)
would wait for each other under different names: a deadlock. So the library names its groups itself.

[Note: Library groups]
Gloo matches the collectives of a group only by their number. A program may issue a collective on one rank alone. It must not
match a collective of this library on other ranks, so the library communicates over an own group for each group of the program.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from ..base.patches import RefCountedPatch
from ..base.torch_internals import NAMES, default_store, hash_ranks
from ..errors import MeshError
from .geometry import Geometry


@dataclass(frozen=True, slots=True)
class Group:
    """Process group as a mesh sees it.

    Attributes:
        handle: the ``torch.distributed`` group.
        members: in mesh order. A group position is an index into it.
        position: group position of this process.
        order: torch's rank in ``handle`` of each group position, or None if they are equal.
        backend: name of the backend, such as ``"gloo"`` or ``"nccl"``.
        name: name of the program's group, which graphs contain.
    """

    handle: Any
    members: tuple[int, ...]
    position: int
    order: tuple[int, ...] | None
    backend: str
    name: str = ""

    @property
    def size(self) -> int:
        return len(self.members)

    @property
    def torch_rank(self) -> int:
        """Return torch's rank of this process in the group."""
        return self.position if self.order is None else self.order[self.position]

    def to_torch(self, items: Sequence[Any]) -> list[Any]:
        """Reorder items from group positions to torch's group ranks."""
        if self.order is None:
            return list(items)
        reordered: list[Any] = [None] * len(items)
        for item, rank in zip(items, self.order, strict=True):
            reordered[rank] = item
        return reordered

    def to_mesh(self, items: Sequence[Any]) -> list[Any]:
        """Reorder items from torch's group ranks to group positions."""
        return list(items) if self.order is None else [items[rank] for rank in self.order]


def get_group(mesh: Geometry, mesh_dims: Sequence[int]) -> Group:
    """Return the group over ``mesh_dims`` that the library communicates over. The first call for some ranks makes it."""
    handle, members, ranks = _program_handle(mesh, mesh_dims)
    library_handle = library_group(handle, mesh.device_type)
    return _make_group_view(library_handle, members, ranks, mesh, handle.group_name)


def get_program_group(mesh: Geometry, mesh_dims: Sequence[int]) -> Group:
    """Return the group over ``mesh_dims`` that belongs to the program."""
    handle, members, ranks = _program_handle(mesh, mesh_dims)
    return _make_group_view(handle, members, ranks, mesh, handle.group_name)


def _make_group_view(handle: Any, members: tuple[int, ...], ranks: list[int], mesh: Geometry, name: str) -> Group:
    position = ranks.index(dist.get_rank())
    return Group(handle, members, position, torch_rank_order(handle, ranks), backend_name(handle, mesh.device_type), name)


def _program_handle(mesh: Geometry, mesh_dims: Sequence[int]) -> tuple[Any, tuple[int, ...], list[int]]:
    """Return the program's torch group of this rank over mesh dims, with its members and global ranks."""
    member = mesh.current_member()
    if member is None:
        raise MeshError(
            f"rank {dist.get_rank()} is not part of {mesh!r}: it has no process group there; "
            "ask for groups on ranks of the mesh only"
        )
    members = mesh.members_of(mesh_dims, member)
    ranks = [mesh.ranks[m] for m in members]
    return _get_or_make_handle(mesh, mesh_dims, ranks), members, ranks


def torch_rank_order(handle: Any, ranks: Sequence[int]) -> tuple[int, ...] | None:
    """Return torch's group rank for each of ``ranks``; None if they are 0, 1, 2 ... in order."""
    torch_ranks = {rank: index for index, rank in enumerate(dist.get_process_group_ranks(handle))}
    order = tuple(torch_ranks[rank] for rank in ranks)
    return None if order == tuple(range(len(order))) else order


def get_torch_group(mesh: Geometry, mesh_dims: Sequence[int]) -> Any:
    """Return the ``torch.distributed`` group over ``mesh_dims``.

    Raises:
        MeshError: the ranks are not processes.
    """
    if mesh.kind == "in_process":
        raise MeshError(
            f"all ranks of {mesh!r} live in this process: there is no process group; "
            "start the program with `torchrun --nproc-per-node N` to have one"
        )
    if mesh.kind == "dry_run":
        raise MeshError(f"{mesh!r} is a dry run: it has no process groups; use init_device_mesh('cpu', ...) under torchrun")
    return _program_handle(mesh, mesh_dims)[0]


def backend_name(handle: Any, device_type: str) -> str:
    """Return the name of the backend for tensors of ``device_type``. A group may have one for each device type."""
    parts = (part.split(":", 1) for part in dist.get_backend_config(handle).split(","))
    by_device = {part[0]: part[-1] for part in parts}
    return by_device.get(device_type, next(iter(by_device.values())))


# --- get or make a group ---------------------------------------------------------------------------------------------
HASH_RANKS_NAME = NAMES["hash_ranks"].path.rpartition(".")[2]


class _GroupCache(threading.local):
    """Groups by ranks and backend, for each thread, because torch's tests run ranks as threads."""

    def __init__(self) -> None:
        self.world: Any = None  # world of the groups; destroy_process_group ends it
        self.groups: dict[tuple[tuple[int, ...], Any], Any] = {}
        self.counts: Counter[tuple[int, ...]] = Counter()
        self.name: str | None = None  # name of the group that is being made

    def reset_for_world(self, world: Any) -> None:
        """Forget the groups of an earlier world. In a new world the processes of these ranks may have different histories."""
        if self.world is not world:
            self.world = world
            self.groups.clear()
            self.counts.clear()


_GROUP_CACHE = _GroupCache()
BEFORE_NEW_GROUP: list[Callable[[list[int], str], None]] = []  # hooks before a group is made, because torch waits for its ranks


def _get_or_make_handle(mesh: Geometry, mesh_dims: Sequence[int], ranks: list[int]) -> Any:
    """Return the torch group over mesh dims: the user's, the world, a known one with the same ranks, or a new one."""
    groups = mesh._root.groups
    group_id = mesh.group_id(mesh_dims)
    if group_id in groups:
        return groups[group_id]
    key = mesh._root.multi_rank_dims(group_id)  # equal for groups of the same ranks in any order
    if key in groups and key:
        return groups[key]
    world, backend = dist.group.WORLD, mesh._root.backends.get(key)
    if backend is None and sorted(ranks) == list(range(dist.get_world_size())):
        handle = world
    else:
        _GROUP_CACHE.reset_for_world(world)
        cache_key = (tuple(sorted(ranks)), backend)
        handle = _GROUP_CACHE.groups.get(cache_key)
        if handle is None:
            handle = _GROUP_CACHE.groups[cache_key] = make_torch_group(mesh, mesh_dims, ranks, backend)
    groups[key or group_id] = handle
    return handle


def make_torch_group(mesh: Geometry, mesh_dims: Sequence[int], ranks: list[int], backend: Any = None) -> Any:
    """Make a torch process group of these ranks, after the ``BEFORE_NEW_GROUP`` hooks.

    ``backend`` is a :class:`.root.Backend`, or None for the world's.
    """
    world = dist.group.WORLD
    for hook in BEFORE_NEW_GROUP:
        hook(ranks, backend_name(world, mesh.device_type) if backend is None or backend.name is None else backend.name)
    names = mesh.mesh_dim_names or [f"dim_{d}" for d in range(mesh.ndim)]
    description = "_".join(["mesh", *(names[d] for d in mesh_dims)])  # for torch's traces, as torch's meshes describe groups
    options = {"timeout": _timeout_of(world, mesh.device_type), "group_desc": description}
    if backend is not None:
        options |= {"backend": backend.name, "pg_options": backend.options}
    return _make_among_all(mesh, mesh_dims, ranks, options) if _splits_world(world) else _make_among_members(ranks, options)


def _splits_world(world: Any) -> bool:
    """Return True if all of the world must join a new group, because NCCL, bound to a device, splits it off the world's."""
    return getattr(world, "bound_device_id", None) is not None


def _timeout_of(handle: Any, device_type: str) -> timedelta | None:
    """Return the timeout of the user's group, which a new group does not inherit; None (torch's default) if it cannot be read."""
    try:
        options = getattr(handle._get_backend(torch.device(device_type)), "options", None)  # torch has no public API to read it
    except RuntimeError:  # a backend written in Python
        return None
    return getattr(options, "_timeout", None)


def _make_among_members(ranks: list[int], options: dict[str, Any]) -> Any:
    with _name_new_groups(ranks):
        return dist.new_group(sorted(ranks), use_local_synchronization=True, **options)


def _make_among_all(mesh: Geometry, mesh_dims: Sequence[int], ranks: list[int], options: dict[str, Any]) -> Any:
    """Make every group along these mesh dims on every process of the world, in one order, and return the group of ``ranks``."""
    own_group = None
    for group in dict.fromkeys(mesh.members_of(mesh_dims, member) for member in mesh.members):
        group_ranks = sorted(mesh.ranks[member] for member in group)
        made = dist.new_group(group_ranks, **options)
        own_group = made if group_ranks == sorted(ranks) else own_group
    return own_group


@contextmanager
def _name_new_groups(ranks: list[int]) -> Iterator[None]:
    """Name groups that are made in the block by their ranks and the number of groups of these ranks, equal on all members."""
    key = tuple(sorted(ranks))
    _GROUP_CACHE.reset_for_world(dist.group.WORLD)
    _GROUP_CACHE.counts[key] += 1
    _GROUP_CACHE.name = f"dtensor_{'_'.join(map(str, key))}_{_GROUP_CACHE.counts[key]}"
    try:
        with _GROUP_NAME_PATCH:
            yield
    finally:
        _GROUP_CACHE.name = None


@contextmanager
def _patch_group_names() -> Iterator[None]:
    """Replace, until the end of the block, torch's function that names a group (no public API sets a name)."""
    setattr(distributed_c10d, HASH_RANKS_NAME, lambda ranks: _GROUP_CACHE.name or hash_ranks(ranks))
    yield
    setattr(distributed_c10d, HASH_RANKS_NAME, hash_ranks)


_GROUP_NAME_PATCH = RefCountedPatch(_patch_group_names)


# --- library groups: see [Note: Library groups] ---------------------------------------------------------------------------
_LIBRARY_GROUPS: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by the program's group; an entry ends with it
_LIBRARY_SUBGROUPS: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
_LIBRARY_HANDLES: WeakSet[Any] = WeakSet()
_LOCK, _GROUP_LOCKS = threading.Lock(), WeakKeyDictionary[Any, Any]()  # one lock for each program group


def library_group(handle: Any, device_type: str) -> Any:
    """Return the group over which the library communicates among the ranks of a program's group.

    On gloo this is an own group, which all these ranks make here together once. On other backends it is ``handle``.
    """
    if handle in _LIBRARY_HANDLES or dist.get_world_size(handle) == 1 or backend_name(handle, device_type) != "gloo":
        return handle
    with _LOCK:
        group_lock = _GROUP_LOCKS.setdefault(handle, threading.RLock())
    with group_lock:  # several threads may communicate for the first time at once
        group = _LIBRARY_GROUPS.get(handle)
        if group is None:
            group = _LIBRARY_GROUPS[handle] = make_library_group(handle, dist.get_process_group_ranks(handle), device_type)
    return group


def library_subgroup(handle: Any, ranks: Sequence[int], device_type: str) -> Any:
    """Return the library group for some ranks of a program's group. Only these ranks communicate and call this function."""
    if len(ranks) == dist.get_world_size(handle) or backend_name(handle, device_type) != "gloo":
        return library_group(handle, device_type)
    subgroups, key = _LIBRARY_SUBGROUPS.setdefault(handle, {}), tuple(sorted(ranks))
    group = subgroups.get(key)
    if group is None:
        group = subgroups[key] = make_library_group(handle, list(ranks), device_type)
    return group


def make_library_group(handle: Any, ranks: list[int], device_type: str, what: str = "of dtensor") -> Any:
    """Make a gloo group of some ranks of the program's group ``handle``. All of them must call this together."""
    for hook in BEFORE_NEW_GROUP:
        hook(ranks, "gloo")
    description = f"{handle.group_desc}, {what}"
    options = {"backend": "gloo", "timeout": _timeout_of(handle, device_type), "group_desc": description}
    group = _make_among_members(ranks, options)
    _LIBRARY_HANDLES.add(group)
    return group


# --- agreement without a collective -------------------------------------------------------------------------------------------
def elect_value(world: Any, key: str, value: str) -> str | None:
    """Return the ``value`` of the first rank that called with ``key``, kept in torch's store. No rank waits for another.

    So ranks may call at any time or never. Return None on all ranks if torch's store does not support it.
    """
    if dist.get_backend(world) == "fake":
        return value  # the fake backend has no other rank
    try:
        return default_store().compare_set(key, "", value).decode()
    except dist.DistError:  # the store is unreachable, perhaps for this rank only
        raise
    except (RuntimeError, NotImplementedError):  # a kind of store without compare_set
        return None
