"""The layout that ranks' pieces add up to, with validation across ranks for ``from_local``."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base.caches import Bounded
from ..base.memory_order import stride_like
from ..base.recorder_hooks import aside
from ..base.symbolic_sizes import sizes
from ..base.tracing import is_traced, kept
from ..base.validation import sizes_of
from ..comm import PerRank, communicator_of, shards_of
from ..comm.cross_rank_check import compared, told_by_all, words_compared
from ..comm.custom_ops import in_graph
from ..comm.flat_rows import content
from ..errors import LayoutError, PlacementError
from ..layout.layout import Layout
from ..layout.splits import Split
from ..mesh.device_mesh import DeviceMesh
from ..placement import Partial, Placement, Replicate, Shard, normalize


def layout_of_locals(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Sequence[Placement] | None,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    *,
    check: bool,
) -> Layout:
    """The layout of the tensor whose pieces are ``local``.

    Raises:
        LayoutError: a piece does not have the shape that the layout gives it, or (``check``) ranks disagree.
    """
    key = None
    if shape is not None and not check and type(local) is torch.Tensor:
        key = (mesh, _hashable(placements), _hashable(shape), _hashable(stride), local.dtype, local.shape)
        try:
            known = _KNOWN.get(key)
        except TypeError:
            key = None
        else:
            if known is not None:  # a piece of this shape fits what was asked for
                return known
    pieces, here = shards_of(local), communicator_of(mesh).holds_all
    if isinstance(local, PerRank) and not (here and len(pieces) == len(mesh.members)):
        has = f"has {len(mesh.members)} ranks" if here else "does not live in this process: give its piece"
        raise LayoutError(f"per_rank with {len(pieces)} tensors for {mesh!r}, which {has}")
    shape = None if shape is None else sizes_of(shape, "from_local(shape=)")
    stride = None if stride is None else sizes_of(stride, "from_local(stride=)")
    ndim = pieces[0].ndim if mesh.current_member() is not None or shape is None else len(shape)
    if mesh.kind == "dry_run":
        check = False
    try:
        wanted = normalize(placements, mesh.ndim, ndim)
    except PlacementError as error:
        if shape is None and (check or measures(mesh, placements)):
            _all_pieces(mesh, pieces, str(error))  # this rank's piece alone may lack the dim: the others wait for its sizes
        raise
    dtype = pieces[0].dtype
    if shape is not None:
        layout = Layout.of(mesh, wanted, shape, stride, dtype)
        if check and communicator_of(mesh).talks:
            _agree(
                layout, _all_pieces(mesh, pieces, str(layout.placements))[0], "the given shape makes"
            )  # a rank must not leave before the exchange below
        else:
            _fits(layout, pieces)
            if key is not None:
                _KNOWN.keep(key, layout)
    else:
        layout = _measured(mesh, wanted, pieces, stride, dtype, check)
    if check:
        _check(layout, pieces)
    return layout


def _hashable(given: Any) -> Any:
    return tuple(given) if isinstance(given, list) else given


def _measured(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    pieces: Sequence[torch.Tensor],
    stride: Any,
    dtype: torch.dtype,
    check: bool,
) -> Layout:
    """The layout from the sizes of all pieces; they are exchanged where a tensor dim is sharded and no sizes are given."""
    shape, order = list(sizes(pieces[0].shape)), sizes(pieces[0].stride())
    if check or measures(mesh, placements):
        shapes, strides = _all_pieces(mesh, pieces, str(placements))
        key = (mesh, placements, shapes, strides if stride is None else stride, dtype)
        layout = _KNOWN.get(key)
        if layout is None:
            steps = strides[_telling(shapes)] if stride is None else stride
            layout = _KNOWN.keep(key, _tiled(mesh, placements, shapes, steps, stride is None, dtype))
        return layout
    for p in _cutting(mesh, placements):
        if p.sizes is not None:
            shape[p.dim] = sum(p.sizes)
    layout = Layout.of(mesh, placements, shape, stride_like(shape, order) if stride is None else stride, dtype)
    _fits(layout, pieces)
    return layout


_KNOWN: Bounded[Any, Layout] = Bounded(4096, "local_layout.known")


def _tiled(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shapes: tuple[tuple[int, ...], ...],
    stride: Sequence[int],
    by_order: bool,
    dtype: torch.dtype,
) -> Layout:
    """The layout that pieces of these shapes tile."""
    _same_dims(shapes)
    shape = list(shapes[0])
    splits: list[Split | None] = [None] * len(shape)
    for dim in sorted({p.dim for i, p in enumerate(placements) if isinstance(p, Shard) and mesh.shape[i] > 1}):
        split = _split_from(mesh, placements, dim, shapes)
        splits[dim], shape[dim] = split, sum(split.sizes)
    idle = {i: p for i, p in enumerate(placements) if mesh.shape[i] == 1}
    partials = [p.reduce_op if isinstance(p, Partial) and mesh.shape[i] > 1 else None for i, p in enumerate(placements)]
    layout = Layout.from_splits(mesh, splits, partials, shape, stride_like(shape, stride) if by_order else stride, dtype, idle)
    _agree(layout, shapes, "the other ranks' pieces make")
    return layout


def _telling(shapes: Sequence[tuple[int, ...]]) -> int:
    """Whose strides say how dims lie in memory: a dim of one element, and an empty piece, may have any."""
    return max(range(len(shapes)), key=lambda k: (sum(size > 1 for size in shapes[k]) if all(shapes[k]) else -1, -k))


def _same_dims(shapes: Sequence[tuple[int, ...]]) -> None:
    if len({len(shape) for shape in shapes}) > 1:
        raise LayoutError(f"from_local: local tensors of different ranks have different numbers of dims: {tuple(shapes)}")


def measures(mesh: DeviceMesh, placements: Any) -> bool:
    """Whether ranks ask each other for sizes, by placements that need not be valid: so that all tell the same order in memory,
    which a piece of one element along a dim cannot."""
    cutting = _cutting(mesh, placements)
    given = {p.dim for p in cutting if p.sizes is not None and min(p.sizes, default=0) > 1}
    return any(p.dim not in given for p in cutting)


def _cutting(mesh: DeviceMesh, placements: Any) -> list[Shard]:
    placements = (
        (placements,) if isinstance(placements, Placement) else placements if isinstance(placements, (list, tuple)) else ()
    )
    return [p for p, size in zip(placements, mesh.shape, strict=False) if isinstance(p, Shard) and size > 1]


_MOST_DIMS = 32


_Table = tuple[tuple[int, ...], ...]


@aside
def _all_pieces(mesh: DeviceMesh, pieces: Sequence[torch.Tensor], told: str) -> tuple[_Table, _Table]:
    """Every member's shape and strides, by position in the mesh as the current rank sees it; ``told`` must be alike on all."""
    mine, steps = sizes(pieces[0].shape), sizes(pieces[0].stride())
    if is_traced(pieces[0]) and mesh.kind == "process_group":
        in_graph("check", pieces[0].new_empty(0), kept(Alike(mesh, pieces[0].dtype, told)), [*mine, *steps])
        return (mine,) * mesh.size(), (steps,) * mesh.size()
    if len(pieces) > 1:
        seen = [pieces[m] for m in mesh.members_of(range(mesh.ndim), 0)]
        shapes = tuple(tuple(piece.shape) for piece in seen)
        _same_dims(shapes)
        compared(mesh, "from_local", [str(piece.dtype) for piece in seen])
        return shapes, tuple(piece.stride() for piece in seen)
    if not communicator_of(mesh).talks:
        return (mine,) * mesh.size(), (steps,) * mesh.size()
    if len(mine) > _MOST_DIMS:
        raise LayoutError(f"from_local without shape= supports up to {_MOST_DIMS} dims, got {len(mine)}; pass shape=")
    said = f"{pieces[0].dtype} under {told}"
    same, found, _ = told_by_all(mesh, said, (*mine, *steps))
    shapes, strides = (tuple(row[: len(row) // 2] for row in found), tuple(row[len(row) // 2 :] for row in found))
    _same_dims(shapes)
    if not same:
        words_compared(mesh, "from_local", said)
    return shapes, strides


@dataclass(frozen=True, slots=True)
class Alike:
    """What a program that is traced takes for granted of the pieces given to ``from_local``; asked at every call."""

    mesh: DeviceMesh
    dtype: torch.dtype
    told: str

    def __call__(self, given: Sequence[int]) -> None:
        """``given``: sizes and strides of this rank's piece."""
        ndim = len(given) // 2
        piece = torch.empty_strided(given[:ndim], given[ndim:], dtype=self.dtype, device="meta")
        shapes, strides = _all_pieces(self.mesh, [piece], self.told)
        telling = [d for d, size in enumerate(piece.shape) if size > 1]
        if len(set(shapes)) > 1 or len({_order(stride, telling) for stride in strides}) > 1:
            raise LayoutError(
                "torch.compile: from_local without shape= assumes equal local tensors on all ranks, but their "
                f"shapes are {list(shapes)} and strides {list(strides)}: pass shape= and stride="
            )


def _split_from(mesh: DeviceMesh, placements: tuple[Placement, ...], dim: int, shapes: Sequence[tuple[int, ...]]) -> Split:
    """How the pieces cut one tensor dim: sizes read along the mesh dims that split it, at index 0 of all others."""
    spelled = [Shard(0, None, p.level) if isinstance(p, Shard) and p.dim == dim else Replicate() for p in placements]
    mesh_dims = Layout.of(mesh, spelled, (mesh.size(),)).splits[0].mesh_dims  # type: ignore[union-attr]  # sharded on a real mesh dim
    steps = [1] * mesh.ndim
    for i in reversed(range(mesh.ndim - 1)):
        steps[i] = steps[i + 1] * mesh.shape[i + 1]
    positions = [0]
    for i in mesh_dims:
        positions = [base + k * steps[i] for base in positions for k in range(mesh.shape[i])]
    return Split(mesh_dims, tuple(shapes[position][dim] for position in positions))


def _agree(layout: Layout, shapes: Sequence[tuple[int, ...]], why: str) -> None:
    """All pieces together tile the tensor (every rank sees all shapes, so all raise together)."""
    mesh = layout.mesh
    for member, shape in zip(mesh.members_of(range(mesh.ndim), 0), shapes, strict=True):
        expected = layout.local_shape(mesh.coordinates[member])
        if shape != expected:
            raise LayoutError(
                f"from_local: rank {mesh.ranks[member]} at {mesh.coordinates[member]} has a local tensor of shape "
                f"{shape}, but {why} it {expected} under {layout.placements}; local tensors along one mesh dim "
                "must agree in all other dims"
            )


def _fits(layout: Layout, pieces: Sequence[torch.Tensor]) -> None:
    mesh = layout.mesh
    members = mesh.members if len(pieces) > 1 else [mesh.current_member()]
    for member, piece in zip(members, pieces, strict=True):
        expected = layout.local_shape(mesh.coordinate_of(member))
        if member is not None and tuple(piece.shape) != expected:
            raise LayoutError(
                f"from_local: rank {mesh.ranks[member]} has a local tensor of shape {tuple(piece.shape)}, but "
                f"{layout!r} gives it {expected}; use Shard(dim, sizes=(...)) for uneven shards, or leave shape= "
                "out so that ranks exchange their sizes"
            )


def _check(layout: Layout, pieces: Sequence[torch.Tensor]) -> None:
    """``run_check``: dtypes and gradients everywhere, values of replicas; names the offending rank, on all ranks."""
    mesh, comm = layout.mesh, communicator_of(layout.mesh)
    everywhere = tuple(range(mesh.ndim))
    members = mesh.members_of(everywhere, mesh.current_member() or 0)
    if comm.holds_all:
        facts = [_facts(pieces[m]) for m in members] if len(pieces) > 1 else []
    else:
        facts = comm.all_gather_object(_facts(pieces[0]), everywhere)
    first: dict[tuple[int, ...], int] = {}
    telling = [d for d in range(layout.ndim) if all(shape[d] > 1 for _, shape, _, _ in facts)]  # others may have any stride
    for position, (kind, _, stride, digest) in enumerate(facts):
        member = members[position]
        for mine, others in ((kind, facts[0][0]), (_order(stride, telling), _order(facts[0][2], telling))):
            if mine != others:
                raise LayoutError(f"from_local: rank {mesh.ranks[member]} has {mine}, rank {mesh.ranks[members[0]]} has {others}")
        coordinate = mesh.coordinates[member]
        kept = tuple(-1 if isinstance(p, Replicate) else c for p, c in zip(layout.placements, coordinate, strict=True))
        like = first.setdefault(kept, position)
        if facts[like][3] != digest:
            raise LayoutError(
                f"from_local: the values of rank {mesh.ranks[member]} differ from those of rank "
                f"{mesh.ranks[members[like]]}, but {layout.placements} says that they are replicas; broadcast the "
                "tensor first, or use Partial() or Shard(dim)"
            )


def _facts(piece: torch.Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...], bytes]:
    """What all pieces have in common, shape and stride, and what replicas have in common."""
    kind = f"{piece.dtype}{', requiring gradients' if piece.requires_grad else ''}"
    return kind, tuple(piece.shape), piece.stride(), hashlib.sha256(content(piece)).digest()


def _order(stride: Sequence[int], dims: Sequence[int]) -> str:
    """The order of dims in memory."""
    return f"dims in the order {sorted(dims, key=lambda d: (-stride[d], d))}"
