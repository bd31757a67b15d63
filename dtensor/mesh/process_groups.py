"""The ``torch.distributed`` group of the members along some mesh dims: given, the world, or made here once; and ours beside it.

Every member of a mesh asks for the same groups in the same order, since plans do not depend on the rank. But a mesh may
cover a part of the world, and processes outside it make no call, so a group is made among its own members only. torch
names such a group after its ranks and *the number of groups that this process has*; where members differ in that number
(one of them is in two meshes) they would wait for each other under different names, for ever. Hence names of our own.

Gloo tells the collectives of a group apart by nothing but their number. So that what a program asks of its group, on one rank
alone perhaps, does not meet what this library asks there on others, we talk over a group of our own beside each of its groups.
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

from ..base.patches import Together
from ..base.torch_internals import NAMES, default_store, hash_ranks
from ..errors import MeshError
from .geometry import Geometry


@dataclass(frozen=True, slots=True)
class Group:
    """A process group as a mesh sees it.

    Attributes:
        handle: the ``torch.distributed`` group.
        members: in mesh order: a group position is an index here.
        position: this process's.
        order: torch's rank in ``handle`` of each group position; None where they are the same.
        backend: its name, ``"gloo"``, ``"nccl"``, ...
        name: of the program's group: what a graph keeps of it.
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
        """torch's rank of this process."""
        return self.position if self.order is None else self.order[self.position]

    def to_torch(self, items: Sequence[Any]) -> list[Any]:
        """Items by group position, put by torch's group rank."""
        if self.order is None:
            return list(items)
        placed: list[Any] = [None] * len(items)
        for item, rank in zip(items, self.order, strict=True):
            placed[rank] = item
        return placed

    def to_mesh(self, items: Sequence[Any]) -> list[Any]:
        """Items by torch's group rank, put by group position."""
        return list(items) if self.order is None else [items[rank] for rank in self.order]


def group_of(mesh: Geometry, mesh_dims: Sequence[int]) -> Group:
    """The group over ``mesh_dims`` over which this process talks to others for us. The first call for some ranks makes it."""
    handle, members, ranks = _of_program(mesh, mesh_dims)
    own = beside(handle, mesh.device_type)
    return _seen(own, members, ranks, mesh, handle.group_name)


def program_group_of(mesh: Geometry, mesh_dims: Sequence[int]) -> Group:
    """The same of the group that its program sees, and talks over."""
    handle, members, ranks = _of_program(mesh, mesh_dims)
    return _seen(handle, members, ranks, mesh, handle.group_name)


def _seen(handle: Any, members: tuple[int, ...], ranks: list[int], mesh: Geometry, name: str) -> Group:
    position = ranks.index(dist.get_rank())
    return Group(handle, members, position, order_in(handle, ranks), backend_of(handle, mesh.device_type), name)


def _of_program(mesh: Geometry, mesh_dims: Sequence[int]) -> tuple[Any, tuple[int, ...], list[int]]:
    member = mesh.current_member()
    if member is None:
        raise MeshError(f"rank {dist.get_rank()} is not part of {mesh!r}: it has no process group there")
    members = mesh.members_of(mesh_dims, member)
    ranks = [mesh.ranks[m] for m in members]
    return _handle(mesh, mesh_dims, ranks), members, ranks


def order_in(handle: Any, ranks: Sequence[int]) -> tuple[int, ...] | None:
    """Torch's group rank of each of these ranks, by group position; None if that is the position."""
    places = {rank: place for place, rank in enumerate(dist.get_process_group_ranks(handle))}
    order = tuple(places[rank] for rank in ranks)
    return None if order == tuple(range(len(order))) else order


def handle_of(mesh: Geometry, mesh_dims: Sequence[int]) -> Any:
    """The ``torch.distributed`` group over ``mesh_dims``.

    Raises:
        MeshError: the ranks are no processes.
    """
    if mesh.kind == "in_process":
        raise MeshError(
            f"all ranks of {mesh!r} live in this process: there is no process group; "
            "start the program with `torchrun --nproc-per-node N` to have one"
        )
    if mesh.kind == "dry_run":
        raise MeshError(f"{mesh!r} is a dry run: it has no process groups; use init_device_mesh('cpu', ...) under torchrun")
    return _of_program(mesh, mesh_dims)[0]


