"""Negative log likelihood of class indices, over a sharded batch and a sharded class dim (vocabulary parallelism).

No score is ever moved: with classes sharded each rank scores the targets in its own range, and the loss is
``Partial("sum")``. The mean is over the *global* weight of the targets, one number to reduce where the batch is sharded; it is
NaN exactly where the plain loss is: when no target counts at all.
"""

from __future__ import annotations

from typing import Any

import torch

from ...base.torch_internals import assert_async
from ...placement import Partial
from ..call import Call
from ..kernels import KernelContext, statistics_bytes
from ..rule import Along, Factors, Kernel, Partials, R, Row, Spec
from ..verbs import kernel_rule
from .loss import MEAN, NONE, SUM, functional

IGNORED = -100  # what local targets of other ranks become: local targets are never negative

Dims = tuple[tuple[str, ...], ...]


def score_dims(call: Call, operand: int) -> tuple[Dims, Dims]:
    """Factors of the scores ``(N, C, ...)`` or ``(C,)`` and of the targets ``(N, ...)``."""
    shape = call.shape(operand)
    if len(shape) == 1:
        return (("c",),), ()
    rest = tuple((f"s{d}",) for d in range(2, len(shape)))
    return (("n",), ("c",), *rest), (("n",), *rest)


def score_sizes(call: Call, operand: int) -> dict[str, int]:
    dims, _ = score_dims(call, operand)
    return {dim[0]: size for dim, size in zip(dims, call.shape(operand), strict=True)}


def weight_dims(call: Call) -> tuple[Dims, ...]:
    return () if call.get("weight") is None else (((),),)  # small, and every rank needs all weights for the mean


# --- what one rank computes --------------------------------------------------------------------------------------------------
def own_targets(target: torch.Tensor, start: int, size: int, total: int, ignore_index: int) -> torch.Tensor:
    """Targets counted from ``start``, those that are ignored or belong to other ranks marked ``IGNORED``.

    Raises:
        IndexError: a target that is no class, as the plain loss does (on CPU; elsewhere asserted on the device).
    """
    target = target.long()  # labels of one byte would wrap around
    counts = target != ignore_index
    legal = ~counts | ((target >= 0) & (target < total))
    if target.device.type == "cpu" and type(target) is torch.Tensor:  # nobody can look into a FakeTensor
        if not bool(legal.all()):
            raise IndexError(f"Target {int(target[~legal].flatten()[0])} is out of bounds.")
    else:
        assert_async(legal.all())
    local = target - start
    return local.masked_fill(~counts | (local < 0) | (local >= size), IGNORED)


def class_block(at: KernelContext, member: int) -> tuple[int, int, int]:
    """(start, size, total) of a member's classes."""
    scores = next(i for i, name in enumerate(at.call.names) if name == "self")
    dim = 1 if len(at.call.shape(scores)) > 1 else 0
    coordinate = at.call.mesh.coordinates[member]
    layout = at.operands[scores]
    return layout.local_offset(coordinate)[dim], layout.local_shape(coordinate)[dim], layout.shape[dim]


def local_weight(weight: torch.Tensor | None, start: int, size: int) -> torch.Tensor | None:
    return None if weight is None else weight.narrow(0, start, size)


