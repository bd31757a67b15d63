"""Reductions over whole dims."""

from __future__ import annotations

import math
from typing import Any

from .call import Call
from .context import KernelContext
from .rule import LINEAR_PARTIAL, Choice, Factors, Kernel
from .verbs import kernel_rule, reduce, reduction_factors
from ..placement import Partial


def no_empty_shard(choice: Choice) -> bool:
    """Every rank has elements to reduce: max and min of nothing do not exist."""
    return all(min(choice.sizes(name)) > 0 for name in choice.splits if name in choice.factors.reduced)


reduce("sum nansum", "sum", partials=LINEAR_PARTIAL)
reduce("prod", "product", partials=("product -> product",))
reduce("amax", "max", partials=("max -> max",), when=no_empty_shard)
reduce("amin", "min", partials=("min -> min",), when=no_empty_shard)
reduce("any", "max")
reduce("all", "min")
reduce("count_nonzero", "sum")
reduce("median mode nanmedian kthvalue", None)


def mean_of_blocks(at: KernelContext, x: Any, *args: Any, dtype: Any = None, **kwargs: Any) -> Any:
    """Each rank's sum over the number of elements of the whole: terms of the mean, uneven and empty blocks included."""
    shape = at.call.shape(0)
    count = math.prod(shape[d] for d in at.call.dims("dim", len(shape)))
    dims = at.call.get("dim")
    keepdim = bool(at.call.get("keepdim", False))
    total = at.map(lambda _, block: block.sum(dims, keepdim, dtype=dtype) if dims is not None else block.sum(dtype=dtype), x)
    return total / count


def mean_factors(call: Call) -> Factors:
    kernel = Kernel(mean_of_blocks, lacking=Partial("sum"))
    return reduction_factors(call, call.dims("dim", len(call.shape(0))), None, kernel)


kernel_rule("mean", mean_factors, partials=LINEAR_PARTIAL)
