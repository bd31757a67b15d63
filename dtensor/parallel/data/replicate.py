"""``replicate``: data parallelism with replicated parameters; gradients are averaged in buckets while backward runs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

from ...errors import ArgumentError, UnsupportedOperationError
from ...mesh.device_mesh import DeviceMesh
from .settings.custom_collectives import AllGather, CommHook, CommHookReducer, ReduceScatter
from .settings.dp_modes import make_replicating_axes
from .settings.policy import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from .unit_arguments import (
    DEFAULT_OFFLOAD,
    DEFAULT_PRECISION,
    M,
    check_mp_policy,
    check_offload_policy,
    mix_in_methods,
    outermost_modules,
)
from .units.fsdp_module import FSDPModule, state_of, units_of
from .units.make_unit import make_replicated_unit


class ReplicatedModule(FSDPModule):
    """Mixin of replicated modules: the methods of :class:`FSDPModule` that concern gradients.

    Backward all-reduces each bucket of gradients once.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    >>> model = dt.parallel.replicate(torch.nn.Linear(3, 1), mesh)
    >>> isinstance(model, ReplicatedModule), model.weight.placements
    (True, (Replicate(),))

    Methods that gather parameters raise ``UnsupportedOperationError``: nothing is gathered.
    """

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Call :meth:`FSDPModule.set_requires_gradient_sync`: nothing is sharded, so the all-reduce is the only communication."""
        self.set_requires_gradient_sync(requires_all_reduce, recurse=recurse)

    def set_custom_all_gather(self, comm: AllGather) -> None:
        """Raise UnsupportedOperationError: replicated parameters are not gathered."""
        raise UnsupportedOperationError("a replicated module has no all-gather; remove set_custom_all_gather")

    def set_custom_reduce_scatter(self, comm: ReduceScatter) -> None:
        """Raise UnsupportedOperationError: gradients are all-reduced."""
        raise UnsupportedOperationError("a replicated module's gradients are all-reduced; see register_comm_hook")

    def register_comm_hook(self, state: Any, hook: CommHook) -> None:
        """Have ``hook(state, bucket)`` reduce each bucket's gradients, as in ``DistributedDataParallel``.

        Args:
            hook: returns a ``torch.futures.Future`` of the averaged ``bucket.buffer()``; torch's own hooks
                (``bf16_compress_hook``, ...) work. With all ranks in one process ``bucket.buffer()`` is a ``PerRank``.
        """
        if not callable(hook):
            raise TypeError(f"register_comm_hook takes a function of a state and a bucket, got {hook!r}")
        for unit in units_of(self, False):
            for k, group in enumerate(unit.groups):
                group.settings.comm_hook = CommHookReducer(hook, state, k, k == len(unit.groups) - 1)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backward does not average gradients: for all but the last pass of an accumulated step."""
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
    """Replicate the parameters and buffers of ``module`` from the first rank, in place, and return it.

    Each rank runs its own batch.

    Gradients are averaged over all dims of ``mesh``, by one all-reduce for each bucket, in an order that does not depend on
    what a rank used. A parameter that this rank did not use gets the average of the others; one that no rank used keeps its
    ``.grad``. Buffers that forward writes in training are broadcast from the first rank. With all ranks in one process the
    batch is a ``per_rank([...])``. A batch that is a DTensor over ``mesh`` gives the global loss and its gradient. Invalid
    options raise ``ValueError``.

    Args:
        module: a module, or several modules of one unit, as for ``fully_shard``.
        mesh: default the mesh entered by ``with mesh:``, else all ranks.
        mp_policy: dtypes of the computation and the reduction.
        offload_policy: ``CPUOffloadPolicy()`` stores parameters, gradients and optimizer states in host memory.
        bucket_cap_mb: mebibytes of gradients in a bucket; default a third of all, at least 4 and at most 25.
        broadcast_buffers: False: each rank keeps buffers of its own, as plain tensors.
        ignored_modules, ignored_params: parameters that are not changed.
        dp_mesh_dims: names of the dims of ``mesh`` to average over (``replicate=``), if it has others.
        device_mesh, process_group: a mesh or a group of ``torch.distributed``, instead of ``mesh``.
        find_unused_parameters, static_graph: no effect; accepted as by ``DistributedDataParallel``. Unused parameters are
            always found.
        gradient_as_bucket_view: ``.grad`` are views of permanent buckets, so that gradients have memory once, at fixed
            addresses. A reference to ``.grad`` that is kept over ``zero_grad()`` sees the next gradients. Gradients that are
            not None before backward (``set_to_none=False``) are reduced in other memory and added.

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
    check_mp_policy(mp_policy)
    modules = outermost_modules(module, "replicate")
    check_offload_policy(offload_policy)
    axes = make_replicating_axes(_requested_mesh(mesh, device_mesh, process_group, modules), dp_mesh_dims, offload_policy)
    ignored = {p for inner in ignored_modules for p in inner.parameters()} | set(ignored_params or ())
    unit = make_replicated_unit(modules, axes, ignored, mp_policy, bucket_cap_mb, broadcast_buffers)
    for group in unit.groups:
        group.settings.grads_as_bucket_views = gradient_as_bucket_view
    for one in modules:
        mix_in_methods(one, ReplicatedModule, "Replicated")
    return module


setattr(replicate, "state", state_of)  # noqa: B010  as for fully_shard


def _requested_mesh(mesh: Any, device_mesh: Any, process_group: Any, modules: Sequence[nn.Module]) -> Any:
    """Return the mesh of the one argument that is not None; None if all are.

    Raises:
        ArgumentError: several are given.
    """
    if sum(given is not None for given in (mesh, device_mesh, process_group)) > 1:
        raise ArgumentError("replicate takes one of mesh=, device_mesh= and process_group=, which mean the same")
    if process_group is None:
        return mesh if device_mesh is None else device_mesh
    return DeviceMesh.from_group(process_group, next((p.device.type for outer in modules for p in outer.parameters()), "cpu"))
