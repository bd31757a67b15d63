"""Strides of results where torch's own inference without data is not what its kernels do on the CPU.

Four laws: dense in row-major order whatever comes in; the memory format that an argument suggests; the order that an
element-by-element loop takes from its operands; and the batches of one-dimensional memory in which a Fourier transform is run.
"""

from __future__ import annotations

import torch

from ...base.memory_order import dense_in, outermost_first
from ...base.torch_internals import suggest_memory_format
from ..call import Meta
from ..op_traits import Given, Law, fact


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


# --- declarations -------------------------------------------------------------------------------------------------------
fact(
    "huber_loss_backward log_sigmoid_forward mse_loss_backward native_layer_norm_backward normal.Tensor_Tensor "
    "normal.Tensor_float normal.float_Tensor pow.Scalar smooth_l1_loss_backward",
    strides=row_major,
)
fact("channel_shuffle max_unpool2d pixel_shuffle", strides=suggested_by("self"))
for _kind in ("reflection", "replication"):
    fact(f"{_kind}_pad2d {_kind}_pad2d_backward {_kind}_pad3d {_kind}_pad3d_backward", strides=suggested_by("self"))
fact("native_batch_norm_backward", strides=suggested_by("input"))
fact(
    "copysign.Tensor div.Tensor_mode floor_divide.default logaddexp logaddexp2 logical_and logical_or logical_xor "
    "special_xlog1py.default xlogy.Tensor",
    strides=loop_over("self", "other"),
)
fact(
    "hardsigmoid_backward hardswish_backward hardtanh_backward logit_backward softplus_backward",
    strides=loop_over("grad_output", "self"),
)
fact("binary_cross_entropy_backward", strides=as_if_empty_like("self"))
fact("max_pool3d_with_indices", strides=of_volumes("self", "self"))
fact("max_pool3d_with_indices_backward", strides=of_volumes("self", "grad_output"))
fact("_prelu_kernel", strides=loop_over("self", "weight"))
fact("_prelu_kernel_backward", strides=loop_over("self", "weight", "grad_output"))
fact("elu_backward", strides=loop_over("grad_output", "self_or_result"))
fact("heaviside", strides=loop_over("self", "values"))
fact("native_dropout_backward", strides=loop_over("grad_output", "mask"))
