"""Segments: reductions of consecutive runs of one dim. Their lengths or bounds are replicated.

If the dim of the segments is sharded, each rank reduces the part of every segment in its block.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...placement import Partial
from ..call import Call
from ..declare import blockwise
from ..kernel_context import At, KernelContext, check_range
from ..rule import Kernel, StrategyChoice

aten = torch.ops.aten
_REDUCE_OPS = {"sum": "sum", "mean": "sum", "prod": "product", "max": "max", "amax": "max", "min": "min", "amin": "min"}


def lengths_in_block(here: At, lengths: torch.Tensor | None, offsets: torch.Tensor | None) -> torch.Tensor:
    """Return for every segment how many of its elements are in one rank's block."""
    if offsets is not None:
        starts, ends = offsets[:-1], offsets[1:]
    else:
        assert lengths is not None
        ends = lengths.cumsum(0)
        starts = ends - lengths
    return ends.clamp(here.offset, here.offset + here.size) - starts.clamp(here.offset, here.offset + here.size)


def segment_lengths(lengths: torch.Tensor | None, offsets: torch.Tensor | None, ndim: int) -> torch.Tensor:
    """Return the global lengths of the segments, shaped to broadcast with ``ndim`` dims."""
    lengths_of_segments = lengths if offsets is None else offsets.diff()
    assert lengths_of_segments is not None
    return lengths_of_segments.view((-1,) + (1,) * (ndim - 1))


def wrong_lengths_error(length: int) -> Exception:
    return RuntimeError(f"segment_reduce(): lengths must add up to the size of the dim and not be negative, got {length}")


def reduce_segments(
    at: KernelContext, data: Any, reduce: str, *, lengths: Any = None, offsets: Any = None, initial: Any = None, **options: Any
) -> Any:
    """Reduce the part of every segment in each rank's block: partial results. The initial value counts once (a kernel)."""
    result = at.results[0]
    assert result is not None
    total = at.operands[0].shape[0]
    nothing = {"sum": 0.0, "product": 1.0, "max": -torch.inf, "min": torch.inf}[_REDUCE_OPS[reduce]]

    def reduce_block_segments(
        here: At, block: torch.Tensor, length: torch.Tensor | None, offset: torch.Tensor | None
    ) -> torch.Tensor:
        """Reduce the parts of the segments in one rank's block. A part without elements gives the identity."""
        if length is not None:
            unsafe = options.get("unsafe")
            check_range(length, range(sys.maxsize if unsafe else total + 1), None, wrong_lengths_error)
            if not unsafe:
                check_range(length.sum(), range(total, total + 1), None, wrong_lengths_error)
        own = lengths_in_block(here, length, offset)
        start = initial if initial is not None and (here.index == 0 or _REDUCE_OPS[reduce] in ("max", "min")) else nothing
        how = "sum" if reduce == "mean" else reduce
        reduced = aten.segment_reduce(block, how, lengths=own, axis=0, unsafe=True, initial=start)
        if reduce == "mean":
            counts = segment_lengths(length, offset, reduced.ndim)
            empty = (torch.nan if initial is None else initial) if here.index == 0 else 0.0
            reduced = (reduced / counts.clamp(min=1)).masked_fill(counts == 0, empty)
        return reduced.to(result.dtype)

    return at.map(reduce_block_segments, data, lengths, offsets)


def spread_segment_gradients(
    at: KernelContext, grad: Any, output: Any, data: Any, reduce: str, *, lengths: Any = None, offsets: Any = None, **options: Any
) -> Any:
    """Return the gradient of each element: its segment's, for a mean divided by the segment's length (a kernel)."""

    def spread_over_block(
        here: At, g: torch.Tensor, block: torch.Tensor, length: torch.Tensor | None, offset: torch.Tensor | None
    ) -> torch.Tensor:
        """Repeat the gradients of segments for the elements in one rank's block; zeros after the last segment."""
        own = lengths_in_block(here, length, offset)
        if reduce == "mean":
            g = g / segment_lengths(length, offset, g.ndim).clamp(min=1)
        spread = g.repeat_interleave(own, 0)
        missing = block.shape[0] - spread.shape[0]  # elements after the last segment
        return torch.cat([spread, spread.new_zeros((missing, *spread.shape[1:]))]) if missing else spread

    return at.map(spread_over_block, grad, data, lengths, offsets)


def segment_reduce_kernel(call: Call) -> Kernel | None:
    """Return the kernel of ``segment_reduce`` along dim 0 with lengths or offsets, else None.

    Torch does not use ``indices`` yet.
    """
    bounded = call.get("lengths") is not None or call.get("offsets") is not None
    return Kernel(reduce_segments, lacking=Partial(_REDUCE_OPS[call["reduce"]])) if call["axis"] == 0 and bounded else None


def segment_gradient_kernel(call: Call) -> Kernel | None:
    return Kernel(spread_segment_gradients) if call["axis"] == 0 and call["reduce"] in ("sum", "mean") else None


def has_no_empty_stack(choice: StrategyChoice) -> bool:
    """Return True if no block of the leading dims is empty. Torch reads the smallest segment length, which must exist."""
    return all(min(choice.sizes(name)) > 0 for name in choice.splits if name.startswith("a."))


DATA, BOUNDS, PARTS = "data: a* [@axis] b*", "lengths: a* [], offsets: a* []", "a* [] b*"
blockwise("segment_reduce", f"{DATA}, {BOUNDS}, indices: a* [] -> {PARTS}", kernel=segment_reduce_kernel, when=has_no_empty_stack)
blockwise(
    "_segment_reduce_backward",
    f"grad: {PARTS}, output: {PARTS}, {DATA}, {BOUNDS} -> a* [@axis] b*",
    kernel=segment_gradient_kernel,
    when=has_no_empty_stack,
)
