"""Mixed meshes: calls with operands on several meshes. Lists run mesh by mesh, 0-d tensors are read as numbers.

Gradient clipping is such a program: it stacks the norms of all parameters, and scales lists of gradients by the result. Tensors
with dims are never moved silently. A 0-d value is reduced on its own mesh and then known to every rank of it, so it may be used
on any mesh of the same ranks, by this law: *all ranks of a mesh hold the same number*. On a mesh whose groups lie inside those of
the number's mesh they do. A number on a slice, ``mesh["dp"]`` of ``("dp", "tp")``, is known to each copy of the slice by itself;
used beyond it (in a norm together with numbers of ``mesh["dp", "tp"]``) the copies tell each other theirs, a gather of a few
bytes over the mesh dims that are missing. Equal ones, up to rounding, are one number (the first copy's); others raise.
Results of numbers alone live on the mesh of most ranks, so that what is on slices of it is told once and not at every use.

Autograd's formulas carry a number's gradient back to where the number came from in the shapes of that place, so in backward
tensors with dims follow the same law.

No mesh at all is a place, too: elements of lists that are plain tensors stay what they are (a list operator works on each
element by itself), and what is written to plain tensors may depend on distributed numbers: every rank writes the same number.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..base.caches import remembered
from ..base.modes import MODES
from ..base.recorder_hooks import aside
from ..base.torch_internals import graph_task
from ..base.tracing import has_no_values
from ..base.user_frames import loaded_elsewhere
from ..comm import PerRank, communicator_of, reordered
from ..errors import ImplicitCommunicationError, MeshError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..propagation.op_schema import Operator
from ..redistribute import execute as run_move
from ..redistribute import plan as plan_move
from .wrap import wrap_local

Runner = Callable[..., Any]


def meshes_of(values: Any) -> dict[DeviceMesh, None]:
    """The meshes of all DTensors among arguments, in order."""
    found: dict[DeviceMesh, None] = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            if (layout := getattr(value, "_layout", None)) is not None:
                found[layout.mesh] = None
        elif isinstance(value, (list, tuple)):
            found.update(meshes_of(value))
    return found


def across_places(operator: Operator, bound: dict[str, Any], meshes: Sequence[DeviceMesh]) -> Runner | None:
    """How to run a call, its arguments by name, whose operands live in several places; None: all in one.

    Args:
        meshes: :func:`meshes_of` the arguments.

    Raises:
        MeshError: it is none of the cases above.
    """
    groups = _by_mesh(operator, bound) if operator.facts.per_element else ()
    if len(groups) > 1:
        return lambda args, kwargs, *_: _mesh_by_mesh(operator, operator.bind(args, kwargs), groups)
    if _writes_numbers(operator, bound):
        return lambda args, kwargs, *_: _with_numbers(operator, operator.bind(args, kwargs))
    return _at_home(operator, bound) if len(meshes) > 1 else None


def _at_home(operator: Operator, bound: dict[str, Any]) -> Runner:
    home = _home(operator, bound)
    name = operator.name

    def run(args: tuple[Any, ...], kwargs: dict[str, Any], *_: Any) -> Any:
        values = [*args, *kwargs.values()]
        _check(name, values, home)
        brought = _brought(values, home, name)
        moved = [_replaced(value, brought) for value in args]
        return operator.func(*moved, **{key: _replaced(value, brought) for key, value in kwargs.items()})

    return run


def _layout(value: Any) -> Any:
    return getattr(value, "_layout", None) if isinstance(value, torch.Tensor) else None


# --- lists --------------------------------------------------------------------------------------------------------------
def _by_mesh(operator: Operator, bound: dict[str, Any]) -> list[list[int]]:
    """Positions of the elements of a list operator, one group for each mesh of the first list's."""
    lists = [bound[name] for name in operator.names if name in operator.tensors and isinstance(bound.get(name), (list, tuple))]
    if not lists:
        return []
    groups: dict[Any, list[int]] = {}
    for i, value in enumerate(lists[0]):
        groups.setdefault(None if _layout(value) is None else _layout(value).mesh, []).append(i)
    return list(groups.values())


