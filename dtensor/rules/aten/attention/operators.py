"""Attention operators (scaled dot-product): batch and heads are factors; sequences are factors of the CPU operator.

With fewer key heads than query heads (grouped queries), the query heads are a product (key head, query within it), and sharding
splits key heads. If one mesh dim shards queries and keys, blocks of keys travel around a ring. The CUDA operators need unsharded
sequences, since they accept no mask with which to compute a block. With dropout there is no rule, because the operators would
generate other numbers for blocks.
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
from ...declare import NO_FACTORS, kernel_rule
from ...kernel_context import run_operator
from ...registry import register
from ...rule import Dims, Factors, Kernel, Rule
from .blocks import attention_block, attention_gradients, attention_gradients_of_blocks, attention_of_blocks
from .ring import ranks_in_ring, ring_attention, ring_gradients

HEAD_DIMS = frozenset(("e", "v"))


# --- factors shared by all fused operators --------------------------------------------------------------------------
def attention_sizes(call: Call) -> dict[str, int] | None:
    """Return the size of each factor of attention by its letter, or None if the shapes do not fit or there is dropout.

    The factors are batch b, key heads h, query heads per key head g, queries l, keys s, and head dims e and v.
    """
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


def attention_dims_by_argument(call: Call) -> dict[str, Dims]:
    """Return the factors of the dims of query, key, value, output and log-sums, each by its argument name."""
    query: Dims = (("b",), ("h", "g"), ("l",), ("e",))
    key: Dims = (("b",), ("h",), ("s",), ("e",))
    out: Dims = (*query[:3], ("v",))
    value = (*key[:3], ("v",))
    rows: Dims = query[:3]
    return {"query": query, "key": key, "value": value, "out": out, "grad_out": out, "grad_out_": out, "logsumexp": rows}


def bias_dims(shape: tuple[int, ...], sizes: dict[str, int]) -> Dims:
    """Return the factors of the dims of a mask or bias, right-aligned to (batch, heads, queries, keys); () for broadcast dims."""
    names = (("b",), ("h", "g"), ("l",), ("s",))[4 - len(shape) :]
    return tuple(
        () if size == 1 and math.prod(sizes[f] for f in own) != 1 else own for size, own in zip(shape, names, strict=True)
    )


def attention_operand_dims(call: Call, table: dict[str, Dims], sizes: dict[str, int]) -> tuple[Dims, ...]:
    """Return the factors of the dims of all operands. Those that are not in ``table`` (seeds, lengths) are replicated."""
    operand_dims = []
    for name, layout in zip(call.names, call.operands, strict=True):
        shape = tuple(layout.shape)
        is_bias = name in ("attn_mask", "attn_bias") and layout.numel > 0
        operand_dims.append(
            bias_dims(shape, sizes) if is_bias else pad_dims(table.get(name, ()) if layout.numel else (), len(shape))
        )
    return tuple(operand_dims)


def pad_dims(dims: Dims, ndim: int) -> Dims:
    """Append unsharded dims up to ``ndim``: cuDNN's log-sums have one dim more than those of other operators."""
    return (*dims, *((),) * (ndim - len(dims)))


# --- the CPU operator -----------------------------------------------------------------------------------------------
def cpu_forward_factors(call: Call) -> Factors | None:
    """Return factors and kernels of the CPU attention operator, or None if shapes do not fit.

    If queries and keys are sharded alike, the kernel is ring attention.
    """
    sizes = attention_sizes(call)
    if sizes is None:
        return None
    table = attention_dims_by_argument(call)
    rows: dict[str, Kernel] = {"l": Kernel(attention_of_blocks)} if call["is_causal"] else {}
    keys = Kernel(attention_of_blocks, collectives=2, nbytes=lambda call: 2 * call.operands[0].nbytes)
    results = (table["out"], table["logsumexp"])
    factors = Factors(attention_operand_dims(call, table, sizes), results, sizes, HEAD_DIMS, kernels=rows | {"s": keys})
    if ranks_in_ring(call) == 1:
        return factors
    return merge_sequence_factors(call, factors, Kernel(ring_attention, collectives=1, nbytes=ring_bytes))


