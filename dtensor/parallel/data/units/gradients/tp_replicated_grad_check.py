"""TP-replicated gradient check: parameters outside the tensor-parallel plan are replicated, so their gradients must be equal.

Each rank computes with the full parameter. If it is used with data that is equal on all ranks (a norm of unsharded
activations), all ranks compute its gradient. If it is used with sharded data (a norm of heads, of which each rank has some),
each rank computes one addend, and the copies of the parameter would silently diverge. The library cannot know whether to sum,
since a parameter may be used in both ways: the plan has to say it. The first gradients are compared once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from .....base.group_by import group_by_key
from .....base.recorder_hooks import untracked
from .....base.tracing import has_no_values
from .....comm import shards_of
from .....comm.map_ranks import communicator_of
from .....errors import PlacementError
from .....mesh.device_mesh import DeviceMesh
from ..parameters.fsdp_param import FSDPParam
from ..parameters.param_group import Column, ParamGroup

_SAMPLE_SIZE = 64  # elements of a gradient that are compared
_RELATIVE_NOISE = 2**-16


@untracked
def check_tp_replicated_grads(group: ParamGroup, gradients: Mapping[int, Column]) -> None:
    """Compare the first gradients of parameters without tensor parallelism over all tensor-parallel ranks.

    Costs two small all-reduces in the first backward pass.

    Raises:
        PlacementError: gradients differ; raised on all ranks of the mesh.
    """
    pairs = [(group.fsdp_params[i], column) for i, column in gradients.items()]
    unchecked = [
        (x, column)
        for x, column in pairs
        if x.tp_layout is None and not x.tp_grads_checked and x.stored_layout.mesh != x.axes.mesh
    ]
    if group.axes.mesh.device_type != "meta":
        for mesh, pairs_here in group_by_key((pair[0].stored_layout.mesh, pair) for pair in unchecked).items():
            _compare_over_tp(group, mesh, pairs_here)


def _compare_over_tp(group: ParamGroup, mesh: DeviceMesh, pairs_here: Sequence[tuple[FSDPParam, Column]]) -> None:
    """Raise if the gradient of a parameter that is replicated over tensor parallelism differs between those ranks."""
    comm, dp_mesh = communicator_of(mesh), group.axes.mesh
    tp_dims = [i for i, dims in enumerate(mesh._dims) if dims not in dp_mesh._dims]
    other_dims = [i for i in range(mesh.ndim) if i not in tp_dims]

    def own_extremes(member: int) -> Tensor:
        """Return samples of a member's gradients and their negatives: a max over ranks gives maximum and minimum."""
        own = torch.stack(
            [_sample_elements(column[member if group.comm.holds_all else 0], dp_mesh.device_type) for _, column in pairs_here]
        )
        return torch.cat([own, -own])

    def relative_difference(_: int, maxima: Tensor) -> Tensor:
        """Return (max - min) / max over ranks, for each gradient; -1 where all ranks have about zero."""
        highest, lowest = maxima[: len(pairs_here)], -maxima[len(pairs_here) :]
        size = torch.maximum(highest.abs(), lowest.abs()).amax(1)
        threshold = size.amax() * _RELATIVE_NOISE  # rounding errors of a zero gradient may differ between ranks
        return torch.where(size > threshold, (highest - lowest).amax(1) / size, -1)

    with torch.no_grad():
        by_rank = comm.map(relative_difference, comm.all_reduce(comm.map(own_extremes), tp_dims, "max").wait())
        differences = shards_of(comm.all_reduce(by_rank, other_dims, "max").wait())[0]
    if has_no_values(differences):
        return
    for (fsdp_param, _), difference in zip(pairs_here, differences.tolist(), strict=True):
        fsdp_param.tp_grads_checked = difference >= 0
        if difference > math.sqrt(torch.finfo(group.compute_dtype(fsdp_param)).eps):
            raise PlacementError(_describe_difference(fsdp_param, mesh, tp_dims))


def _sample_elements(grad: Tensor | None, device_type: str) -> Tensor:
    """Return ``_SAMPLE_SIZE`` evenly spaced elements of a gradient, to compare between ranks."""
    if grad is None or grad.numel() == 0:
        return torch.zeros(_SAMPLE_SIZE, device=device_type)
    flat = torch.view_as_real(grad).reshape(-1) if grad.is_complex() else grad.reshape(-1)
    at = torch.arange(_SAMPLE_SIZE, device=flat.device) * flat.numel() // _SAMPLE_SIZE
    return flat[at].float().nan_to_num(0, 0, 0)


def _describe_difference(fsdp_param: FSDPParam, mesh: DeviceMesh, tp_dims: Sequence[int]) -> str:
    """Return the error text for a parameter with gradients that differ along mesh dims ``tp_dims``."""
    module, name = fsdp_param.locations[0]
    names = mesh.mesh_dim_names
    over = ", ".join(repr(names[i]) if names else str(i) for i in tp_dims)
    return (
        f"the gradient of {name!r} of {type(module).__name__} differs between ranks of mesh dim {over}. "
        "The plan of parallelize_module does not contain it, so each rank has a full copy. It is used "
        "with sharded data (heads, a sequence), so the copies would diverge, or these ranks got "
        "different inputs. Add its module to the plan: SequenceParallel() for a norm of a sharded "
        'sequence, "replicated_with_grad_allreduce" if each rank has some of the heads'
    )
