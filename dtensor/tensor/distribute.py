"""Distribute: ``distribute_tensor``, which makes a distributed tensor of a plain one, from the values of one rank or of each."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import torch

from ..base.caches import memoize
from ..base.recorder_hooks import current_recorder
from ..base.tensor_tree import map_inner_tensors
from ..base.torch_internals import functorch_active, is_traceable_wrapper_subclass
from ..base.tracing import is_tracing
from ..base.validation import check_int, check_strided
from ..comm import PerRank, shards_of
from ..comm.communicator import BoundCollective
from ..comm.cross_rank_check import check_identical, payload_bytes
from ..comm.flat_rows import content_bytes, tensor_from_bytes
from ..comm.map_ranks import communicator_of
from ..comm.pack import Box, SendRecvPlan, Traffic, Transfer
from ..errors import LayoutError, MeshError
from ..layout.layout import Layout
from ..layout.placement_forms import resolve_placements, split_mesh_and_placements
from ..mesh.device_mesh import DeviceMesh, as_mesh
from ..placement import Placements
from ..random.draw import clone_block, run_as_graph_op
from ..redistribute import redistribute_local
from ..redistribute.executor import box_inside, to_memory_order_of
from ..redistribute.step import describe_placements, layout_text
from ..state.functorch import as_writable_in_transform, below_transforms, has_tangent, layout_of, unwrap_constant
from .autograd import redistribute_if_needed
from .dtensor import DTensor, wrap


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: Any = None,
    placements: Placements | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Return ``tensor`` as a DTensor with the same global value. A leaf that requires grad gives a leaf that requires grad.

    Args:
        tensor: the global tensor. A meta tensor gives local meta tensors. A DTensor is redistributed, also if it is hidden by a
            ``torch.func`` transform, where it lacks the method.
        device_mesh: default the mesh entered by ``with mesh:``. Placements in its place are taken as ``placements``.
        placements: in any form (``Placements``), default ``Replicate()`` on all mesh dims.
        src_data_rank: the rank with the value that counts, by its index along every mesh dim. It sends each rank its shard (a
            broadcast if nothing is sharded, else one scatter), after the ranks have compared their arguments (an exchange of a
            few bytes, which includes a small tensor). None: every rank shards its own copy, no communication.

    Raises:
        PlacementError, MeshError: see :class:`Layout`. LayoutError: a non-leaf that requires grad; on all ranks, if they pass
            different shapes, dtypes or placements, or some a meta tensor and some data.

    >>> import dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2, 2))
    >>> dt.distribute_tensor(torch.arange(6).reshape(2, 3), mesh, [dt.Shard(0), dt.Shard(1)])
    DTensor(int64[2, 3] on (0=S(0), 1=S(1))
      rank 0: [[0, 1]]
      rank 1: [[2]]
      rank 2: [[3, 4]]
      rank 3: [[5]])
    """
    device_mesh, placements = split_mesh_and_placements(device_mesh, placements)
    mesh = as_mesh(device_mesh)
    if (layout := layout_of(tensor)) is not None:
        if layout.mesh != mesh:
            raise MeshError(
                f"distribute_tensor: the DTensor is on {layout.mesh!r}, not on {mesh!r}; call x.redistribute(mesh, placements)"
            )
        target = resolve_placements(placements, mesh, layout.ndim)
        return tensor.redistribute(placements=target) if isinstance(tensor, DTensor) else redistribute_if_needed(tensor, target)
    if functorch_active():
        tensor = unwrap_constant(tensor)
    with below_transforms():
        result = _distribute_plain(tensor, mesh, placements, src_data_rank)
    return as_writable_in_transform(result)


def _distribute_plain(tensor: torch.Tensor, mesh: DeviceMesh, placements: Any, src_data_rank: int | None) -> DTensor:
    """Return a plain tensor as a DTensor; see :func:`distribute_tensor`."""
    received = None
    if src_data_rank is None:
        layout = _make_layout(tensor, mesh, placements)
    elif is_tracing() and mesh.kind == "process_group":  # one operator of the graph does the rest
        return _distribute_in_graph(tensor, _make_layout(tensor, mesh, placements), placements, src_data_rank)
    else:
        layout, received = _agree_on_layout(tensor, mesh, placements, src_data_rank)
    reduced = layout.reduced()
    local = (
        _scatter_from_source(tensor.detach(), reduced, src_data_rank)
        if received is None
        else _shard_received(received, reduced, src_data_rank or 0)
    )
    result = wrap(local if reduced is layout else redistribute_local(local, reduced, layout), layout)
    return result.requires_grad_() if tensor.requires_grad else result