def backend_of(handle: Any, device_type: str) -> str:
    """The backend that serves tensors of ``device_type`` (a group may have one for each)."""
    parts = (part.split(":", 1) for part in dist.get_backend_config(handle).split(","))
    by_device = {part[0]: part[-1] for part in parts}
    return by_device.get(device_type, next(iter(by_device.values())))


# --- finding or making it --------------------------------------------------------------------------------------------
HASH_RANKS = NAMES["hash_ranks"].path.rpartition(".")[2]


class _Made(threading.local):
    """Groups by ranks and backend; every thread has its own, since torch's tests run ranks as threads."""

    def __init__(self) -> None:
        self.world: Any = None  # that the groups belong to; another one after destroy_process_group
        self.groups: dict[tuple[tuple[int, ...], Any], Any] = {}
        self.times: Counter[tuple[int, ...]] = Counter()
        self.name: str | None = None  # of the group that is being made

    def begin_world(self, world: Any) -> None:
        """Forget the groups of a world that has ended. In another one, processes with other pasts may have these ranks."""
        if self.world is not world:
            self.world = world
            self.groups.clear()
            self.times.clear()


_MADE = _Made()
BEFORE: list[Callable[[list[int], str], None]] = []  # called before a group of these ranks is made: torch waits for them


def _handle(mesh: Geometry, mesh_dims: Sequence[int], ranks: list[int]) -> Any:
    given = mesh._root.groups
    group_id = mesh.group_id(mesh_dims)
    if group_id in given:
        return given[group_id]
    key = mesh._root.wide(group_id)  # the same ranks, whatever their order
    if key in given and key:
        return given[key]
    world, backend = dist.group.WORLD, mesh._root.backends.get(key)
    if backend is None and sorted(ranks) == list(range(dist.get_world_size())):
        handle = world
    else:
        _MADE.begin_world(world)
        known = (tuple(sorted(ranks)), backend)
        handle = _MADE.groups.get(known)
        if handle is None:
            handle = _MADE.groups[known] = new_handle(mesh, mesh_dims, ranks, backend)
    given[key or group_id] = handle
    return handle


def new_handle(mesh: Geometry, mesh_dims: Sequence[int], ranks: list[int], backend: Any = None) -> Any:
    """A group of these ranks; ``backend``: see :class:`.root.Backend`, None: the world's."""
    world = dist.group.WORLD
    for meet in BEFORE:
        meet(ranks, backend_of(world, mesh.device_type) if backend is None or backend.name is None else backend.name)
    options = {"timeout": _timeout_of(world, mesh.device_type), "group_desc": _described(mesh, mesh_dims)}
    if backend is not None:
        options |= {"backend": backend.name, "pg_options": backend.options}
    return _make_among_all(mesh, mesh_dims, ranks, options) if _splits(world) else _make_among_members(ranks, options)


def _described(mesh: Geometry, mesh_dims: Sequence[int]) -> str:
    """What torch's traces and recorders call the group: ``mesh_dp``, as they do with torch's meshes, or ``mesh_dim_0``."""
    names = mesh.mesh_dim_names or [f"dim_{d}" for d in range(mesh.ndim)]
    return "_".join(["mesh", *(names[d] for d in mesh_dims)])


def _splits(world: Any) -> bool:
    """Whether new groups are split off the world's communicator (NCCL bound to a device), which all of the world must join."""
    return getattr(world, "bound_device_id", None) is not None


def _timeout_of(handle: Any, device_type: str) -> timedelta | None:
    """The user's timeout, which a new group does not take over by itself; None, torch's default, if it cannot be read."""
    try:
        options = getattr(handle._get_backend(torch.device(device_type)), "options", None)  # no public way to read it
    except RuntimeError:  # a backend written in Python
        return None
    return getattr(options, "_timeout", None)


def _make_among_members(ranks: list[int], options: dict[str, Any]) -> Any:
    with _named_for(ranks):
        return dist.new_group(sorted(ranks), use_local_synchronization=True, **options)


