"""Writing by index. Along a sharded dim each rank writes what belongs to its own block; what belongs to others goes to a scratch
row.

What is combined with what is there may also be shared out among ranks by the index: their results are the terms of the result.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from ..call import Call
from ..indexing import CONSTANT, adds, alone, may_accumulate, reduces, replaces, writes
from ..rule import Choice, Factors, own_factors
from ..sharded_index_local import ELEMENTS, FLAT, PLACES, ROWS, TABLE, masked
from .indexing import by_number

aten = torch.ops.aten

writes("scatter scatter_reduce", ELEMENTS, reduces)
writes("scatter_add", ELEMENTS, adds)
writes("index_add", ROWS, adds, plain=("index",))
writes("index_copy", ROWS, replaces, plain=("index",))
writes(
    "index_fill",
    ROWS,
    replaces,
    plain=("index",),
    partials=tuple(f"{op},R{value} -> {op}" for op in CONSTANT for value in ("", ",R")),
)
writes("embedding_renorm_", TABLE, alone, whole="d1")  # the norm is over whole rows


def rows_multiply(choice: Choice) -> bool:
    """torch cannot multiply rows of one element in half precision: no block has such rows where the whole has longer ones."""
    call = choice.call
    if call["reduce"] != "prod" or call.operands[0].dtype not in (torch.float16, torch.bfloat16) or not choice.splits:
        return True
    others = set(range(len(call.shape(0)))) - {call["dim"] % len(call.shape(0))}
    return not all(1 in choice.sizes(f"d{d}") for d in others)


writes("index_reduce", ROWS, alone, when=rows_multiply, plain=("index",))


# --- elements of the flattened tensor ---
def put_in_dims(x: Tensor, indices: Any, source: Tensor, accumulate: bool) -> Tensor:
    return aten.index_put(x, indices, source.reshape(indices[0].shape), accumulate)


writes("put", FLAT, may_accumulate, put_in_dims, plain=("index",))


# --- advanced indexing ---
def one_value(call: Call) -> Factors | None:
    """One value for all elements that a mask picks: element by element."""
    given = [(d, item) for d, item in enumerate(call["indices"]) if item is not None]
    if len(given) != 1 or math.prod(call["values"].shape) != 1:
        return None
    dims, sizes = own_factors(call)
    first, mask = given[0]
    own = dims[first : first + len(mask.shape)]
    return Factors((dims, own, ((),) * len(call["values"].shape)), (dims,), sizes)


def put_by_number(x: Any, indices: Any, values: Any, accumulate: bool = False, *options: Any) -> Any:
    return aten.index_put.default(x, by_number(indices), values, accumulate)


writes(
    "index_put _index_put_impl _unsafe_index_put",
    PLACES,
    may_accumulate,
    lambda x, indices, values, accumulate, *options: aten.index_put.default(x, indices, values, accumulate),
    masks=one_value,
    decompose=put_by_number,
    decomposes=lambda call: masked(call) and one_value(call) is None,
    plain=("indices",),
)