def _agree_on_layout(tensor: torch.Tensor, mesh: DeviceMesh, placements: Any, source: int) -> tuple[Layout, torch.Tensor | None]:
    """Return the layout, after a comparison of all ranks' arguments, and the source's tensor if it is small.

    A small tensor is included in the comparison. Else the second result is None.
    """
    is_recorded = current_recorder() is not None  # then the broadcast is a recorded step, which is replayed

    def find_layout() -> tuple[Layout, int, bool, list[str]]:
        """Return the layout, the source's position, whether this rank is the source, and what prevents an early payload."""
        layout = _make_layout(tensor, mesh, placements)
        position, is_source = _find_source(mesh, check_int(source, "src_data_rank"))
        is_wrapper = is_traceable_wrapper_subclass(tensor)
        differences = (("recorded", is_recorded), ("no data", tensor.is_meta), (type(tensor).__name__, is_wrapper))
        return layout, position, is_source, [word for word, holds in differences if holds]

    def describe_arguments(own: tuple[Layout, int, bool, list[str]]) -> tuple[Any, tuple[int, ...], bytes]:
        """Return what ranks compare: the arguments, the strides, and the bytes of a small tensor of the source."""
        layout, position, is_source, special = own
        payload = content_bytes(tensor) if is_source and not special and layout.nbytes <= payload_bytes(mesh) else b""
        return (layout, position, tensor.requires_grad, *special), layout.stride, payload

    (layout, position, _, special), by_rank = check_identical(mesh, "distribute_tensor", find_layout, describe_arguments)
    if by_rank is None:
        return layout, None
    layout = layout.replace(stride=by_rank.numbers[position])  # this rank's tensor may have other strides
    if special or layout.nbytes > payload_bytes(mesh):
        return layout, None
    return layout, tensor_from_bytes(by_rank.payloads[position, : layout.nbytes], layout.shape, layout.dtype)


@memoize(1024)
def _find_source(mesh: DeviceMesh, source: int) -> tuple[int, bool]:
    """Return the source's position in the mesh, and whether this rank is the source."""
    return _source_position(mesh, source), mesh.coordinate_of(mesh.current_member()) == (source,) * mesh.ndim


def _distribute_in_graph(tensor: torch.Tensor, layout: Layout, placements: Any, source: int) -> DTensor:
    """Return the DTensor of a traced tensor. All communication is one operator of the graph."""

    def distribute_to_layout(layouts: Sequence[Layout], value: torch.Tensor) -> torch.Tensor:
        """Distribute the tensor, and raise if its layout is not the one that the graph was compiled for."""
        (target,) = layouts
        result = distribute_tensor(value, target.mesh, placements, src_data_rank=source)
        if result._layout != target:
            raise LayoutError(
                f"distribute_tensor: rank {source} passed {result._layout!r}, but the compiled program of this rank "
                f"expects {target!r}; pass tensors with the same strides on all ranks (.contiguous())"
            )
        return result._local

    return wrap(run_as_graph_op((layout,), distribute_to_layout, tensor.detach()), layout)


def _make_layout(tensor: torch.Tensor, mesh: DeviceMesh, placements: Any) -> Layout:
    """Return the layout of the result of ``distribute_tensor``; raise if ``tensor`` is no leaf.

    Raises:
        LayoutError: the tensor is not a leaf, or has a forward-mode tangent.
    """
    if not check_strided(tensor, "distribute_tensor").is_leaf or has_tangent(tensor):
        raise LayoutError(
            "distribute_tensor takes leaf tensors; for a computed tensor use DTensor.from_local(value, mesh, placements)"
        )
    dense = torch.empty_like(
        shards_of(tensor)[0], device="meta"
    ).stride()  # the strides of a clone: the layout describes dense memory
    return Layout.of(mesh, placements, tensor.shape, dense, tensor.dtype)


