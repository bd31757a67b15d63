"""LSTM layers as one kernel (oneDNN's, on CPU): sequences are a factor; time steps, features and weights are unsharded.

What the kernel saves for its backward pass has a format and a size that depend on a rank's own sequences, which no layout
describes. It is not saved; the backward pass computes it again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ..call import Call
from ..declare import blockwise
from ..kernel_context import on_each_rank
from ..rule import StrategyChoice

aten = torch.ops.aten


@on_each_rank
def run_layer(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Run oneDNN's LSTM layer on one rank's sequences, and return an empty workspace in place of its own."""
    *_, hx, cx, _, _, _, hidden = args[:10]
    nothing = x.new_empty(0, dtype=torch.uint8)
    if not x.numel():
        return x.new_zeros((*x.shape[:2], hidden)), hx.clone(), cx.clone(), nothing
    return *aten.mkldnn_rnn_layer.default(x, *args)[:3], nothing


@on_each_rank
def run_layer_gradients(x: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Run one rank's LSTM layer again to make its workspace, and compute the gradients of input, weights and states."""
    weights, hx, cx = args[:4], args[4], args[5]
    if not x.numel():
        state_gradients = zip((hx, cx), args[10:12], strict=True)
        return *map(torch.zeros_like, (x, *weights)), *(
            torch.zeros_like(s) if g is None else g.clone() for s, g in state_gradients
        )
    reverse, mode, hidden, layers, biases, train, both, sizes, batch_first, _ = args[12:]
    settings = (reverse, sizes, mode, hidden, layers, biases, both, batch_first, train)
    with torch.enable_grad():  # makes the kernel save its workspace
        *_, workspace = aten.mkldnn_rnn_layer.default(x, *weights, hx, cx, *settings)
    gradients: tuple[Tensor, ...] = aten.mkldnn_rnn_layer_backward.default(x, *args[:-1], workspace)
    return gradients


def is_unpacked(choice: StrategyChoice) -> bool:
    """Return True if sequences are not packed, or nothing is sharded.

    Packed sequences end one after another, so they have no blocks.
    """
    return not choice.call["batch_sizes"] or not choice.splits


def layer_flops(call: Call) -> float:
    """Return the FLOPs of an LSTM layer: each step multiplies its features, and the state before it, by the weights."""
    steps, sequences, features = call.shape(0)
    gates, hidden = call.shape(2)
    return 2.0 * steps * sequences * gates * (features + hidden)


LAYER = (
    "input: [] b [], weight0: [] [], weight1: [] [], weight2: [], weight3: [], hx_: b [], cx_: b [] -> [] b [], b [], b [], []"
)
GRADIENTS = (
    "input: [] b [], weight1: [] [], weight2: [] [], weight3: [], weight4: [], hx_: b [], cx_tmp: b [], output: [] b [], "
    "hy_: b [], cy_: b [], grad_output: [] b [], grad_hy: b [], grad_cy: b [], workspace: [] "
    "-> [] b [], [] [], [] [], [], [], b [], b []"
)
# the gates of one step of a cell, on accelerators; a bias is shared by all sequences
blockwise("_thnn_fused_lstm_cell", "b [], b [], b [], [], [] -> b [], b [], b []")
blockwise("_thnn_fused_lstm_cell_backward_impl", "b [], b [], b [], b [], b [] -> b [], b [], []", sums="b")
blockwise("_thnn_fused_gru_cell", "b [], b [], b [], [], [] -> b [], b []")
blockwise("_thnn_fused_gru_cell_backward", "b [], b [] -> b [], b [], b [], [], []", sums="b")
blockwise("mkldnn_rnn_layer", LAYER, sums={"b": "R"}, when=is_unpacked, local=run_layer, flops=layer_flops)
blockwise(
    "mkldnn_rnn_layer_backward",
    GRADIENTS,
    sums="b",
    when=is_unpacked,
    local=run_layer_gradients,
    flops=lambda call: 3 * layer_flops(call),
)
