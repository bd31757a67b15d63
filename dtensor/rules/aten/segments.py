"""Reductions of segments: consecutive runs of one dim, whose lengths or bounds are whole on every rank.

Where the dim of the segments is sharded, each rank reduces the part of every segment that lies in its block.
"""

from __future__ import annotations

from typing import Any

import torch

from ...placement import Partial
from ..call import Call
from ..kernels import At, KernelContext
from ..rule import Choice, Dims, Factors, Kernel
from ..verbs import kernel_rule

aten = torch.ops.aten
_OPS = {"sum": "sum", "mean": "sum", "max": "max", "min": "min", "prod": "product"}


def segment_dims(call: Call) -> dict[str, tuple[Dims, dict[str, int]]]:
    """Factors of the data (with dim ``s`` in segments), of the results (segments in its place), and of lengths or offsets."""
    data = call.shape(call.names.index("data"))
    axis = call["axis"] % len(data)
    lead, rest = tuple((f"b{d}",) for d in range(axis)), tuple((f"d{d}",) for d in range(axis + 1, len(data)))
    sizes = {f"{'b' if d < axis else 's' if d == axis else 'd'}{'' if d == axis else d}": size for d, size in enumerate(data)}
    return {
        "data": ((*lead, ("s",), *rest), sizes),
        "reduced": ((*lead, (), *rest), sizes),
        "bounds": ((*lead, ()), sizes),
    }


def operand_dims(call: Call) -> tuple[Dims, ...]:
    table = segment_dims(call)
    kinds = {
        "data": "data",
        "grad": "reduced",
        "output": "reduced",
        "lengths": "bounds",
        "offsets": "bounds",
        "indices": "bounds",
    }
    return tuple(table[kinds[name]][0] if len(call.shape(i)) else () for i, name in enumerate(call.names))


def reduced_factors(call: Call) -> Factors | None:
    """``indices`` have no meaning yet in torch."""
    table = segment_dims(call)
    _dims, sizes = table["data"]
    if call.get("axis") == 0 and (call.get("lengths") is not None or call.get("offsets") is not None):
        part = Kernel(reduce_parts, lacking=Partial(_OPS[call["reduce"]]))
        return Factors(operand_dims(call), (table["reduced"][0],), sizes, kernels={"s": part})
    return Factors(operand_dims(call), (table["reduced"][0],), sizes, whole=frozenset({"s"}))


def lengths_in_block(here: At, lengths: torch.Tensor | None, offsets: torch.Tensor | None) -> torch.Tensor:
    """How much of every segment lies in the block."""
    if offsets is not None:
        starts, ends = offsets[:-1], offsets[1:]
    else:
        assert lengths is not None
        ends = lengths.cumsum(0)
        starts = ends - lengths
    return ends.clamp(here.offset, here.offset + here.size) - starts.clamp(here.offset, here.offset + here.size)


def reduce_parts(
    at: KernelContext, data: Any, reduce: str, *, lengths: Any = None, offsets: Any = None, initial: Any = None, **options: Any
) -> Any:
    """Terms of the reduction: empty parts contribute what changes nothing, the initial value counts once."""
    result = at.results[0]
    assert result is not None
    nothing = {"sum": 0.0, "mean": 0.0, "prod": 1.0, "max": -torch.inf, "min": torch.inf}[reduce]

    def one(here: At, block: torch.Tensor, length: torch.Tensor | None, offset: torch.Tensor | None) -> torch.Tensor:
        own = lengths_in_block(here, length, offset)
        start = initial if initial is not None and (here.index == 0 or reduce in ("max", "min")) else nothing
        how = "sum" if reduce == "mean" else reduce
        made = aten.segment_reduce(block, how, lengths=own, axis=0, unsafe=True, initial=start)
        if reduce == "mean":
            total = length if length is not None else offset.diff()  # type: ignore[union-attr]  # one of them is given
            shape = (-1,) + (1,) * (made.ndim - 1)
            mean = made / total.clamp(min=1).view(shape)
            empty = torch.full_like(mean, torch.nan) if initial is None else torch.full_like(mean, initial)
            made = torch.where(total.view(shape) > 0, mean, empty if here.index == 0 else torch.zeros_like(mean))
        return made.to(result.dtype)

    return at.map(one, data, lengths, offsets)


def gradient_factors(call: Call) -> Factors | None:
    dims, sizes = segment_dims(call)["data"]
    if call["axis"] == 0 and call["reduce"] in ("sum", "mean"):
        return Factors(operand_dims(call), (dims,), sizes, kernels={"s": Kernel(spread_parts)})
    return Factors(operand_dims(call), (dims,), sizes, whole=frozenset({"s"}))


def spread_parts(
    at: KernelContext, grad: Any, output: Any, data: Any, reduce: str, *, lengths: Any = None, offsets: Any = None, **options: Any
) -> Any:
    """Every element gets its segment's gradient, or its share of it."""

    def one(
        here: At, g: torch.Tensor, block: torch.Tensor, length: torch.Tensor | None, offset: torch.Tensor | None
    ) -> torch.Tensor:
        own = lengths_in_block(here, length, offset)
        if reduce == "mean":
            total = length if length is not None else offset.diff()  # type: ignore[union-attr]  # one of them is given
            g = g / total.clamp(min=1).view((-1,) + (1,) * (g.ndim - 1))
        made = g.repeat_interleave(own, 0)
        missing = block.shape[0] - made.shape[0]  # elements after the last segment
        return torch.cat([made, made.new_zeros((missing, *made.shape[1:]))]) if missing else made

    return at.map(one, grad, data, lengths, offsets)


def no_empty_stack(choice: Choice) -> bool:
    """torch asks for the smallest length, of which there must be one."""
    return all(min(choice.sizes(name)) > 0 for name in choice.splits if name[0] == "b")


kernel_rule("segment_reduce", reduced_factors, when=no_empty_stack)
kernel_rule("_segment_reduce_backward", gradient_factors, when=no_empty_stack)
