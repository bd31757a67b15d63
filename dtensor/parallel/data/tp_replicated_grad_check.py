"""Parameters that tensor parallelism left out are replicated over its ranks, and so must be their gradients: looked at once.

Each rank computes with all of such a parameter. Where what goes with it is the same on all ranks (a norm of whole activations)
they all find its gradient; where it is cut (a norm of heads, of which each rank has some) each finds a term of it, and the copies
of the parameter would part without a word. Which terms are to be added up is not known, since it may be used in both ways: the
plan has to say it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ...base.group_by import by_key
from ...base.recorder_hooks import aside
from ...base.tracing import has_no_values
from ...comm import communicator_of, shards_of
from ...errors import PlacementError
from ...mesh.device_mesh import DeviceMesh
from .autograd_function import Column
from .managed import Managed
from .param_group import Group

_SAMPLE = 64  # elements of a gradient that are compared
_NOISE = 2**-16


@aside
def check_left_out(group: Group, gradients: Mapping[int, Column]) -> None:
    """The first gradients of such parameters are the same on all tensor-parallel ranks.

    Costs two small all-reduces in the first backward pass.

    Raises:
        PlacementError: they are not, on any rank of the mesh.
    """
    pairs = [(group.managed[i], column) for i, column in gradients.items()]
    unknown = [(m, column) for m, column in pairs if m.inside is None and not m.seen_alike and m.stored.mesh != m.axes.mesh]
    if group.axes.mesh.device_type != "meta":
        for mesh, asked in by_key((pair[0].stored.mesh, pair) for pair in unknown).items():
            _check(group, mesh, asked)


def _check(group: Group, mesh: DeviceMesh, asked: Sequence[tuple[Managed, Column]]) -> None:
    comm, inner = communicator_of(mesh), group.axes.mesh
    between = [i for i, dims in enumerate(mesh._dims) if dims not in inner._dims]
    rest = [i for i in range(mesh.ndim) if i not in between]

    def extremes(member: int) -> Tensor:
        own = torch.stack([_sample(column[member if group.comm.holds_all else 0], inner.device_type) for _, column in asked])
        return torch.cat([own, -own])

    def parting(_: int, extreme: Tensor) -> Tensor:
        """How far apart the largest and the smallest of all ranks' are, over the largest; -1 where all are about zero."""
        highest, lowest = extreme[: len(asked)], -extreme[len(asked) :]
        size = torch.maximum(highest.abs(), lowest.abs()).amax(1)
        at_least = size.amax() * _NOISE  # a gradient that is zero but for rounding may be rounded otherwise on other ranks
        return torch.where(size > at_least, (highest - lowest).amax(1) / size, -1)

    with torch.no_grad():
        found = comm.map(parting, comm.all_reduce(comm.map(extremes), between, "max").wait())
        apart = shards_of(comm.all_reduce(found, rest, "max").wait())[0]
    if has_no_values(apart):
        return
    for (m, _), parted in zip(asked, apart.tolist(), strict=True):
        m.seen_alike = parted >= 0
        if parted > math.sqrt(torch.finfo(group.dtype_of(m)).eps):
            raise PlacementError(_told(m, mesh, between))


def _sample(grad: Tensor | None, device_type: str) -> Tensor:
    """Some of a gradient's numbers, evenly spread."""
    if grad is None or grad.numel() == 0:
        return torch.zeros(_SAMPLE, device=device_type)
    flat = torch.view_as_real(grad).reshape(-1) if grad.is_complex() else grad.reshape(-1)
    at = torch.arange(_SAMPLE, device=flat.device) * flat.numel() // _SAMPLE
    return flat[at].float().nan_to_num(0, 0, 0)


def _told(m: Managed, mesh: DeviceMesh, between: Sequence[int]) -> str:
    module, name = m.places[0]
    names = mesh.mesh_dim_names
    over = ", ".join(repr(names[i]) if names else str(i) for i in between)
    return (
        f"the gradient of {name!r} of {type(module).__name__} differs between ranks of mesh dim {over}. "
        "The plan of parallelize_module does not contain it, so each rank has a full copy. It is used "
        "with sharded data (heads, a sequence), so the copies would diverge, or these ranks got "
        "different inputs. Add its module to the plan: SequenceParallel() for a norm of a sharded "
        'sequence, "replicated_with_grad_allreduce" if each rank has some of the heads'
    )