def _mesh_by_mesh(operator: Operator, bound: dict[str, Any], groups: Sequence[Sequence[int]]) -> Any:
    count = sum(map(len, groups))
    made: list[Any] = [None] * count
    for group in groups:
        part = {
            name: [value[i] for i in group] if isinstance(value, (list, tuple)) and len(value) == count else value
            for name, value in bound.items()
        }
        results = operator.call(part)
        for i, result in zip(group, results or (), strict=False):
            made[i] = result
    return made if any(item is not None for item in made) else None


# --- plain tensors ------------------------------------------------------------------------------------------------------
def _writes_numbers(operator: Operator, bound: dict[str, Any]) -> bool:
    """Whether a call is one of plain tensors, as what it writes first is plain, and all that is distributed in it are numbers."""
    if not operator.mutated or operator.outs:
        return False
    first = next(bound.get(name) for name in operator.names if name in operator.mutated)
    return all(_layout(value) is None for value in _leaves([first])) and all(
        _layout(value).numel == 1 for value in _leaves(list(bound.values())) if _layout(value) is not None
    )


def _with_numbers(operator: Operator, bound: dict[str, Any]) -> Any:
    """Run the call with what is distributed replaced by its value. A rank outside the mesh, which has none, writes nothing."""
    ranked = any(isinstance(value, PerRank) for value in _leaves(list(bound.values())))
    made = {name: _number(value, operator.name, ranked) for name, value in bound.items()}
    if not all(communicator_of(mesh).held for mesh in meshes_of(bound.values())):
        return bound[operator.returns[0]] if len(operator.returns) == 1 and operator.returns[0] else None
    result = operator.call(made)
    for name in operator.mutated:  # gradients, of fused optimizers
        for value, number in zip(_leaves([bound.get(name)]), _leaves([made.get(name)]), strict=True):
            if _layout(value) is not None:
                value.copy_(number)
    return result


def _number(value: Any, name: str, ranked: bool) -> Any:
    if isinstance(value, (list, tuple)):
        return [_number(item, name, ranked) for item in value]
    layout = _layout(value)
    if layout is None:
        return value
    local = _whole(value, name)
    if not isinstance(local, PerRank) or ranked:
        return local
    first = local.shards[0]
    if not layout.mesh.spans_root and not all(shard.equal(first) for shard in local.shards):
        raise MeshError(
            f"{name}: a 0-d tensor on {layout.mesh!r}, with values that differ between the submeshes, would "
            "be written to a plain tensor"
        )
    return first


# --- numbers ------------------------------------------------------------------------------------------------------------
def _home(operator: Operator, bound: dict[str, Any]) -> DeviceMesh:
    """The mesh of what is written, else of the largest operand; of numbers alone, the mesh of most ranks."""
    written = [bound.get(name) for name in operator.names if name in operator.mutated]
    for chosen in (written, list(bound.values())):
        layouts = [_layout(value) for value in _leaves(chosen) if _layout(value) is not None]
        if layouts:
            mesh: DeviceMesh = max(layouts, key=lambda layout: (_extent(layout), layout.mesh.size())).mesh
            return mesh
    raise AssertionError("no operand lives on a mesh")


def _extent(layout: Layout) -> int:
    """Number of different elements: an expanded number is still one."""
    return layout.numel if any(layout.stride) else 1


def _check(name: str, values: Sequence[Any], home: DeviceMesh) -> None:
    backward = graph_task() != -1
    for value in _leaves(values):
        layout = _layout(value)
        if layout is None or layout.mesh == home:
            continue
        if (layout.shape and not backward) or not _same_ranks(layout.mesh, home):
            raise apart(name, meshes_of(values))


def apart(name: str, meshes: Iterable[DeviceMesh]) -> MeshError:
    """What is raised where operands live on several meshes that do not go together."""
    return MeshError(
        f"{name}: operands are on different meshes: {', '.join(map(repr, meshes))}; redistribute them to "
        f"one mesh with x.redistribute(mesh, placements){loaded_elsewhere(sys._getframe())}"
    )


