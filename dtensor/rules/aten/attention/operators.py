"""Scaled dot-product attention: batch and heads are factors without communication; so are sequences, in the CPU operator.

Fewer key heads than query heads (grouped queries) make the query heads a product (key head, query within it): sharding
cuts key heads. Where queries and keys are cut by the same mesh dim, blocks of keys travel around a ring.
The CUDA operators keep sequences whole, since they take no mask with which to compute a block. With dropout there is no rule: the
operators would draw other numbers on blocks.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from ....base.torch_internals import FakeTensorMode
from ....layout.layout import Layout
from ....placement import Partial
from ...call import Call
from ...declare import NOTHING, kernel_rule
from ...kernel_context import plain_op
from ...registry import register
from ...rule import Dims, Factors, Kernel, Rule
from .blocks import attention_block, attention_gradients, attention_of_blocks, gradients_of_blocks
from .ring import ranks_in_ring, ring_attention, ring_gradients

HEAD_DIMS = frozenset(("e", "v"))


# --- factors shared by all fused operators --------------------------------------------------------------------------
def attention_sizes(call: Call) -> dict[str, int] | None:
    """Sizes of batch b, key heads h, query heads per key head g, queries l, keys s, head dims; None where they do not fit, and
    with dropout."""
    q, k = call.shape(call.names.index("query")), call.shape(call.names.index("key"))
    if call["dropout_p"] > 0 or len(q) != 4 or len(k) != 4 or q[0] != k[0] or not k[1] or q[1] % k[1]:
        return None
    return {
        "b": q[0],
        "h": k[1],
        "g": q[1] // k[1],
        "l": q[2],
        "s": k[2],
        "e": q[3],
        "v": call.shape(call.names.index("value"))[3],
    }


def attention_table(call: Call) -> dict[str, Dims]:
    """Factors of operands by argument name."""
    query: Dims = (("b",), ("h", "g"), ("l",), ("e",))
    key: Dims = (("b",), ("h",), ("s",), ("e",))
    out: Dims = (*query[:3], ("v",))
    value = (*key[:3], ("v",))
    rows: Dims = query[:3]
    return {"query": query, "key": key, "value": value, "out": out, "grad_out": out, "grad_out_": out, "logsumexp": rows}


def bias_dims(shape: tuple[int, ...], sizes: dict[str, int]) -> Dims:
    """Factors of a mask or bias, right-aligned to (batch, heads, queries, keys); dims of size one are broadcast."""
    names = (("b",), ("h", "g"), ("l",), ("s",))[4 - len(shape) :]
    return tuple(
        () if size == 1 and math.prod(sizes[f] for f in own) != 1 else own for size, own in zip(shape, names, strict=True)
    )


def placed(call: Call, table: dict[str, Dims], sizes: dict[str, int]) -> tuple[Dims, ...]:
    """Factors of all operands; those not in the table (seeds, lengths) are whole."""
    found = []
    for name, layout in zip(call.names, call.operands, strict=True):
        shape = tuple(layout.shape)
        is_bias = name in ("attn_mask", "attn_bias") and layout.numel > 0
        found.append(bias_dims(shape, sizes) if is_bias else of_ndim(table.get(name, ()) if layout.numel else (), len(shape)))
    return tuple(found)


def of_ndim(dims: Dims, ndim: int) -> Dims:
    """``dims``, further ones whole: cuDNN's sums of rows have one more than other operators'."""
    return (*dims, *((),) * (ndim - len(dims)))


# --- the CPU operator -----------------------------------------------------------------------------------------------
def forward_factors(call: Call) -> Factors | None:
    sizes = attention_sizes(call)
    if sizes is None:
        return None
    table = attention_table(call)
    rows: dict[str, Kernel] = {"l": Kernel(attention_of_blocks)} if call["is_causal"] else {}
    keys = Kernel(attention_of_blocks, collectives=2, nbytes=lambda call: 2 * call.operands[0].nbytes)
    results = (table["out"], table["logsumexp"])
    made = Factors(placed(call, table, sizes), results, sizes, HEAD_DIMS, kernels=rows | {"s": keys})
    if ranks_in_ring(call) == 1:
        return made
    return one_sequence(call, made, Kernel(ring_attention, collectives=1, nbytes=bytes_passed))


def backward_factors(call: Call) -> Factors | None:
    sizes = attention_sizes(call)
    if sizes is None:
        return None
    table = attention_table(call)
    kernels = dict.fromkeys("ls", Kernel(gradients_of_blocks, lacking=Partial("sum"))) if call["is_causal"] else {}
    results = (table["query"], table["key"], table["value"])
    made = Factors(placed(call, table, sizes), results, sizes, HEAD_DIMS, dict.fromkeys("gls", "sum"), kernels=kernels)
    if ranks_in_ring(call) == 1:
        return made
    return one_sequence(call, made, Kernel(ring_gradients, collectives=2, nbytes=bytes_passed))


def one_sequence(call: Call, factors: Factors, ring: Kernel) -> Factors:
    """The same operation where queries and keys are cut alike, as one factor ``t``; of a mask each rank needs its rows whole."""

    def renamed(dims: Dims, mask: bool) -> Dims:
        return tuple(() if mask and own == ("s",) else ("t",) if own in (("l",), ("s",)) else own for own in dims)

    operands = tuple(renamed(dims, name == "attn_mask") for name, dims in zip(call.names, factors.operands, strict=True))
    results = tuple(renamed(dims, False) for dims in factors.results)
    sizes = {("t" if name in "ls" else name): size for name, size in factors.sizes.items()}
    reduced = {name: op for name, op in factors.reduced.items() if name not in "ls"}
    return Factors(operands, results, sizes, HEAD_DIMS, reduced, kernels={"t": ring})


def bytes_passed(call: Call) -> int:
    """Of all passes of keys and values; they overlap with the computation, so that a ring has the latency of one collective."""
    key, value = (call.operands[call.names.index(name)] for name in ("key", "value"))
    return (ranks_in_ring(call) - 1) * (key.max_local_nbytes + value.max_local_nbytes)


# --- FLOPs, all rows meeting all keys, as torch counts them -----------------------------------------------------------------
def _products(call: Call, keys: int, values: int) -> int:
    batch, heads, rows, e = call.shape(call.names.index("query"))
    _, _, s, v = call.shape(call.names.index("value"))
    return 2 * batch * heads * rows * s * (keys * e + values * v)


# products of queries and keys, and of their weights and the values; in backward the weights again, then gradients of weights and
# values, and of queries and keys
FORWARD: dict[str, Any] = {"flops": partial(_products, keys=1, values=1), "floats_matter": True}
BACKWARD: dict[str, Any] = {"flops": partial(_products, keys=3, values=2), "floats_matter": True}


def linear_in_value(call: Call) -> tuple[str, ...]:
    """The rows' sums do not depend on the values."""
    mask = ",R" * (len(call.operands) - 3)
    return tuple(f"R,R,{op}{mask} -> {op},R" for op in ("sum", "avg"))


