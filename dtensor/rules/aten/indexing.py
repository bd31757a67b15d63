"""Reading by index. Along a sharded dim each rank reads what its own block holds and adds zeros: big operands do not move."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..declare import blockwise
from ..indexing import reads
from ..notation_rules import by
from ..partial_rules import linear
from ..sharded_index_local import ELEMENTS, FLAT, PLACES, ROWS, TABLE, masked

aten = torch.ops.aten

reads("embedding", TABLE)
reads("index_select", ROWS, plain=("index",))
reads("gather", ELEMENTS)
reads("take", FLAT, aten.index.Tensor, plain=("index",))


# --- advanced indexing ---
def by_number(indices: Sequence[Any]) -> list[Any]:
    """Masks replaced by the positions that they pick, one index for each of their dims."""
    numbered: list[Any] = []
    for item in indices:
        is_mask = isinstance(item, torch.Tensor) and item.dtype in (torch.bool, torch.uint8)
        numbered += item.nonzero().unbind(1) if is_mask else [item]
    return numbered


def index_by_number(op: Any, x: Any, indices: Sequence[Any]) -> Any:
    return op(x, by_number(indices))


for _name in ("index", "_unsafe_index"):
    _by_number = functools.partial(index_by_number, getattr(aten, _name))
    reads(_name, PLACES, aten.index.Tensor, decompose=_by_number, decomposes=masked, plain=("indices",))


# --- gradients of embeddings ---
# each rank adds the rows of its own indices; their frequencies count all ranks' indices
ROWS_ADDED = by("scale_grad_by_freq", {False: "i* e, i* -> [] e", True: "[i*] e, [i*] -> [] e"})
blockwise("embedding_dense_backward", ROWS_ADDED, sums="i*", partials=linear("grad_output"))


# --- places in a sorted sequence ---
# how many elements come before each value is the sum over the blocks of the sequence
blockwise("bucketize", "s*, n -> s*", sums="n")
blockwise("searchsorted", "n, s* -> s* | b* n, b* s -> b* s | [n], s*, [n] -> s* | b* [n], b* s, b* [n] -> b* s", sums="n")
