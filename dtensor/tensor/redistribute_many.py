"""Redistribute many tensors at once (``redistribute_many``): equal steps of several tensors go in one collective."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import Any

import torch

from ..errors import LayoutError, PlacementError
from ..layout.layout import Layout
from ..layout.placement_forms import is_placement_form
from ..placement import Placement, Placements
from ..redistribute import execute_many, plan
from ..state.shared_memory import clone_if_aliased, storage_addresses
from ..state.version_counters import check_unwritten
from ..state.wrap import wrap_local, wrap_pending
from .autograd import grad_layout, to_dtensor_grad
from .dtensor import DTensor


def redistribute_many(
    tensors: Sequence[DTensor],
    placements: Sequence[Placements] | Placements,
    *,
    async_op: bool = False,
) -> list[DTensor]:
    """Return ``x.redistribute(placements=...)`` of each tensor. Differentiable; few collectives in forward and backward.

    Steps that plans take at the same time go in one collective per group of ranks: all exchanges of blocks (of any dtypes) in
    one, all reductions of one op and dtype in one. Results of a reduction share one buffer, each a region of its own.

    Args:
        placements: in any form (``Placements``): a list with one entry per tensor, or one entry for all of them. Mesh dims that
            placements by name leave out keep their placements.
        async_op: return at once; all results wait at the first use of any.

    Raises:
        LayoutError: the number of placements is not the number of tensors, or a tensor is no DTensor.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> xs = [dt.distribute_tensor(torch.ones(n), mesh, [dt.Shard(0)]) for n in (3, 4)]
    >>> with dt.debug.CommDebugMode() as comm:
    ...     ys = dt.redistribute_many(xs, [dt.Replicate()])
    >>> [y.placements for y in ys], comm.get_total_counts()
    ([(Replicate(),), (Replicate(),)], 1)
    """
    tensors = [None] if isinstance(tensors, torch.Tensor) else list(tensors)  # list() would return its rows
    if not all(isinstance(x, DTensor) for x in tensors):
        raise LayoutError(
            "redistribute_many takes a list of DTensors; make them with distribute_tensor() or DTensor.from_local()"
        )
    if isinstance(placements, (list, tuple, Iterator)):
        placements_by_tensor: list[Any] = list(placements)
    elif is_placement_form(placements):
        placements_by_tensor = [placements] * len(tensors)
    else:
        raise PlacementError(f"redistribute_many takes a list of placements, or a list of such lists, got {placements!r}")
    if all(isinstance(item, Placement) for item in placements_by_tensor) and (placements_by_tensor or not tensors):
        placements_by_tensor = [tuple(placements_by_tensor)] * len(tensors)
    if len(placements_by_tensor) != len(tensors):
        raise LayoutError(
            f"redistribute_many: {len(placements_by_tensor)} placements for {len(tensors)} tensors; give one tuple for each"
        )
    targets = [x._layout.replace(placements=item) for x, item in zip(tensors, placements_by_tensor, strict=True)]
    changed = [i for i, x in enumerate(tensors) if targets[i] is not x._layout]
    results = list(tensors)
    if changed:
        changed_results = RedistributeMany.apply(tuple(targets[i] for i in changed), async_op, *(tensors[i] for i in changed))
        for i, result in zip(changed, changed_results, strict=True):
            results[i] = result
    return results


class RedistributeMany(torch.autograd.Function):
    """Autograd function: the same global values with other layouts.

    The gradients go together, each to the layout of its source.
    """

    @staticmethod
    def forward(ctx: Any, targets: tuple[Layout, ...], async_op: bool, *xs: Any) -> Any:
        """Redistribute all tensors together; each result has memory of its own."""
        ctx.sources, ctx.targets = [x._layout for x in xs], targets
        ctx.set_materialize_grads(False)
        plans = [plan(x._layout, target) for x, target in zip(xs, targets, strict=True)]
        pending_values = execute_many(plans, [x._local for x in xs])

        def clone_aliased_results(values: list[Any]) -> list[Any]:
            """Return the results, with copies of those that would share memory with their inputs."""
            # each result has memory of its own, as in Redistribute
            return [
                value if steps.communicates else clone_if_aliased(value, storage_addresses(x._local))
                for value, steps, x in zip(values, plans, xs, strict=True)
            ]

        if not async_op:
            return tuple(map(wrap_local, clone_aliased_results(pending_values.wait()), targets))
        all_pending = check_unwritten(pending_values.then(clone_aliased_results), xs)
        pending_by_tensor = [all_pending.then(operator.itemgetter(i)) for i in range(len(xs))]
        return tuple(
            wrap_pending(pending, target, x._local) for pending, target, x in zip(pending_by_tensor, targets, xs, strict=True)
        )

    @staticmethod
    def jvp(ctx: Any, _: Any, __: Any, *tangents: Any) -> Any:
        """Redistribute the tangents as the tensors; absent ones are zeros."""
        like = next(t for t in tangents if t is not None)
        return tuple(
            like.new_zeros(target.shape, dtype=target.dtype)
            if t is None
            else t.redistribute(target.mesh, grad_layout(target, None).placements)
            for t, target in zip(tangents, ctx.targets, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Redistribute the gradients together to the gradient layouts of the inputs."""
        present = [i for i, grad in enumerate(grads) if grad is not None]
        grads = tuple(
            None if grad is None else to_dtensor_grad(grad, like) for grad, like in zip(grads, ctx.targets, strict=True)
        )
        result: list[Any] = [None] * len(grads)
        targets = {i: grads[i]._layout.replace(placements=grad_layout(ctx.sources[i], None).placements) for i in present}
        changed = [i for i in present if targets[i] is not grads[i]._layout]
        for i in present:
            result[i] = grads[i]
        if changed:
            changed_grads = RedistributeMany.apply(tuple(targets[i] for i in changed), False, *(grads[i] for i in changed))
            for i, grad in zip(changed, changed_grads, strict=True):
                result[i] = grad
        return None, None, *result
