"""Reading by index. Along a sharded dim each rank reads what its own block holds and adds zeros: big operands do not move."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from ..call import Call
from ..indexed import named, reads
from ..kernels import KernelContext
from ..owned import ELEMENTS, FLAT, PLACES, ROWS, TABLE, masked
from ..rule import Dims, Factors, Kernel
from ..verbs import kernel_rule

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
def embedding_gradient(call: Call) -> Factors:
    """Each rank adds the rows of its own indices (their frequencies count all ranks' indices)."""
    indices, sizes = named("i", call.shape(1))
    rows, more = named("e", call.shape(0)[-1:])
    whole = frozenset(sizes) if call["scale_grad_by_freq"] else frozenset()
    reduced = dict.fromkeys(sizes, "sum")
    return Factors(((*indices, *rows), indices), (((), *rows),), sizes | more, whole, reduced)


kernel_rule("embedding_dense_backward", embedding_gradient, partials=("sum,R -> sum", "avg,R -> avg"))


# --- places in a sorted sequence ---
def counted_below(call: Call) -> Factors | None:
    """How many elements of a sorted sequence come before each value: the sum over its blocks."""
    sequence, values = (1, 0) if "boundaries" in call.arguments else (0, 1)
    if len(call.shape(sequence)) != 1 and call.shape(sequence)[:-1] != call.shape(values)[:-1]:
        return None  # the operator says what is wrong
    sizes = {f"d{d}": size for d, size in enumerate(call.shape(values))}
    dims: Dims = tuple((name,) for name in sizes)
    batch = dims[:-1] if len(call.shape(sequence)) > 1 else ()
    ordered: Dims = (*batch, ("n",))
    sizes["n"] = call.shape(sequence)[-1]
    operands = [dims, dims]
    operands[sequence] = ordered
    permuted = len(call.operands) == 3
    operands += [ordered] if permuted else []
    return Factors(tuple(operands), (dims,), sizes, frozenset({"n"} if permuted else ()), reduced={"n": "sum"})


kernel_rule("bucketize searchsorted", counted_below)


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
