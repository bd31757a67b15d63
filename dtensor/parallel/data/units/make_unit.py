"""Make units: the parameters, buffers and gradient buckets of the modules of one ``fully_shard`` or ``replicate`` call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from ....base.group_by import group_by_key
from ..settings.dp_modes import MeshAxes
from ..settings.policy import MixedPrecisionPolicy
from .fsdp_module import make_reshard_group, units_of
from .parameters.buffers import ModuleBuffers
from .parameters.fsdp_param import FSDPParam
from .parameters.fsdp_param_init import ShardPlacementFn, axes_on_common_root, make_fsdp_params, move_to_common_mesh
from .parameters.param_group import ParamGroup
from .unit import FSDPUnit

_MEBIBYTE = 1024 * 1024
_FIRST_BUCKET_BYTES = _MEBIBYTE  # small, so that the first all-reduce starts early
# Nothing overlaps the last bucket's all-reduce, so it has a third of all at most; smaller ones take longer than they hide.
_MIN_BUCKET_BYTES, _MAX_BUCKET_BYTES, _MIN_BUCKETS = 4 * _MEBIBYTE, 25 * _MEBIBYTE, 3


def make_sharded_unit(
    modules: Sequence[nn.Module],
    axes: MeshAxes,
    ignored: set[nn.Parameter],
    placement_fn: ShardPlacementFn | None,
    policy: MixedPrecisionPolicy,
    reshard_after_forward: Any,
) -> FSDPUnit:
    """Make the FSDP unit of the modules, with a parameter group for each set of mesh axes that its parameters have."""
    make_reshard_group(axes, reshard_after_forward)  # raises before any change
    axes = axes_on_common_root(axes, modules)
    fsdp_params = make_fsdp_params(modules, axes, ignored, "fully_shard", placement_fn)
    buffers = ModuleBuffers([below for one in modules for below in one.modules()], axes)
    by_axes: dict[MeshAxes, list[FSDPParam]] = {axes: []} | group_by_key((x.axes, x) for x in fsdp_params)
    unit = FSDPUnit(modules, [ParamGroup(own, each, policy) for each, own in by_axes.items()], buffers, axes, policy)
    for group in unit.groups:
        group.reshard_group = make_reshard_group(group.axes, reshard_after_forward)
    units = [inner for one in modules for inner in units_of(one, True)]
    move_to_common_mesh([x for inner in units for x in inner.fsdp_params()], axes.mesh)
    return unit


def make_replicated_unit(
    modules: Sequence[nn.Module],
    axes: MeshAxes,
    ignored: set[nn.Parameter],
    policy: MixedPrecisionPolicy,
    bucket_cap_mb: float | None,
    shared: bool,
) -> FSDPUnit:
    """Make the unit of replicated modules, with a parameter group for each bucket of gradients."""
    max_bytes = _bucket_bytes(bucket_cap_mb)  # raises before any change
    axes = axes_on_common_root(axes, modules)
    fsdp_params = make_fsdp_params(modules, axes, ignored, "replicate")
    move_to_common_mesh(fsdp_params, axes.mesh)
    groups = [ParamGroup(bucket, axes, policy) for bucket in _make_buckets(fsdp_params, max_bytes)]
    below = [inner for outer in modules for inner in outer.modules()]
    unit = FSDPUnit(modules, groups, ModuleBuffers(below, axes, shared), axes, policy)
    unit.grad_accumulation.in_group_order = True
    unit.keep_after_forward = True
    return unit


def _bucket_bytes(bucket_cap_mb: float | None) -> float | None:
    """Return ``bucket_cap_mb`` in bytes; None means no limit."""
    if bucket_cap_mb is None:
        return None
    if not bucket_cap_mb > 0:
        raise ValueError(f"bucket_cap_mb is a number of mebibytes above 0, got {bucket_cap_mb!r}")
    return bucket_cap_mb * _MEBIBYTE


def _make_buckets(fsdp_params: list[FSDPParam], max_bytes: float | None) -> list[list[FSDPParam]]:
    """Return the parameters in buckets, in the order in which backward is expected to reach them, each up to its size limit."""
    result: list[list[FSDPParam]] = []
    sizes = [x.unsharded_layout.max_local_nbytes for x in fsdp_params]
    if max_bytes is None:
        max_bytes = min(_MAX_BUCKET_BYTES, max(_MIN_BUCKET_BYTES, sum(sizes) / _MIN_BUCKETS))
    filled_bytes, capacity = 0.0, min(max_bytes, _FIRST_BUCKET_BYTES)
    for fsdp_param, nbytes in zip(reversed(fsdp_params), reversed(sizes), strict=True):
        if not result or filled_bytes + nbytes > capacity:
            capacity = max_bytes if result else capacity
            result.append([])
            filled_bytes = 0.0
        result[-1].append(fsdp_param)
        filled_bytes += nbytes
    return result
