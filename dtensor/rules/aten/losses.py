"""Losses: a mean is a sum over the *global* count, so that uneven and empty blocks weigh what they should.

``reduction="none"`` is element by element (or sample by sample), a sum is ``Partial("sum")``, and of a mean each rank's sum over
the count of the whole is a term; where all blocks are even, their means have that mean.

Negative log likelihood over a sharded class dim (vocabulary parallelism) moves no score: each rank scores the targets in its own
range. The count is the weight of the targets, one number to reduce where the batch is sharded; the mean is NaN exactly where the
plain loss is, when no target counts at all.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...placement import Partial
from ..call import Call
from ..declare import along, blockwise, by_pattern, kernel_rule
from ..kernel_context import At, KernelContext, check_range, on_each_rank, statistics_bytes
from ..notation_rules import by
from ..rule import Along, Dims, Factors, Kernel, Partials, R, Row

NONE, MEAN, SUM = 0, 1, 2  # the values of argument ``reduction``
TERMS = Partial("sum")


def functional(call: Call) -> Any:
    """The overload that returns its result (an ``out=`` argument is filled by the engine)."""
    return call.func.overloadpacket.default


def with_reduction(call: Call, args: tuple[Any, ...], reduction: int) -> tuple[Any, ...]:
    """Positional arguments with ``reduction`` replaced."""
    place = [argument.name for argument in call.func._schema.arguments].index("reduction")
    return (*args[:place], reduction, *args[place + 1 :])


def sums_dtype(dtype: torch.dtype) -> torch.dtype:
    """A sum of half precision would overflow where the mean does not."""
    return torch.promote_types(dtype, torch.float32)


# --- a mean is a sum over the count of the whole ----------------------------------------------------------------------------
Count = Callable[[Call], int]


def count_elements(call: Call) -> int:
    """How many losses there are of operands that are compared element by element."""
    shapes = (layout.shape for name, layout in zip(call.names, call.operands, strict=True) if name != "grad_output")
    return torch.broadcast_shapes(*shapes).numel()


def count_samples(call: Call) -> int:
    """How many losses there are of samples."""
    return call.shape(call.names.index("self"))[0]


def gradient_over(count: Count) -> Any:
    """The gradient of a mean: the local operator would divide by the number of local elements."""

    def program(at: KernelContext, grad: Any, *args: Any, **kwargs: Any) -> Any:
        return functional(at.call)(*with_reduction(at.call, (grad / count(at.call), *args), SUM), **kwargs)

    return program


# --- element by element -----------------------------------------------------------------------------------------------------
EACH, ALL = "each: s* -> s*", "each: s* ->"
blockwise(
    "mse_loss smooth_l1_loss huber_loss soft_margin_loss binary_cross_entropy binary_cross_entropy_with_logits",
    by("reduction", {NONE: EACH, MEAN: ALL, SUM: ALL}),
    sums={"s": by("reduction", {MEAN: "avg", SUM: "sum"})},
)
blockwise(
    "mse_loss_backward smooth_l1_loss_backward huber_loss_backward soft_margin_loss_backward binary_cross_entropy_backward",
    by("reduction", {NONE: EACH, MEAN: "each: [s*] -> s*", SUM: EACH}),
    kernel=Kernel(gradient_over(count_elements), joint=True, orderless=True),
)


# --- margins of classes: samples are factors, classes are whole -------------------------------------------------------------
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
    kernels = {} if loss else {"n": Kernel(loss_of_samples, lacking=TERMS, orderless=True)}
    return Factors(tuple(dims), results, {"n": samples}, kernels=kernels)


def loss_of_samples(at: KernelContext, *args: Any, **kwargs: Any) -> Any:
    """The loss of a block: its sum, for a mean over the count of the whole."""
    total = count_samples(at.call) if at.call["reduction"] == MEAN else 1
    made = functional(at.call)(*with_reduction(at.call, args, SUM), **kwargs)
    loss, *rest = (made,) if isinstance(made, Tensor) else made
    loss = of_something(loss, args[0]) / total
    return (loss, *[of_targets(x, args[1]) for x in rest]) if rest else loss


@on_each_rank
def of_targets(which: Tensor, targets: Tensor) -> Tensor:
    """Which classes are targets; of no samples a CUDA kernel gives this no shape."""
    return which.reshape(targets.shape)


@on_each_rank
def of_something(loss: Tensor, x: Tensor) -> Tensor:
    """A sum; torch leaves the loss of no samples as it found the memory (a CUDA kernel not even its shape)."""
    return loss if x.numel() else loss.new_zeros(())


def margin_gradient_factors(call: Call) -> Factors:
    dims, samples = operand_dims(call, 1)
    grad: Dims = (("n",),) if call.shape(0) else ()
    kernels = {"n": Kernel(gradient_over(count_samples), orderless=True)} if call["reduction"] == MEAN else {}
    return Factors((grad, *dims), (dims[0],), {"n": samples}, kernels=kernels)


kernel_rule("multi_margin_loss multilabel_margin_loss_forward", margin_factors)
kernel_rule("multi_margin_loss_backward multilabel_margin_loss_backward", margin_gradient_factors)


along("glu glu_backward glu_jvp glu_backward_jvp", shapes=None)  # the halves of a dim meet


# --- negative log likelihood of class indices -------------------------------------------------------------------------------
IGNORED = -100  # what local targets of other ranks become: local targets are never negative


def own_targets(target: Tensor, start: int, size: int, total: int, ignore_index: int) -> Tensor:
    """Targets counted from ``start``, those that are ignored or belong to other ranks marked ``IGNORED``.

    Raises:
        IndexError: a target that is no class, as the plain loss does (on CPU; elsewhere asserted on the device).
    """
    target = target.long()  # labels of one byte would wrap around
    check_range(target, range(total), ignore_index, _no_class)
    if not size:
        return torch.full_like(target, IGNORED)
    local = target - start
    others = local != local.clamp(0, size - 1)
    return local.masked_fill_(others.logical_or_(target == ignore_index) if 0 <= ignore_index < total else others, IGNORED)


def _no_class(target: int) -> Exception:
    return IndexError(f"Target {target} is out of bounds.")


def classes_of(call: Call) -> tuple[int, int]:
    """The dim of the scores that has the classes, and how many there are."""
    shape = call.shape(call.names.index("self"))
    dim = min(1, len(shape) - 1)
    return dim, shape[dim]


def of_own_classes(at: KernelContext, target: Any, weight: Any, ignore_index: int) -> tuple[Any, Any]:
    """Each rank's targets and weights, of the classes that its block of scores has."""
    dim, total = at.once(classes_of)

    def own(here: At, target: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
        classes = at.held("self", dim, here.member)
        local = own_targets(target, classes.start, len(classes), total, ignore_index)
        return local, None if weight is None else weight.narrow(0, classes.start, len(classes))

    return at.map(own, target, weight)


def weight_of(target: Tensor, weight: Tensor | None, ignore_index: int, dtype: torch.dtype) -> Tensor:
    """The total weight of the targets that count."""
    target = target.long()
    counts = target != ignore_index
    if weight is None:
        return counts.count_nonzero().to(dtype)
    if not weight.numel():
        return weight.new_zeros((), dtype=dtype)
    return weight.to(dtype)[target.masked_fill(~counts, 0)].masked_fill(~counts, 0).sum()


@on_each_rank
def losses_in_sum(op: Any, scores: Tensor, target: Tensor, weight: Tensor | None, ignored: int) -> tuple[Tensor, Tensor]:
    return op(scores, target, weight, SUM, ignored) if target.numel() else (scores.sum(), scores.sum())


@on_each_rank
def loss_of_own(op: Any, scores: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    """In sum: a rank without a class has targets, which generated code would look up all the same."""
    return op(scores, target, weight, SUM, IGNORED)[0] if scores.numel() else scores.sum()


@on_each_rank
def loss_of_each(op: Any, scores: Tensor, target: Tensor, weight: Tensor | None) -> Tensor:
    return op(scores, target, weight, NONE, IGNORED)[0] if scores.numel() else scores.new_zeros(target.shape)


def nll_loss(at: KernelContext, scores: Any, target: Any, weight: Any, reduction: int, ignore_index: int) -> Any:
    op, dtype = at.once(functional), at.dtype(0)
    wide = sums_dtype(dtype)
    if "c" not in at.splits and reduction != NONE and dtype is wide:  # the operator gives the two sums of all classes
        loss, total = losses_in_sum(op, scores, target, weight, ignore_index)
    else:
        own = of_own_classes(at, target, weight, ignore_index)
        total = weight_of(target, weight, ignore_index, wide)
        if reduction == NONE:
            return loss_of_each(op, scores, *own), torch.zeros_like(total, dtype=dtype)
        if dtype is wide:
            loss = loss_of_own(op, scores, *own)
        else:
            loss = loss_of_each(op, scores, *own).sum(dtype=wide)
    if reduction == MEAN:
        total = at.all_reduce(total, "sum", tuple([name for name in at.splits if name != "c"]), spent=True)
        loss = loss / total
    return (loss, total) if dtype is wide else (loss.to(dtype), total.to(dtype))


# every rank needs all weights for the mean
IN_BATCH, ALONE = "self: n c s*, target: n s*, weight: []", "self: c, target: , weight: []"
SCORES = by_pattern(f"{IN_BATCH} -> n s*, | {IN_BATCH} -> , | {ALONE} -> ,").factors


def nll_factors(call: Call) -> Factors | None:
    found, none, mean = SCORES(call), call["reduction"] == NONE, call["reduction"] == MEAN
    if found is None:
        return None
    # the operator's own sums over a block of the batch are terms of both results (of half precision they might overflow), and
    # without a reduction a sample's loss is its own, the weight being zero on every rank
    own = none or (not mean and call.operands[0].dtype in (torch.float32, torch.float64))
    by_class = Kernel(nll_loss, lacking=(TERMS, R), joint=True)
    # the weight of the targets of one rank: a term of the total, which a mean has reduced already
    by_batch = Kernel(
        nll_loss,
        lacking=(TERMS, R if mean else TERMS),
        collectives=int(mean),
        nbytes=lambda call: statistics_bytes(call, call["reduction"] == MEAN),
        joint=True,
        orderless=True,
    )
    kernels = {name: by_class if name == "c" else by_batch for name in found.sizes if name == "c" or not own}
    reduced = {name: "R" if none else "sum" for name in found.sizes if name not in kernels}
    return replace(found, reduced=reduced, kernels=kernels)


kernel_rule("nll_loss_forward nll_loss2d_forward", nll_factors, plain=("target", "weight"))


def nll_gradient(
    at: KernelContext,
    grad: Any,
    scores: Any,
    target: Any,
    weight: Any,
    reduction: int,
    ignore_index: int,
    total: Any,
) -> Any:
    own = of_own_classes(at, target, weight, ignore_index)
    return gradient_of_own(at.once(functional), grad, scores, *own, reduction, total)


@on_each_rank
def gradient_of_own(
    op: Any, grad: Tensor, scores: Tensor, target: Tensor, weight: Tensor | None, reduction: int, total: Tensor
) -> Any:
    return op(grad, scores, target, weight, reduction, IGNORED, total) if scores.numel() else torch.zeros_like(scores)


GRADIENTS = by_pattern(
    f"grad_output: n s*, {IN_BATCH}, total_weight: -> n c s* | grad_output: , {IN_BATCH}, total_weight: -> n c s* "
    f"| grad_output: , {ALONE}, total_weight: -> c",
    kernels={"c": Kernel(nll_gradient)},
).factors


def nll_gradient_rows(call: Call) -> Partials:
    """Without a mean the total weight, which may be zero, is not looked at: linear in the gradient, and its terms may stay."""
    dims = GRADIENTS(call)
    if call["reduction"] == MEAN or dims is None:
        return ()
    weights = ",finite" * (len(call.operands) - 4)
    rows: list[str | Row] = [f"{op},R,R{weights},R -> {op}" for op in ("sum", "avg")]
    for name in dims.sizes:
        if name != "c":
            operands = [Along(name) if any(name in dim for dim in d) else R for d in dims.operands[:-1]]
            rows.append(Row((*operands, TERMS), (Along(name),), name))
    return tuple(rows)


kernel_rule("nll_loss_backward nll_loss2d_backward", GRADIENTS, partials=nll_gradient_rows, as_laid_out=True)
