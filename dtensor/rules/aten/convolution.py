"""Convolutions: samples, groups, and channels are factors; input channels are contracted; positions are whole.

``input: n (g i) positions``, ``weight: (g o) i kernel`` (transposed: ``(g i) o kernel``), ``bias: (g o)``,
``output: n (g o) positions``. With one group the inner channel dims lead; with several, ranks take whole groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..blockwise import asked_for
from ..call import Call
from ..kernels import At, KernelContext
from ..registry import register
from ..rule import Choice, Dims, Factors, Kernel, LocalView, Rule


def dims_and_sizes(call: Call) -> tuple[dict[str, Dims], dict[str, int]]:
    """Factors by argument (and of the ``output``), and their sizes."""
    x, weight = (call.shape(call.names.index(name)) for name in ("input", "weight"))
    groups, transposed = call["groups"], call["transposed"]
    positions: Dims = ((),) * (len(x) - 2)
    first, second = ("i", "o") if transposed else ("o", "i")
    sizes = {"n": x[0], "g": groups, first: weight[0] // max(1, groups), second: weight[1]}
    table: dict[str, Dims] = {
        "input": (("n",), ("g", "i"), *positions),
        "weight": (("g", first), (second,), *positions),
        "bias": (("g", "o"),),
        "output": (("n",), ("g", "o"), *positions),
    }
    return table | {"grad_output": table["output"]}, sizes


def batched(call: Call) -> bool:
    """A call without a batch dim is left to gathering."""
    ndim = {len(call.shape(call.names.index(name))) for name in ("input", "weight")}
    return len(ndim) == 1


def forward_factors(call: Call) -> Factors | None:
    if not batched(call):
        return None
    table, sizes = dims_and_sizes(call)
    operands = tuple(table[name] for name in call.names)
    return Factors(operands, (table["output"],), sizes, reduced={"i": "sum"}, additive=frozenset((2,)))


def local_groups(call: Call, view: LocalView) -> dict[str, Any]:
    """Groups of the block."""
    if "output_mask" in call.arguments:
        return {"groups": groups_of(call, view.operands[call.names.index("grad_output")], *view.operands[1:3])}
    return {"groups": groups_of(call, view.results[0], *view.operands[:2])}


def groups_of(call: Call, output: Sequence[int], x: Sequence[int], weight: Sequence[int]) -> int:
    """Groups in a block, from the shapes of its output, input and weight: of the latter, dim 1 is the channels of one group.

    The channels inside a group may be cut too, where each rank has a single group.
    """
    channels = output[1] if call["transposed"] else x[1]
    return channels // weight[1] if weight[1] else int(call["groups"])


def channels_everywhere(choice: Choice) -> bool:
    """Every rank has channels: the operator refuses to have none."""
    return all(min(choice.sizes(name)) > 0 for name in ("g", "i", "o") if name in choice.splits)


def backward_factors(call: Call) -> Factors | None:
    """The gradient of the bias does not know the input channels: with those sharded it is whole, not a sum."""
    if not batched(call):
        return None
    table, sizes = dims_and_sizes(call)
    results = asked_for(call, (table["input"], table["weight"], table["bias"]))
    operands = tuple(table[name] for name in call.names)
    return Factors(operands, results, sizes, reduced={"n": "sum", "o": "sum"}, kernels={"i": Kernel(gradients_of_input_channels)})


def gradients_of_input_channels(at: KernelContext, *args: Any) -> Any:
    """The operator on a block of input channels; the gradient of the bias, which lacks them, is whole."""

    def own(_: At, grad: Tensor, x: Tensor, weight: Tensor) -> Any:
        groups = groups_of(at.call, grad.shape, x.shape, weight.shape)
        return at.call.func(grad, x, weight, bias_sizes and [grad.shape[1]], *settings, groups, mask)

    grad, x, weight, bias_sizes, *settings, _groups, mask = args
    return at.map(own, grad, x, weight)


def local_backward(call: Call, view: LocalView) -> dict[str, Any]:
    bias = call["bias_sizes"]
    return local_groups(call, view) | {
        "bias_sizes": None if bias is None else [view.operands[call.names.index("grad_output")][1]]
    }


SOURCE = "n (g i) [s], (g o) i [k], +(g o) -> n (g o) [s]"
register(
    "convolution",
    Rule(forward_factors, ("R,R,avg -> avg",), when=channels_everywhere, local_args=local_groups, kind="einsum", source=SOURCE),
)
register(
    "convolution_backward",
    Rule(
        backward_factors,
        when=channels_everywhere,
        local_args=local_backward,
        kind="einsum",
        source="as convolution",
    ),
)
