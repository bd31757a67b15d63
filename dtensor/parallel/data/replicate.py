"""``replicate``: data parallelism with whole parameters on every rank; gradients are averaged in buckets while backward runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...errors import ArgumentError, UnsupportedOperationError
from ...mesh.device_mesh import DeviceMesh
from .buffers import Buffers
from .comm_hook import CommHook, Reducer
from .custom_collectives import AllGather, ReduceScatter
from .dp_modes import Axes, copying
from .fsdp_module import FSDPModule, state_of
from .fully_shard import DEFAULT_OFFLOAD, DEFAULT_PRECISION, M, add_methods, check_offload, check_policy, outermost
from .managed import Managed
from .managed_param import adopt, among, onto_one_mesh
from .param_group import Group
from .pending_gradients import units_of
from .policy import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from .unit import Unit

_MEBIBYTE = 1024 * 1024
_FIRST_BUCKET_BYTES = _MEBIBYTE  # the first gradients of backward start to travel early
# Nothing overlaps the last bucket's all-reduce, so it has a third of all at most; smaller ones take longer than they hide.
_LEAST_BYTES, _MOST_BYTES, _PARTS = 4 * _MEBIBYTE, 25 * _MEBIBYTE, 3


class ReplicatedModule(FSDPModule):
    """What a replicated module can do besides what it could before: of :class:`FSDPModule`, what concerns gradients.

    A backward all-reduces each unit's gradients once.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    >>> model = dt.parallel.replicate(torch.nn.Linear(3, 1), mesh)
    >>> isinstance(model, ReplicatedModule), model.weight.placements
    (True, (Replicate(),))

    What gathers parameters raises ``UnsupportedOperationError``: nothing is gathered.
    """

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """As :meth:`set_requires_gradient_sync`: nothing is cut, so the all-reduce is all there is."""
        self.set_requires_gradient_sync(requires_all_reduce, recurse=recurse)

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Refused: whole parameters are not gathered."""
        raise UnsupportedOperationError("a replicated module has no all-gather; remove set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Refused: gradients are all-reduced."""
        raise UnsupportedOperationError("a replicated module's gradients are all-reduced; see register_comm_hook")

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """``hook(state, bucket)`` reduces each bucket's gradients instead of the all-reduce, as in ``DistributedDataParallel``.

        Args:
            hook: gives a ``torch.futures.Future`` of what ``bucket.buffer()`` becomes, averaged; torch's own
                (``bf16_compress_hook``, ...) serve. With all ranks in one process ``bucket.buffer()`` is a ``PerRank``.
        """
        if not callable(hook):
            raise TypeError(f"register_comm_hook takes a function of a state and a bucket, got {hook!r}")
        for unit in units_of(self, False):
            for k, group in enumerate(unit.groups):
                group.settings.reduces = Reducer(hook, state, k, k == len(unit.groups) - 1)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Inside, backward does not average gradients: for all but the last pass of a step that accumulates several."""
        self.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            self.set_requires_gradient_sync(True)


def replicate(
    module: M,
    mesh: Any = None,
    *,
    mp_policy: MixedPrecisionPolicy = DEFAULT_PRECISION,
    offload_policy: OffloadPolicy = DEFAULT_OFFLOAD,
    bucket_cap_mb: float | None = None,
    broadcast_buffers: bool = True,
    ignored_modules: Iterable[nn.Module] = (),
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
    device_mesh: Any = None,
    process_group: Any = None,
    find_unused_parameters: bool = False,
    static_graph: bool = False,
    gradient_as_bucket_view: bool = False,
) -> M:
    """``module``, in place, its parameters (and buffers) those of the first rank, everywhere; each rank runs it on its own batch.

    Gradients are averaged over all dims of ``mesh``, one all-reduce per bucket, in an order that does not depend on what a rank
    used: a parameter that this rank did not use gets the others' average, one that no rank used keeps its ``.grad``. Buffers that
    forward writes in training are the first rank's afterwards. With all ranks in one process the batch is a ``per_rank([...])``;
    a batch that is a DTensor over ``mesh`` gives the global loss and its gradient. Wrong options raise ``ValueError``.

    Args:
        module: a module, or several that make up one unit, as of ``fully_shard``.
        mesh: default the one entered by ``with mesh:``, else all ranks. mp_policy: dtypes to compute and to reduce in.
        offload_policy: ``CPUOffloadPolicy()`` keeps parameters, gradients and optimizer states in host memory.
        bucket_cap_mb: mebibytes of gradients per bucket, default a third of them all, but 4 at least and 25 at most.
        broadcast_buffers: otherwise buffers stay each rank's own: plain tensors.
        ignored_modules, ignored_params: left as they are.
        dp_mesh_dims: the dims of ``mesh`` to average over, by name (``replicate=``), where it has others too.
        device_mesh, process_group: in place of ``mesh``: a mesh, or a group of ``torch.distributed``.
        find_unused_parameters, static_graph: taken, as of ``DistributedDataParallel``; unused parameters are found anyway.
        gradient_as_bucket_view: ``.grad`` are views of buckets that stay, so that gradients have memory once, and always the
            same. What refers to one after ``zero_grad()`` sees the next. Gradients that are kept (``set_to_none=False``) are
            added to, and reduced aside.

    >>> import dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    >>> model = replicate(torch.nn.Linear(3, 1), mesh)
    >>> with model.no_sync():
    ...     model(dt.per_rank([torch.ones(1, 3), torch.zeros(1, 3)])).sum().backward()
    >>> model.weight.grad is None
    True
    >>> model(dt.per_rank([torch.ones(1, 3), torch.zeros(1, 3)])).sum().backward()
    >>> model.weight.grad.placements, model.weight.grad.full_tensor()
    ((Replicate(),), tensor([[1., 1., 1.]]))
    """
    check_policy(mp_policy)
    modules = outermost(module, "replicate")
    check_offload(offload_policy)
    axes = copying(_asked_mesh(mesh, device_mesh, process_group, modules), dp_mesh_dims, offload_policy)
    ignored = {p for inner in ignored_modules for p in inner.parameters()} | set(ignored_params or ())
    unit = _unit(modules, axes, ignored, mp_policy, _bytes_of(bucket_cap_mb), broadcast_buffers)
    for group in unit.groups:
        group.settings.views = gradient_as_bucket_view
    for one in modules:
        add_methods(one, ReplicatedModule, "Replicated")
    return module


setattr(replicate, "state", state_of)  # noqa: B010  as of fully_shard


def _unit(
    modules: Sequence[nn.Module],
    axes: Axes,
    ignored: set[nn.Parameter],
    policy: MixedPrecisionPolicy,
    limit: float | None,
    shared: bool,
) -> Unit:
    axes = among(axes, modules)
    managed = adopt(modules, axes, ignored, "replicate")
    onto_one_mesh(managed, axes.mesh)
    groups = [Group(bucket, axes, policy) for bucket in buckets(managed, limit)]
    below = [inner for one in modules for inner in one.modules()]
    unit = Unit(modules, groups, Buffers(below, axes, shared), axes, policy)
    unit.unreduced.in_order = True
    unit.keep_after_forward = True
    return unit


def _asked_mesh(mesh: Any, device_mesh: Any, process_group: Any, modules: Sequence[nn.Module]) -> Any:
    """Return the mesh that one of three arguments gives; None where none does."""
    if sum(given is not None for given in (mesh, device_mesh, process_group)) > 1:
        raise ArgumentError("replicate takes one of mesh=, device_mesh= and process_group=, which say the same")
    if process_group is None:
        return mesh if device_mesh is None else device_mesh
    return DeviceMesh.from_group(process_group, next((p.device.type for one in modules for p in one.parameters()), "cpu"))


def _bytes_of(bucket_cap_mb: float | None) -> float | None:
    if bucket_cap_mb is None:
        return None
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb is a number of mebibytes above 0, got {bucket_cap_mb!r}")
    return bucket_cap_mb * _MEBIBYTE


def buckets(managed: list[Managed], limit: float | None) -> list[list[Managed]]:
    """Parameters in the order in which backward is expected to reach them, cut where a bucket is full."""
    result: list[list[Managed]] = []
    if limit is None:
        limit = min(_MOST_BYTES, max(_LEAST_BYTES, sum(m.compute.max_local_nbytes for m in managed) / _PARTS))
    filled, cap = 0.0, min(limit, _FIRST_BUCKET_BYTES)
    for m in reversed(managed):
        if not result or filled + m.compute.max_local_nbytes > cap:
            cap = limit if result else cap
            result.append([])
            filled = 0.0
        result[-1].append(m)
        filled += m.compute.max_local_nbytes
    return result
