"""Creation of tensors like a model (``new_zeros``), with its dtype and device, and its sharding of dims of equal size."""

from __future__ import annotations

from typing import Any

from ...base.memory_order import stride_like
from ...placement import REDUCE_OPS
from ..call import Call
from ..declare import kernel_rule
from ..kernel_context import At, KernelContext
from ..op_traits import declare_traits
from ..rule import Factors, Kernel, LocalView, factors_of_first_operand


def new_tensor_factors(call: Call) -> Factors:
    """Return factors that shard dims of the new tensor as the model (operand 0), where both have the same size."""
    dims, sizes = factors_of_first_operand(call)
    result = call.results[0]
    assert result is not None
    same_size = [a == b for a, b in zip(result.shape, call.shape(0), strict=False)]
    own = tuple([dims[d] if d < len(same_size) and same_size[d] else () for d in range(len(result.shape))])
    kernels = {name: Kernel(make_blocks, joint=True) for name in sizes if (name,) not in own}
    return Factors((dims,), (own,), sizes, kernels=kernels)


def make_blocks(at: KernelContext, model: Any, *args: Any, **kwargs: Any) -> Any:
    """Create each rank's block of the new tensor, if the model is sharded along dims that it lacks (a kernel)."""
    packet, layout = at.call.func.overloadpacket, at.results[0]  # the packet selects the overload without out=
    assert layout is not None
    strided = at.call.get("stride") is not None

    def make_block(here: At, block: Any) -> Any:
        """Create one rank's block of the new tensor, with strides in the order of the global ones."""
        shape = layout.shape_of(here.member)
        leading = (shape, stride_like(shape, at.call["stride"])) if strided else (shape,)
        return packet(block, *leading, *args[len(leading) :], **kwargs)

    return at.map(make_block, model)


def local_size_args(call: Call, at: LocalView) -> dict[str, Any]:
    """Return the ``size`` argument for one rank's block, and its ``stride`` if the call gives strides."""
    if call.get("stride") is None:
        return {"size": at.results[0]}
    return {"size": at.results[0], "stride": stride_like(at.results[0], call["stride"])}


kernel_rule(
    "new_empty new_empty_strided new_zeros new_ones new_full",
    new_tensor_factors,
    partials=tuple(f"{op} -> R" for op in REDUCE_OPS),
    local_args=local_size_args,
)


# --- the model's memory is not read ---
declare_traits("empty.memory_format empty_permuted.default empty_strided.default empty_like.default", memory_use="nothing")
declare_traits("new_empty.default new_empty_strided.default", memory_use="nothing")
declare_traits("zeros_like.default ones_like.default full_like.default", memory_use="results")
declare_traits("new_zeros.default new_ones.default new_full.default", memory_use="results")