def cpu_backward_factors(call: Call) -> Factors | None:
    """Return factors and kernels of the backward of the CPU attention operator, or None if shapes do not fit."""
    sizes = attention_sizes(call)
    if sizes is None:
        return None
    table = attention_dims_by_argument(call)
    kernels = dict.fromkeys("ls", Kernel(attention_gradients_of_blocks, lacking=Partial("sum"))) if call["is_causal"] else {}
    results = (table["query"], table["key"], table["value"])
    factors = Factors(
        attention_operand_dims(call, table, sizes), results, sizes, HEAD_DIMS, dict.fromkeys("gls", "sum"), kernels=kernels
    )
    if ranks_in_ring(call) == 1:
        return factors
    return merge_sequence_factors(call, factors, Kernel(ring_gradients, collectives=2, nbytes=ring_bytes))


def merge_sequence_factors(call: Call, factors: Factors, ring: Kernel) -> Factors:
    """Replace the factors of queries and keys by one factor ``t`` with the kernel ``ring``, for ring attention.

    The mask is sharded by rows only.
    """

    def rename_dims(dims: Dims, mask: bool) -> Dims:
        return tuple(() if mask and own == ("s",) else ("t",) if own in (("l",), ("s",)) else own for own in dims)

    operands = tuple(rename_dims(dims, name == "attn_mask") for name, dims in zip(call.names, factors.operands, strict=True))
    results = tuple(rename_dims(dims, False) for dims in factors.results)
    sizes = {("t" if name in "ls" else name): size for name, size in factors.sizes.items()}
    reduced = {name: op for name, op in factors.reduced.items() if name not in "ls"}
    return Factors(operands, results, sizes, HEAD_DIMS, reduced, kernels={"t": ring})


def ring_bytes(call: Call) -> int:
    """Return the bytes of keys and values that a rank sends in all steps of the ring."""
    key, value = (call.operands[call.names.index(name)] for name in ("key", "value"))
    return (ranks_in_ring(call) - 1) * (key.max_local_nbytes + value.max_local_nbytes)


# --- FLOPs of all rows with all keys, as torch counts them ------------------------------------------------------------------
def _attention_flops(call: Call, keys: int, values: int) -> int:
    """Return the FLOPs of attention with ``keys`` products as wide as keys, and ``values`` products as wide as values."""
    batch, heads, rows, e = call.shape(call.names.index("query"))
    _, _, s, v = call.shape(call.names.index("value"))
    return 2 * batch * heads * rows * s * (keys * e + values * v)


# forward: queries and keys, weights and values. backward: the weights again, then the gradients of
# weights and values, and of queries and keys
FORWARD: dict[str, Any] = {"flops": partial(_attention_flops, keys=1, values=1), "floats_matter": True}
BACKWARD: dict[str, Any] = {"flops": partial(_attention_flops, keys=3, values=2), "floats_matter": True}


def partials_of_value(call: Call) -> tuple[str, ...]:
    """Return the strategies in which the values, and so the output, are partial. The log-sums do not depend on the values."""
    mask = ",R" * (len(call.operands) - 3)
    return tuple(f"R,R,{op}{mask} -> {op},R" for op in ("sum", "avg"))


CPU = "_scaled_dot_product_flash_attention_for_cpu"
kernel_rule(CPU, cpu_forward_factors, partials=partials_of_value, local=attention_block, as_laid_out=True, **FORWARD)
kernel_rule(f"{CPU}_backward", cpu_backward_factors, local=attention_gradients, as_laid_out=True, **BACKWARD)


# --- the CUDA operators: unsharded sequences ------------------------------------------------------------------------
def unshard_sequences(dims: Dims) -> Dims:
    return tuple(() if own in (("l",), ("s",)) else own for own in dims)


