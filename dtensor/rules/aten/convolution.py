"""Convolutions: samples, groups, and channels are factors; input channels are contracted; positions have halos.

With one group the inner channel dims may be sharded; with several, ranks have complete groups. In a transposed convolution, input
and output change places in the weight, and positions are unsharded. Otherwise blocks of positions receive the inputs beyond their
edges from their neighbors.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ...placement import Partial
from ..call import Call
from ..declare import make_blockwise_rule
from ..declared_factors import by
from ..kernel_context import At, KernelContext
from ..kernels.halo_exchange import SlidingWindow, add_halo_gradients, make_range_lookup, read_with_halo
from ..registry import register
from ..rule import Declaration, Factors, Kernel, LocalView

aten = torch.ops.aten

WEIGHT_PATTERNS = {False: "(g o) i [s*]", True: "(g i) o [s*]"}
FORWARD = by(
    "transposed", {t: f"input: n (g i) [s*], weight: {w}, bias: +(g o) -> n (g o) [s*]" for t, w in WEIGHT_PATTERNS.items()}
)
BACKWARD = by(
    "transposed",
    {
        t: f"grad_output: n (g o) [s*], input: n (g i) [s*], weight: {w} -> n (g i) [s*], {w}, (g o)"
        for t, w in WEIGHT_PATTERNS.items()
    },
)
SIZES = {"g": "groups"}
GROUP_OPTIONS: dict[str, Any] = {"nonempty": "g i o", "kind": "einsum"}


def groups_in_block(call: Call, x: Any, weight: Any, output: Any) -> int:
    """Return the number of groups in a rank's block. Dim 1 of the weight is the number of channels of one group.

    The channels inside a group may be sharded too, if each rank has a single group.
    """
    channels = output[1] if call["transposed"] else x[1]
    return channels // weight[1] if weight[1] else int(call["groups"])


def local_forward_args(call: Call, view: LocalView) -> dict[str, Any]:
    x, weight = view.operands[:2]
    return {"groups": groups_in_block(call, x, weight, view.results[0])}


def local_backward_args(call: Call, view: LocalView) -> dict[str, Any]:
    grad, x, weight = view.operands
    return {"groups": groups_in_block(call, x, weight, grad), "bias_sizes": call["bias_sizes"] and [grad[1]]}


def convolution_flops(call: Call) -> int:
    """Return the FLOPs of one convolution: each output position meets the weight of an output channel.

    If it is transposed, each input position does.
    """
    x, weight = (call.shape(call.names.index(name)) for name in ("input", "weight"))
    output = call.results[0] if "grad_output" not in call.names else call.operands[call.names.index("grad_output")]
    met = x if call["transposed"] or output is None else output.shape
    return 2 * math.prod(met) * math.prod(weight[1:])


def gradient_flops(call: Call) -> int:
    """Return the FLOPs of the requested gradients of input and weight, each as many as those of the forward pass."""
    return convolution_flops(call) * sum(call["output_mask"][:2])


# --- positions with halos ---------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class SpatialFactors(Declaration):
    """The factors of a notation, with one factor for the inputs and outputs of each dim of positions."""

    notation: Callable[[Call], Factors | None]
    kernel: Any

    def __call__(self, call: Call) -> Factors | None:
        """Return the factors of a convolution. A sharded dim of positions has a kernel that exchanges halos."""
        factors = self.notation(call)
        if factors is None or call["transposed"] or len(call.shape(call.names.index("input"))) < 3:
            return factors
        sizes, windows, kernels = dict(factors.sizes), dict(factors.windows), dict(factors.kernels)
        operands, results = list(factors.operands), list(factors.results)
        inputs, outputs = (("operand", call.names.index("input")), ("result", 0))
        if "grad_output" in call.names:
            outputs = ("operand", call.names.index("grad_output"))
        for d, reach in enumerate(sliding_windows(call)):
            name, split = f"p{d}", call.operands[inputs[1]].splits[2 + d]
            sizes[name], *tensor_windows = reach.factor_windows(None if split is None else split.sizes)
            of_inputs = [inputs, ("result", 0)] if "grad_output" in call.names and call["output_mask"][0] else [inputs]
            for (side, i), window in [*((at, tensor_windows[0]) for at in of_inputs), (outputs, tensor_windows[1])]:
                tensors = operands if side == "operand" else results
                tensors[i] = (*tensors[i][: 2 + d], (name,), *tensors[i][3 + d :])
                if window != range(sizes[name]):
                    windows[side, i, name] = window
            kernels[name] = Kernel(self.kernel(d), Partial("sum"), *_halo_cost(call, d))
        return replace(factors, operands=tuple(operands), results=tuple(results), sizes=sizes, kernels=kernels, windows=windows)

    def __str__(self) -> str:
        return str(self.notation)


def sliding_windows(call: Call) -> list[SlidingWindow]:
    """Return, for each dim of positions, the window of inputs that each output reads."""
    x, weight = (call.shape(call.names.index(name)) for name in ("input", "weight"))
    if "grad_output" in call.names:
        outputs = call.shape(call.names.index("grad_output"))
    else:
        output = call.results[0]
        assert output is not None
        outputs = output.shape
    each = [_per_dim(call[name], len(x) - 2) for name in ("stride", "padding", "dilation")]
    return [SlidingWindow(*sizes) for sizes in zip(x[2:], outputs[2:], weight[2:], *each, strict=True)]


def _per_dim(value: Any, dims: int) -> list[int]:
    """Return a setting (stride, padding ...) as a list with one number for each dim of positions."""
    return list(value) if len(value) == dims else [value[0]] * dims


def _halo_cost(call: Call, d: int) -> tuple[int, Any]:
    """Return how many collectives the halo exchange along dim ``d`` takes, and a function for their bytes."""
    times = 1 + ("grad_output" in call.names and call["output_mask"][0])

    def nbytes(call: Call) -> int:
        layout, reach = call.operands[call.names.index("input")], sliding_windows(call)[d]
        return times * reach.halo * (layout.numel // max(1, reach.inputs)) * layout.dtype.itemsize

    return times, nbytes


@dataclass(frozen=True, slots=True)
class ConvolutionWithHalo(Declaration):
    """The outputs of a rank along dim ``d`` of positions."""

    d: int

    def __call__(self, at: KernelContext, x: Any, weight: Any, bias: Any, *sizes: Any) -> Any:
        """Receive the halo of each rank's block, and compute the rank's outputs."""
        dim, reach, result = self.d + 2, at.compute_once(sliding_windows)[self.d], at.results[0]
        assert result is not None
        outputs = make_range_lookup(result, dim)

        def convolve_block(here: At, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            """Convolve one rank's inputs, halo included. A rank without outputs returns an empty block."""
            if not outputs(here.member):
                return x.new_empty(result.shape_of(here.member))
            return aten.convolution(x, weight, bias, *_block_settings(sizes, self.d, x, weight))

        return at.map(convolve_block, read_with_halo(at, x, dim, at.operands[0], reach, outputs), weight, bias)


