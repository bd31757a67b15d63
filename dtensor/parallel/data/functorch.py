"""A unit under transforms of ``torch.func``: nobody is told there when gradients come, so the values that modules see are those
of operations that any transform differentiates, gathered into memory that lives as long as their graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

from ...base.torch_internals import tree_map
from ...comm import PerRank, shards_of
from ...dispatch.functorch import placed_of
from ...errors import MeshError, UnsupportedOperationError
from ...placement import Partial
from ...ranks.functorch import as_one, each_rank, seen
from ...tensor.autograd import as_local, from_pieces, laid
from ...tensor.dtensor import DTensor
from .all_gather_extensions import Extensions
from .managed import Managed
from .param_group import Group


def put_differentiable(groups: Sequence[Group], distributed: bool) -> ExitStack:
    """Gathered values in the parameters' places, each by a collective of its own, until it is closed."""
    values, stood = [(m, _whole(group, m, distributed)) for group in groups for m in group.managed], ExitStack()
    for m, value in values:
        for at, name in m.places:
            stood.callback(at._parameters.__setitem__, name, at._parameters[name])
        m.put(value)
    return stood


def as_one_tensor(output: Any) -> Any:
    """A module's results as transforms look for them: they know of no ranks."""

    def one(x: Any) -> Any:
        return as_one(x.shards, PerRank) if isinstance(x, PerRank) else x

    return tree_map(one, output, is_leaf=lambda x: isinstance(x, PerRank))


def _whole(group: Group, m: Managed, distributed: bool) -> Any:
    x, axes = _standing(m), group.axes
    if Extensions.among([m]):
        raise UnsupportedOperationError(
            f"{m.places[0][1]!r} has fsdp_pre_all_gather, which transforms of torch.func do not support; use "
            "the module before fully_shard"
        )
    if axes.host is not None:
        x = x.to(axes.mesh.device_type)
    whole, dp = laid(x.to(group.dtype_of(m)), m.compute.placements), axes.mesh._dims
    if distributed:
        return whole
    where = [Partial("avg") if dims in dp else p for p, dims in zip(m.compute.placements, m.compute.mesh._dims, strict=True)]
    local = each_rank(as_local(whole, where))
    if m.inside is None:
        return local
    inside = m.inside.replace(dtype=group.dtype_of(m))
    return from_pieces(inside, inside, False, *shards_of(local))


def _standing(m: Managed) -> Any:
    """What stands in a parameter's place: what transforms differentiate by, perhaps.

    Raises:
        MeshError: it is laid out otherwise.
    """
    module, name = m.places[0]
    found: Any = module._parameters[name]
    own = seen(found)
    if not isinstance(own, DTensor) or placed_of(found)[1] != m.stored.placements or found.shape != m.stored.shape:
        raise MeshError(f"{m.described()} was replaced by a {type(own).__name__} of {found.shape}; it was {m.stored!r}")
    return found
