"""Convolutions: samples, groups, and channels are factors; input channels are contracted; positions are whole.

``input: n (g i) positions``, ``weight: (g o) i kernel`` (transposed: ``(g i) o kernel``), ``bias: (g o)``,
``output: n (g o) positions``. With one group the inner channel dims lead; with several, ranks take whole groups.
"""

from __future__ import annotations

from typing import Any

from .blockwise import asked_for, linear_in
from .call import Call
from .context import KernelContext
from .registry import register
from .rule import Choice, Dims, Factors, Kernel, LocalView, Rule

BIAS_ROWS = {
    2: ("sum,R -> sum", "R,sum -> sum", "avg,R -> avg", "R,avg -> avg"),
    3: ("sum,R,sum -> sum", "R,sum,sum -> sum", "avg,R,R -> avg", "R,avg,R -> avg", "R,R,avg -> avg"),
}


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


def partial_rows(call: Call) -> tuple[str, ...]:
    """Linear in input and in weight; the bias is one more term."""
    return BIAS_ROWS[len(call.operands)]


def local_groups(call: Call, view: LocalView) -> dict[str, Any]:
    """Groups of the block."""
    position = call.names.index("input")
    channels = view.operands[position][1]
    whole = call.shape(position)[1]
    return {"groups": call["groups"] if channels == whole or call["groups"] == 1 else channels * call["groups"] // whole}


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
    """The operator on a block of input channels: no group is cut, for then there is only one."""
    return at.call.func(*args)


def local_backward(call: Call, view: LocalView) -> dict[str, Any]:
    bias = call["bias_sizes"]
    return local_groups(call, view) | {
        "bias_sizes": None if bias is None else [view.operands[call.names.index("grad_output")][1]]
    }


SOURCE = "n (g i) [s], (g o) i [k], +(g o) -> n (g o) [s]"
register(
    "convolution",
    Rule(forward_factors, partial_rows, when=channels_everywhere, local_args=local_groups, kind="einsum", source=SOURCE),
)
register(
    "convolution_backward",
    Rule(
        backward_factors,
        linear_in(0),
        when=channels_everywhere,
        local_args=local_backward,
        kind="einsum",
        source="as convolution",
    ),
)
