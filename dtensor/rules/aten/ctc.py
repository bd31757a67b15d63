"""CTC loss (``ctc_loss``): sequences are a factor; time steps, classes and labels are unsharded.

The table of label positions is as wide as the longest target of *all* sequences, which a rank may not have.
"""

from __future__ import annotations

from typing import Any

import torch

from ..call import Call
from ..declare import NO_FACTORS, blockwise, composed
from ..kernel_context import At, KernelContext
from ..registry import register
from ..rule import Kernel, Rule

aten = torch.ops.aten


def sequences_of_block(here: At, call: Call, targets: torch.Tensor) -> tuple[torch.Tensor, list[int], list[int]]:
    """Return the targets, input lengths and target lengths of the sequences in one rank's block."""
    block = slice(here.offset, here.offset + here.size)
    lengths = list(call["target_lengths"])
    if targets.ndim == 1:
        targets = targets.narrow(0, sum(lengths[: here.offset]), sum(lengths[block]))
    return targets, list(call["input_lengths"])[block], lengths[block]


def ctc_losses(at: KernelContext, log_probs: Any, targets: Any, *lengths: Any, **options: Any) -> Any:
    """Compute the CTC losses of the sequences in each rank's block (a kernel)."""
    table = at.results[1]
    assert table is not None
    rest = lengths[2:]

    def ctc_losses_of_block(here: At, block: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the losses of one rank's sequences, and pad the table ``alpha`` to its global width."""
        labels, inputs, outputs = sequences_of_block(here, at.call, labels)
        if not here.size:
            return block.new_empty((0,)), block.new_empty((0, *table.shape[1:]))
        loss, alpha = aten._ctc_loss.default(block, labels, inputs, outputs, *rest)
        padded_alpha = alpha.new_full((here.size, *table.shape[1:]), -torch.inf)
        padded_alpha[..., : alpha.shape[2]] = alpha
        return loss, padded_alpha

    return at.map(ctc_losses_of_block, log_probs, targets)


def ctc_gradients(at: KernelContext, grad: Any, log_probs: Any, targets: Any, inputs: Any, outputs: Any, *rest: Any) -> Any:
    """Compute the gradients of the CTC losses of the sequences in each rank's block (a kernel)."""
    losses, table, *options = rest

    def ctc_gradients_of_block(
        here: At, g: torch.Tensor, block: torch.Tensor, labels: torch.Tensor, loss: Any, alpha: Any
    ) -> torch.Tensor:
        """Compute the gradients of one rank's sequences; zeros if it has none."""
        labels, own_inputs, own_outputs = sequences_of_block(here, at.call, labels)
        if not here.size:
            return torch.zeros_like(block)
        width = 2 * max(own_outputs) + 1
        return aten._ctc_loss_backward.default(
            g, block, labels, own_inputs, own_outputs, loss, alpha[..., :width].contiguous(), *options
        )

    return at.map(ctc_gradients_of_block, grad, log_probs, targets, losses, table)


def make_length_list_operator(name: str) -> Any:
    """Return a function that converts length tensors to lists (all ranks read them once) and calls the operator."""
    op = getattr(aten, name).default
    first = 2 if name == "_ctc_loss" else 3
    return lambda *args: op(*args[:first], *(x.flatten().tolist() for x in args[first : first + 2]), *args[first + 2 :])


# targets have a row for each sequence or are concatenated; a tensor without a sequence dim is one sequence
LOSSES = "[] n [], n [] -> n, n [] [] | [] n [], [] -> n, n [] [] | [] [], [] -> , [] []"
GRADIENTS = "n, [] n [], n [], n, n [] [] -> [] n [] | n, [] n [], [], n, n [] [] -> [] n [] | , [] [], [], , [] [] -> [] []"
# the libraries of accelerators only compute unsharded batches
for _library in ("cudnn", "miopen"):
    for _overload in ("", ".Tensor"):
        register(f"_use_{_library}_ctc_loss{_overload}", Rule(NO_FACTORS, answer=lambda call: False, kind="answer"))
blockwise("_ctc_loss", LOSSES, kernels={"n": Kernel(ctc_losses)}, plain=("targets",))
blockwise("_ctc_loss_backward", GRADIENTS, kernels={"n": Kernel(ctc_gradients)})
composed("_ctc_loss.Tensor", make_length_list_operator("_ctc_loss"), plain=("targets", "input_lengths", "target_lengths"))
composed("_ctc_loss_backward.Tensor", make_length_list_operator("_ctc_loss_backward"))
