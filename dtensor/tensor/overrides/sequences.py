"""Sequences of different lengths (``torch.nn.utils.rnn``): pad, pack, and pad packed sequences.

Torch writes sequences into plain buffers and reads their lengths through pointers. Here they are slices, pads and
concatenations of DTensors. Lengths are plain tensors, equal on all ranks, on the CPU as in torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...comm.cross_rank_check import check_same_on_all_ranks
from ..dtensor import DTensor
from ..host_access import full_value


def pad_sequence(
    sequences: list[Tensor], batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> Any:
    """Pad sequences to one length and stack them, in the dtype of the first one: torch copies them into a plain buffer."""
    first = sequences[0]
    same_kind = all(isinstance(x, DTensor) and x.ndim > 0 and x.shape[1:] == first.shape[1:] for x in sequences)
    if not same_kind or padding_side not in ("left", "right"):
        return NotImplemented
    longest = max(x.shape[0] for x in sequences)
    rest = [0, 0] * (first.ndim - 1)
    sides = [(longest - x.shape[0], 0)[:: 1 if padding_side == "left" else -1] for x in sequences]
    padded = [F.pad(x.to(first.dtype), [*rest, *side], value=padding_value) for x, side in zip(sequences, sides, strict=True)]
    return torch.stack(padded, 0 if batch_first else 1)


def pack_padded(x: Any, lengths: Tensor, batch_first: bool) -> Any:
    """Return the rows of all time steps, concatenated, and the number of rows of each step."""
    if isinstance(lengths, DTensor):
        return torch.ops.aten._pack_padded_sequence(x, full_value(lengths), batch_first)
    batch, steps = (x.shape[:2] if batch_first else x.shape[1::-1]) if x.ndim > 1 else (0, 0)
    if lengths.shape != (batch,) or lengths.dtype != torch.int64:
        return NotImplemented
    check_same_on_all_ranks(x.device_mesh, lengths, "pack_padded_sequence")
    sizes = lengths.tolist()
    if not sizes or sizes != sorted(sizes, reverse=True) or not 0 < sizes[-1] <= sizes[0] <= steps:
        return NotImplemented
    counts = [sum(size > step for size in sizes) for step in range(sizes[0])]
    by_step = x.transpose(0, 1) if batch_first else x
    return torch.cat([by_step[step, :count] for step, count in enumerate(counts)]), torch.tensor(counts, device="cpu")


def pad_packed(data: Tensor, batch_sizes: Tensor, batch_first: bool, padding_value: float, total_length: int) -> Any:
    """Return the padded sequences of a packed sequence, and the length of each."""
    if isinstance(batch_sizes, DTensor):
        return torch.ops.aten._pad_packed_sequence(data, full_value(batch_sizes), batch_first, padding_value, total_length)
    counts = batch_sizes.tolist()
    if 0 < total_length < len(counts):
        return NotImplemented
    rest = [0, 0] * (data.ndim - 1)
    steps = [F.pad(step, [*rest, 0, counts[0] - step.shape[0]], value=padding_value) for step in data.split(counts)]
    padded = F.pad(torch.stack(steps), [*rest, 0, 0, 0, max(0, total_length - len(counts))], value=padding_value)
    lengths = torch.tensor([sum(count > row for count in counts) for row in range(counts[0])], device="cpu")
    return (padded.transpose(0, 1) if batch_first else padded), lengths
