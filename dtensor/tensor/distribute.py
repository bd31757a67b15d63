"""Make distributed tensors and modules from plain ones."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
from torch import nn

from ..base.caches import remembered
from ..base.recorder_hooks import current
from ..base.torch_internals import functorch_active, is_traceable_wrapper_subclass
from ..base.tracing import under_way
from ..base.validation import strided, whole
from ..base.wrapper_subclass import part_by_part
from ..comm import PerRank, communicator_of, shards_of
from ..comm.backend_base import Run
from ..comm.cross_rank_check import alike, room
from ..comm.flat_rows import content, from_bytes
from ..comm.pack import Box, Route, Traffic, Transfer
from ..dispatch.functorch import below_transforms, constant, has_tangent, layout_of, within_transforms
from ..errors import ArgumentError, LayoutError, MeshError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh, as_mesh
from ..placement import Placement, Replicate
from ..random.draw import as_one_step, block_of
from ..redistribute import redistribute_local
from ..redistribute.executor import in_order, inside
from ..redistribute.step import described, place
from .autograd import laid
from .dtensor import DTensor, wrap
from .stale_params import Attributes, replacing

M = TypeVar("M", bound=nn.Module)


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: Any = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """``tensor``, the same global value, laid out over the mesh. A leaf that requires grad gives a leaf that requires grad.

    Args:
        tensor: the global tensor (a meta tensor gives meta pieces; a DTensor is redistributed,
                also where ``torch.func`` hides that it is one, so that it lacks the method).
        placements: one per mesh dim, default ``Replicate()`` on all.
        src_data_rank: whose value counts: the rank at this index along every mesh dim sends each rank its block (a broadcast
            where nothing is sharded, else one scatter), after the ranks have compared their arguments (an exchange of a few
            bytes, with which a small tensor comes). None: every rank cuts its own copy, no communication.

    Raises:
        PlacementError, MeshError: see :class:`Layout`. LayoutError: a non-leaf that requires grad; on all ranks, where they give
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
    mesh = as_mesh(device_mesh)
    if (own := layout_of(tensor)) is not None:
        if own.mesh != mesh:
            raise MeshError(
                f"distribute_tensor: the DTensor is on {own.mesh!r}, not on {mesh!r}; call x.redistribute(mesh, placements)"
            )
        if not isinstance(tensor, DTensor):
            return cast(DTensor, laid(tensor, own.whole().placements if placements is None else placements))
        return tensor.redistribute(placements=placements)
    if functorch_active():
        tensor = constant(tensor)
    with below_transforms():
        made = _distributed(tensor, mesh, placements, src_data_rank)
    return within_transforms(made)


def _distributed(tensor: torch.Tensor, mesh: DeviceMesh, placements: Any, src_data_rank: int | None) -> DTensor:
    sent = None
    if src_data_rank is None:
        layout = _layout_of(tensor, mesh, placements)
    elif under_way() and mesh.kind == "process_group":  # all that follows is a step of the graph
        return _sent_in_graph(tensor, _layout_of(tensor, mesh, placements), placements, src_data_rank)
    else:
        layout, sent = _agreed(tensor, mesh, placements, src_data_rank)
    reduced = layout.reduced()
    local = _scatter(tensor.detach(), reduced, src_data_rank) if sent is None else _cut(sent, reduced, src_data_rank or 0)
    made = wrap(local if reduced is layout else redistribute_local(local, reduced, layout), layout)
    return made.requires_grad_() if tensor.requires_grad else made


def _agreed(tensor: torch.Tensor, mesh: DeviceMesh, placements: Any, source: int) -> tuple[Layout, torch.Tensor | None]:
    """The layout, once all ranks have said the same; and what the source holds, where it is small enough to come with that."""
    recorded = current() is not None  # what is sent is a step of its own then, which is done again

    def made() -> tuple[Layout, int, bool, list[str]]:
        layout = _layout_of(tensor, mesh, placements)
        position, here = _source_in(mesh, whole(source, "src_data_rank"))
        composed = is_traceable_wrapper_subclass(tensor)
        words = (("recorded", recorded), ("no data", tensor.is_meta), (type(tensor).__name__, composed))
        return layout, position, here, [word for word, holds in words if holds]

    def told(made: tuple[Layout, int, bool, list[str]]) -> tuple[Any, tuple[int, ...], bytes]:
        layout, position, here, besides = made
        load = content(tensor) if here and not besides and layout.nbytes <= room(mesh) else b""
        return (layout, position, tensor.requires_grad, *besides), layout.stride, load

    (layout, position, _, besides), by_rank = alike(mesh, "distribute_tensor", made, told)
    if by_rank is None:
        return layout, None
    layout = layout.replace(stride=by_rank.numbers[position])  # it may hold something that lies in its memory in another way
    if besides or layout.nbytes > room(mesh):
        return layout, None
    return layout, from_bytes(by_rank.loads[position, : layout.nbytes], layout.shape, layout.dtype)