def _scatter_from_source(tensor: torch.Tensor, layout: Layout, source: int | None) -> Any:
    """Return the local tensors of this process, sent by the rank at ``source``. None: each rank shards its own copy."""
    mesh, comm = layout.mesh, communicator_of(layout.mesh)
    position = None if source is None else _source_position(mesh, source)
    if mesh.device_type in ("cpu", "cuda") and tensor.device.type not in ("meta", mesh.device_type):
        tensor = tensor.to(mesh.device_type)
    if not comm.held:
        return torch.zeros(layout.local_shape(None), dtype=layout.dtype, device=tensor.device)
    if tensor.is_meta or mesh.kind == "dry_run":
        return comm.map(lambda member: layout.new_local_like(torch.empty(0, device="meta"), member))
    if position is None or mesh.size() == 1 or (comm.holds_all and not isinstance(tensor, PerRank)):
        return comm.map(lambda member, full: clone_block(full, layout, member), tensor)
    if is_traceable_wrapper_subclass(tensor):  # broadcast to every rank, because a subclass shards itself
        tensor = map_inner_tensors(lambda part: comm.broadcast(part, range(mesh.ndim), position).wait(), tensor)
        return comm.map(lambda member, full: clone_block(full, layout, member), tensor)
    return comm.map(to_memory_order_of, _bind_scatter(layout, position)(tensor).wait(), layout)


def _shard_received(received: torch.Tensor, layout: Layout, source: int) -> Any:
    """Return the shards of a tensor that every rank received during the comparison of arguments.

    It is reported to listeners as the collective that it replaces.
    """
    comm = communicator_of(layout.mesh)
    comm.report(
        _collective_name(layout), range(layout.mesh.ndim), lambda: _received_nbytes(layout, _source_position(layout.mesh, source))
    )
    return comm.map(lambda member: to_memory_order_of(member, clone_block(received, layout, member), layout))


@memoize(1024)
def _received_nbytes(layout: Layout, position: int) -> int:
    """Return the bytes that a rank receives from the rank at ``position``, the maximum over ranks."""
    mesh = layout.mesh
    group = mesh.members_of(range(mesh.ndim), mesh.current_member() or 0)
    sizes = [layout.local_shape(mesh.coordinates[member]) for k, member in enumerate(group) if k != position]
    return max(map(math.prod, sizes)) * layout.dtype.itemsize


def _collective_name(layout: Layout) -> str:
    return "scatter" if any(layout.splits) else "broadcast"


@memoize(1024)
def _bind_scatter(layout: Layout, position: int) -> BoundCollective:
    """Return the bound collective that sends each rank its shard of the tensor of the rank at ``position``.

    If nothing is sharded, it is a broadcast.
    """
    mesh, mesh_dims = layout.mesh, tuple(range(layout.mesh.ndim))
    full = Layout.replicated(mesh, layout.shape, layout.stride, layout.dtype)

    @functools.cache
    def plan_member(member: int) -> SendRecvPlan:
        """Return the regions that one member sends if it is the source, and the one that it receives."""
        group = mesh.members_of(mesh_dims, member)
        shape, size = tuple(layout.shape), layout.local_shape(mesh.coordinates[member])
        own_index, no_boxes = group.index(member), (None,) * len(group)
        own_box = Box((0,) * len(size), size)
        if own_index == position:
            boxes = [box_inside(full, member, layout, other) for other in group]
            sends = tuple(None if k == own_index or not box.numel else box for k, box in enumerate(boxes))
            return SendRecvPlan(shape, size, sends, no_boxes, (boxes[own_index], own_box) if own_box.numel else None)
        received = tuple(own_box if k == position and own_box.numel else None for k in range(len(group)))
        return SendRecvPlan(shape, size, no_boxes, received, None)

    traffic = Traffic(layout.max_local_nbytes // layout.dtype.itemsize, 1, True)
    text = f"{layout_text(full)} from {position} -> {describe_placements(layout)}"
    return communicator_of(mesh).bind_transfer(
        mesh_dims, Transfer(plan_member, layout.dtype, _collective_name(layout), lambda _: traffic, text)
    )


def _source_position(mesh: DeviceMesh, source: int) -> int:
    """Return the position, over all mesh dims, of the rank at index ``source`` along each of them.

    Raises:
        MeshError: there is no such rank.
    """
    source = check_int(source, "src_data_rank")
    if any(not 0 <= source < size for size in mesh.shape):
        raise MeshError(
            f"src_data_rank={source} is not an index along every dim of {mesh!r}; use 0, or None to shard each rank's own copy"
        )
    return mesh.index_over(range(mesh.ndim), (source,) * mesh.ndim)