# --- forward ----------------------------------------------------------------------------------------------------------------
def nll_forward(at: KernelContext, scores: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    op, dtype = functional(at.call), at.operands[0].dtype
    wide = torch.promote_types(dtype, torch.float32)  # sums of half precision would overflow
    classes_whole = at.operands[0].splits[min(1, len(at.call.shape(0)) - 1)] is None

    def one(
        here: Any, scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if classes_whole and reduction != NONE and dtype is wide and target.numel():  # the plain operator gives these two
            loss, total_weight = op(scores, target, weight, SUM, ignore_index)
            return loss, total_weight
        start, size, total = class_block(at, here.member)
        local = own_targets(target, start, size, total, ignore_index)
        if size:
            each = op(scores, local, local_weight(weight, start, size), NONE, IGNORED)[0]
        else:
            each = scores.new_zeros(target.shape)
        return each if reduction == NONE else each.sum(dtype=wide), weight_of(target, weight, ignore_index, wide)

    loss, total_weight = at.map(one, scores, target, weight)
    if reduction == NONE:
        return loss, at.map(lambda _, x: torch.zeros_like(x, dtype=dtype), total_weight)
    batch_dims = tuple(i for name, split in at.splits.items() if name != "c" for i in split.mesh_dims)
    if reduction == MEAN and batch_dims:
        total_weight = at.comm.all_reduce(total_weight, batch_dims, "sum")
    mean = reduction == MEAN
    if not mean and dtype is wide:
        return loss, total_weight
    return at.map(lambda _, x, w: ((x / w if mean else x).to(dtype), w.to(dtype)), loss, total_weight)


def weight_of(target: torch.Tensor, weight: torch.Tensor | None, ignore_index: int, dtype: torch.dtype) -> torch.Tensor:
    """The total weight of the targets that count."""
    target = target.long()
    counts = target != ignore_index
    if weight is None:
        return counts.sum().to(dtype)
    if not weight.numel():
        return weight.new_zeros((), dtype=dtype)
    return weight.to(dtype)[target.masked_fill(~counts, 0)].masked_fill(~counts, 0).sum()


def nll_factors(call: Call) -> Factors:
    scores, target = score_dims(call, 0)
    sizes = score_sizes(call, 0)
    none = call["reduction"] == NONE
    # the operator's own sums over a block of the batch are terms of both results; of half precision they might overflow
    sums = call["reduction"] == SUM and call.operands[0].dtype in (torch.float32, torch.float64)
    loss: Spec = Partial("sum")
    by_class = Kernel(nll_forward, lacking=(loss, R), joint=True)
    # the weight of the targets of one rank: a term of the total, which a mean has reduced already
    by_batch = Kernel(
        nll_forward,
        lacking=(loss, R if call["reduction"] != SUM else Partial("sum")),
        collectives=int(call["reduction"] == MEAN),
        nbytes=lambda call: statistics_bytes(call, call["reduction"] == MEAN),
        joint=True,
    )
    kernels = {name: by_class if name == "c" else by_batch for name in sizes if name == "c" or not sums}
    operands, results = (scores, target, *weight_dims(call)), (target if none else (), ())
    reduced = {name: "sum" for name in sizes if name not in kernels}
    return Factors(operands, results, sizes, reduced=reduced, kernels=kernels)


kernel_rule("nll_loss_forward nll_loss2d_forward", nll_factors, plain=("target", "weight"))


# --- backward ---------------------------------------------------------------------------------------------------------------
def nll_backward(
    at: KernelContext,
    grad: Any,
    scores: Any,
    target: Any,
    weight: Any,
    reduction: int,
    ignore_index: int,
    total_weight: Any,
) -> Any:
    op = functional(at.call)

    def one(
        here: Any, g: torch.Tensor, scores: torch.Tensor, target: torch.Tensor, weight: torch.Tensor | None, total: torch.Tensor
    ) -> torch.Tensor:
        start, size, classes = class_block(at, here.member)
        if not size:
            return torch.zeros_like(scores)
        local = own_targets(target, start, size, classes, ignore_index)
        return op(g, scores, local, local_weight(weight, start, size), reduction, IGNORED, total)

    return at.map(one, grad, scores, target, weight, total_weight)


def nll_gradient_factors(call: Call) -> Factors:
    scores, target = score_dims(call, 1)
    grad = target if call["reduction"] == NONE else ()
    operands = (grad, scores, target, *weight_dims(call), ())
    return Factors(operands, (scores,), score_sizes(call, 1), kernels={"c": Kernel(nll_backward)})


def nll_gradient_rows(call: Call) -> Partials:
    """Without a mean the total weight, which may be zero, is not looked at: linear in the gradient, and its terms may stay."""
    if call["reduction"] == MEAN:
        return ()
    weights = ",finite" * (len(call.operands) - 4)
    rows: list[str | Row] = [f"{op},R,R{weights},R -> {op}" for op in ("sum", "avg")]
    dims = nll_gradient_factors(call)
    for name in dims.sizes:
        if name != "c":
            operands = [Along(name) if any(name in dim for dim in d) else R for d in dims.operands[:-1]]
            rows.append(Row((*operands, Partial("sum")), (Along(name),), name))
    return tuple(rows)


kernel_rule("nll_loss_backward nll_loss2d_backward", nll_gradient_factors, partials=nll_gradient_rows, as_laid_out=True)
