"""Local layout: derive the layout of a global tensor from local tensors, with checks across ranks (``from_local``)."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base.caches import BoundedDict
from ..base.memory_order import stride_like
from ..base.recorder_hooks import untracked
from ..base.symbolic_sizes import hashable_sizes
from ..base.tracing import is_traced, register_object
from ..base.validation import check_sizes
from ..comm import PerRank, shards_of
from ..comm.cross_rank_check import check_texts_equal, exchange_and_compare_texts, gather_summaries
from ..comm.flat_rows import content_bytes
from ..comm.map_ranks import communicator_of
from ..comm.processes.traced_collectives import call_in_graph
from ..errors import LayoutError, PlacementError
from ..layout.layout import Layout
from ..layout.placement_forms import hashable_form, read_placements
from ..layout.splits import Split
from ..mesh.device_mesh import DeviceMesh
from ..placement import Partial, Placement, Placements, Replicate, Shard, normalize_placements


def layout_of_locals(
    local: torch.Tensor,
    mesh: DeviceMesh,
    placements: Placements | None,
    shape: Sequence[int] | None,
    stride: Sequence[int] | None,
    *,
    check: bool,
) -> Layout:
    """Return the layout of the global tensor that consists of the local tensors ``local``; ranks may exchange sizes.

    Raises:
        LayoutError: a local tensor does not have the shape that the layout gives it, or (``check``) ranks disagree.
    """
    key = None
    if shape is not None and not check and type(local) is torch.Tensor:
        key = (mesh, hashable_form(placements), _as_hashable(shape), _as_hashable(stride), local.dtype, local.shape)
        try:
            cached = _LAYOUTS.get(key)
        except TypeError:
            key = None
        else:
            if cached is not None:  # a local tensor of this shape fits these arguments
                return cached
    locals_, is_in_process = shards_of(local), communicator_of(mesh).holds_all
    if isinstance(local, PerRank) and not (is_in_process and len(locals_) == len(mesh.members)):
        problem = (
            f"has {len(mesh.members)} ranks"
            if is_in_process
            else "has its ranks in other processes: pass the local tensor of this rank"
        )
        raise LayoutError(f"per_rank with {len(locals_)} tensors for {mesh!r}, which {problem}")
    shape = None if shape is None else check_sizes(shape, "from_local(shape=)")
    stride = None if stride is None else check_sizes(stride, "from_local(stride=)")
    ndim = locals_[0].ndim if mesh.current_member() is not None or shape is None else len(shape)
    if mesh.kind == "dry_run":
        check = False
    try:
        placements = read_placements(placements, mesh, ndim)
        normalized = normalize_placements(placements, mesh.ndim, ndim)
    except PlacementError as error:
        if shape is None and (check or exchanges_sizes(mesh, placements)):
            _gather_shapes(mesh, locals_, str(error))  # only this rank may lack the dim, and the others wait for its sizes
        raise
    dtype = locals_[0].dtype
    if shape is not None:
        layout = Layout.of(mesh, normalized, shape, stride, dtype)
        if check and communicator_of(mesh).has_other_processes:
            # raise on all ranks, not on one of them before _check_values exchanges
            shapes, _ = _gather_shapes(mesh, locals_, str(layout.placements))
            _check_all_shapes(layout, shapes, "the given shape makes")
        else:
            _check_own_shapes(layout, locals_)
            if key is not None:
                _LAYOUTS.keep(key, layout)
    else:
        layout = _layout_of_unsized(mesh, normalized, locals_, stride, dtype, check)
    if check:
        _check_values(layout, locals_)
    return layout


def _as_hashable(given: Any) -> Any:
    return tuple(given) if isinstance(given, list) else given


def _layout_of_unsized(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    locals_: Sequence[torch.Tensor],
    stride: Any,
    dtype: torch.dtype,
    check: bool,
) -> Layout:
    """Return the layout for ``from_local`` without ``shape``, from sizes that ranks exchange if needed.

    Ranks exchange the shapes of their local tensors if a tensor dim is sharded without given sizes, or if ``check`` is set.
    """
    shape, local_stride = list(hashable_sizes(locals_[0].shape)), hashable_sizes(locals_[0].stride())
    if check or exchanges_sizes(mesh, placements):
        shapes, strides = _gather_shapes(mesh, locals_, str(placements))
        key = (mesh, placements, shapes, strides if stride is None else stride, dtype)
        layout = _LAYOUTS.get(key)
        if layout is None:
            local_strides = strides[_rank_that_defines_order(shapes)] if stride is None else stride
            layout = _LAYOUTS.keep(key, _layout_from_shapes(mesh, placements, shapes, local_strides, stride is None, dtype))
        return layout
    for p in _effective_shards(mesh, placements):
        if p.sizes is not None:
            shape[p.dim] = sum(p.sizes)
    layout = Layout.of(mesh, placements, shape, stride_like(shape, local_stride) if stride is None else stride, dtype)
    _check_own_shapes(layout, locals_)
    return layout


_LAYOUTS: BoundedDict[Any, Layout] = BoundedDict(4096, "local_layout.known")


def _layout_from_shapes(
    mesh: DeviceMesh,
    placements: tuple[Placement, ...],
    shapes: tuple[tuple[int, ...], ...],
    stride: Sequence[int],
    by_order: bool,
    dtype: torch.dtype,
) -> Layout:
    """Return the layout of a global tensor with local tensors of these shapes, which must tile it.

    ``by_order``: only the order of ``stride`` counts, because it is the stride of a local tensor.
    """
    _check_equal_ndim(shapes)
    shape = list(shapes[0])
    splits: list[Split | None] = [None] * len(shape)
    for dim in sorted({p.dim for i, p in enumerate(placements) if isinstance(p, Shard) and mesh.shape[i] > 1}):
        split = _split_of_dim(mesh, placements, dim, shapes)
        splits[dim], shape[dim] = split, sum(split.sizes)
    placements_of_size_one = {i: p for i, p in enumerate(placements) if mesh.shape[i] == 1}
    partials = [p.reduce_op if isinstance(p, Partial) and mesh.shape[i] > 1 else None for i, p in enumerate(placements)]
    layout = Layout.from_splits(
        mesh, splits, partials, shape, stride_like(shape, stride) if by_order else stride, dtype, placements_of_size_one
    )
    _check_all_shapes(layout, shapes, "the local tensors of the other ranks make")
    return layout


def _rank_that_defines_order(shapes: Sequence[tuple[int, ...]]) -> int:
    """Return the position of the rank with local strides that define the order of dims in memory.

    It is the rank with most dims larger than 1. A dim of one element, and an empty local tensor, may have any stride.
    """
    return max(range(len(shapes)), key=lambda k: (sum(size > 1 for size in shapes[k]) if all(shapes[k]) else -1, -k))


def _check_equal_ndim(shapes: Sequence[tuple[int, ...]]) -> None:
    if len({len(shape) for shape in shapes}) > 1:
        raise LayoutError(f"from_local: local tensors of different ranks have different numbers of dims: {tuple(shapes)}")


def exchanges_sizes(mesh: DeviceMesh, placements: Any) -> bool:
    """Return True if ``from_local`` without ``shape`` makes ranks exchange sizes under these placements, valid or not.

    Ranks also exchange strides in that case, because a local tensor with one element along a dim does not define the memory
    order.
    """
    shards = _effective_shards(mesh, placements)
    sized_dims = {p.dim for p in shards if p.sizes is not None and min(p.sizes, default=0) > 1}
    return any(p.dim not in sized_dims for p in shards)


def _effective_shards(mesh: DeviceMesh, placements: Any) -> list[Shard]:
    """Return the Shard placements along mesh dims of more than one rank."""
    placements = read_placements(placements, mesh)
    placements = (
        (placements,) if isinstance(placements, Placement) else placements if isinstance(placements, (list, tuple)) else ()
    )
    return [p for p, size in zip(placements, mesh.shape, strict=False) if isinstance(p, Shard) and size > 1]


_MAX_DIMS = 32


_IntRows = tuple[tuple[int, ...], ...]


@untracked
def _gather_shapes(mesh: DeviceMesh, locals_: Sequence[torch.Tensor], description: str) -> tuple[_IntRows, _IntRows]:
    """Return the shapes and the strides of the local tensors of all ranks, by position in the mesh.

    Positions are those that the current rank uses.

    ``description`` must be equal on all ranks.
    """
    shape, stride = hashable_sizes(locals_[0].shape), hashable_sizes(locals_[0].stride())
    if is_traced(locals_[0]) and mesh.kind == "process_group":
        call_in_graph(
            "check",
            locals_[0].new_empty(0),
            register_object(EqualLocalsCheck(mesh, locals_[0].dtype, description)),
            [*shape, *stride],
        )
        return (shape,) * mesh.size(), (stride,) * mesh.size()
    if len(locals_) > 1:
        ordered = [locals_[m] for m in mesh.members_of(range(mesh.ndim), 0)]
        shapes = tuple(tuple(local.shape) for local in ordered)
        _check_equal_ndim(shapes)
        check_texts_equal(mesh, "from_local", [str(local.dtype) for local in ordered])
        return shapes, tuple(local.stride() for local in ordered)
    if not communicator_of(mesh).has_other_processes:
        return (shape,) * mesh.size(), (stride,) * mesh.size()
    if len(shape) > _MAX_DIMS:
        raise LayoutError(f"from_local without shape= supports up to {_MAX_DIMS} dims, got {len(shape)}; pass shape=")
    text = f"{locals_[0].dtype} under {description}"
    is_equal, rows, _ = gather_summaries(mesh, text, (*shape, *stride))
    shapes, strides = (tuple(row[: len(row) // 2] for row in rows), tuple(row[len(row) // 2 :] for row in rows))
    _check_equal_ndim(shapes)
    if not is_equal:
        exchange_and_compare_texts(mesh, "from_local", text)
    return shapes, strides


@dataclass(frozen=True, slots=True)
class EqualLocalsCheck:
    """Check of a traced program that local tensors of ``from_local`` have equal shapes on all ranks. It runs at every call."""

    mesh: DeviceMesh
    dtype: torch.dtype
    told: str

    def __call__(self, given: Sequence[int]) -> None:
        """Check this rank's ``given``: the sizes, then the strides, of its local tensor."""
        ndim = len(given) // 2
        local = torch.empty_strided(given[:ndim], given[ndim:], dtype=self.dtype, device="meta")
        shapes, strides = _gather_shapes(self.mesh, [local], self.told)
        long_dims = [d for d, size in enumerate(local.shape) if size > 1]
        if len(set(shapes)) > 1 or len({_describe_order(stride, long_dims) for stride in strides}) > 1:
            raise LayoutError(
                "torch.compile: from_local without shape= assumes equal local tensors on all ranks, but their "
                f"shapes are {list(shapes)} and strides {list(strides)}: pass shape= and stride="
            )


