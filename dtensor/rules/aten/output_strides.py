"""Output strides of operators for which torch's inference without data differs from its CPU kernels.

There are four rules. Strides are dense in row-major order, or those of the memory format that an argument suggests, or those of
an element-by-element loop over the operands, or those of the batches of signals of a Fourier transform.
"""

from __future__ import annotations

import torch

from ...base.memory_order import dense_stride, dims_outermost_first
from ...base.torch_internals import suggest_memory_format
from ..call import Meta
from ..op_traits import MetaArguments, StrideFunction, declare_traits


def row_major(result: Meta, arguments: MetaArguments) -> tuple[int, ...]:
    return torch.empty(result.shape, device="meta").stride()


def make_suggested_strides(name: str) -> StrideFunction:
    """Return a stride function: channels-last if argument ``name`` suggests that memory format, else row-major."""

    def suggested_strides(result: Meta, arguments: MetaArguments) -> tuple[int, ...]:
        """Return the result's strides in the memory format that the argument suggests."""
        if len(result.shape) != arguments[name].ndim:  # a result of another rank: statistics, gradients of weights
            return row_major(result, arguments)
        return torch.empty(result.shape, device="meta", memory_format=suggest_memory_format(arguments[name])).stride()

    return suggested_strides


def make_iterator_strides(*names: str) -> StrideFunction:
    """Return a stride function: the strides of TensorIterator (torch's element-by-element loop) over these arguments."""

    def loop_strides(result: Meta, arguments: MetaArguments) -> tuple[int, ...]:
        """Return the strides that ``add`` or ``addcmul`` infers for operands of these shapes and strides."""
        operands = [_as_bytes(x) for x in (arguments[name] for name in names) if isinstance(x, torch.Tensor)]
        if len(operands) == 3:
            return torch.addcmul(*operands).stride()
        return torch.add(operands[0], operands[1] if len(operands) > 1 else 1).stride()

    return loop_strides


def make_fft_strides(name: str) -> StrideFunction:
    """Return a stride function: the strides of the results of MKL's Fourier transforms on CPU.

    MKL gets a batch of signals: first the untransformed dims, widest stride first, then in each signal the transformed dims.
    These are in the order of strides as well, except the last one of a transform between real and complex numbers.
    """

    def mkl_strides(result: Meta, arguments: MetaArguments) -> tuple[int, ...]:
        """Return the result's strides: untransformed dims outside, transformed dims inside."""
        x, dims = arguments["self"], [d % arguments["self"].ndim for d in arguments["dim"]]
        if x.device.type != "cpu" or not dims or not torch.backends.mkl.is_available():
            return result.stride
        strides = x.stride()
        if name == "_fft_c2c":
            return _batched_strides(result.shape, strides, dims_outermost_first(strides, dims))
        if name == "_fft_r2c":
            return _batched_strides(result.shape, strides, [*dims_outermost_first(strides, dims[:-1]), dims[-1]])
        if len(dims) > 1:  # the other dims are transformed first, as complex numbers
            strides = _batched_strides(x.shape, strides, dims_outermost_first(strides, dims[:-1]))
        return _batched_strides(result.shape, strides, dims[-1:])

    return mkl_strides


def _batched_strides(shape: tuple[int, ...], strides: tuple[int, ...], signal: list[int]) -> tuple[int, ...]:
    """Return dense strides with the dims ``signal`` innermost, and the other dims in the order of ``strides``."""
    return dense_stride(shape, [*dims_outermost_first(strides, [d for d in range(len(shape)) if d not in signal]), *signal])


def make_empty_like_strides(name: str) -> StrideFunction:
    """Return a stride function: the memory order of argument ``name`` if the result has its shape, else row-major."""

    def empty_like_strides(result: Meta, arguments: MetaArguments) -> tuple[int, ...]:
        """Return the strides of ``torch.empty_like`` of the argument, if the result has its shape; else row-major ones."""
        same = tuple(arguments[name].shape) == tuple(result.shape)
        return torch.empty_like(arguments[name]).stride() if same else row_major(result, arguments)

    return empty_like_strides


def make_volume_strides(batched: str, single: str) -> StrideFunction:
    """Return a stride function for 3d pooling: channels-last if ``batched`` suggests it; without a batch, if ``single`` does."""

    def pooled_volume_strides(result: Meta, arguments: MetaArguments) -> tuple[int, ...]:
        """Return the strides of a batch of volumes, or of a single volume."""
        if len(result.shape) == 5:
            return make_suggested_strides(batched)(result, arguments)
        last = arguments[single].unsqueeze(0).is_contiguous(memory_format=torch.channels_last_3d)
        order = torch.channels_last_3d if last else torch.contiguous_format
        return torch.empty((1, *result.shape), device="meta", memory_format=order).stride()[1:]

    return pooled_volume_strides


def _as_bytes(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.shape, x.stride(), dtype=torch.int8, device="meta")


# --- declarations -------------------------------------------------------------------------------------------------------
declare_traits(
    "huber_loss_backward log_sigmoid_forward mse_loss_backward native_layer_norm_backward normal.Tensor_Tensor "
    "normal.Tensor_float normal.float_Tensor pow.Scalar smooth_l1_loss_backward",
    strides=row_major,
)
declare_traits("channel_shuffle max_unpool2d pixel_shuffle", strides=make_suggested_strides("self"))
for _kind in ("reflection", "replication"):
    declare_traits(
        f"{_kind}_pad2d {_kind}_pad2d_backward {_kind}_pad3d {_kind}_pad3d_backward", strides=make_suggested_strides("self")
    )
declare_traits("native_batch_norm_backward", strides=make_suggested_strides("input"))
declare_traits(
    "copysign.Tensor div.Tensor_mode floor_divide.default logaddexp logaddexp2 logical_and logical_or logical_xor "
    "special_xlog1py.default xlogy.Tensor",
    strides=make_iterator_strides("self", "other"),
)
declare_traits(
    "hardsigmoid_backward hardswish_backward hardtanh_backward logit_backward softplus_backward",
    strides=make_iterator_strides("grad_output", "self"),
)
declare_traits("binary_cross_entropy_backward", strides=make_empty_like_strides("self"))
declare_traits("max_pool3d_with_indices", strides=make_volume_strides("self", "self"))
declare_traits("max_pool3d_with_indices_backward", strides=make_volume_strides("self", "grad_output"))
declare_traits("_prelu_kernel", strides=make_iterator_strides("self", "weight"))
declare_traits("_prelu_kernel_backward", strides=make_iterator_strides("self", "weight", "grad_output"))
declare_traits("elu_backward", strides=make_iterator_strides("grad_output", "self_or_result"))
declare_traits("heaviside", strides=make_iterator_strides("self", "values"))
declare_traits("native_dropout_backward", strides=make_iterator_strides("grad_output", "mask"))
