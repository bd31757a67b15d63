"""Strides of results where torch's own inference without data is not what its kernels do on the CPU.

Four laws: dense in row-major order whatever comes in; the memory format that an argument suggests; the order that an
element-by-element loop takes from its operands; and the batches of one-dimensional memory in which a Fourier transform is run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..base.memory_order import dense_in, outermost_first
from ..base.torch_internals import suggest_memory_format
from ..rules.call import Meta

Given = dict[str, Any]  # arguments by name, as tensors without data
Law = Callable[[Meta, Given], tuple[int, ...]]


def row_major(result: Meta, given: Given) -> tuple[int, ...]:
    return torch.empty(result.shape, device="meta").stride()


def suggested_by(name: str) -> Law:
    """Channels last if this argument is, else row-major."""

    def law(result: Meta, given: Given) -> tuple[int, ...]:
        if len(result.shape) != given[name].ndim:  # statistics, gradients of weights
            return row_major(result, given)
        return torch.empty(result.shape, device="meta", memory_format=suggest_memory_format(given[name])).stride()

    return law


def loop_over(*names: str) -> Law:
    """What TensorIterator gives, by an operator whose inference is its own."""

    def law(result: Meta, given: Given) -> tuple[int, ...]:
        operands = [_bytes(x) for x in (given[name] for name in names) if isinstance(x, torch.Tensor)]
        if len(operands) == 3:
            return torch.addcmul(*operands).stride()
        return torch.add(operands[0], operands[1] if len(operands) > 1 else 1).stride()

    return law


def transformed(name: str) -> Law:
    """MKL is given a batch of signals: the dims that are kept, widest stride first, and in each signal the transformed dims.

    The latter widest stride first as well, but for the last one of a transform between real and complex numbers.
    """

    def law(result: Meta, given: Given) -> tuple[int, ...]:
        x, dims = given["self"], [d % given["self"].ndim for d in given["dim"]]
        if x.device.type != "cpu" or not dims or not torch.backends.mkl.is_available():
            return result.stride
        strides = x.stride()
        if name == "_fft_c2c":
            return _batched(result.shape, strides, outermost_first(strides, dims))
        if name == "_fft_r2c":
            return _batched(result.shape, strides, [*outermost_first(strides, dims[:-1]), dims[-1]])
        if len(dims) > 1:  # all but the last as complex numbers first
            strides = _batched(x.shape, strides, outermost_first(strides, dims[:-1]))
        return _batched(result.shape, strides, dims[-1:])

    return law


def _batched(shape: tuple[int, ...], strides: tuple[int, ...], signal: list[int]) -> tuple[int, ...]:
    """Dense strides of a result whose signals lie along ``signal``, one after the other."""
    return dense_in(shape, [*outermost_first(strides, [d for d in range(len(shape)) if d not in signal]), *signal])


def as_if_empty_like(name: str) -> Law:
    """The order of dims in memory of this argument, where the result has its shape."""

    def law(result: Meta, given: Given) -> tuple[int, ...]:
        same = tuple(given[name].shape) == tuple(result.shape)
        return torch.empty_like(given[name]).stride() if same else row_major(result, given)

    return law


def of_volumes(batched: str, single: str) -> Law:
    """Channels last if ``batched`` suggests it; without a batch, if ``single`` lies in that order."""

    def law(result: Meta, given: Given) -> tuple[int, ...]:
        if len(result.shape) == 5:
            return suggested_by(batched)(result, given)
        last = given[single].unsqueeze(0).is_contiguous(memory_format=torch.channels_last_3d)
        order = torch.channels_last_3d if last else torch.contiguous_format
        return torch.empty((1, *result.shape), device="meta", memory_format=order).stride()[1:]

    return law


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=torch.int8, device="meta")


LAWS: dict[str, Law] = {
    **dict.fromkeys(
        [
            "aten::_log_softmax_backward_data",
            "aten::huber_loss_backward",
            "aten::log_sigmoid_forward",
            "aten::mse_loss_backward",
            "aten::native_layer_norm_backward",
            "aten::nll_loss2d_forward",
            "aten::normal.Tensor_Tensor",
            "aten::pow.Scalar",
            "aten::smooth_l1_loss_backward",
        ],
        row_major,
    ),
    **dict.fromkeys(
        [
            "aten::channel_shuffle",
            "aten::max_unpool2d",
            "aten::pixel_shuffle",
            *(
                f"aten::{kind}_pad{n}d{end}"
                for kind in ("reflection", "replication")
                for n in (2, 3)
                for end in ("", "_backward")
            ),
        ],
        suggested_by("self"),
    ),
    **dict.fromkeys(
        [
            "aten::native_batch_norm",
            "aten::native_batch_norm_backward",
            *(f"aten::_native_batch_norm_legit{overload}" for overload in ("", ".no_stats")),
        ],
        suggested_by("input"),
    ),
    **dict.fromkeys(
        [
            "aten::copysign.Tensor",
            "aten::div.Tensor_mode",
            "aten::floor_divide",
            "aten::logaddexp",
            "aten::logaddexp2",
            "aten::logical_and",
            "aten::logical_or",
            "aten::logical_xor",
            "aten::special_xlog1py",
            "aten::xlogy.Tensor",
        ],
        loop_over("self", "other"),
    ),
    **dict.fromkeys(
        [
            *(f"aten::hard{kind}_backward" for kind in ("sigmoid", "swish", "tanh")),
            "aten::logit_backward",
            "aten::softplus_backward",
        ],
        loop_over("grad_output", "self"),
    ),
    **dict.fromkeys(["aten::binary_cross_entropy", "aten::binary_cross_entropy_backward"], as_if_empty_like("self")),
    "aten::max_pool3d_with_indices": of_volumes("self", "self"),
    "aten::max_pool3d_with_indices_backward": of_volumes("self", "grad_output"),
    "aten::_prelu_kernel": loop_over("self", "weight"),
    "aten::_prelu_kernel_backward": loop_over("self", "weight", "grad_output"),
    "aten::elu_backward": loop_over("grad_output", "self_or_result"),
    "aten::heaviside": loop_over("self", "values"),
    "aten::native_dropout_backward": loop_over("grad_output", "mask"),
    **{f"aten::{name}": transformed(name) for name in ("_fft_c2c", "_fft_c2r", "_fft_r2c")},
}


def as_computed(name: str, results: tuple[Any, ...], given: Given) -> tuple[Any, ...]:
    """The results with the strides that a kernel gives them (``name`` with its overload)."""
    law = LAWS.get(name)
    if law is None:
        return results
    return tuple(Meta(x.shape, law(x, given), x.dtype) if isinstance(x, Meta) else x for x in results)