def _split_of_dim(mesh: DeviceMesh, placements: tuple[Placement, ...], dim: int, shapes: Sequence[tuple[int, ...]]) -> Split:
    """Return the split of tensor dim ``dim``, from the local sizes of the ranks that shard it; other mesh dims at index 0."""
    dim_placements = [Shard(0, None, p.level) if isinstance(p, Shard) and p.dim == dim else Replicate() for p in placements]
    mesh_dims = Layout.of(mesh, dim_placements, (mesh.size(),)).splits[0].mesh_dims  # type: ignore[union-attr]  # it is sharded
    mesh_strides = [1] * mesh.ndim
    for i in reversed(range(mesh.ndim - 1)):
        mesh_strides[i] = mesh_strides[i + 1] * mesh.shape[i + 1]
    positions = [0]
    for i in mesh_dims:
        positions = [base + k * mesh_strides[i] for base in positions for k in range(mesh.shape[i])]
    return Split(mesh_dims, tuple(shapes[position][dim] for position in positions))


def _check_all_shapes(layout: Layout, shapes: Sequence[tuple[int, ...]], why: str) -> None:
    """Raise LayoutError if the local tensors do not tile the global tensor. Every rank has all shapes, so all ranks raise."""
    mesh = layout.mesh
    for member, shape in zip(mesh.members_of(range(mesh.ndim), 0), shapes, strict=True):
        expected = layout.local_shape(mesh.coordinates[member])
        if shape != expected:
            raise LayoutError(
                f"from_local: rank {mesh.ranks[member]} at {mesh.coordinates[member]} has a local tensor of shape "
                f"{shape}, but {why} it {expected} under {layout.placements}; local tensors along one mesh dim "
                "must agree in all other dims"
            )


