"""Scattering (writes by index): along a sharded dim each rank writes to its own block, and drops what belongs to other blocks.

If written values are combined with existing ones, ranks may also divide the indices: their results are then partial.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..call import Call
from ..kernels.index_rules import (
    CONSTANT_REDUCTIONS,
    combine_by_reduce,
    combine_by_sum,
    combine_if_accumulate,
    combine_on_owner,
    index_write,
    replace_written,
)
from ..kernels.sharded_index_local import ELEMENTS, FLAT, PLACES, ROWS, TABLE, has_mask
from ..rule import Factors, StrategyChoice, factors_of_first_operand
from .indexing import masks_to_indices

aten = torch.ops.aten

index_write("scatter scatter_reduce", ELEMENTS, combine_by_reduce)
index_write("scatter_add", ELEMENTS, combine_by_sum)
index_write("index_add", ROWS, combine_by_sum, plain=("index",))
index_write("index_copy", ROWS, replace_written, plain=("index",))
index_write(
    "index_fill",
    ROWS,
    replace_written,
    plain=("index",),
    partials=tuple(f"{op},R{value} -> {op}" for op in CONSTANT_REDUCTIONS for value in ("", ",R")),
)
index_write("embedding_renorm_", TABLE, combine_on_owner, unsharded="d1")  # the norm needs unsharded rows


def allows_half_precision_product(choice: StrategyChoice) -> bool:
    """Return False if small blocks make ``index_reduce`` multiply rows of one element in half precision, which torch cannot."""
    call = choice.call
    if call["reduce"] != "prod" or call.operands[0].dtype not in (torch.float16, torch.bfloat16) or not choice.splits:
        return True
    others = set(range(len(call.shape(0)))) - {call["dim"] % len(call.shape(0))}
    return not all(1 in choice.sizes(f"d{d}") for d in others)


index_write("index_reduce", ROWS, combine_on_owner, when=allows_half_precision_product, plain=("index",))


# --- elements of the flattened tensor ---
def put_by_dims(x: Tensor, indices: Any, source: Tensor, accumulate: bool) -> Tensor:
    return aten.index_put(x, indices, source.reshape(indices[0].shape), accumulate)


index_write("put", FLAT, combine_if_accumulate, put_by_dims, plain=("index",))


# --- advanced indexing ---
def single_value_factors(call: Call) -> Factors | None:
    """Return elementwise factors of an ``index_put`` that writes one value where a single mask is True. None for other calls."""
    indices = [(d, item) for d, item in enumerate(call["indices"]) if item is not None]
    if len(indices) != 1 or math.prod(call["values"].shape) != 1:
        return None
    dims, sizes = factors_of_first_operand(call)
    first, mask = indices[0]
    own = dims[first : first + len(mask.shape)]
    return Factors((dims, own, ((),) * len(call["values"].shape)), (dims,), sizes)


def put_with_masks(x: Any, indices: Any, values: Any, accumulate: bool = False, *options: Any) -> Any:
    return aten.index_put.default(x, masks_to_indices(indices), values, accumulate)


index_write(
    "index_put _index_put_impl _unsafe_index_put",
    PLACES,
    combine_if_accumulate,
    lambda x, indices, values, accumulate, *options: aten.index_put.default(x, indices, values, accumulate),
    masks=single_value_factors,
    decompose=put_with_masks,
    decomposes=lambda call: has_mask(call) and single_value_factors(call) is None,
    plain=("indices",),
)
