"""Indexing reads: along a sharded dim each rank reads what its own block has and adds zeros. Large operands do not move."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..declare import blockwise
from ..declared_factors import by
from ..kernels.index_rules import index_read
from ..kernels.sharded_index_local import ELEMENTS, FLAT, PLACES, ROWS, TABLE, has_mask
from ..partial_rules import linear

aten = torch.ops.aten

index_read("embedding", TABLE)
index_read("index_select", ROWS, plain=("index",))
index_read("gather", ELEMENTS)
index_read("take", FLAT, aten.index.Tensor, plain=("index",))


# --- advanced indexing ---
def masks_to_indices(indices: Sequence[Any]) -> list[Any]:
    """Replace each mask in a list of indices by the positions that it selects, one index for each dim of the mask."""
    index_list: list[Any] = []
    for item in indices:
        is_mask = isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
        index_list += item.nonzero().unbind(1) if is_mask else [item]
    return index_list


def index_with_masks(op: Any, x: Any, indices: Sequence[Any]) -> Any:
    return op(x, masks_to_indices(indices))


for _name in ("index", "_unsafe_index"):
    _by_number = functools.partial(index_with_masks, getattr(aten, _name))
    index_read(_name, PLACES, aten.index.Tensor, decompose=_by_number, decomposes=has_mask, plain=("indices",))


# --- gradients of embeddings ---
# each rank adds the rows of its own indices; frequencies count the indices of all ranks
EMBEDDING_GRADIENT = by("scale_grad_by_freq", {False: "i* e, i* -> [] e", True: "[i*] e, [i*] -> [] e"})
blockwise("embedding_dense_backward", EMBEDDING_GRADIENT, sums="i*", partials=linear("grad_output"))


# --- positions in a sorted sequence ---
# the number of elements before each value is the sum of those of the blocks
blockwise("bucketize", "s*, n -> s*", sums="n")
blockwise("searchsorted", "n, s* -> s* | b* n, b* s -> b* s | [n], s*, [n] -> s* | b* [n], b* s, b* [n] -> b* s", sums="n")
