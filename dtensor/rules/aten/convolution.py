"""Convolutions: samples, groups, and channels are factors; input channels are contracted; positions are whole.

With one group the inner channel dims lead; with several, ranks take whole groups. Transposed, input and output change places in
the weight, and in nothing else.
"""

from __future__ import annotations

import math
from typing import Any

from ..call import Call
from ..factoring import by
from ..rule import LocalView
from ..verbs import blockwise

WEIGHT = {False: "(g o) i [s*]", True: "(g i) o [s*]"}
FORWARD = by("transposed", {t: f"input: n (g i) [s*], weight: {w}, bias: +(g o) -> n (g o) [s*]" for t, w in WEIGHT.items()})
BACKWARD = by(
    "transposed",
    {t: f"grad_output: n (g o) [s*], input: n (g i) [s*], weight: {w} -> n (g i) [s*], {w}, (g o)" for t, w in WEIGHT.items()},
)
SIZES = {"g": "groups"}


def groups_of(call: Call, x: Any, weight: Any, output: Any) -> int:
    """Groups in a block, from the shapes: dim 1 of the weight is the channels of one of them.

    The channels inside a group may be cut too, where each rank has a single group.
    """
    channels = output[1] if call["transposed"] else x[1]
    return channels // weight[1] if weight[1] else int(call["groups"])


def local_groups(call: Call, view: LocalView) -> dict[str, Any]:
    x, weight = view.operands[:2]
    return {"groups": groups_of(call, x, weight, view.results[0])}


def local_backward(call: Call, view: LocalView) -> dict[str, Any]:
    grad, x, weight = view.operands
    return {"groups": groups_of(call, x, weight, grad), "bias_sizes": call["bias_sizes"] and [grad[1]]}


def products(call: Call) -> int:
    """FLOPs of one convolution: every position of the outputs meets the weight of an output channel, transposed every input's."""
    x, weight = (call.shape(call.names.index(name)) for name in ("input", "weight"))
    made = call.results[0] if "grad_output" not in call.names else call.operands[call.names.index("grad_output")]
    met = x if call["transposed"] or made is None else made.shape
    return 2 * math.prod(met) * math.prod(weight[1:])


def products_of_gradients(call: Call) -> int:
    """As many for the gradient of the input, and as many for that of the weight."""
    return products(call) * sum(call["output_mask"][:2])


blockwise(
    "convolution",
    FORWARD,
    sums="i",
    sizes=SIZES,
    nonempty="g i o",
    partials="R,R,avg -> avg",
    local_args=local_groups,
    flops=products,
    kind="einsum",
)
blockwise(
    "convolution_backward",
    BACKWARD,
    sums={"n": "sum", "o": "sum", "i": "R"},  # the gradient of the bias knows no input channels
    sizes=SIZES,
    nonempty="g i o",
    local_args=local_backward,
    flops=products_of_gradients,
    kind="einsum",
)
