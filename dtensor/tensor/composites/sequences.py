"""Sequences of several lengths (``torch.nn.utils.rnn``): padded, packed and padded again.

Torch writes them into plain buffers and reads their lengths through pointers; here they are slices, pads and joins of DTensors.
Lengths are facts about shapes: plain tensors on every rank, as torch has them on the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...comm.cross_rank_check import same_on_all
from ..dtensor import DTensor
from ..host_access import whole_of
from .above_autograd import recomposed


def pad_sequence(
    sequences: list[Tensor], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Any:
    """Torch copies the sequences into a plain buffer, which has the first one's dtype."""
    first = sequences[0]
    alike = all(isinstance(x, DTensor) and x.ndim > 0 and x.shape[1:] == first.shape[1:] for x in sequences)
    if not alike or padding_side not in ("left", "right"):
        return NotImplemented
    longest = max(x.shape[0] for x in sequences)
    rest = [0, 0] * (first.ndim - 1)
    sides = [(longest - x.shape[0], 0)[:: 1 if padding_side == "left" else -1] for x in sequences]
    padded = [F.pad(x.to(first.dtype), [*rest, *side], value=padding_value) for x, side in zip(sequences, sides, strict=True)]
    return torch.stack(padded, 0 if batch_first else 1)


def pack_padded(x: Any, lengths: Tensor, batch_first: bool) -> Any:
    """The rows of each step that has any, one step after the other, and how many each has."""
    if isinstance(lengths, DTensor):
        return torch.ops.aten._pack_padded_sequence(x, whole_of(lengths), batch_first)
    batch, steps = (x.shape[:2] if batch_first else x.shape[1::-1]) if x.ndim > 1 else (0, 0)
    if lengths.shape != (batch,) or lengths.dtype != torch.int64:
        return NotImplemented
    same_on_all(x.device_mesh, lengths, "pack_padded_sequence")
    sizes = lengths.tolist()
    if not sizes or sizes != sorted(sizes, reverse=True) or not 0 < sizes[-1] <= sizes[0] <= steps:
        return NotImplemented
    counts = [sum(size > step for size in sizes) for step in range(sizes[0])]
    by_step = x.transpose(0, 1) if batch_first else x
    return torch.cat([by_step[step, :count] for step, count in enumerate(counts)]), torch.tensor(counts, device="cpu")


def pad_packed(data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int) -> Any:
    """Each step's rows made as many as the first one's, and the length of each sequence."""
    if isinstance(batch_sizes, DTensor):
        return torch.ops.aten._pad_packed_sequence(data, whole_of(batch_sizes), batch_first, padding_value, total_length)
    counts = batch_sizes.tolist()
    if 0 < total_length < len(counts):
        return NotImplemented
    rest = [0, 0] * (data.ndim - 1)
    steps = [F.pad(step, [*rest, 0, counts[0] - step.shape[0]], value=padding_value) for step in data.split(counts)]
    padded = F.pad(torch.stack(steps), [*rest, 0, 0, 0, max(0, total_length - len(counts))], value=padding_value)
    lengths = torch.tensor([sum(count > row for count in counts) for row in range(counts[0])], device="cpu")
    return (padded.transpose(0, 1) if batch_first else padded), lengths


recomposed("aten::pad_sequence", pad_sequence)
recomposed("aten::_pack_padded_sequence", pack_padded)
recomposed("aten::_pad_packed_sequence", pad_packed)
