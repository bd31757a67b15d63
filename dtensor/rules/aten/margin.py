"""Margin losses of classes, and gated halves: samples are factors, classes (the two halves) are whole.

A mean is over all samples: each rank's sum over the number of samples of the whole.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from ...placement import Partial
from ..call import Call
from ..kernels import KernelContext
from ..rule import Dims, Factors, Kernel
from ..verbs import kernel_rule
from .loss import MEAN, NONE, SUM, functional, with_reduction


def operand_dims(call: Call, first: int) -> tuple[list[Dims], int]:
    """Dims of operands from ``first`` on (scores, labels, class weights), and the number of samples."""
    scores = call.shape(first)
    batched = len(scores) == 2
    samples = scores[0] if batched else 1
    dims: list[Dims] = []
    for i in range(first, len(call.operands)):
        weight = call.names[i] == "weight"
        dims.append((("n",), *((),) * (len(call.shape(i)) - 1)) if batched and not weight else ((),) * len(call.shape(i)))
    return dims, samples


def margin_factors(call: Call) -> Factors:
    dims, samples = operand_dims(call, 0)
    loss: Dims = (("n",),) if len(call.shape(0)) == 2 and call["reduction"] == NONE else ()
    results = (loss, dims[1]) if len(call.results) == 2 else (loss,)
    if not loss:  # the meta kernel gives a single sample's loss a dim
        call.results = tuple(
            meta and (replace(meta, shape=(), stride=()) if i == 0 else meta) for i, meta in enumerate(call.results)
        )
    kernels = {} if loss else {"n": Kernel(sum_over_samples, lacking=Partial("sum"))}
    return Factors(tuple(dims), results, {"n": samples}, kernels=kernels)


def sum_over_samples(at: KernelContext, *args: Any, **kwargs: Any) -> Any:
    op, samples = functional(at.call), at.call.shape(0)[0] if at.call["reduction"] == MEAN else 1

    def one(_: Any, *locals_: Any) -> Any:
        made = op(*locals_, **kwargs)
        loss, *rest = (made,) if isinstance(made, torch.Tensor) else made
        # torch leaves the loss of no samples as it found the memory
        loss = loss / samples if locals_[0].numel() else torch.zeros_like(loss)
        return (loss, *rest) if rest else loss

    return at.map(one, *with_reduction(at.call, args, SUM))


def margin_gradient_factors(call: Call) -> Factors:
    dims, samples = operand_dims(call, 1)
    grad: Dims = (("n",),) if call.shape(0) else ()
    kernels = {"n": Kernel(gradient_of_samples)} if call["reduction"] == MEAN else {}
    return Factors((grad, *dims), (dims[0],), {"n": samples}, kernels=kernels)


def gradient_of_samples(at: KernelContext, grad: Any, *args: Any, **kwargs: Any) -> Any:
    op, samples = functional(at.call), at.call.shape(1)[0]
    args = with_reduction(at.call, (grad, *args), SUM)
    return at.map(lambda _, g, *locals_: op(g / samples, *locals_, **kwargs), *args)


kernel_rule("multi_margin_loss multilabel_margin_loss_forward", margin_factors)
kernel_rule("multi_margin_loss_backward multilabel_margin_loss_backward", margin_gradient_factors)


# --- gates ---
def gated(call: Call) -> Factors:
    """The dim whose halves meet is whole, in operands and results alike."""
    ndim = len(call.shape(0))
    (d,) = call.dims("dim", ndim)
    shape = call.shape(0)
    dims: Dims = tuple(() if k == d else (f"d{k}",) for k in range(ndim))
    return Factors((dims,) * len(call.operands), (dims,), {f"d{k}": size for k, size in enumerate(shape)})


kernel_rule("glu glu_backward glu_jvp glu_backward_jvp", gated)
