"""A plain tensor that the ranks of one process use together, and its gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..errors import LayoutError


class UsedByRanks(torch.autograd.Function):
    """One plain tensor as every rank's: with processes each would have its own, and each a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        return tuple(x.view_as(x) for _ in range(count))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, None]:
        """What every rank found. The ranks' gradients are not added up: each belongs to a copy.

        Raises:
            LayoutError: they differ, and there is one tensor for all of them.
        """
        found = [grad for grad in grads if grad is not None]
        for grad in found[1:]:
            if not torch.allclose(grad, found[0], *_tolerance(found[0]), equal_nan=True):
                raise LayoutError(
                    f"the gradient of a plain tensor of shape {tuple(grad.shape)} differs between ranks, since they used it with "
                    "values of their own: with processes each rank would have another one. Distribute the tensor "
                    "(dtensor.distribute_tensor, distribute_module, parallel.replicate), or give every rank its own with per_rank"
                )
        return (found[0] if found else None), None


def _tolerance(x: Tensor) -> tuple[float, float]:
    """Equal up to the order that a sum was taken in."""
    near = torch.finfo(x.dtype).eps ** 0.5
    return near, near * (x.abs().max().item() if x.numel() else 0.0)
