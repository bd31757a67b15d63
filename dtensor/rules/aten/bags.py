"""Bags of embeddings: columns are factors, and a table whose rows are sharded gives terms of sums; ``embedding_renorm_``.

Indices and the bounds of bags are whole on every rank.
"""

from __future__ import annotations

from typing import Any

import torch

from ..call import Call
from ..kernels import At, KernelContext
from ..owned import located
from ..rule import Dims, Factors, Kernel
from ..verbs import kernel_rule

aten = torch.ops.aten
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


# --- embedding_renorm_ ---
def renormed(call: Call) -> Factors:
    """Rows that some index names; their norm is over whole rows."""
    indices: Dims = ((),) * len(call.shape(1))
    rows: Dims = (("v",), ())
    return Factors((rows, indices), (rows,), {"v": call.shape(0)[0]}, kernels={"v": Kernel(renorm_owned)})


def renorm_owned(at: KernelContext, weight: Any, indices: Any, max_norm: float, norm_type: float) -> Any:
    def owned(here: At, rows: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        inside, position = located(index, here.offset, here.size, at.total, negative=False, error=IndexError)
        return aten.embedding_renorm_(rows.clone(), position[inside], max_norm, norm_type)

    return at.map(owned, weight, indices)


kernel_rule("embedding_renorm_", renormed)
