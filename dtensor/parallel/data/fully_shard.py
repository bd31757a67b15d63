"""``fully_shard``: parameters, gradients and optimizer states cut over the data-parallel ranks, whole only while in use."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from torch import nn

from ...base.group_by import by_key
from ...errors import ContradictionError, UnitError
from .buffers import Buffers
from .dp_modes import Axes, sharding
from .fsdp_module import FSDPModule, neighbours_of, state_of
from .managed import Managed
from .managed_param import ShardPlacement, adopt, among, onto_one_mesh
from .param_group import Group
from .pending_gradients import units_of
from .policy import DataParallelMeshDims, MixedPrecisionPolicy, OffloadPolicy
from .unit import Unit, unit_of

M = TypeVar("M", bound=nn.Module | Sequence[nn.Module])
DEFAULT_PRECISION = MixedPrecisionPolicy()
DEFAULT_OFFLOAD = OffloadPolicy()


def fully_shard(
    module: M,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacement | None = None,
    mp_policy: MixedPrecisionPolicy = DEFAULT_PRECISION,
    offload_policy: OffloadPolicy = DEFAULT_OFFLOAD,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> M:
    """``module``, in place, with the parameters that no inner unit has cut over the data-parallel mesh.

    Call it on inner modules first, then on the outer one: each call makes a unit, gathered by one all-gather before it runs
    (while the one before it runs, from the second pass on), freed after, gathered again in backward, its gradients averaged by
    one reduce-scatter. With all ranks in one process the batch is a ``per_rank([...])``. A batch that is a DTensor over the
    data-parallel mesh gives the global loss and its gradient, as on one device.

    Args:
        module: a module, or several that make up one unit, whose common weights stay one. It comes back with the methods of
            ``FSDPModule`` as well; a type checker learns of them by ``isinstance(model, FSDPModule)``.
        mesh: 1-d: parameters are cut over it. 2-d: cut over its second dim, copied over its first (HSDP). Tensor-parallel
            parameters live on ``mesh["tp"]`` of the same mesh; what it cuts along the same tensor dim it cuts first. Default
            the mesh entered by ``with mesh:``, else all ranks.
        reshard_after_forward: free after forward; default yes, but for the outermost unit, whose backward comes next. A number
            n, a divisor of the ranks: keep 1/n, so that backward gathers from n neighbouring ranks only.
        shard_placement_fn: per parameter the ``Shard(dim)`` to cut by, default (None) ``Shard(0)``; or a
            ``ShardPlacementResult``, with a mesh of its own.
        mp_policy: dtypes to compute and to reduce in.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards, gradients and optimizer states in host memory.
        ignored_params: left as they are.
        dp_mesh_dims: the dims of ``mesh`` that are data-parallel, by name, where ``mesh`` has others too; default all. With
            ``replicate=`` alone nothing is cut: parameters stay whole, and gradients are averaged by an all-reduce.

    Raises:
        MeshError: more than two data-parallel dims, names of none, or a parameter on a mesh that is not of the same root.
        UnitError: ``module`` is a container that nobody calls, or has a weight that is distributed elsewhere, too.
        ContradictionError: it is a unit already.

    Cost: per unit and pass two all-gathers, and one reduce-scatter. ``fully_shard.state(module)`` tells what is gathered now.

    >>> import dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    >>> model = fully_shard(torch.nn.Linear(3, 4), mesh=mesh)
    >>> [tuple(shard.shape) for shard in model.weight.to_local().shards]
    [(2, 3), (2, 3)]
    >>> model(dt.per_rank([torch.ones(1, 3), torch.zeros(1, 3)])).sum().backward()
    >>> model.bias.grad.placements, model.bias.grad.full_tensor()
    ((Shard(dim=0),), tensor([1., 1., 1., 1.]))
    """
    _check_options(reshard_after_forward, mp_policy, offload_policy)
    modules = outermost(module, "fully_shard")
    axes = sharding(mesh, dp_mesh_dims, offload_policy)
    unit = _unit(modules, axes, set(ignored_params or ()), shard_placement_fn, mp_policy, reshard_after_forward)
    if reshard_after_forward is not None:
        unit.keep_after_forward = not reshard_after_forward or (reshard_after_forward == 1 and reshard_after_forward is not True)
    for one in modules:
        add_methods(one, FSDPModule, "FSDP")
    return module


setattr(fully_shard, "state", state_of)  # noqa: B010  no attribute of functions that types know


def _unit(
    modules: Sequence[nn.Module],
    axes: Axes,
    ignored: set[nn.Parameter],
    where: ShardPlacement | None,
    policy: MixedPrecisionPolicy,
    reshard_after_forward: Any,
) -> Unit:
    neighbours_of(axes, reshard_after_forward)  # refuses before anything is done
    axes = among(axes, modules)
    managed = adopt(modules, axes, ignored, "fully_shard", where)
    buffers = Buffers([below for one in modules for below in one.modules()], axes)
    by_axes: dict[Axes, list[Managed]] = {axes: []} | by_key((m.axes, m) for m in managed)
    unit = Unit(modules, [Group(own, each, policy) for each, own in by_axes.items()], buffers, axes, policy)
    for group in unit.groups:
        group.neighbours = neighbours_of(group.axes, reshard_after_forward)
    units = [inner for one in modules for inner in units_of(one, True)]
    onto_one_mesh([m for inner in units for group in inner.groups for m in group.managed], axes.mesh)
    return unit


def outermost(module: Any, name: str) -> list[nn.Module]:
    """A module, or of several those that are not parts of others, with which they run; a unit can be made of each."""
    modules = list(module) if isinstance(module, (list, tuple)) else [module]
    for one in modules:
        check_callable(one, name)
    inner = {below for one in modules for below in one.modules() if below is not one}
    return [one for one in dict.fromkeys(modules) if one not in inner]


def _check_options(reshard_after_forward: Any, mp_policy: Any, offload_policy: Any) -> None:
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, (bool, int)):
        raise ValueError(f"reshard_after_forward is True, False, None or a number of ranks, got {reshard_after_forward!r}")
    check_policy(mp_policy)
    check_offload(offload_policy)


def check_policy(mp_policy: Any) -> None:
    """Raises TypeError unless it is a policy."""
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        found = f"{mp_policy!r} of {type(mp_policy).__module__}"
        raise TypeError(f"mp_policy takes a MixedPrecisionPolicy(param_dtype=..., reduce_dtype=...), got {found}")


def check_offload(offload_policy: Any) -> None:
    """Raises TypeError unless it is a policy."""
    if not isinstance(offload_policy, OffloadPolicy):
        raise TypeError(f"offload_policy takes CPUOffloadPolicy() or OffloadPolicy(), got {offload_policy!r}")


def check_callable(module: Any, name: str) -> None:
    """Whether a unit can be made of ``module``: it runs by being called, and is none yet.

    Raises:
        TypeError, UnitError: it cannot.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"{name} takes a module, got {type(module).__name__}")
    has_forward = type(module).forward is not nn.Module.forward or "forward" in module.__dict__
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)) and not has_forward:
        raise UnitError(
            f"{name} of a {type(module).__name__}: it is a container without a forward of its own, so its "
            f"parameters would never be gathered; apply {name} to each of its modules: for block in blocks: "
            f"{name}(block, mesh=mesh)"
        )
    if unit_of(module) is not None:
        raise ContradictionError(
            f"this {type(module).__name__} is data-parallel already; call {name} once per module, inner ones first"
        )


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Treat a method of a unit's module like ``forward``: parameters are gathered before it and given back after.

    A call costs the all-gather that a forward does.

    >>> import torch, dtensor as dt
    >>> from dtensor.parallel import fully_shard
    >>> mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    >>> class Model(torch.nn.Linear):
    ...     def logits(self, x):
    ...         return self(x)
    >>> model = fully_shard(Model(3, 4), mesh=mesh)
    >>> register_fsdp_forward_method(model, "logits")
    >>> model.logits(torch.ones(2, 3)).shape
    torch.Size([2, 4])

    A name that the module does not have raises.
    """
    method = getattr(module, method_name)
    setattr(module, method_name, functools.partial(_like_forward, module, method))  # a copy of which is the copy's


def _like_forward(module: nn.Module, method: Any, /, *args: Any, **kwargs: Any) -> Any:
    unit = unit_of(module)
    if unit is None:
        return method(*args, **kwargs)
    args, kwargs = unit.before_forward(module, args, kwargs)
    output = None
    try:
        output = method(*args, **kwargs)
    finally:
        output = unit.after_forward(module, output)
    return output


def add_methods(module: nn.Module, methods: type, prefix: str) -> None:
    """Make ``module`` an instance of ``methods`` too."""
    cls = type(module)
    if not issubclass(cls, methods):
        module.__class__ = type(f"{prefix}{cls.__name__}", (methods, cls), {"__module__": cls.__module__})
