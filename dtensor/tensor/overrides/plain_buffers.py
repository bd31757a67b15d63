"""Plain buffers: operators that torch computes through pointers or plain buffers above ``__torch_dispatch__``, written anew.

``tensor_split`` reads its tensor of sections through a pointer. The chunked linear cross entropy without a reduction adds its
gradients up in buffers of ``torch.zeros``. ``matmul`` with ``out=`` writes a flattened product. Dispatch does not see these
steps, so each function here computes the operator of DTensors by operators that dispatch sees. A function returns
NotImplemented where torch's own kernel is right. :mod:`.table` says which operator runs which function.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...base.torch_internals import assert_async, forward_ad
from ...comm.map_ranks import communicator_of
from ...dispatch import replicate_plain
from ..dtensor import DTensor
from .register import overload_named


def matmul_out(x: Tensor, y: Tensor, *, out: Tensor) -> Any:
    """Compute ``matmul`` and copy the product into ``out``, where torch would pass ``out`` to a product of another shape."""
    needs_grad = torch.is_grad_enabled() and any(t.requires_grad for t in (x, y, out))  # torch raises for these
    if max(x.ndim, y.ndim) > 2 and not needs_grad:
        product = torch.matmul(x, y)
        if out.dtype == product.dtype:
            return torch.ops.aten.clone.out(product, out=out)
    return NotImplemented


def fill_diagonal(x: Any, value: Any, wrap: bool = False) -> Any:
    """Fill the diagonals of ``x`` through views of it: torch writes from the start of the storage instead."""
    if x.ndim < 2 or len(set(x.shape)) > 1 < x.ndim - 1:
        return NotImplemented  # torch raises
    height, width = x.shape[0], x.shape[-1]
    wrapped = range(width + 1, height, width + 1) if wrap and x.ndim == 2 and x.is_contiguous() else ()
    for start in (0, *wrapped):
        diagonal = x[start:] if start else x
        for _ in range(x.ndim - 1):
            diagonal = diagonal.diagonal(0, 0, 1)
        diagonal.fill_(value)
    if wrap and x.ndim == 2 and not x.is_contiguous() and height > width + 1:  # past the ends of rows, like torch
        count = (x.numel() + width) // (width + 1) - width
        x[width + 1 :].as_strided((count,), (sum(x.stride()),)).fill_(value)
    return x


def diagonal_scatter(x: Tensor, src: Tensor, *offset_and_dims: Any, **options: Any) -> Any:
    """Call ``diagonal_scatter`` with ``src`` converted to the complex dtype of ``x``, as the gradient of ``eigh`` needs it."""
    if not x.is_complex() or src.is_complex():
        return NotImplemented
    return torch.diagonal_scatter(x, src.to(x.dtype), *offset_and_dims, **options)


def tensor_split(x: Tensor, sections: Tensor, dim: int = 0) -> Any:
    """Call ``tensor_split`` with a tensor of sections read as Python numbers on all ranks."""
    if sections.ndim > 1 or sections.dtype is not torch.int64:
        return NotImplemented  # torch raises
    return torch.tensor_split(x, sections.tolist(), dim)


def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    target: Tensor,
    bias: Tensor | None,
    class_weight: Tensor | None,
    ignore_index: int,
    chunk_size: int,
    policy: str,
    dtype: torch.dtype,
) -> Tensor:
    """Return one loss per sample, computed in the accumulation dtype from all logits at once, without chunks.

    The logits keep the placements of the product: each rank has its shard of them.
    """
    logits = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    class_scale = None if class_weight is None else class_weight.detach().to(dtype)  # it gets no gradient in torch either
    return F.cross_entropy(logits, target, class_scale, ignore_index=ignore_index, reduction="none").to(x.dtype)


def _reduce_partials(x: Any) -> Any:
    """Return a DTensor without partial placements; all other values as they are."""
    if not isinstance(x, DTensor) or not any(x.layout.partials):
        return x
    return x.redistribute(placements=x.layout.reduced().placements)


def on_reduced_operands(name: str) -> Callable[..., Any]:
    """Return an override that reduces partial operands before it calls the operator ``name``.

    With a partial tolerance, a product such as ``max(s) * rtol`` is rounded differently before it is compared.
    """

    def run_reduced(*args: Any, **kwargs: Any) -> Any:
        """Call the operator with partial operands reduced. Return NotImplemented if none is partial."""
        new_kwargs = {key: value if key == "out" else _reduce_partials(value) for key, value in kwargs.items()}
        new_args = [_reduce_partials(value) for value in args]
        if all(new is old for new, old in zip((*new_args, *new_kwargs.values()), (*args, *kwargs.values()), strict=True)):
            return NotImplemented
        return overload_named(name)(*new_args, **new_kwargs)

    return run_reduced


def copied_into_out(name: str) -> Callable[..., Any]:
    """Return an override that computes the operator ``name`` without ``out=``, and copies the results into ``out``.

    Torch's kernels of these operators fill further tensors, which they make plain.
    """
    packet_name, _, overload = name.removeprefix("aten::").partition(".")
    packet = getattr(torch.ops.aten, packet_name)
    out_names = [argument.name for argument in getattr(packet, overload)._schema.arguments if argument.is_out]

    def run_and_copy_into_out(*args: Any, **kwargs: Any) -> Any:
        """Compute the operator without ``out=``, and copy the results into DTensors."""
        outs = [kwargs.pop(out) for out in out_names]
        if not all(isinstance(out, DTensor) for out in outs):
            return NotImplemented
        results = packet(*args, **kwargs)
        values = results if isinstance(results, (list, tuple)) else [results]
        written = [_copy_into(value, out) for value, out in zip(values, outs, strict=True)]
        return tuple(written) if len(written) > 1 else written[0]

    return run_and_copy_into_out


def _copy_into(value: Any, out: Tensor) -> Tensor:
    """Copy a result into ``out``, resized to its shape and strides if the shapes differ, and return ``out``."""
    resized = out.shape != value.shape
    torch.ops.aten.clone.out(value, out=out)
    if resized and out.stride() != value.stride():
        out.data = value
    return out


def matrix_rank_out(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
    """Compute ``matrix_rank`` into ``out``, which torch ignores if the matrix is a tensor subclass."""
    ranks = torch.ops.aten.linalg_matrix_rank(*args, **kwargs)
    if isinstance(out, DTensor) and not isinstance(ranks, DTensor):  # for matrices without elements torch makes plain zeros
        ranks = replicate_plain(ranks, out._layout.mesh)
    return torch.sum(ranks.unsqueeze(-1), -1, out=out)


def one_hot(x: Any, num_classes: int = -1) -> Any:
    """Return one-hot rows of the labels ``x`` in row-major order; each rank checks the range of its labels.

    For a tensor subclass torch compares labels with a range and does not check their bounds. Here each rank checks its own.
    """
    if x.dtype is not torch.int64:
        return NotImplemented
    reduced = x._layout.reduced()
    if not x.is_contiguous() or reduced is not x._layout:
        return F.one_hot(x.contiguous().redistribute(placements=reduced.placements), num_classes)
    if not x.numel() and num_classes <= 0:
        raise RuntimeError("Can not infer total number of classes from empty tensor.")
    if x.numel():
        communicator_of(reduced.mesh).map(_check_labels, x._local, num_classes)
    class_count = num_classes if num_classes > 0 else int(x.max()) + 1
    classes = torch.arange(class_count, dtype=x.dtype, device=x.device)
    return (x.unsqueeze(-1) == replicate_plain(classes, reduced.mesh)).long()


def _check_labels(member: int, labels: Tensor, num_classes: int) -> None:
    """Assert, with torch's message, that the labels of one rank are in the range of ``num_classes``."""
    assert_async((labels >= 0).all(), "Class values must be non-negative.")
    if num_classes != -1:
        assert_async((labels < num_classes).all(), "Class values must be smaller than num_classes.")


