"""New tensors made like another one, which gives dtype and device, and how dims are cut that are as large as its own."""

from __future__ import annotations

from typing import Any

from ...base.memory_order import stride_like
from ...placement import REDUCE_OPS
from ..call import Call
from ..declare import kernel_rule
from ..kernel_context import At, KernelContext
from ..op_traits import fact
from ..rule import Factors, Kernel, LocalView, own_factors


def made_like(call: Call) -> Factors:
    """Dims that are as large as the model's are cut as those are: gradients of reads, buffers for a batch's results."""
    dims, sizes = own_factors(call)
    result = call.results[0]
    assert result is not None
    alike = [a == b for a, b in zip(result.shape, call.shape(0), strict=False)]
    own = tuple([dims[d] if d < len(alike) and alike[d] else () for d in range(len(result.shape))])
    kernels = {name: Kernel(make, joint=True) for name in sizes if (name,) not in own}
    return Factors((dims,), (own,), sizes, kernels=kernels)


def make(at: KernelContext, model: Any, *args: Any, **kwargs: Any) -> Any:
    """One with blocks of some dims, also where the model's blocks are of others."""
    packet, layout = at.call.func.overloadpacket, at.results[0]  # not the out= overload
    assert layout is not None
    strided = at.call.get("stride") is not None

    def one(here: At, block: Any) -> Any:
        shape = layout.shape_of(here.member)
        given = (shape, stride_like(shape, at.call["stride"])) if strided else (shape,)
        return packet(block, *given, *args[len(given) :], **kwargs)

    return at.map(one, model)


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
