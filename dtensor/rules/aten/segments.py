"""Reductions of segments: consecutive runs of one dim, whose lengths or bounds are whole on every rank.

Where the dim of the segments is sharded, each rank reduces the part of every segment that lies in its block.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from ...placement import Partial
from ..call import Call
from ..declare import blockwise
from ..kernel_context import At, KernelContext, check_range
from ..rule import Choice, Kernel

aten = torch.ops.aten
_OPS = {"sum": "sum", "mean": "sum", "prod": "product", "max": "max", "amax": "max", "min": "min", "amin": "min"}


def lengths_in_block(here: At, lengths: torch.Tensor | None, offsets: torch.Tensor | None) -> torch.Tensor:
    """How much of every segment lies in the block."""
    if offsets is not None:
        starts, ends = offsets[:-1], offsets[1:]
    else:
        assert lengths is not None
        ends = lengths.cumsum(0)
        starts = ends - lengths
    return ends.clamp(here.offset, here.offset + here.size) - starts.clamp(here.offset, here.offset + here.size)


def lengths_of(lengths: torch.Tensor | None, offsets: torch.Tensor | None, ndim: int) -> torch.Tensor:
    """The lengths of whole segments, in a shape that broadcasts with ``ndim`` dims."""
    found = lengths if offsets is None else offsets.diff()
    assert found is not None
    return found.view((-1,) + (1,) * (ndim - 1))


def misfit(found: int) -> Exception:
    return RuntimeError(f"segment_reduce(): lengths must add up to the size of the dim and not be negative, got {found}")


def reduce_parts(
    at: KernelContext, data: Any, reduce: str, *, lengths: Any = None, offsets: Any = None, initial: Any = None, **options: Any
) -> Any:
    """Terms of the reduction: empty parts contribute what changes nothing, the initial value counts once."""
    result = at.results[0]
    assert result is not None
    total = at.operands[0].shape[0]
    nothing = {"sum": 0.0, "product": 1.0, "max": -torch.inf, "min": torch.inf}[_OPS[reduce]]

    def one(here: At, block: torch.Tensor, length: torch.Tensor | None, offset: torch.Tensor | None) -> torch.Tensor:
        if length is not None:
            unsafe = options.get("unsafe")
            check_range(length, range(sys.maxsize if unsafe else total + 1), None, misfit)
            if not unsafe:
                check_range(length.sum(), range(total, total + 1), None, misfit)
        own = lengths_in_block(here, length, offset)
        start = initial if initial is not None and (here.index == 0 or _OPS[reduce] in ("max", "min")) else nothing
        how = "sum" if reduce == "mean" else reduce
        made = aten.segment_reduce(block, how, lengths=own, axis=0, unsafe=True, initial=start)
        if reduce == "mean":
            counts = lengths_of(length, offset, made.ndim)
            empty = (torch.nan if initial is None else initial) if here.index == 0 else 0.0
            made = (made / counts.clamp(min=1)).masked_fill(counts == 0, empty)
        return made.to(result.dtype)

    return at.map(one, data, lengths, offsets)


def spread_parts(
    at: KernelContext, grad: Any, output: Any, data: Any, reduce: str, *, lengths: Any = None, offsets: Any = None, **options: Any
) -> Any:
    """Every element gets its segment's gradient, or its share of it."""

    def one(
        here: At, g: torch.Tensor, block: torch.Tensor, length: torch.Tensor | None, offset: torch.Tensor | None
    ) -> torch.Tensor:
        own = lengths_in_block(here, length, offset)
        if reduce == "mean":
            g = g / lengths_of(length, offset, g.ndim).clamp(min=1)
        made = g.repeat_interleave(own, 0)
        missing = block.shape[0] - made.shape[0]  # elements after the last segment
        return torch.cat([made, made.new_zeros((missing, *made.shape[1:]))]) if missing else made

    return at.map(one, grad, data, lengths, offsets)


def reducing(call: Call) -> Kernel | None:
    """``indices`` have no meaning yet in torch."""
    bounded = call.get("lengths") is not None or call.get("offsets") is not None
    return Kernel(reduce_parts, lacking=Partial(_OPS[call["reduce"]])) if call["axis"] == 0 and bounded else None


def spreading(call: Call) -> Kernel | None:
    return Kernel(spread_parts) if call["axis"] == 0 and call["reduce"] in ("sum", "mean") else None


def no_empty_stack(choice: Choice) -> bool:
    """torch asks for the smallest length, of which there must be one."""
    return all(min(choice.sizes(name)) > 0 for name in choice.splits if name.startswith("a."))


DATA, BOUNDS, PARTS = "data: a* [@axis] b*", "lengths: a* [], offsets: a* []", "a* [] b*"
blockwise("segment_reduce", f"{DATA}, {BOUNDS}, indices: a* [] -> {PARTS}", kernel=reducing, when=no_empty_stack)
blockwise(
    "_segment_reduce_backward",
    f"grad: {PARTS}, output: {PARTS}, {DATA}, {BOUNDS} -> a* [@axis] b*",
    kernel=spreading,
    when=no_empty_stack,
)
