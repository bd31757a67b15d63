"""What the ranks of one process have alike, and its gradients: a plain tensor that all use, pieces of what is replicated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..base.recorder_hooks import site
from ..base.tracing import has_no_values
from ..errors import LayoutError
from .functorch import seen
from .shared_writes import AgreedByRanks


class UsedByRanks(torch.autograd.Function):
    """One plain tensor as every rank's: with processes each would have its own, and each a gradient of its own."""

    @staticmethod
    def forward(x: Tensor, count: int) -> tuple[Tensor, ...]:
        return tuple(x.view_as(x) if x.layout is torch.strided else x.clone() for _ in range(count))

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.count = inputs[1]
        ctx.set_materialize_grads(False)

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, _: Any) -> tuple[Tensor, ...]:
        return tuple(tangent.view_as(tangent) for _ in range(ctx.count))

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, count: int) -> Any:
        return UsedByRanks.apply(x, count), (in_dims[0],) * count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        """What every rank found. The ranks' gradients are not added up: each belongs to a copy.

        Raises:
            LayoutError: they differ, and there is one tensor for all of them.
        """
        found = [grad for grad in grads if grad is not None]
        compare(*[seen(grad.detach()) for grad in found])
        if not found or not torch.is_grad_enabled():
            return (found[0] if found else None), None
        return AgreedByRanks.apply(*found), None


@site  # values decide, so each replay compares those that it has
def compare(*values: Tensor) -> None:
    """Raise LayoutError if gradients differ that ranks have of one value."""
    values = tuple(x if x.layout is torch.strided else x.to_dense() for x in values)
    for grad in values[1:]:
        if not has_no_values(grad) and not torch.allclose(grad, values[0], *tolerance(values[0]), equal_nan=True):
            raise LayoutError(differing(grad.shape))


def differing(shape: Sequence[int]) -> str:
    """Return the error text for gradients that differ between ranks, of a value of this shape."""
    return (
        f"the gradient of a tensor of shape {tuple(shape)} that all ranks have differs between ranks, which used it with values "
        "of their own. If the gradient is the sum of the ranks', write to_local(grad_placements=[Partial()]), "
        "full_tensor(grad_placements=[Partial()]) or local_map(..., in_grad_placements=...). If the tensor is a plain one, "
        "distribute it (distribute_tensor, distribute_module, parallel.replicate), or give each rank its own with per_rank([...])"
    )


def tolerance(x: Tensor) -> tuple[float, float]:
    """Return how far gradients that are equal may differ, relative and absolute: by the order that a sum was taken in."""
    near, finite = torch.finfo(x.dtype).eps ** 0.5, x[x.isfinite()]
    return near, near * (finite.abs().max().item() if finite.numel() else 0.0)
