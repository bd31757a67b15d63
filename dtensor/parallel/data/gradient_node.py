"""The autograd function of data parallelism: it stands where gathered parameters come from, and hands their gradients on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from ...comm import shards_of
from ...errors import DTensorError
from ...mesh.device_mesh import DeviceMesh
from ...placement import Partial
from ...tensor.autograd import move
from ...tensor.dtensor import DTensor
from .param_group import Group
from .parameters import Managed

Column = tuple[Tensor | None, ...]  # one parameter's gradient: per member held here its own, where there is one


class Receiver(Protocol):
    """Who takes the gradients of a group's gathered parameters."""

    def receive(self, group: Group, use: Any, gradients: dict[int, Column], distributed: DeviceMesh | None) -> None:
        """Local gradients by parameter; ``distributed``: terms of one global sum over that mesh, not each rank's own."""


class Gathered(torch.autograd.Function):
    """An anchor -> gathered parameters, as the flat outputs of :meth:`Group.values`.

    Its node runs when the gradients of *all* its outputs are there, however often a module was called: they are reduced once.
    The sharded parameters are no inputs: their gradients arrive later, so that reductions overlap the rest of backward.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, group: Group, receiver: Receiver, use: Any, distributed: DeviceMesh | None
    ) -> tuple[Tensor, ...]:
        ctx.group, ctx.receiver, ctx.use, ctx.distributed = group, receiver, use, distributed
        ctx.set_materialize_grads(False)
        ctx.trainable = [m.parameter.requires_grad for m in group.managed]
        flat, owners = group.values(distributed), group.owners(distributed)
        ctx.mark_non_differentiable(*(x for x, i in zip(flat, owners, strict=True) if not ctx.trainable[i]))
        return tuple(flat)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        group: Group = ctx.group
        pieces = group.pieces
        columns: list[list[Tensor | None]] = [[] for _ in group.managed]
        for grad, i in zip(grads, group.owners(ctx.distributed), strict=True):
            columns[i].append(grad)
        gradients = {
            i: tuple(own) if own[0].__class__ is Tensor and len(own) == pieces else _column(group, m, own, ctx.distributed)
            for i, (m, own, trainable) in enumerate(zip(group.managed, columns, ctx.trainable, strict=True))
            if trainable
        }
        ctx.receiver.receive(group, ctx.use, gradients, ctx.distributed)
        return None, None, None, None, None


def _column(group: Group, m: Managed, grads: Sequence[Tensor | None], distributed: DeviceMesh | None) -> Column:
    """The local gradients of one parameter: those of a DTensor as terms of the data-parallel sum."""
    grad = grads[0]
    if not isinstance(grad, DTensor):
        return (None,) * group.pieces if grad is None and len(grads) == 1 else tuple(grads)
    if distributed is not None:
        used = group.layout_inside(m, distributed)
        assert used is not None
        dp = {group.axes.mesh._dims[i] for i in group.axes.both}
        where = [Partial() if dims in dp else p for p, dims in zip(used.placements, used.mesh._dims, strict=True)]
    else:
        if m.inside is None:
            raise DTensorError(
                "a data-parallel parameter was used when its unit was through: call the modules that the unit was made of, not "
                "parts of them by themselves"
            )
        where = list(m.inside.placements)
    target = grad._layout.replace(placements=where)
    return shards_of((grad if target is grad._layout else move(grad, target))._local)
