"""New tensors made like another one, which gives dtype and device, and its placements where the sizes are its own."""

from __future__ import annotations

from typing import Any

from ...base.memory_order import stride_like
from ...placement import REDUCE_OPS
from ..call import Call
from ..facts import fact
from ..kernels import KernelContext
from ..rule import Factors, Kernel, LocalView, own_factors
from ..verbs import kernel_rule


def made_like(call: Call) -> Factors:
    """A tensor of other sizes is whole on every rank, however its model lies."""
    dims, sizes = own_factors(call)
    result = call.results[0]
    assert result is not None
    if result.shape == call.shape(0):
        return Factors((dims,), (dims,), sizes)
    return Factors((dims,), (((),) * len(result.shape),), sizes, kernels=dict.fromkeys(sizes, Kernel(make_whole, joint=True)))


def make_whole(at: KernelContext, model: Any, *args: Any, **kwargs: Any) -> Any:
    packet = at.call.func.overloadpacket  # not the out= overload
    return at.map(lambda here, block: packet(block, *args, **kwargs), model)


def local_sizes(call: Call, at: LocalView) -> dict[str, Any]:
    if call.get("stride") is None:
        return {"size": at.results[0]}
    return {"size": at.results[0], "stride": stride_like(at.results[0], call["stride"])}


kernel_rule(
    "new_empty new_empty_strided new_zeros new_ones new_full",
    made_like,
    partials=tuple(f"{op} -> R" for op in REDUCE_OPS),
    local_args=local_sizes,
)


# --- of what they are like they read the sizes alone ---
fact("empty.memory_format empty_permuted.default empty_strided.default empty_like.default", touches="nothing")
fact("new_empty.default new_empty_strided.default", touches="nothing")
fact("zeros_like.default ones_like.default full_like.default", touches="results")
fact("new_zeros.default new_ones.default new_full.default", touches="results")