class _Product(torch.autograd.Function):
    """The product along ``dim`` (None: of all elements), with the gradient of plain tensors.

    If no element is zero, this gradient is the product divided by each element. For subclasses torch multiplies the other
    elements instead, which gives other values for NaN and infinity.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
        """Compute the product, and save what :meth:`backward` needs."""
        result = x.prod() if dim is None else x.prod(dim, keepdim)
        ctx.save_for_backward(x, result)
        ctx.options = dim, keepdim
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """Return the gradient of ``prod`` by division, or by products of the other elements where some are zero."""
        if grad is None:
            return None, None, None
        x, result = ctx.saved_tensors
        dim, keepdim = ctx.options
        if dim is not None and not keepdim and x.ndim:
            grad, result = grad.unsqueeze(dim), result.unsqueeze(dim)
        if not x.ndim or not x.numel():
            return grad.expand(x.shape), None, None
        zeros = (x == 0).sum()
        by_division = grad * (result / torch.where(zeros == 0, x, 1)).conj()
        if dim is None:
            by_products = (grad * _products_of_others(x.reshape(-1), 0).conj()).view(x.shape)
            if not torch.is_grad_enabled():  # with gradients enabled, torch keeps the products: they have gradients
                by_products = torch.where(zeros > 1, torch.zeros_like(x), by_products)
        else:
            by_products = grad * _products_of_others(x, dim).conj()
        return torch.where(zeros == 0, by_division, by_products), None, None


def _products_of_others(x: Tensor, dim: int) -> Tensor:
    """Return for each element the product of all other elements along ``dim``."""
    size = x.shape[dim]
    one = torch.ones_like(x.narrow(dim, 0, 1))
    before = torch.cat([one, x.narrow(dim, 0, size - 1)], dim).cumprod(dim)
    after = torch.cat([one, x.narrow(dim, 1, size - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    return before * after


def _records_backward(x: Tensor) -> bool:
    """Return True if autograd records operations on ``x`` for a backward pass, and no forward-mode derivative is computed."""
    return torch.is_grad_enabled() and x.requires_grad and forward_ad._current_level < 0


def prod(x: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """Return the product of elements of ``x``, by an autograd function with the gradient formula of plain tensors."""
    if not _records_backward(x):
        return NotImplemented
    converted = x if dtype is None else x.to(dtype)
    return _Product.apply(converted, dim, keepdim) if converted.requires_grad else NotImplemented


class _RealFFT(torch.autograd.Function):
    """A Fourier transform of real values. Torch's gradient of a onesided spectrum fills the other half in a plain buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: list[int], normalization: int) -> Tensor:
        """Compute the onesided transform, and save the size of the transformed dim."""
        ctx.options = x.shape[dim[-1]], dim, normalization
        ctx.set_materialize_grads(False)
        return torch.ops.aten._fft_r2c(x, dim, normalization, True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        """Return the gradient of the real FFT: the complex FFT of the padded gradient."""
        if grad is None:
            return None, None, None
        size, dim, normalization = ctx.options
        padding = [0, 0] * (grad.ndim - 1 - dim[-1] % grad.ndim) + [0, size - grad.shape[dim[-1]]]
        return torch.ops.aten._fft_c2c(F.pad(grad, padding), dim, normalization, False).real, None, None


def fft_r2c(x: Tensor, dim: list[int], normalization: int, onesided: bool) -> Any:
    """Return the onesided transform of real values, by an autograd function that makes no plain buffer in backward."""
    return _RealFFT.apply(x, dim, normalization) if onesided and _records_backward(x) else NotImplemented
