"""FSDP units under transforms of ``torch.func`` (functorch).

Hooks do not report gradients there. So modules see values that differentiable operations gather, which any transform can
differentiate, in memory that lives as long as their graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from ....base.torch_internals import tree_map
from ....comm import PerRank, shards_of
from ....errors import MeshError, UnsupportedOperationError
from ....placement import Partial
from ....ranks.per_rank_functorch import join_ranks, split_ranks, unwrap_functorch
from ....state.functorch import mesh_and_placements_of
from ....tensor.autograd import from_local_recorded, redistribute_if_needed, to_local_tensor
from ....tensor.dtensor import DTensor
from .parameters.all_gather_extensions import AllGatherExtensions
from .parameters.fsdp_param import FSDPParam
from .parameters.param_group import ParamGroup


def put_differentiable_values(groups: Sequence[ParamGroup], has_distributed_batch: bool) -> ExitStack:
    """Put unsharded values into the modules through which ``torch.func`` can differentiate, until the result is closed."""
    values = [(x, _unshard_differentiably(group, x, has_distributed_batch)) for group in groups for x in group.fsdp_params]
    stack = ExitStack()
    for fsdp_param, value in values:
        for module, name in fsdp_param.locations:
            stack.callback(module._parameters.__setitem__, name, module._parameters[name])
        fsdp_param.put_value(value)
    return stack


def wrap_ranks_as_one(output: Any) -> Any:
    """Return a module's output with each ``PerRank`` joined to one tensor, which ``torch.func`` can handle."""

    def wrap_one(x: Any) -> Any:
        return join_ranks(x.shards, PerRank) if isinstance(x, PerRank) else x

    return tree_map(wrap_one, output, is_leaf=lambda x: isinstance(x, PerRank))


def _unshard_differentiably(group: ParamGroup, fsdp_param: FSDPParam, has_distributed_batch: bool) -> Any:
    """Return the unsharded parameter as a differentiable function of the sharded one, for transforms of ``torch.func``."""
    x, axes = _differentiated_value(fsdp_param), group.axes
    if AllGatherExtensions.are_needed([fsdp_param]):
        raise UnsupportedOperationError(
            f"{fsdp_param.locations[0][1]!r} has fsdp_pre_all_gather, which transforms of torch.func do not support; use "
            "the module before fully_shard"
        )
    if axes.offload is not None:
        x = x.to(axes.mesh.device_type)
    dtype, layout, dp_dims = group.compute_dtype(fsdp_param), fsdp_param.unsharded_layout, axes.mesh._dims
    unsharded = redistribute_if_needed(x.to(dtype), layout.placements)
    if has_distributed_batch:
        return unsharded
    pairs = zip(layout.placements, layout.mesh._dims, strict=True)
    grad_placements = [Partial("avg") if dims in dp_dims else placement for placement, dims in pairs]
    local = split_ranks(to_local_tensor(unsharded, grad_placements))
    if fsdp_param.tp_layout is None:
        return local
    tp_layout = fsdp_param.tp_layout.replace(dtype=dtype)
    return from_local_recorded(tp_layout, tp_layout, False, *shards_of(local))


def _differentiated_value(fsdp_param: FSDPParam) -> Any:
    """Return the module's present value of the parameter, possibly one that a ``torch.func`` transform wraps.

    Raises:
        MeshError: its layout is not that of the parameter.
    """
    module, name = fsdp_param.locations[0]
    value: Any = module._parameters[name]
    unwrapped, stored = unwrap_functorch(value), fsdp_param.stored_layout
    if not isinstance(unwrapped, DTensor) or mesh_and_placements_of(value)[1] != stored.placements or value.shape != stored.shape:
        raise MeshError(
            f"{fsdp_param.describe()} was replaced by a {type(unwrapped).__name__} of {value.shape}; it was {stored!r}"
        )
    return value
