"""``fully_shard``: parameters, gradients and optimizer states are sharded over the data-parallel ranks, unsharded only in use."""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterable
from typing import Any

from torch import nn

from .settings.dp_modes import make_sharding_axes
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
from .units.fsdp_module import FSDPModule, state_of
from .units.make_unit import make_sharded_unit
from .units.parameters.fsdp_param_init import ShardPlacementFn
from .units.unit import unit_of


def fully_shard(
    module: M,
    *,
    mesh: Any = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = DEFAULT_PRECISION,
    offload_policy: OffloadPolicy = DEFAULT_OFFLOAD,
    ignored_params: Iterable[nn.Parameter] | None = None,
    dp_mesh_dims: DataParallelMeshDims | None = None,
) -> M:
    """Shard the parameters of ``module`` that are in no inner unit over the data-parallel mesh, in place, and return it.

    Call it on inner modules first, then on the outer one. Each call makes a unit. One all-gather unshards it before it runs,
    overlapped with the unit before it from the second pass on. It is resharded after forward and unsharded again in backward.
    One reduce-scatter averages its gradients. With all ranks in one process the batch is a ``per_rank([...])``. A batch that
    is a DTensor over the data-parallel mesh gives the global loss and its gradient, as on one device.

    Args:
        module: a module, or several modules of one unit; weights that they share stay shared. It also gets the methods of
            ``FSDPModule``, which ``isinstance(model, FSDPModule)`` tells a type checker.
        mesh: 1-d: parameters are sharded over it. 2-d: sharded over its second dim, replicated over its first (HSDP).
            Tensor-parallel parameters are on ``mesh["tp"]`` of the same mesh; along a tensor dim that both shard, tensor
            parallelism splits first. Default the mesh entered by ``with mesh:``, else all ranks.
        reshard_after_forward: reshard after forward; default True, except for the outermost unit, whose backward is next. A
            number n that divides the ranks: keep 1/n, so that backward gathers from n neighboring ranks only.
        shard_placement_fn: returns for a parameter the ``Shard(dim)`` to shard by (None: ``Shard(0)``), also as text, by the name
            of the mesh dim or as a ``Partition``; or a ``ShardPlacementResult`` with a mesh of its own.
        mp_policy: dtypes of the computation and the reduction.
        offload_policy: ``CPUOffloadPolicy()`` stores shards, gradients and optimizer states in host memory.
        ignored_params: parameters that are not changed.
        dp_mesh_dims: names of the data-parallel dims of ``mesh``, if it has others; default all. With ``replicate=`` alone
            nothing is sharded: parameters stay replicated, and an all-reduce averages gradients.

    Raises:
        MeshError: more than two data-parallel dims, names of none, or a parameter on a mesh with another root.
        UnitError: ``module`` is a container without forward, or shares a weight that is distributed elsewhere too.
        ContradictionError: ``module`` is a unit already.

    Cost: per unit and pass two all-gathers and one reduce-scatter. ``fully_shard.state(module)`` tells what is unsharded now.

    >>> import dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    >>> model = fully_shard(torch.nn.Linear(3, 4), mesh=mesh)
    >>> [tuple(shard.shape) for shard in model.weight.to_local().shards]
    [(2, 3), (2, 3)]
    >>> model(dt.per_rank([torch.ones(1, 3), torch.zeros(1, 3)])).sum().backward()
    >>> model.bias.grad.placements, model.bias.grad.full_tensor()
    ((Shard(dim=0),), tensor([1., 1., 1., 1.]))
    """
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, (bool, int)):
        raise ValueError(f"reshard_after_forward is True, False, None or a number of ranks, got {reshard_after_forward!r}")
    check_mp_policy(mp_policy)
    check_offload_policy(offload_policy)
    modules = outermost_modules(module, "fully_shard")
    axes = make_sharding_axes(mesh, dp_mesh_dims, offload_policy)
    unit = make_sharded_unit(modules, axes, set(ignored_params or ()), shard_placement_fn, mp_policy, reshard_after_forward)
    if reshard_after_forward is not None:
        unit.keep_after_forward = not reshard_after_forward or (reshard_after_forward == 1 and reshard_after_forward is not True)
    for one in modules:
        mix_in_methods(one, FSDPModule, "FSDP")
    return module


setattr(fully_shard, "state", state_of)  # noqa: B010  type checkers do not know attributes of functions


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Treat a method of a unit's module like ``forward``: unshard the parameters before it, and reshard them after it.

    A call costs the all-gather of a forward.

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

    Raises AttributeError if the module does not have the method.
    """
    method = getattr(module, method_name)
    setattr(module, method_name, functools.partial(_call_as_forward, module, method))  # copies of the module copy the partial


def _call_as_forward(module: nn.Module, method: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Call a method of a module between the unshard and the reshard of its unit, as forward is called."""
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


def units_by_size(
    module: nn.Module, min_num_params: int, never: Collection[type[nn.Module]] = (nn.ModuleList, nn.ModuleDict)
) -> list[nn.Module]:
    """Return the modules to make FSDP units of: inner ones first, ``module`` last.

    Each has at least ``min_num_params`` elements of parameters that no inner unit has.

    Args:
        never: types that cannot be units, since they are not called.

    >>> model = nn.Sequential(nn.Linear(9, 9), nn.Sequential(nn.Linear(2, 2), nn.Linear(9, 8)), nn.Linear(3, 3))
    >>> [type(unit).__name__ for unit in units_by_size(model, 75)]
    ['Linear', 'Linear', 'Sequential']

    No communication, no errors.
    """
    units: list[nn.Module] = []
    counted: set[nn.Parameter] = set()

    def collect_units(submodule: nn.Module) -> list[nn.Parameter]:
        """Append the modules below ``submodule`` to make units of; return the parameters that remain in none."""
        uncovered = [p for p in submodule._parameters.values() if p is not None and p not in counted]
        counted.update(uncovered)
        for child in submodule.children():
            uncovered += collect_units(child)
        if (
            submodule is not module
            and not isinstance(submodule, tuple(never))
            and sum(p.numel() for p in uncovered) >= min_num_params
        ):
            units.append(submodule)
            return []
        return uncovered

    collect_units(module)
    return [*units, module]