@dataclass(frozen=True, slots=True)
class GradientsWithHalo(Declaration):
    """The gradients of a rank's outputs along dim ``d`` of positions: of the inputs that they read, and addends for weight and
    bias."""

    d: int

    def __call__(self, at: KernelContext, grad: Any, x: Any, weight: Any, bias: Any, *settings: Any) -> Any:
        """Receive the halo of each rank's inputs, compute gradients, and add input gradients on the ranks that own the inputs."""
        *sizes, mask = settings
        dim, reach, outputs = self.d + 2, at.compute_once(sliding_windows)[self.d], make_range_lookup(at.operands[0], self.d + 2)

        def convolve_block_backward(here: At, grad: Tensor, x: Tensor, weight: Tensor) -> Any:
            """Compute the gradients of one rank's outputs, for inputs with halo. Zeros if the rank has no outputs."""
            if not grad.numel():
                nothing = torch.zeros_like(x), torch.zeros_like(weight), grad.new_zeros(grad.shape[1])
                return tuple([value if is_requested else None for value, is_requested in zip(nothing, mask, strict=True)])
            sides = bias and [grad.shape[1]]
            return aten.convolution_backward(grad, x, weight, sides, *_block_settings(sizes, self.d, x, weight), mask)

        read_gradient, *others = at.map(
            convolve_block_backward, grad, read_with_halo(at, x, dim, at.operands[1], reach, outputs), weight
        )
        return (add_halo_gradients(at, read_gradient, dim, at.operands[1], reach, outputs) if mask[0] else None, *others)


def _block_settings(sizes: Any, d: int, x: Tensor, weight: Tensor) -> tuple[Any, ...]:
    """Return the arguments from stride to groups for a block whose dim ``d`` is padded already."""
    stride, padding, dilation, transposed, output_padding, groups = sizes
    padding = [0 if k == d else n for k, n in enumerate(_per_dim(padding, x.ndim - 2))]
    return stride, padding, dilation, transposed, output_padding, x.shape[1] // weight.shape[1] if weight.shape[1] else groups


FORWARD_RULE = make_blockwise_rule(
    FORWARD,
    sums={"i": "sum"},
    sizes=SIZES,
    partials="R,R,avg -> avg",
    local_args=local_forward_args,
    flops=convolution_flops,
    **GROUP_OPTIONS,
)
register("convolution", replace(FORWARD_RULE, factors=SpatialFactors(FORWARD_RULE.factors, ConvolutionWithHalo)))
# the gradient of the bias has no input channels
BACKWARD_RULE = make_blockwise_rule(
    BACKWARD, sums={"n o": "sum", "i": "R"}, sizes=SIZES, local_args=local_backward_args, flops=gradient_flops, **GROUP_OPTIONS
)
register("convolution_backward", replace(BACKWARD_RULE, factors=SpatialFactors(BACKWARD_RULE.factors, GradientsWithHalo)))