CPU = "_scaled_dot_product_flash_attention_for_cpu"
kernel_rule(CPU, forward_factors, partials=linear_in_value, local=attention_block, as_laid_out=True, **FORWARD)
kernel_rule(f"{CPU}_backward", backward_factors, local=attention_gradients, as_laid_out=True, **BACKWARD)


# --- the CUDA operators: sequences whole ----------------------------------------------------------------------------
def whole_sequences(dims: Dims) -> Dims:
    return tuple(() if own in (("l",), ("s",)) else own for own in dims)


def _with_whole_sequences(call: Call, sizes: dict[str, int]) -> tuple[dict[str, Dims], tuple[Dims, ...]]:
    """The dims of results by name, and those of the operands."""
    table = {name: whole_sequences(dims) for name, dims in attention_table(call).items()}
    return table, tuple(whole_sequences(dims) for dims in placed(call, table, sizes))


def cuda_forward_factors(call: Call) -> Factors | None:
    """Results beyond the output and the rows' sums (seeds, lengths) are the same on all ranks."""
    sizes = attention_sizes(call)
    if sizes is None:
        return None
    table, operands = _with_whole_sequences(call, sizes)
    named = {"output": table["out"], "logsumexp": table["logsumexp"], "log_sumexp": table["logsumexp"]}
    results = []
    for value, meta in zip(call.func._schema.returns, call.results, strict=True):
        if meta is not None:
            results.append(of_ndim(() if 0 in meta.shape else named.get(value.name, ()), len(meta.shape)))
    kernels = dict.fromkeys("bhg", Kernel(plain_op, joint=True))
    return Factors(operands, tuple(results), sizes, HEAD_DIMS | {"l", "s"}, kernels=kernels)


def cuda_backward_factors(call: Call) -> Factors | None:
    """A gradient of a bias that is broadcast over batch or heads is a sum over them."""
    sizes = attention_sizes(call)
    if sizes is None:
        return None
    table, operands = _with_whole_sequences(call, sizes)
    own = [
        table["query"],
        table["key"],
        table["value"],
        *(whole_sequences(bias_dims(m.shape, sizes)) for m in call.results[3:] if m is not None),
    ]
    results = tuple(dims for dims, meta in zip(own, call.results, strict=False) if meta is not None)
    return Factors(operands, results, sizes, HEAD_DIMS | {"l", "s"}, dict.fromkeys("bhg", "sum"))


for _name in ("flash", "efficient", "cudnn"):
    kernel_rule(f"_scaled_dot_product_{_name}_attention", cuda_forward_factors, **FORWARD)
    kernel_rule(f"_scaled_dot_product_{_name}_attention_backward", cuda_backward_factors, **BACKWARD)


# --- which of them --------------------------------------------------------------------------------------------------
def choice(call: Call) -> int:
    """What torch chooses for plain tensors of the global shapes.

    It looks at shapes, dtypes, the device, and whether the last dim is dense, but at no values: so hardly any memory is taken. A
    device that only pretends to be there chooses for fakes.
    """
    device = call.mesh.device_type

    def chosen() -> int:
        given = {name: _hollow(x, device) if isinstance(x, Layout) else x for name, x in call.arguments.items()}
        positional = [given.pop(argument.name) for argument in call.func._schema.arguments if not argument.kwarg_only]
        return int(call.func(*positional, **given))

    try:
        return chosen()
    except NotImplementedError:
        with FakeTensorMode():
            return chosen()


def _hollow(layout: Layout, device: str) -> torch.Tensor:
    """A tensor of the global shape, all of whose rows are the same memory."""
    ndim = len(layout.shape)
    row, step = (layout.shape[-1], layout.stride[-1]) if ndim else (1, 1)
    step = step if row < 2 else min(step, 2)
    held = torch.empty(max(0, (row - 1) * step + 1), dtype=layout.dtype, device=device)
    return held.as_strided(layout.shape, (*(0,) * (ndim - 1), step)[:ndim])


register("_fused_sdp_choice", Rule(NOTHING, answer=choice, floats_matter=True, kind="answer"))