@remembered(1024)
def _source_in(mesh: DeviceMesh, source: int) -> tuple[int, bool]:
    """The source's position in the mesh, and whether this rank is the source."""
    return _position(mesh, source), mesh.coordinate_of(mesh.current_member()) == (source,) * mesh.ndim


def _sent_in_graph(tensor: torch.Tensor, layout: Layout, placements: Any, source: int) -> DTensor:
    def sent(layouts: Sequence[Layout], given: torch.Tensor) -> torch.Tensor:
        (wanted,) = layouts
        made = distribute_tensor(given, wanted.mesh, placements, src_data_rank=source)
        if made._layout != wanted:
            raise LayoutError(
                f"distribute_tensor: rank {source} passed {made._layout!r}, but the compiled program of this rank "
                f"expects {wanted!r}; pass tensors with the same strides on all ranks (.contiguous())"
            )
        return made._local

    return wrap(as_one_step((layout,), sent, tensor.detach()), layout)


def _layout_of(tensor: torch.Tensor, mesh: DeviceMesh, placements: Any) -> Layout:
    if not strided(tensor, "distribute_tensor").is_leaf or has_tangent(tensor):
        raise LayoutError(
            "distribute_tensor takes leaf tensors; for a computed tensor use DTensor.from_local(value, mesh, placements)"
        )
    dense = torch.empty_like(shards_of(tensor)[0], device="meta").stride()  # as of a clone: the layout describes dense memory
    return Layout.of(mesh, placements, tensor.shape, dense, tensor.dtype)


def _scatter(tensor: torch.Tensor, layout: Layout, source: int | None) -> Any:
    mesh, comm = layout.mesh, communicator_of(layout.mesh)
    position = None if source is None else _position(mesh, source)
    if mesh.device_type in ("cpu", "cuda") and tensor.device.type not in ("meta", mesh.device_type):
        tensor = tensor.to(mesh.device_type)
    if not comm.held:
        return torch.zeros(layout.local_shape(None), dtype=layout.dtype, device=tensor.device)
    if tensor.is_meta or mesh.kind == "dry_run":
        return comm.map(lambda member: layout.block_beside(torch.empty(0, device="meta"), member))
    if position is None or mesh.size() == 1 or (comm.holds_all and not isinstance(tensor, PerRank)):
        return comm.map(lambda member, full: block_of(full, layout, member), tensor)
    if is_traceable_wrapper_subclass(tensor):  # whole to every rank: it says itself how it is cut
        tensor = part_by_part(lambda part: comm.broadcast(part, range(mesh.ndim), position).wait(), tensor)
        return comm.map(lambda member, full: block_of(full, layout, member), tensor)
    return comm.map(in_order, _scattering(layout, position)(tensor).wait(), layout)


def _cut(sent: torch.Tensor, layout: Layout, source: int) -> Any:
    """The blocks of what has come to every rank; told as the collective that it saves."""
    comm = communicator_of(layout.mesh)
    comm.report(_kind(layout), range(layout.mesh.ndim), lambda: _brought(layout, _position(layout.mesh, source)))
    return comm.map(lambda member: in_order(member, block_of(sent, layout, member), layout))


@remembered(1024)
def _brought(layout: Layout, position: int) -> int:
    """Bytes that come from the rank at ``position`` to another, the most over ranks."""
    mesh = layout.mesh
    group = mesh.members_of(range(mesh.ndim), mesh.current_member() or 0)
    sizes = [layout.local_shape(mesh.coordinates[member]) for k, member in enumerate(group) if k != position]
    return max(map(math.prod, sizes)) * layout.dtype.itemsize


def _kind(layout: Layout) -> str:
    return "scatter" if any(layout.splits) else "broadcast"


