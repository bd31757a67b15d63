"""Reading by index. Along a sharded dim each rank reads what its own block holds and adds zeros: big operands do not move."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..call import Call
from ..factoring import by
from ..indexed import reads
from ..kernels import KernelContext
from ..owned import ELEMENTS, FLAT, PLACES, ROWS, TABLE, masked
from ..rows import linear
from ..rule import Dims, Factors, Kernel
from ..verbs import blockwise, kernel_rule

aten = torch.ops.aten

reads("embedding", TABLE)
reads("index_select", ROWS, plain=("index",))
reads("gather", ELEMENTS)
reads("take", FLAT, aten.index.Tensor)


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


# --- bags of embeddings: columns are factors; indices and the bounds of bags are whole on every rank ---
SUM, MEAN, MAX = 0, 1, 2


def bags(call: Call) -> Factors:
    """The bag of each index, the sizes of bags and, for sums, the empty marker of places know no column."""
    whole: list[Dims] = [((),) * len(call.shape(i)) for i in range(1, len(call.operands))]
    results = [meta for meta in call.results if meta is not None]
    places: Dims = ((), ("e",)) if call["mode"] == MAX and len(results[3].shape) == 2 else ((),) * len(results[3].shape)
    rest: tuple[Dims, ...] = tuple(((),) * len(meta.shape) for meta in results[1:3])
    sizes = {"v": call.shape(0)[0], "e": call.shape(0)[1]}
    kernels = {"e": Kernel(same)}
    return Factors((((), ("e",)), *whole), (((), ("e",)), *rest, places), sizes, kernels=kernels)


def same(at: KernelContext, *args: Any, **kwargs: Any) -> Any:
    """The operator on columns: what knows no column is whole."""
    return at.map(lambda _, *locals_: at.call.func.overloadpacket(*locals_, **kwargs), *args)


def bag_gradients(call: Call) -> Factors:
    """The gradient of the table, in the columns of the incoming one."""
    whole: list[Dims] = [
        ((), ("e",))
        if call.names[i] == "maximum_indices" and call["mode"] == MAX and len(call.shape(i)) == 2
        else ((),) * len(call.shape(i))
        for i in range(1, len(call.operands))
    ]
    return Factors((((), ("e",)), *whole), (((), ("e",)),), {"e": call.shape(0)[1]})


def bag_weight_gradients(call: Call) -> Factors:
    """Products of columns, summed."""
    whole: list[Dims] = [((),) * len(call.shape(i)) for i in range(2, len(call.operands))]
    return Factors((((), ("e",)), ((), ("e",)), *whole), (((),),), {"e": call.shape(0)[1]}, reduced={"e": "sum"})


def bags_partials(call: Call) -> tuple[str, ...]:
    """Linear in the table, unless weights of indices multiply it; the largest is not."""
    if call["mode"] == MAX:
        return ()
    rest = ",finite" * (len(call.operands) - 1)
    return f"sum{rest} -> sum,R,R,R", f"avg{rest} -> avg,R,R,R"


kernel_rule("_embedding_bag _embedding_bag_forward_only", bags, partials=bags_partials, plain=("offsets",))
kernel_rule(
    "_embedding_bag_backward _embedding_bag_dense_backward", bag_gradients, when=lambda choice: not choice.call.get("sparse")
)
kernel_rule("_embedding_bag_per_sample_weights_backward", bag_weight_gradients)