def _check_own_shapes(layout: Layout, locals_: Sequence[torch.Tensor]) -> None:
    """Raise LayoutError if a local tensor of this process does not have the shape that ``layout`` gives it."""
    mesh = layout.mesh
    members = mesh.members if len(locals_) > 1 else [mesh.current_member()]
    for member, local in zip(members, locals_, strict=True):
        expected = layout.local_shape(mesh.coordinate_of(member))
        if member is not None and tuple(local.shape) != expected:
            raise LayoutError(
                f"from_local: rank {mesh.ranks[member]} has a local tensor of shape {tuple(local.shape)}, but "
                f"{layout!r} gives it {expected}; use Shard(dim, sizes=(...)) for uneven shards, or leave shape= "
                "out so that ranks exchange their sizes"
            )


def _check_values(layout: Layout, locals_: Sequence[torch.Tensor]) -> None:
    """Compare dtypes and ``requires_grad`` of local tensors on all ranks, and the values of replicas (``run_check``).

    Raises:
        LayoutError: on all ranks; it names the rank that differs.
    """
    mesh, comm = layout.mesh, communicator_of(layout.mesh)
    mesh_dims = tuple(range(mesh.ndim))
    members = mesh.members_of(mesh_dims, mesh.current_member() or 0)
    if comm.holds_all:
        facts = [_describe_local(locals_[m]) for m in members] if len(locals_) > 1 else []
    else:
        facts = comm.all_gather_object(_describe_local(locals_[0]), mesh_dims)
    first: dict[tuple[int, ...], int] = {}
    long_dims = [d for d in range(layout.ndim) if all(shape[d] > 1 for _, shape, _, _ in facts)]  # other dims may have any stride
    for position, (kind, _, stride, digest) in enumerate(facts):
        member = members[position]
        for value, expected in (
            (kind, facts[0][0]),
            (_describe_order(stride, long_dims), _describe_order(facts[0][2], long_dims)),
        ):
            if value != expected:
                raise LayoutError(
                    f"from_local: rank {mesh.ranks[member]} has {value}, rank {mesh.ranks[members[0]]} has {expected}; "
                    "pass local tensors that agree, or other placements"
                )
        coordinate = mesh.coordinates[member]
        group = tuple(-1 if isinstance(p, Replicate) else c for p, c in zip(layout.placements, coordinate, strict=True))
        reference = first.setdefault(group, position)
        if facts[reference][3] != digest:
            raise LayoutError(
                f"from_local: the values of rank {mesh.ranks[member]} differ from those of rank "
                f"{mesh.ranks[members[reference]]}, but {layout.placements} says that they are replicas; broadcast the "
                "tensor first, or use Partial() or Shard(dim)"
            )


def _describe_local(local: torch.Tensor) -> tuple[str, tuple[int, ...], tuple[int, ...], bytes]:
    """Return what ranks compare of a local tensor: dtype and ``requires_grad``, shape, stride, and a hash of the values.

    The text must be equal on all ranks, the hash on replicas.
    """
    kind = f"{local.dtype}{', requiring gradients' if local.requires_grad else ''}"
    return kind, tuple(local.shape), local.stride(), hashlib.sha256(content_bytes(local)).digest()


def _describe_order(stride: Sequence[int], dims: Sequence[int]) -> str:
    """Return the order of dims in memory, as text."""
    return f"dims in the order {sorted(dims, key=lambda d: (-stride[d], d))}"
