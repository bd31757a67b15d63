"""Layers of an LSTM as one kernel (oneDNN's, on CPU): sequences are factors; time steps, features and weights are whole.

What the kernel keeps for its backward pass has a form of its own, of a size that follows from a rank's own sequences: no layout
says how to move it. It is not kept, and the backward pass makes it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call import Call
from ..kernels import on_each_rank
from ..registry import register
from ..rule import Dims, Factors, Rule

aten = torch.ops.aten
STATES = ("hx_", "cx_", "cx_tmp", "hy_", "cy_", "grad_hy", "grad_cy")
STEPS = ("input", "output", "grad_output")
STATE: Dims = (("b",), ())
STEP: Dims = ((), ("b",), ())


@on_each_rank
def layer(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Output and last states; nothing for the backward pass."""
    *_, hx, cx, _, _, _, hidden = args[:10]
    nothing = x.new_empty(0, dtype=torch.uint8)
    if not x.numel():
        return x.new_zeros((*x.shape[:2], hidden)), hx.clone(), cx.clone(), nothing
    return *aten.mkldnn_rnn_layer.default(x, *args)[:3], nothing


@on_each_rank
def layer_gradients(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Of the input, the weights and the first states."""
    weights, hx, cx = args[:4], args[4], args[5]
    if not x.numel():
        given = zip((hx, cx), args[10:12], strict=True)
        return *map(torch.zeros_like, (x, *weights)), *(torch.zeros_like(s) if g is None else g.clone() for s, g in given)
    reverse, mode, hidden, layers, biases, train, both, sizes, batch_first, _ = args[12:]
    settings = (reverse, sizes, mode, hidden, layers, biases, both, batch_first, train)
    with torch.enable_grad():  # which asks the kernel to keep it
        *_, kept = aten.mkldnn_rnn_layer.default(x, *weights, hx, cx, *settings)
    gradients: tuple[Tensor, ...] = aten.mkldnn_rnn_layer_backward.default(x, *args[:-1], kept)
    return gradients


def _sequences(call: Call, results: tuple[Dims, ...], lacking: str) -> Factors | None:
    if call["batch_sizes"]:  # packed: sequences end one after another
        return None
    known = dict.fromkeys(STATES, STATE) | dict.fromkeys(STEPS, STEP)
    operands = tuple(known.get(name, ((),) * layout.ndim) for name, layout in zip(call.names, call.operands, strict=True))
    return Factors(operands, results, {"b": call.shape(0)[1]}, reduced={"b": lacking})


def layer_factors(call: Call) -> Factors | None:
    return _sequences(call, (STEP, STATE, STATE, ((),)), "R")


def gradient_factors(call: Call) -> Factors | None:
    weights: tuple[Dims, ...] = (((), ()), ((), ()), ((),), ((),))
    return _sequences(call, (STEP, *weights, STATE, STATE), "sum")


def products(call: Call) -> float:
    """Each step multiplies its features, and the state before it, by the weights."""
    steps, sequences, features = call.shape(0)
    gates, hidden = call.shape(2)
    return 2.0 * steps * sequences * gates * (features + hidden)


register("mkldnn_rnn_layer", Rule(layer_factors, local=layer, flops=products, kind="blockwise"))
register(
    "mkldnn_rnn_layer_backward",
    Rule(gradient_factors, local=layer_gradients, flops=lambda call: 3 * products(call), kind="blockwise"),
)
