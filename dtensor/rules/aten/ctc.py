"""``ctc_loss``: sequences are factors; time steps, classes and labels are whole.

The table of label positions is as wide as the longest target of *all* sequences, which a rank's own need not have.
"""

from __future__ import annotations

from typing import Any

import torch

from ..call import Call
from ..declare import NOTHING, blockwise, composed
from ..kernel_context import At, KernelContext
from ..registry import register
from ..rule import Kernel, Rule

aten = torch.ops.aten


def own(here: At, call: Call, targets: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
    """Targets and lengths of the sequences of one rank's block."""
    block = slice(here.offset, here.offset + here.size)
    lengths = list(call["target_lengths"])
    if targets.ndim == 1:
        targets = targets.narrow(0, sum(lengths[: here.offset]), sum(lengths[block]))
    return targets, list(call["input_lengths"])[block], lengths[block]


def own_losses(at: KernelContext, log_probs: Any, targets: Any, *lengths: Any, **options: Any) -> Any:
    table = at.results[1]
    assert table is not None
    rest = lengths[2:]

    def one(here: At, block: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        labels, inputs, outputs = own(here, at.call, labels)
        if not here.size:
            return block.new_empty((0,)), block.new_empty((0, *table.shape[1:]))
        loss, alpha = aten._ctc_loss.default(block, labels, inputs, outputs, *rest)
        wide = alpha.new_full((here.size, *table.shape[1:]), -torch.inf)
        wide[..., : alpha.shape[2]] = alpha
        return loss, wide

    return at.map(one, log_probs, targets)


def own_gradients(at: KernelContext, grad: Any, log_probs: Any, targets: Any, inputs: Any, outputs: Any, *rest: Any) -> Any:
    losses, table, *options = rest

    def one(here: At, g: torch.Tensor, block: torch.Tensor, labels: torch.Tensor, loss: Any, alpha: Any) -> torch.Tensor:
        labels, own_inputs, own_outputs = own(here, at.call, labels)
        if not here.size:
            return torch.zeros_like(block)
        width = 2 * max(own_outputs) + 1
        return aten._ctc_loss_backward.default(
            g, block, labels, own_inputs, own_outputs, loss, alpha[..., :width].contiguous(), *options
        )

    return at.map(one, grad, log_probs, targets, losses, table)


def by_lists(name: str) -> Any:
    """Lengths that are tensors, of one sequence perhaps numbers, are read once by all ranks."""
    op = getattr(aten, name).default
    first = 2 if name == "_ctc_loss" else 3
    return lambda *args: op(*args[:first], *(x.flatten().tolist() for x in args[first : first + 2]), *args[first + 2 :])


# targets have a row for each sequence, or stand one after another; without sequences there is one
LOSSES = "[] n [], n [] -> n, n [] [] | [] n [], [] -> n, n [] [] | [] [], [] -> , [] []"
GRADIENTS = "n, [] n [], n [], n, n [] [] -> [] n [] | n, [] n [], [], n, n [] [] -> [] n [] | , [] [], [], , [] [] -> [] []"
# whether an accelerator's library computes: it knows whole batches only
for _library in ("cudnn", "miopen"):
    for _overload in ("", ".Tensor"):
        register(f"_use_{_library}_ctc_loss{_overload}", Rule(NOTHING, answer=lambda call: False, kind="answer"))
blockwise("_ctc_loss", LOSSES, kernels={"n": Kernel(own_losses)}, plain=("targets",))
blockwise("_ctc_loss_backward", GRADIENTS, kernels={"n": Kernel(own_gradients)})
composed("_ctc_loss.Tensor", by_lists("_ctc_loss"), plain=("targets", "input_lengths", "target_lengths"))
composed("_ctc_loss_backward.Tensor", by_lists("_ctc_loss_backward"))