def _same_ranks(a: DeviceMesh, b: DeviceMesh) -> bool:
    """Whether the ranks of one mesh, with all copies where it is a slice, are those of the other."""
    return sorted(a.ranks) == sorted(b.ranks) and (a.kind, a.device_type) == (b.kind, b.device_type)


def _brought(values: Sequence[Any], home: DeviceMesh, name: str) -> dict[int, Any]:
    """By identity, each value of another mesh as the same one on every rank of ``home``; those of one layout travel together."""
    apart: dict[Layout, dict[int, Any]] = {}
    for value in _leaves(values):
        layout = _layout(value)
        if layout is not None and layout.mesh != home:
            apart.setdefault(layout, {})[id(value)] = value
    brought: dict[int, Any] = {}
    for layout, those in apart.items():
        first, *others = those.values()
        row = _by_member_of(home, layout.mesh, _whole(torch.ops.aten.stack.default([first, *others]) if others else first, name))
        row = _told(row, layout.mesh, home, name)
        target = Layout.replicated(home, layout.shape, layout.stride, layout.dtype)
        parts = row.unbind() if others else [row]
        brought.update((key, wrap_local(part, target)) for key, part in zip(those, parts, strict=True))
    return brought


def _replaced(value: Any, brought: dict[int, Any]) -> Any:
    if isinstance(value, (list, tuple)):
        return [_replaced(item, brought) for item in value]
    return brought.get(id(value), value)


def _whole(value: Any, name: str) -> Any:
    """The local of a value from elsewhere after its reduction."""
    layout = value._layout
    if layout.is_replicated:
        return value._local
    if MODES.explicit:
        raise ImplicitCommunicationError(
            f"{name} would all-gather an operand of another mesh, {layout!r}, under explicit(); redistribute it before"
        )
    return run_move(plan_move(layout, layout.whole()), value._local)


# --- numbers of slices --------------------------------------------------------------------------------------------------
@remembered(256)
def _missing(mesh: DeviceMesh, home: DeviceMesh) -> tuple[int, ...]:
    """The dims of ``home`` along which ranks are in different groups of ``mesh``."""
    group_of: dict[int, tuple[int, ...]] = {}
    for member in mesh.members:
        group_of[mesh.ranks[member]] = mesh.members_of(range(mesh.ndim), member)
    dims = []
    for d in range(home.ndim):
        lines = ([group_of[home.ranks[m]] for m in home.members_of((d,), member)] for member in home.members)
        if any(group != line[0] for line in lines for group in line):
            dims.append(d)
    return tuple(dims)


def _by_member_of(home: DeviceMesh, mesh: DeviceMesh, local: Any) -> Any:
    """``local`` in the order of the other mesh's members, where all ranks live in this process."""
    return local if mesh.ranks == home.ranks else reordered(local, [mesh.ranks.index(rank) for rank in home.ranks])


def _told(local: Any, mesh: DeviceMesh, home: DeviceMesh, name: str) -> Any:
    """What the first copy of a slice holds, on every rank of ``home``.

    Raises:
        MeshError: the copies differ (on all ranks that share them).
    """
    mesh_dims, comm = _missing(mesh, home), communicator_of(home)
    if not mesh_dims or not comm.held:
        return local
    if MODES.explicit:
        raise ImplicitCommunicationError(
            f"{name} would compare the values of a 0-d tensor on {mesh!r} under explicit(), which communicates"
        )
    shape = tuple(local.shape)
    copies = comm.all_gather(local, mesh_dims, lambda member: shape).wait()
    comm.map(lambda _, *rows: _alike(rows, name, mesh), *copies)
    return copies[0]


@aside
def _alike(rows: Sequence[torch.Tensor], name: str, mesh: DeviceMesh) -> None:
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


def _leaves(values: Sequence[Any]) -> list[Any]:
    return [leaf for value in values for leaf in (_leaves(value) if isinstance(value, (list, tuple)) else [value])]