def _unsharded_sequence_factors(call: Call, sizes: dict[str, int]) -> tuple[dict[str, Dims], tuple[Dims, ...]]:
    """Return the factors of results (by name) and of operands of a CUDA operator, which needs unsharded sequences."""
    table = {name: unshard_sequences(dims) for name, dims in attention_dims_by_argument(call).items()}
    return table, tuple(unshard_sequences(dims) for dims in attention_operand_dims(call, table, sizes))


def cuda_forward_factors(call: Call) -> Factors | None:
    """Return the factors of a CUDA attention operator, or None if shapes do not fit.

    Results beyond output and log-sums (seeds, lengths) are equal on all ranks.
    """
    sizes = attention_sizes(call)
    if sizes is None:
        return None
    table, operands = _unsharded_sequence_factors(call, sizes)
    dims_of_result = {"output": table["out"], "logsumexp": table["logsumexp"], "log_sumexp": table["logsumexp"]}
    results = []
    for value, meta in zip(call.func._schema.returns, call.results, strict=True):
        if meta is not None:
            results.append(pad_dims(() if 0 in meta.shape else dims_of_result.get(value.name, ()), len(meta.shape)))
    kernels = dict.fromkeys("bhg", Kernel(run_operator, joint=True))
    return Factors(operands, tuple(results), sizes, HEAD_DIMS | {"l", "s"}, kernels=kernels)


def cuda_backward_factors(call: Call) -> Factors | None:
    """Return the factors of the backward of a CUDA attention operator, or None if shapes do not fit.

    The gradient of a broadcast bias is a sum over batch or heads.
    """
    sizes = attention_sizes(call)
    if sizes is None:
        return None
    table, operands = _unsharded_sequence_factors(call, sizes)
    own = [
        table["query"],
        table["key"],
        table["value"],
        *(unshard_sequences(bias_dims(m.shape, sizes)) for m in call.results[3:] if m is not None),
    ]
    results = tuple(dims for dims, meta in zip(own, call.results, strict=False) if meta is not None)
    return Factors(operands, results, sizes, HEAD_DIMS | {"l", "s"}, dict.fromkeys("bhg", "sum"))


for _name in ("flash", "efficient", "cudnn"):
    kernel_rule(f"_scaled_dot_product_{_name}_attention", cuda_forward_factors, **FORWARD)
    kernel_rule(f"_scaled_dot_product_{_name}_attention_backward", cuda_backward_factors, **BACKWARD)


# --- selection of the backend ---------------------------------------------------------------------------------------
def choose_backend(call: Call) -> int:
    """Return the attention backend that torch would choose for plain tensors of the global shapes.

    It reads shapes, dtypes, the device, and whether the last dim is dense, but no values. So the tensors take hardly any memory.
    For a fake device, fake tensors are used.
    """
    device = call.mesh.device_type

    def run_choice() -> int:
        """Call torch's choice of a backend on tensors of the global shapes that take hardly any memory."""
        arguments = {name: _make_hollow_tensor(x, device) if isinstance(x, Layout) else x for name, x in call.arguments.items()}
        positional = [arguments.pop(argument.name) for argument in call.func._schema.arguments if not argument.kwarg_only]
        return int(call.func(*positional, **arguments))

    try:
        return run_choice()
    except NotImplementedError:
        with FakeTensorMode():
            return run_choice()


def _make_hollow_tensor(layout: Layout, device: str) -> torch.Tensor:
    """Return a tensor of the global shape that takes hardly any memory, because all rows share it."""
    ndim = len(layout.shape)
    row, step = (layout.shape[-1], layout.stride[-1]) if ndim else (1, 1)
    step = step if row < 2 else min(step, 2)
    storage = torch.empty(max(0, (row - 1) * step + 1), dtype=layout.dtype, device=device)
    return storage.as_strided(layout.shape, (*(0,) * (ndim - 1), step)[:ndim])


register("_fused_sdp_choice", Rule(NO_FACTORS, answer=choose_backend, floats_matter=True, kind="answer"))