def _make_among_all(mesh: Geometry, mesh_dims: Sequence[int], ranks: list[int], options: dict[str, Any]) -> Any:
    """Every process of the world makes every group along these mesh dims, in one order."""
    mine = None
    for group in dict.fromkeys(mesh.members_of(mesh_dims, member) for member in mesh.members):
        others = sorted(mesh.ranks[member] for member in group)
        made = dist.new_group(others, **options)
        mine = made if others == sorted(ranks) else mine
    return mine


@contextmanager
def _named_for(ranks: list[int]) -> Iterator[None]:
    """Groups made inside are named after their ranks and how often we made one of these ranks: alike on all its members."""
    key = tuple(sorted(ranks))
    _MADE.begin_world(dist.group.WORLD)
    _MADE.times[key] += 1
    _MADE.name = f"dtensor_{'_'.join(map(str, key))}_{_MADE.times[key]}"
    try:
        with _NAMING:
            yield
    finally:
        _MADE.name = None


@contextmanager
def _names_of_ours() -> Iterator[None]:
    """Torch names groups as the thread that makes one says. It has no public way to name a group."""
    setattr(distributed_c10d, HASH_RANKS, lambda ranks: _MADE.name or hash_ranks(ranks))
    yield
    setattr(distributed_c10d, HASH_RANKS, hash_ranks)


_NAMING = Together(_names_of_ours)


# --- ours beside the program's ------------------------------------------------------------------------------------------
_BESIDE: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()  # by the program's group: it ends with it
_PARTS: WeakKeyDictionary[Any, dict[tuple[int, ...], Any]] = WeakKeyDictionary()
_OURS: WeakSet[Any] = WeakSet()
_LOCK, _MAKING = threading.Lock(), WeakKeyDictionary[Any, Any]()  # by the program's group, as ranks may make others meanwhile


def beside(handle: Any, device_type: str) -> Any:
    """The group over which this library talks among the ranks of a program's group: on gloo one of its own, which all of them
    make here together once; on other backends that group.
    """
    if handle in _OURS or dist.get_world_size(handle) == 1 or backend_of(handle, device_type) != "gloo":
        return handle
    with _LOCK:
        making = _MAKING.setdefault(handle, threading.RLock())
    with making:  # several threads may communicate for the first time at once
        found = _BESIDE.get(handle)
        if found is None:
            found = _BESIDE[handle] = _made_beside(handle, dist.get_process_group_ranks(handle), device_type)
    return found


def beside_part(handle: Any, ranks: Sequence[int], device_type: str) -> Any:
    """The same where only these of its ranks talk, and come here."""
    if len(ranks) == dist.get_world_size(handle) or backend_of(handle, device_type) != "gloo":
        return beside(handle, device_type)
    made, key = _PARTS.setdefault(handle, {}), tuple(sorted(ranks))
    found = made.get(key)
    if found is None:
        found = made[key] = _made_beside(handle, list(ranks), device_type)
    return found


def made_of(handle: Any, device_type: str, what: str) -> Any:
    """A gloo group of the ranks of ``handle``, which all of them make here together."""
    return _made_beside(handle, dist.get_process_group_ranks(handle), device_type, what)


def _made_beside(handle: Any, ranks: list[int], device_type: str, what: str = "of dtensor") -> Any:
    for meet in BEFORE:
        meet(ranks, "gloo")
    described = f"{handle.group_desc}, {what}"
    options = {"backend": "gloo", "timeout": _timeout_of(handle, device_type), "group_desc": described}
    made = _make_among_members(ranks, options)
    _OURS.add(made)
    return made


# --- what all ranks must hold alike, without a collective -------------------------------------------------------------------
def settled_by_first(world: Any, key: str, value: str) -> str | None:
    """The ``value`` of the rank that asked first; no rank waits for another, so they may ask at any time, or never.

    None, on all ranks alike, where torch has no store to leave it in.
    """
    if dist.get_backend(world) == "fake":
        return value  # there is no other rank
    try:
        return default_store().compare_set(key, "", value).decode()
    except dist.DistError:  # it is out of reach, for this rank alone perhaps
        raise
    except (RuntimeError, NotImplementedError):  # a kind of store that cannot
        return None
