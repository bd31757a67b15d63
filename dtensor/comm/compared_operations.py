"""Compared operations: an operation on tensors of several ranks enters their rolling hash, which they compare at the next
collective.

The hash is that of the ranks that compute with the same tensors. Only the main thread adds to it.
"""

from __future__ import annotations

import threading
import zlib
from collections.abc import Callable, Sequence
from typing import ParamSpec, TypeVar

import torch

from ..base.caches import memoize
from ..base.generators import get_generator_state
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..watchdog.collective_hooks import get_or_make_operation_log
from ..watchdog.flight_recorder import OperationHash, fingerprint
from ..watchdog.levels import CheckLevel, operation_records_of

P = ParamSpec("P")
T = TypeVar("T")
_MAIN_THREAD = threading.main_thread().ident


@memoize(256)
def ranks_along(mesh: DeviceMesh, dims: tuple[int, ...] | None = None) -> frozenset[int]:
    """Return the global ranks of this rank's group along mesh dims (default: all); empty if ranks are not processes."""
    if mesh.kind != "process_group":
        return frozenset()
    along = range(mesh.ndim) if dims is None else dims
    return frozenset(mesh.ranks[member] for member in mesh.members_of(along, mesh.current_member() or 0))


def ranks_computing_with(layouts: Sequence[Layout]) -> frozenset[int]:
    """Return the global ranks of this rank's group along all mesh dims over which any of these tensors is sharded or partial.

    Empty if the ranks are not processes, and if ranks could disagree about the set. A tensor on a slice of one mesh and a
    tensor on another mesh have other ranks in common for each copy of the slice.
    """
    dims: dict[DeviceMesh, set[int]] = {}
    for layout in layouts:
        group_dims = layout.mesh.group_id(dim for dim in range(layout.mesh.ndim) if not layout.placements[dim].is_replicate())
        if group_dims:
            dims.setdefault(layout.mesh._get_root_mesh(), set()).update(group_dims)
    if len(dims) > 1 and any(root.size_of(group_dims) != root.size() for root, group_dims in dims.items()):
        return frozenset()
    return frozenset[int]().union(*(ranks_along(root, tuple(sorted(group_dims))) for root, group_dims in dims.items()))


def operation_hash_of(layouts: Sequence[Layout]) -> OperationHash | None:
    """Return the rolling hash of the :func:`ranks_computing_with` these tensors; None for fewer than two ranks."""
    ranks = ranks_computing_with(layouts)
    return operation_records_of(layouts[0].mesh._root.world).operation_hash_of(ranks) if len(ranks) > 1 else None


def count_as_operation(layouts: Sequence[Layout], mesh_dims: Sequence[int], text: str, run: Callable[P, T]) -> Callable[P, T]:
    """Wrap a collective so that its calls enter the rolling hash of the ranks that compute with tensors of ``layouts``.

    Ranks that share such tensors issue the collectives of their different groups in one order. If the tensors are sharded over
    ``mesh_dims`` alone, the group itself compares that order, and ``run`` is returned as it is.
    """
    mesh = layouts[0].mesh
    op_hash = operation_hash_of(layouts) if len(ranks_computing_with(layouts)) > mesh.size_of(mesh_dims) else None
    if op_hash is None:
        return run
    step = fingerprint(f"{text} {mesh.named(mesh_dims)}")

    def run_counted(*args: P.args, **kwargs: P.kwargs) -> T:
        """Mix the collective into the hash that ranks compare (in the main thread only), then run it."""
        if CheckLevel.now != "off" and threading.get_ident() == _MAIN_THREAD:
            op_hash.hash = hash((op_hash.hash, step))
        return run(*args, **kwargs)

    return run_counted


def compare_generator_state(mesh: DeviceMesh, generator: torch.Generator, how: str) -> None:
    """Mix the state of ``generator`` and ``how`` ranks draw from it into the hash that they compare at their next collective."""
    if _is_compared(mesh):
        state_hash = zlib.crc32(how.encode(), zlib.crc32(get_generator_state(generator).numpy().data))
        _add_to_hash(mesh, state_hash, f"{how} from the generator in state {state_hash:x}")


def compare_text(mesh: DeviceMesh, text: str) -> None:
    """Mix ``text``, a description of a local operation, into the hash that ranks of ``mesh`` compare at their next collective."""
    if _is_compared(mesh):
        _add_to_hash(mesh, fingerprint(text), text)


def _is_compared(mesh: DeviceMesh) -> bool:
    return CheckLevel.now in ("watch", "strict") and len(ranks_along(mesh)) > 1 and threading.get_ident() == _MAIN_THREAD


def _add_to_hash(mesh: DeviceMesh, value: int, text: str) -> None:
    """Mix one operation of ``mesh`` into the hash that its ranks compare; ``text`` describes the operation."""
    if CheckLevel.now == "watch":
        op_hash = operation_records_of(mesh._root.world).operation_hash_of(ranks_along(mesh))
        op_hash.hash, op_hash.last = hash((op_hash.hash, value)), text
    elif (log := get_or_make_operation_log(mesh._root.world, ranks_along(mesh))) is not None:
        log.mix(value)
