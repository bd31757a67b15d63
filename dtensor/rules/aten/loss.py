"""Losses that compare element by element: ``mse_loss``, ``smooth_l1_loss``, ``huber_loss``, binary cross entropy, soft margin.

``reduction="none"`` is pointwise, a sum is ``Partial("sum")``. A mean divides by the *global* number of elements, so that
uneven and empty blocks weigh what they should; where all blocks are even it is the mean of their means.
"""

from __future__ import annotations

from typing import Any

import torch

from ...placement import Partial
from ..call import Call
from ..kernels import KernelContext
from ..rule import Factors, Kernel
from ..verbs import aligned, broadcast_factors, kernel_rule
from .reduction import even_average

NONE, MEAN, SUM = 0, 1, 2  # the values of argument ``reduction``


def with_reduction(call: Call, args: tuple[Any, ...], reduction: int) -> tuple[Any, ...]:
    """Positional arguments with ``reduction`` replaced."""
    place = [argument.name for argument in call.func._schema.arguments].index("reduction")
    return (*args[:place], reduction, *args[place + 1 :])


def functional(call: Call) -> Any:
    """The overload that returns its result (an ``out=`` argument is filled by the engine)."""
    return call.func.overloadpacket.default


def elements(call: Call, *operands: int) -> int:
    """Number of elements that the mean is over."""
    return torch.broadcast_shapes(*(call.shape(i) for i in operands)).numel()


# --- forward --------------------------------------------------------------------------------------------------------------
def mean_of_losses(at: KernelContext, *args: Any, **kwargs: Any) -> Any:
    """Each rank's sum over the number of elements of the whole: terms of the mean."""
    op, count = functional(at.call), elements(at.call, *range(len(at.operands)))
    result = at.results[0]
    assert result is not None
    wide = torch.promote_types(result.dtype, torch.float32)  # a sum of half precision would overflow where the mean does not
    args = with_reduction(at.call, args, SUM if wide is result.dtype else NONE)
    return at.map(lambda _, *locals_: (op(*locals_, **kwargs).sum(dtype=wide) / count).to(result.dtype), *args)


def loss_factors(call: Call) -> Factors | None:
    factors = broadcast_factors(call)
    if factors is None or call["reduction"] == NONE:
        return factors
    results = ((),)
    if call["reduction"] == SUM:
        return Factors(factors.operands, results, factors.sizes, reduced=dict.fromkeys(factors.sizes, "sum"))
    if all(split is None or split.even for layout in call.operands for split in layout.splits):
        return Factors(factors.operands, results, factors.sizes, reduced=dict.fromkeys(factors.sizes, "avg"))
    kernel = Kernel(mean_of_losses, lacking=Partial("sum"), joint=True)
    return Factors(factors.operands, results, factors.sizes, kernels=dict.fromkeys(factors.sizes, kernel))


kernel_rule(
    "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits",
    loss_factors,
    when=even_average,
)


# --- backward ---------------------------------------------------------------------------------------------------------------
def mean_gradient(at: KernelContext, grad: Any, *args: Any, **kwargs: Any) -> Any:
    """The local op would divide by the number of local elements."""
    op, count = functional(at.call), elements(at.call, *range(1, len(at.operands)))
    args = with_reduction(at.call, (grad, *args), SUM)
    return at.map(lambda _, g, *locals_: op(g / count, *locals_, **kwargs), *args)


def loss_gradient_factors(call: Call) -> Factors:
    shapes = [tuple(layout.shape) for layout in call.operands]
    whole = torch.broadcast_shapes(*shapes[1:])
    sizes = {f"d{d}": size for d, size in enumerate(whole)}
    operands = tuple(aligned(shape, len(whole), sizes) for shape in shapes)
    results = tuple(aligned(meta.shape, len(whole), sizes) for meta in call.results if meta is not None)
    kernels = dict.fromkeys(sizes, Kernel(mean_gradient, joint=True)) if call["reduction"] == MEAN else {}
    return Factors(operands, results, sizes, kernels=kernels)


kernel_rule(
    "mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward binary_cross_entropy_backward",
    loss_gradient_factors,
)
