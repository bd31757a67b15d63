"""Losses: a mean is a sum over the *global* count, so that uneven and empty blocks have the right weight.

``reduction="none"`` is element by element (or sample by sample), and a sum is ``Partial("sum")``. For a mean, each rank's sum
over the global count is an addend. If all blocks are even, the mean of their means is right too.

Negative log likelihood over a sharded class dim (vocabulary parallelism) moves no score: each rank scores the targets in its own
range. The count is the weight of the targets, one number to reduce if the batch is sharded. The mean is NaN exactly where the
plain loss is, if no target counts at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...placement import Partial
from ..call import Call
from ..declare import along, blockwise, kernel_rule, make_blockwise_rule
from ..declared_factors import by
from ..kernel_context import At, KernelContext, check_range, on_each_rank, statistics_bytes
from ..rule import Along, Dims, Factors, Kernel, Partials, R, Strategy

NONE, MEAN, SUM = 0, 1, 2  # the values of argument ``reduction``
PARTIAL_SUM = Partial("sum")


def default_overload(call: Call) -> Any:
    """Return the operator's default overload, which returns its result; the engine fills an ``out=`` argument."""
    return call.func.overloadpacket.default


def replace_reduction(call: Call, args: tuple[Any, ...], reduction: int) -> tuple[Any, ...]:
    """Return positional arguments of a loss with argument ``reduction`` replaced."""
    place = [argument.name for argument in call.func._schema.arguments].index("reduction")
    return (*args[:place], reduction, *args[place + 1 :])


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which losses are added. A sum in half precision would overflow where the mean does not."""
    return torch.promote_types(dtype, torch.float32)


# --- a mean is a sum over the global count ----------------------------------------------------------------------------------
Count = Callable[[Call], int]


def count_elements(call: Call) -> int:
    """Return the global number of losses of a call that compares element by element."""
    shapes = (layout.shape for name, layout in zip(call.names, call.operands, strict=True) if name != "grad_output")
    return torch.broadcast_shapes(*shapes).numel()


def count_samples(call: Call) -> int:
    """Return the global number of samples of a call that has one loss for each."""
    return call.shape(call.names.index("self"))[0]


def make_mean_gradient(count: Count) -> Any:
    """Return a kernel function for a mean's gradient, because the local operator would divide by the local count."""

    def gradient_of_mean(at: KernelContext, grad: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the gradient of a sum, from the incoming gradient divided by the global count."""
        return default_overload(at.call)(*replace_reduction(at.call, (grad / count(at.call), *args), SUM), **kwargs)

    return gradient_of_mean


# --- element by element -----------------------------------------------------------------------------------------------------
ELEMENTWISE, REDUCED_TO_SCALAR = "each: s* -> s*", "each: s* ->"
blockwise(
    "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits",
    by("reduction", {NONE: ELEMENTWISE, MEAN: REDUCED_TO_SCALAR, SUM: REDUCED_TO_SCALAR}),
    sums={"s": by("reduction", {MEAN: "avg", SUM: "sum"})},
)
blockwise(
    "mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward binary_cross_entropy_backward",
    by("reduction", {NONE: ELEMENTWISE, MEAN: "each: [s*] -> s*", SUM: ELEMENTWISE}),
    kernel=Kernel(make_mean_gradient(count_elements), joint=True, order_invariant=True),
)


# --- margins of classes: samples are factors, classes are unsharded ---------------------------------------------------------
def margin_operand_dims(call: Call, first: int) -> tuple[list[Dims], int]:
    """Return the factors of the operands of a margin loss from operand ``first`` on, and the number of samples."""
    scores = call.shape(first)
    batched = len(scores) == 2
    samples = scores[0] if batched else 1
    dims: list[Dims] = []
    for i in range(first, len(call.operands)):
        weight = call.names[i] == "weight"
        dims.append((("n",), *((),) * (len(call.shape(i)) - 1)) if batched and not weight else ((),) * len(call.shape(i)))
    return dims, samples


def margin_factors(call: Call) -> Factors:
    """Return the factors of a margin loss: samples can be sharded, classes are unsharded."""
    dims, samples = margin_operand_dims(call, 0)
    loss: Dims = (("n",),) if len(call.shape(0)) == 2 and call["reduction"] == NONE else ()
    results = (loss, dims[1]) if len(call.results) == 2 else (loss,)
    if not loss:  # the meta kernel gives the loss of a single sample a dim
        call.results = tuple(
            meta and (replace(meta, shape=(), stride=()) if i == 0 else meta) for i, meta in enumerate(call.results)
        )
    kernels = {} if loss else {"n": Kernel(margin_loss_of_samples, lacking=PARTIAL_SUM, order_invariant=True)}
    return Factors(tuple(dims), results, {"n": samples}, kernels=kernels)


def margin_loss_of_samples(at: KernelContext, *args: Any, **kwargs: Any) -> Any:
    """Compute the margin loss of each rank's samples as an addend: its sum, for a mean divided by the global count (a kernel)."""
    total = count_samples(at.call) if at.call["reduction"] == MEAN else 1
    results = default_overload(at.call)(*replace_reduction(at.call, args, SUM), **kwargs)
    loss, *rest = (results,) if isinstance(results, Tensor) else results
    loss = zero_if_empty(loss, args[0]) / total
    return (loss, *[reshape_like_targets(x, args[1]) for x in rest]) if rest else loss


@on_each_rank
def reshape_like_targets(which: Tensor, targets: Tensor) -> Tensor:
    """Reshape the marks of targets that ``multilabel_margin_loss`` saves; CUDA kernels return another shape for empty batches."""
    return which.reshape(targets.shape)


@on_each_rank
def zero_if_empty(loss: Tensor, x: Tensor) -> Tensor:
    """Return the loss of a block, or 0 for an empty one, for which torch leaves it uninitialized."""
    return loss if x.numel() else loss.new_zeros(())


def margin_gradient_factors(call: Call) -> Factors:
    """Return the factors of the backward of a margin loss, with a kernel if it is a mean."""
    dims, samples = margin_operand_dims(call, 1)
    grad: Dims = (("n",),) if call.shape(0) else ()
    kernels = {"n": Kernel(make_mean_gradient(count_samples), order_invariant=True)} if call["reduction"] == MEAN else {}
    return Factors((grad, *dims), (dims[0],), {"n": samples}, kernels=kernels)


kernel_rule("multi_margin_loss multilabel_margin_loss_forward", margin_factors)
kernel_rule("multi_margin_loss_backward multilabel_margin_loss_backward", margin_gradient_factors)


along("glu glu_backward glu_jvp glu_backward_jvp", shapes=None)  # the halves of a dim are combined


# --- negative log likelihood of class indices -------------------------------------------------------------------------------
IGNORED = -100  # the mark of targets of other ranks: local targets are never negative


def local_targets(target: Tensor, start: int, size: int, total: int, ignore_index: int) -> Tensor:
    """Convert targets to class indices of one rank's block of classes. Ignored ones and other ranks' become ``IGNORED``.

    Raises:
        IndexError: a target is no class, as in the plain loss (on CPU; elsewhere asserted on the device).
    """
    target = target.long()  # byte labels would wrap around
    check_range(target, range(total), ignore_index, _wrong_class_error)
    if not size:
        return torch.full_like(target, IGNORED)
    local = target - start
    others = local != local.clamp(0, size - 1)
    return local.masked_fill_(others.logical_or_(target == ignore_index) if 0 <= ignore_index < total else others, IGNORED)


def _wrong_class_error(target: int) -> Exception:
    return IndexError(f"Target {target} is out of bounds.")


def class_dim_and_count(call: Call) -> tuple[int, int]:
    """Return the class dim of a loss's scores, and the global number of classes."""
    shape = call.shape(call.names.index("self"))
    dim = min(1, len(shape) - 1)
    return dim, shape[dim]


def select_own_classes(at: KernelContext, target: Any, weight: Any, ignore_index: int) -> tuple[Any, Any]:
    """Return each rank's targets and class weights, for the classes in its block of the scores."""
    dim, total = at.compute_once(class_dim_and_count)

    def select_on_rank(here: At, target: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """Convert targets and narrow class weights to the classes in one rank's block of the scores."""
        classes = at.block_range("self", dim, here.member)
        local = local_targets(target, classes.start, len(classes), total, ignore_index)
        return local, None if weight is None else weight.narrow(0, classes.start, len(classes))

    return at.map(select_on_rank, target, weight)


def total_weight(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """Return the total class weight of one rank's targets that are not ignored; without weights, their number."""
    target = target.long()
    counts = target != ignore_index
    if weight is None:
        return counts.count_nonzero().to(dtype)
    if not weight.numel():
        return weight.new_zeros((), dtype=dtype)
    return weight.to(dtype)[target.masked_fill(~counts, 0)].masked_fill(~counts, 0).sum()


@on_each_rank
def sum_losses_and_weights(op: Any, scores: Tensor, target: Tensor, weight: Tensor | None, ignored: int) -> tuple[Tensor, Tensor]:
    return op(scores, target, weight, SUM, ignored) if target.numel() else (scores.sum(), scores.sum())


@on_each_rank
def sum_losses_of_own_classes(op: Any, scores: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    """Return the sum of the losses of targets in this rank's classes; 0 without classes."""
    return op(scores, target, weight, SUM, IGNORED)[0] if scores.numel() else scores.sum()


@on_each_rank
def losses_of_own_classes(op: Any, scores: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    return op(scores, target, weight, NONE, IGNORED)[0] if scores.numel() else scores.new_zeros(target.shape)


def nll_loss_of_blocks(at: KernelContext, scores: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    """Compute the negative log likelihood of each rank's samples and classes as addends, and the total weight (a kernel)."""
    op, dtype = at.compute_once(default_overload), at.dtype(0)
    wide = sum_dtype(dtype)
    if "c" not in at.splits and reduction != NONE and dtype is wide:  # the operator returns both sums over all classes
        loss, total = sum_losses_and_weights(op, scores, target, weight, ignore_index)
    else:
        own = select_own_classes(at, target, weight, ignore_index)
        total = total_weight(target, weight, ignore_index, wide)
        if reduction == NONE:
            return losses_of_own_classes(op, scores, *own), torch.zeros_like(total, dtype=dtype)
        if dtype is wide:
            loss = sum_losses_of_own_classes(op, scores, *own)
        else:
            loss = losses_of_own_classes(op, scores, *own).sum(dtype=wide)
    if reduction == MEAN:
        total = at.all_reduce(total, "sum", tuple([name for name in at.splits if name != "c"]), spent=True)
        loss = loss / total
    return (loss, total) if dtype is wide else (loss.to(dtype), total.to(dtype))


# the mean needs all weights on every rank
BATCHED, UNBATCHED = "self: n c s*, target: n s*, weight: []", "self: c, target: , weight: []"
NLL_NOTATION = make_blockwise_rule(f"{BATCHED} -> n s*, | {BATCHED} -> , | {UNBATCHED} -> ,").factors


def nll_factors(call: Call) -> Factors | None:
    """Return the factors of a negative log likelihood with kernels for sharded classes and samples; None if shapes do not fit."""
    factors, none, mean = NLL_NOTATION(call), call["reduction"] == NONE, call["reduction"] == MEAN
    if factors is None:
        return None
    # The operator's sums over a block of the batch are addends of both results (in half precision they might overflow).
    # Without a reduction each sample has its own loss, and the weight is zero on every rank.
    keeps_operator = none or (not mean and call.operands[0].dtype in (torch.float32, torch.float64))
    by_class = Kernel(nll_loss_of_blocks, lacking=(PARTIAL_SUM, R), joint=True)
    # the weight of one rank's targets is an addend of the total, which a mean has already reduced
    by_batch = Kernel(
        nll_loss_of_blocks,
        lacking=(PARTIAL_SUM, R if mean else PARTIAL_SUM),
        collectives=int(mean),
        nbytes=lambda call: statistics_bytes(call, call["reduction"] == MEAN),
        joint=True,
        order_invariant=True,
    )
    kernels = {name: by_class if name == "c" else by_batch for name in factors.sizes if name == "c" or not keeps_operator}
    reduced = {name: "R" if none else "sum" for name in factors.sizes if name not in kernels}
    return replace(factors, reduced=reduced, kernels=kernels)


kernel_rule("nll_loss_forward nll_loss2d_forward", nll_factors, plain=("target", "weight"))


def nll_gradient_of_blocks(
    at: KernelContext,
    grad: Any,
    scores: Any,
    target: Any,
    weight: Any,
    reduction: int,
    ignore_index: int,
    total: Any,
) -> Any:
    """Compute the gradient of a negative log likelihood with respect to each rank's classes (a kernel)."""
    own = select_own_classes(at, target, weight, ignore_index)
    return gradient_of_own_classes(at.compute_once(default_overload), grad, scores, *own, reduction, total)


@on_each_rank
def gradient_of_own_classes(
    op: Any, grad: Tensor, scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, total: Tensor
) -> Any:
    """Run the backward operator on one rank's block of scores; zeros for an empty block."""
    return op(grad, scores, target, weight, reduction, IGNORED, total) if scores.numel() else torch.zeros_like(scores)


NLL_GRADIENT_NOTATION = make_blockwise_rule(
    f"grad_output: n s*, {BATCHED}, total_weight: -> n c s* | grad_output: , {BATCHED}, total_weight: -> n c s* "
    f"| grad_output: , {UNBATCHED}, total_weight: -> c",
    kernels={"c": Kernel(nll_gradient_of_blocks)},
).factors


def nll_gradient_strategies(call: Call) -> Partials:
    """Return strategies for partial gradients of a negative log likelihood. With a mean there are none.

    So the operator is linear in the gradient, which may stay partial.
    """
    factors = NLL_GRADIENT_NOTATION(call)
    if call["reduction"] == MEAN or factors is None:
        return ()
    weights = ",finite" * (len(call.operands) - 4)
    strategies: list[str | Strategy] = [f"{op},R,R{weights},R -> {op}" for op in ("sum", "avg")]
    for name in factors.sizes:
        if name != "c":
            operands = [Along(name) if any(name in dim for dim in d) else R for d in factors.operands[:-1]]
            strategies.append(Strategy((*operands, PARTIAL_SUM), (Along(name),), name))
    return tuple(strategies)


kernel_rule("nll_loss_backward nll_loss2d_backward", NLL_GRADIENT_NOTATION, partials=nll_gradient_strategies, as_laid_out=True)
