"""The autograd function of data parallelism: it stands where gathered parameters come from, and hands their gradients on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ...base.torch_internals import engine_runs
from ...comm import shards_of
from ...errors import DTensorError, UnsupportedOperationError
from ...mesh.device_mesh import DeviceMesh
from ...placement import Partial
from ...tensor.autograd import move
from ...tensor.dtensor import DTensor
from .managed import Managed
from .param_group import Group

Column = tuple[Tensor | None, ...]  # one parameter's gradient: per member held here its own, where there is one
_BEFORE = 5  # inputs before the parameters: they have no gradient
with torch.inference_mode(False), torch.enable_grad():
    ANCHOR = torch.empty(0, device="cpu", requires_grad=True)
    _ANCHORED: Any = ANCHOR.view_as(ANCHOR).grad_fn.next_functions[0][0]  # type: ignore[union-attr]  # its node, kept alive


class Receiver(Protocol):
    """Who takes the gradients of a group's gathered parameters."""

    def receive(
        self, group: Group, use: Any, gradients: dict[int, Column], distributed: DeviceMesh | None, asked: bool
    ) -> dict[Tensor, Tensor]:
        """Local gradients by parameter; ``distributed``: terms of one global sum over that mesh, not each rank's own.

        Returns:
            What autograd gets, if it was ``asked`` for some gradients: those of parameters, reduced. Else nothing.
        """


class Gathered(torch.autograd.Function):
    """An anchor and the sharded parameters -> gathered parameters, as the flat outputs of :meth:`Group.values`.

    Its node runs when the gradients of *all* its outputs are there, however often a module was called: they are reduced once.
    In a backward pass over all of the graph the sharded parameters get nothing from it: their gradients arrive later, so that
    reductions overlap the rest of backward. A pass that was asked for some gradients only (``torch.autograd.grad``, ``inputs=``)
    is one that never reaches the anchor, which nobody can ask for; it gets them from here, reduced.
    """

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, group: Group, receiver: Receiver, use: Any, distributed: DeviceMesh | None, *parameters: Tensor
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
        if not issubclass(type(ctx), BackwardCFunction):
            raise UnsupportedOperationError(
                "compiled autograd does not support parameters under fully_shard or replicate, because their "
                "gradients are reduced during a pass of the autograd engine; compile the model, and let autograd "
                "run its backward pass"
            )
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
        asked = not engine_runs(_ANCHORED)
        if not asked and any(grad is not None and grad.requires_grad for grad in grads):
            raise UnsupportedOperationError(
                "backward(create_graph=True) does not support parameters under fully_shard or replicate: their "
                "gradients are reduced after the pass and have no graph. Gradients of inputs have one: "
                "torch.autograd.grad(loss, inputs, create_graph=True)"
            )
        given = ctx.receiver.receive(group, ctx.use, gradients, ctx.distributed, asked)
        return *(None,) * _BEFORE, *([given.get(m.parameter) for m in group.managed] if asked else (None,) * len(group.managed))


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
                "a data-parallel parameter was used after its unit had ended: call the modules that are units, "
                "not their submodules directly"
            )
        where = list(m.inside.placements)
    target = grad._layout.replace(placements=where)
    return shards_of((grad if target is grad._layout else move(grad, target))._local)
