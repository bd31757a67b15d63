"""Cross-mesh calls: operator calls with operands on several meshes, or with elements of lists that are plain tensors.

Gradient clipping is such a program: it stacks the norms of all parameters, and scales lists of gradients by the result.

- List operators run mesh by mesh, since they work on each element by itself. No mesh is a place, too: plain elements stay plain.
- Tensors with dims are never redistributed to another mesh implicitly; the call raises.
- A 0-d tensor is reduced on its own mesh and may then be used on any mesh of the same ranks. See [Note: Numbers of submeshes].
- In backward, tensors with dims are treated like 0-d tensors: autograd's formulas expand the gradient of a number to the shape
  of the operand that the number came from.
- A call that writes to plain tensors may read distributed numbers: every rank writes the same number.

[Note: Numbers of submeshes]
All ranks of a mesh must hold the same number. They do if each group of the mesh is within one group of the number's mesh.
A number on a submesh, ``mesh["dp"]`` of ``("dp", "tp")``, has one copy for each index of the other mesh dims. If it is used
beyond the submesh (in a norm together with numbers of ``mesh["dp", "tp"]``), the copies are gathered over the missing mesh dims,
a few bytes, and compared. If they are equal up to rounding, all ranks use the first copy; else the call raises. The result of
numbers alone is on the mesh with the most ranks, so that numbers of submeshes are gathered once and not at each use.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ..base.caches import memoize
from ..base.modes import MODES
from ..base.recorder_hooks import untracked
from ..base.tensor_tree import iter_tree_leaves, map_leaves
from ..base.torch_internals import graph_task
from ..base.tracing import has_no_values
from ..base.user_frames import optimizer_state_hint
from ..comm import PerRank, reordered
from ..comm.map_ranks import communicator_of
from ..errors import ImplicitCommunicationError, MeshError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..propagation.op_schema import OperatorSchema
from ..redistribute import execute
from ..redistribute import plan as plan_redistribution
from ..state.wrap import wrap_local
from .programs.frame import Runner


def meshes_of(values: Any) -> dict[DeviceMesh, None]:
    """Return the meshes of all DTensors among ``values`` and in lists of them, in order."""
    meshes: dict[DeviceMesh, None] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            if (layout := getattr(value, "_layout", None)) is not None:
                meshes[layout.mesh] = None
        elif isinstance(value, (list, tuple)):
            meshes.update(meshes_of(value))
    return meshes


def make_cross_mesh_runner(operator: OperatorSchema, bound: dict[str, Any]) -> Runner | None:
    """Return the runner of a call with operands on several meshes, or with plain tensors to write; None for other calls.

    Args:
        bound: the arguments by name.

    Raises:
        MeshError: no case of the module's docstring serves the call.
    """
    groups = _group_by_mesh(operator, bound) if operator.traits.per_element else ()
    if len(groups) > 1:
        return lambda args, kwargs, *_: _run_mesh_by_mesh(operator, operator.bind(args, kwargs), groups)
    if _writes_plain_tensors(operator, bound):
        return lambda args, kwargs, *_: _run_on_plain_tensors(operator, operator.bind(args, kwargs))
    return _make_home_runner(operator, bound) if len(meshes_of(bound.values())) > 1 else None


def _make_home_runner(operator: OperatorSchema, bound: dict[str, Any]) -> Runner:
    """Return the runner that copies operands to the mesh of the written or largest operand, and calls the operator there."""
    home = _choose_home_mesh(operator, bound)
    name = operator.name

    def run_on_home_mesh(args: tuple[Any, ...], kwargs: dict[str, Any], *_: Any) -> Any:
        """Copy the operands of other meshes to the mesh ``home``, then call the operator."""
        values = [*args, *kwargs.values()]
        _check_copyable_operands(name, values, home)
        copies = _copy_to_mesh(values, home, name)
        args, kwargs = map_leaves(lambda value: copies.get(id(value), value), (args, kwargs))
        return operator.func(*args, **kwargs)

    return run_on_home_mesh


def _layout_of(value: Any) -> Any:
    return getattr(value, "_layout", None) if isinstance(value, torch.Tensor) else None


# --- lists --------------------------------------------------------------------------------------------------------------
def _group_by_mesh(operator: OperatorSchema, bound: dict[str, Any]) -> list[list[int]]:
    """Return the positions of list elements, one group for each mesh in the first list; [] for a call without lists."""
    lists = [bound[name] for name in operator.names if name in operator.tensors and isinstance(bound.get(name), (list, tuple))]
    if not lists:
        return []
    groups: dict[Any, list[int]] = {}
    for i, value in enumerate(lists[0]):
        groups.setdefault(None if _layout_of(value) is None else _layout_of(value).mesh, []).append(i)
    return list(groups.values())


def _run_mesh_by_mesh(operator: OperatorSchema, bound: dict[str, Any], groups: Sequence[Sequence[int]]) -> Any:
    """Run a list operator once for each group of elements on one mesh, and return the results in order."""
    count = sum(map(len, groups))
    results: list[Any] = [None] * count
    for group in groups:
        part = {
            name: [value[i] for i in group] if isinstance(value, (list, tuple)) and len(value) == count else value
            for name, value in bound.items()
        }
        for i, result in zip(group, operator.call(part) or (), strict=False):
            results[i] = result
    return results if any(item is not None for item in results) else None


# --- plain tensors ------------------------------------------------------------------------------------------------------
def _writes_plain_tensors(operator: OperatorSchema, bound: dict[str, Any]) -> bool:
    """Return True if the first argument that a call writes to is plain, and all DTensors of the call have one element."""
    if not operator.mutated or operator.outs:
        return False
    first = next(bound.get(name) for name in operator.names if name in operator.mutated)
    return all(_layout_of(value) is None for value in iter_tree_leaves(first)) and all(
        _layout_of(value).numel == 1 for value in iter_tree_leaves(bound) if _layout_of(value) is not None
    )


def _run_on_plain_tensors(operator: OperatorSchema, bound: dict[str, Any]) -> Any:
    """Run the call with plain numbers in place of its DTensors. A rank outside the mesh, which has no number, writes nothing."""
    ranked = any(isinstance(value, PerRank) for value in iter_tree_leaves(bound))
    plain = map_leaves(lambda value: _to_plain_value(value, operator.name, ranked), bound)
    if not all(communicator_of(mesh).held for mesh in meshes_of(bound.values())):
        return bound[operator.returns[0]] if len(operator.returns) == 1 and operator.returns[0] else None
    result = operator.call(plain)
    for name in operator.mutated:  # gradients, of fused optimizers
        for value, number in zip(iter_tree_leaves(bound.get(name)), iter_tree_leaves(plain.get(name)), strict=True):
            if _layout_of(value) is not None:
                value.copy_(number)
    return result


def _to_plain_value(value: Any, name: str, ranked: bool) -> Any:
    """Return the reduced value of a DTensor as a plain tensor, a ``PerRank`` if ``ranked``; other values unchanged."""
    layout = _layout_of(value)
    if layout is None:
        return value
    local = _replicate_on_own_mesh(value, name)
    if not isinstance(local, PerRank) or ranked:
        return local
    first = local.shards[0]
    if not layout.mesh.spans_root and not all(shard.equal(first) for shard in local.shards):
        raise MeshError(
            f"{name}: a 0-d tensor on {layout.mesh!r}, with values that differ between the submeshes, would "
            "be written to a plain tensor; reduce it over the other mesh dims first, or write to a DTensor on that mesh"
        )
    return first


# --- numbers ------------------------------------------------------------------------------------------------------------
def _choose_home_mesh(operator: OperatorSchema, bound: dict[str, Any]) -> DeviceMesh:
    """Return the mesh of the written argument, else of the largest operand; for numbers alone, the mesh with the most ranks."""
    written = [bound.get(name) for name in operator.names if name in operator.mutated]
    for chosen in (written, list(bound.values())):
        layouts = [_layout_of(value) for value in iter_tree_leaves(chosen) if _layout_of(value) is not None]
        if layouts:
            mesh: DeviceMesh = max(layouts, key=lambda layout: (_count_elements(layout), layout.mesh.size())).mesh
            return mesh
    raise AssertionError("no operand is on a mesh")


def _count_elements(layout: Layout) -> int:
    """Return the number of different elements of a tensor with this layout; an expanded number counts as one."""
    return layout.numel if any(layout.stride) else 1


def _check_copyable_operands(name: str, values: Sequence[Any], home: DeviceMesh) -> None:
    """Raise unless each operand of another mesh is 0-d, or this is backward, and its mesh has the ranks of ``home``."""
    backward = graph_task() != -1
    for value in iter_tree_leaves(values):
        layout = _layout_of(value)
        if layout is None or layout.mesh == home:
            continue
        if (layout.shape and not backward) or not _same_ranks(layout.mesh, home):
            raise make_mesh_error(name, meshes_of(values))


def make_mesh_error(name: str, meshes: Iterable[DeviceMesh]) -> MeshError:
    """Return the error of a call with operands on several meshes that cannot be combined."""
    return MeshError(
        f"{name}: operands are on different meshes: {', '.join(map(repr, meshes))}; redistribute them to "
        f"one mesh with x.redistribute(mesh, placements){optimizer_state_hint(sys._getframe())}"
    )


def _same_ranks(a: DeviceMesh, b: DeviceMesh) -> bool:
    """Return True if two meshes have the same ranks and device type; a submesh counts with all its copies."""
    return sorted(a.ranks) == sorted(b.ranks) and (a.kind, a.device_type) == (b.kind, b.device_type)


def _copy_to_mesh(values: Sequence[Any], home: DeviceMesh, name: str) -> dict[int, Any]:
    """Replicate each value of another mesh on ``home``, values of one layout in one collective.

    Returns:
        The copies by the identity of the value.
    """
    by_layout: dict[Layout, dict[int, Any]] = {}
    for value in iter_tree_leaves(values):
        layout = _layout_of(value)
        if layout is not None and layout.mesh != home:
            by_layout.setdefault(layout, {})[id(value)] = value
    copies: dict[int, Any] = {}
    for layout, group in by_layout.items():
        first, *others = group.values()
        stacked = torch.ops.aten.stack.default([first, *others]) if others else first
        local = _replicate_on_own_mesh(stacked, name)
        if layout.mesh.ranks != home.ranks:  # in process, shards are in the order of the members
            local = reordered(local, [layout.mesh.ranks.index(rank) for rank in home.ranks])
        local = _take_equal_copy(local, layout.mesh, home, name)
        target = Layout.replicated(home, layout.shape, layout.stride, layout.dtype)
        parts = local.unbind() if others else [local]
        copies.update((key, wrap_local(part, target)) for key, part in zip(group, parts, strict=True))
    return copies


def _replicate_on_own_mesh(value: Any, name: str) -> Any:
    """Return the local value of an operand, replicated on its own mesh first; raise under ``explicit()``."""
    layout = value._layout
    if layout.is_replicated:
        return value._local
    if MODES.explicit:
        raise ImplicitCommunicationError(
            f"{name} would all-gather an operand of another mesh, {layout!r}, under explicit(); redistribute it before the call"
        )
    return execute(plan_redistribution(layout, layout.to_replicated()), value._local)


# --- numbers of submeshes -----------------------------------------------------------------------------------------------
@memoize(256)
def _dims_across_submeshes(mesh: DeviceMesh, home: DeviceMesh) -> tuple[int, ...]:
    """Return the dims of ``home`` along which ranks are in different copies of the submesh ``mesh``."""
    group_of: dict[int, tuple[int, ...]] = {}
    for member in mesh.members:
        group_of[mesh.ranks[member]] = mesh.members_of(range(mesh.ndim), member)
    dims = []
    for d in range(home.ndim):
        rows = ([group_of[home.ranks[m]] for m in home.members_of((d,), member)] for member in home.members)
        if any(group != row[0] for row in rows for group in row):
            dims.append(d)
    return tuple(dims)


def _take_equal_copy(local: Any, mesh: DeviceMesh, home: DeviceMesh, name: str) -> Any:
    """Gather the copies of all submeshes, check that they are equal, and return the first; see [Note: Numbers of submeshes].

    Raises:
        MeshError: the copies differ (on all ranks that share them).
    """
    mesh_dims, comm = _dims_across_submeshes(mesh, home), communicator_of(home)
    if not mesh_dims or not comm.held:
        return local
    if MODES.explicit:
        raise ImplicitCommunicationError(
            f"{name} would compare the values of a 0-d tensor on {mesh!r} between its submeshes, which communicates, under "
            "explicit(); use it with operands of that mesh only"
        )
    shape = tuple(local.shape)
    copies = comm.all_gather(local, mesh_dims, lambda member: shape).wait()
    comm.map(lambda _, *rows: _check_copies_equal(rows, name, mesh), *copies)
    return copies[0]


@untracked
def _check_copies_equal(rows: Sequence[torch.Tensor], name: str, mesh: DeviceMesh) -> None:
    """Raise if a value differs between submeshes by more than rounding."""
    first = rows[0]
    if first.is_meta or has_no_values(first):
        return
    rounding = 16 * torch.finfo(first.dtype).eps if first.is_floating_point() or first.is_complex() else 0.0
    for row in rows[1:]:
        if not torch.allclose(row, first, rtol=rounding, atol=0.0, equal_nan=True):
            raise MeshError(
                f"{name}: the values on submeshes of {mesh!r} differ, {first.tolist()} and {row.tolist()}, so "
                "there is no single value for all ranks. Reduce them over the other mesh dims first, or use them "
                "on that mesh only"
            )