@remembered(1024)
def _scattering(layout: Layout, position: int) -> Run:
    """The blocks of what the rank at ``position`` holds whole: from it to every rank, or the same to all where nothing is cut."""
    mesh, everywhere = layout.mesh, tuple(range(layout.mesh.ndim))
    full = Layout.replicated(mesh, layout.shape, layout.stride, layout.dtype)

    @functools.cache
    def route_of(member: int) -> Route:
        group = mesh.members_of(everywhere, member)
        shape, size = tuple(layout.shape), layout.local_shape(mesh.coordinates[member])
        mine, nothing = group.index(member), (None,) * len(group)
        own = Box((0,) * len(size), size)
        if mine == position:
            leaving = [inside(full, member, layout, other) for other in group]
            sends = tuple(None if k == mine or not box.numel else box for k, box in enumerate(leaving))
            return Route(shape, size, sends, nothing, (leaving[mine], own) if own.numel else None)
        comes = tuple(own if k == position and own.numel else None for k in range(len(group)))
        return Route(shape, size, nothing, comes, None)

    met = Traffic(layout.max_local_nbytes // layout.dtype.itemsize, 1, True)
    said = f"{described(full)} from {position} -> {place(layout)}"
    return communicator_of(mesh).bind_transfer(everywhere, Transfer(route_of, layout.dtype, _kind(layout), lambda _: met, said))


def _position(mesh: DeviceMesh, source: int) -> int:
    """The group position, over all mesh dims, of the rank at index ``source`` along each."""
    source = whole(source, "src_data_rank")
    if any(not 0 <= source < size for size in mesh.shape):
        raise MeshError(
            f"src_data_rank={source} is not an index along every dim of {mesh!r}; use 0, or None to shard each rank's own copy"
        )
    return mesh.index_over(range(mesh.ndim), (source,) * mesh.ndim)


def distribute_module(
    module: M,
    device_mesh: Any = None,
    partition_fn: Callable[[str, nn.Module, DeviceMesh], None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> M:
    """``module``, its parameters and buffers made DTensors in place.

    Args:
        partition_fn: ``(name, submodule, mesh)``, called for every submodule; replaces parameters by DTensors
            (``submodule.register_parameter(name, nn.Parameter(distribute_tensor(...)))``). What it leaves is replicated.
        input_fn: ``(module, inputs, mesh) -> inputs``, run before forward.
        output_fn: ``(module, outputs, mesh) -> outputs``, run after forward.

    What is left to be replicated is broadcast from rank 0, as :func:`distribute_tensor` does.

    Raises:
        MeshError: no mesh is given and none is entered.

    >>> import torch, dtensor as dt
    >>> def rows(name, part, mesh):
    ...     if isinstance(part, torch.nn.Linear):
    ...         part.weight = torch.nn.Parameter(dt.distribute_tensor(part.weight.detach(), mesh, [dt.Shard(0)]))
    >>> model = dt.distribute_module(torch.nn.Linear(3, 4), dt.init_device_mesh("cpu", (2,)), rows)
    >>> model.weight.placements, model.bias.placements
    ((Shard(dim=0),), (Replicate(),))
    """
    mesh = as_mesh(device_mesh)
    if not isinstance(module, nn.Module):
        raise ArgumentError(
            f"distribute_module takes an nn.Module, got {type(module).__name__}; for a tensor use distribute_tensor"
        )
    for given, what in ((partition_fn, "partition_fn"), (input_fn, "input_fn"), (output_fn, "output_fn")):
        if given is not None and not callable(given):
            raise ArgumentError(f"distribute_module: {what} takes a function, got {given!r}")
    prepare = None if input_fn is None else _with_module(input_fn, "input_fn")
    finish = None if output_fn is None else _with_module(output_fn, "output_fn")
    with replacing(module.modules(), "distribute_module"):
        for name, submodule in list(module.named_modules()):
            if partition_fn is not None:
                partition_fn(name, submodule, mesh)
            replicate_own(submodule, mesh)
    if prepare is not None:
        module.register_forward_pre_hook(lambda mod, inputs: prepare(mod, inputs, mesh))
    if finish is not None:
        module.register_forward_hook(lambda mod, inputs, outputs: finish(mod, outputs, mesh))
    return module


def _with_module(fn: Callable[..., Any], name: str) -> Callable[..., Any]:
    """``fn`` as a function of (module, values, mesh); older programs' take (values, mesh)."""
    try:
        inspect.signature(fn).bind(None, None, None)
    except TypeError:
        try:
            inspect.signature(fn).bind(None, None)
        except TypeError:
            raise ArgumentError(f"{name} takes (module, values, mesh), not {inspect.signature(fn)}") from None
        warnings.warn(
            f"{name}(values, mesh) is deprecated; write a function of (module, values, mesh)", FutureWarning, stacklevel=3
        )
        return lambda _, values, mesh: fn(values, mesh)
    except ValueError:  # no signature to be had
        pass
    return fn


# --- what a module itself has ----------------------------------------------------------------------------------------------
def own_tensors(module: nn.Module) -> Iterator[tuple[dict[str, Any], str, torch.Tensor]]:
    """The parameters and buffers of ``module`` itself, each with where it stands and under which name."""
    for held in (module._parameters, module._buffers):
        for name, x in list(held.items()):
            if x is not None:
                yield held, name, x


def distribute_at(
    held: dict[str, Any], name: str, mesh: DeviceMesh, placements: Sequence[Placement], source: int | None = 0
) -> None:
    """Put the same value as a DTensor in the place of a plain tensor of a module's; of a parameter a parameter."""
    old = held[name]
    made = distribute_tensor(old.detach(), mesh, placements, src_data_rank=source)
    is_parameter = isinstance(old, nn.Parameter)
    held[name] = nn.Parameter(made, old.requires_grad) if is_parameter else made.requires_grad_(old.requires_grad)
    Attributes.of(old).set_on(held[name])


def replicate_own(module: nn.Module, mesh: DeviceMesh, source: int | None = 0) -> None:
    """Replicate what is still plain of what ``module`` itself has."""
    for held, name, x in own_tensors(module):
        if not isinstance(x, DTensor):
            distribute_at(held, name, mesh, [Replicate()] * mesh.ndim, source)
