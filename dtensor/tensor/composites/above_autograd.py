"""Operators of torch that look into memory or fill plain buffers above ``__torch_dispatch__``, put together in another way.

``tensor_split`` reads its tensor of sections through a pointer, and the chunked linear cross entropy without a reduction adds
its gradients up in buffers that ``torch.zeros`` made. ``matmul`` with ``out=`` writes a folded product. These happen in or
above autograd, where no rule reaches; the dispatch key that torch runs first for tensor subclasses is the place to say what
they are made of. Other subclasses get torch's own way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ...base.caches import remembered
from ...base.patches import changed
from ...base.tensor_tree import leaves
from ...base.torch_internals import (
    DispatchKey,
    DispatchKeySet,
    OpOverload,
    OpOverloadPacket,
    assert_async,
    forward_ad,
    has_kernel,
    keys_after,
)
from ...comm import communicator_of
from ...dispatch.plain_tensor_args import replicated
from ...rules.registry import lookup
from ..dtensor import DTensor
from .tls_snapshot_compat import entered

_KEY = "PythonTLSSnapshot"
BELOW = keys_after(DispatchKey.PythonTLSSnapshot)
_LIBRARIES: list[torch.library.Library] = []  # what they declare lasts as long as they do
GOES_ON = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)  # from here an operator that is no composite, too


def undecomposed() -> None:
    """Have operators that have a rule served by it where torch has a compiler's Python take them apart above autograd: into plain
    constants (the weights of a bilinear interpolation) beside DTensors."""
    if not GOES_ON:
        return
    for packet in list(vars(torch.ops.aten).values()):  # those that somebody has asked for, as who has Python for them did
        for operator in list(vars(packet).values()) if isinstance(packet, OpOverloadPacket) else ():
            if not isinstance(operator, OpOverload) or DispatchKey.Autograd not in operator.py_kernels:
                continue
            if not has_kernel(operator.name(), _KEY):
                _served_below(operator)


def _served_below(operator: Any) -> None:
    def run(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        below = keys & BELOW
        if any(isinstance(x, DTensor) for x in args) and lookup(operator) is not None:
            below = below.remove(DispatchKey.PythonDispatcher)
        return operator.redispatch(below, *args, **kwargs)

    implemented(operator.name(), run)


def recomposed(name: str, function: Callable[..., Any]) -> None:
    """Run ``function`` where a DTensor is among the arguments; else, or where it answers NotImplemented, torch's own way.

    The operator may be defined later, or never (older torch).
    """

    def run(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        if (args and type(args[0]) is DTensor) or any(isinstance(x, DTensor) for x in leaves([*args, *kwargs.values()])):
            result = function(*args, **kwargs)
            if result is not NotImplemented:
                return result
        going_on, below = overload_named(name).redispatch, keys & BELOW
        alone = GOES_ON or has_kernel(name, "CompositeImplicitAutograd")
        return going_on(below, *args, **kwargs) if alone else entered(going_on, below, *args, **kwargs)

    implemented(name, run)


@remembered(1024)
def overload_named(name: str) -> Any:
    """The operator of this full name, ``"aten::lstm.input"``."""
    namespace, _, full = name.partition("::")
    packet, _, overload = full.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def implemented(name: str, run: Callable[..., Any]) -> None:
    namespace, _, full = name.partition("::")
    library = torch.library.Library(namespace, "IMPL")
    library.impl(full, run, _KEY, with_keyset=True)
    _LIBRARIES.append(library)
    changed("dispatch key PythonTLSSnapshot")


def matmul_into(x: Tensor, y: Tensor, *, out: Tensor) -> Any:
    """Torch folds batch dims into rows and hands ``out`` to a product of another shape."""
    recorded = torch.is_grad_enabled() and any(t.requires_grad for t in (x, y, out))  # which torch refuses
    if max(x.ndim, y.ndim) > 2 and not recorded:
        product = torch.matmul(x, y)
        if out.dtype == product.dtype:
            return torch.ops.aten.clone.out(product, out=out)
    return NotImplemented


def fill_diagonal(x: Any, value: Any, wrap: bool = False) -> Any:
    """Torch goes through memory from where the storage of the wrapper begins, also in views that begin elsewhere."""
    if x.ndim < 2 or len(set(x.shape)) > 1 < x.ndim - 1:
        return NotImplemented  # torch says what is wrong
    height, width = x.shape[0], x.shape[-1]
    wrapped = range(width + 1, height, width + 1) if wrap and x.ndim == 2 and x.is_contiguous() else ()
    for start in (0, *wrapped):
        line = x[start:] if start else x
        for _ in range(x.ndim - 1):
            line = line.diagonal(0, 0, 1)
        line.fill_(value)
    if wrap and x.ndim == 2 and not x.is_contiguous() and height > width + 1:  # past the ends of rows, as torch does
        count = (x.numel() + width) // (width + 1) - width
        x[width + 1 :].as_strided((count,), (sum(x.stride()),)).fill_(value)
    return x


def scattered_diagonal(x: Tensor, src: Tensor, *where: Any, **named: Any) -> Any:
    """Real numbers on the diagonal of complex ones, as in the gradient of ``eigh``: torch forgets that theirs is real."""
    if not x.is_complex() or src.is_complex():
        return NotImplemented
    return torch.diagonal_scatter(x, src.to(x.dtype), *where, **named)


def tensor_split(x: Tensor, sections: Tensor, dim: int = 0) -> Any:
    """The sections are numbers that all ranks read."""
    if sections.ndim > 1 or sections.dtype is not torch.int64:
        return NotImplemented  # torch says what is wrong
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
    """One loss per sample, computed in the accumulator's dtype; the logits are whole, but each rank holds its shard of them."""
    logits = F.linear(x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    scale = None if class_weight is None else class_weight.detach().to(dtype)  # torch gives it no gradient
    return F.cross_entropy(logits, target, scale, ignore_index=ignore_index, reduction="none").to(x.dtype)


def without_terms(x: Any) -> Any:
    if not isinstance(x, DTensor) or not any(x.layout.partials):
        return x
    return x.redistribute(placements=x.layout.reduced().placements)


def on_reduced(name: str) -> None:
    """On reduced operands: where ``r`` comes in terms, ``max(s) * r`` is rounded otherwise, and then compared."""

    def run(*args: Any, **kwargs: Any) -> Any:
        given = {key: value if key == "out" else without_terms(value) for key, value in kwargs.items()}
        whole = [without_terms(value) for value in args]
        if all(new is old for new, old in zip((*whole, *given.values()), (*args, *kwargs.values()), strict=True)):
            return NotImplemented
        packet, _, overload = name.partition(".")
        return getattr(getattr(torch.ops.aten, packet), overload)(*whole, **given)

    recomposed(f"aten::{name}", run)


def into(name: str) -> None:
    """``out=`` of an operator whose kernel fills further tensors, which it makes plain: the results are copied."""
    packet, _, overload = name.partition(".")
    base = getattr(torch.ops.aten, packet)
    outs = [argument.name for argument in getattr(base, overload)._schema.arguments if argument.is_out]

    def run(*args: Any, **kwargs: Any) -> Any:
        given = [kwargs.pop(out) for out in outs]
        if not all(isinstance(out, DTensor) for out in given):
            return NotImplemented
        made = base(*args, **kwargs)
        values = made if isinstance(made, (list, tuple)) else [made]
        written = [_written(value, out) for value, out in zip(values, given, strict=True)]
        return tuple(written) if len(written) > 1 else written[0]

    recomposed(f"aten::{name}", run)


def _written(value: Any, out: Tensor) -> Tensor:
    """``out`` with the value; of another shape it lies in memory as the value does."""
    resized = out.shape != value.shape
    torch.ops.aten.clone.out(value, out=out)
    if resized and out.stride() != value.stride():
        out.data = value
    return out


def rank_into(*args: Any, out: Tensor, **kwargs: Any) -> Tensor:
    """Torch forgets ``out`` where the matrix is of a subclass."""
    count = torch.ops.aten.linalg_matrix_rank(*args, **kwargs)
    if isinstance(out, DTensor) and not isinstance(count, DTensor):  # of matrices without elements torch makes zeros
        count = replicated(count, out._layout.mesh)
    return torch.sum(count.unsqueeze(-1), -1, out=out)


def one_hot(x: Any, num_classes: int = -1) -> Any:
    """Row-major, in whatever order the labels lie. Where they are a subclass torch compares them with a range and no longer looks
    whether they are inside, which each rank does here with its own.
    """
    if x.dtype is not torch.int64:
        return NotImplemented
    whole = x._layout.reduced()
    if not x.is_contiguous() or whole is not x._layout:
        return F.one_hot(x.contiguous().redistribute(placements=whole.placements), num_classes)
    if not x.numel() and num_classes <= 0:
        raise RuntimeError("Can not infer total number of classes from empty tensor.")
    if x.numel():
        communicator_of(whole.mesh).map(_are_classes, x._local, num_classes)
    count = num_classes if num_classes > 0 else int(x.max()) + 1
    classes = torch.arange(count, dtype=x.dtype, device=x.device)
    return (x.unsqueeze(-1) == replicated(classes, whole.mesh)).long()


def _are_classes(member: int, labels: Tensor, num_classes: int) -> None:
    assert_async((labels >= 0).all(), "Class values must be non-negative.")
    if num_classes != -1:
        assert_async((labels < num_classes).all(), "Class values must be smaller than num_classes.")


class Product(torch.autograd.Function):
    """The product along ``dim`` (None: of all elements), with the gradient that plain tensors get.

    Where no element is zero that is the product over each element; torch takes products of the others for subclasses, which
    differ beside NaN and infinity.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int | None, keepdim: bool) -> Tensor:
        result = x.prod() if dim is None else x.prod(dim, keepdim)
        ctx.save_for_backward(x, result)
        ctx.along = dim, keepdim
        ctx.set_materialize_grads(False)
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None, None
        x, result = ctx.saved_tensors
        dim, keepdim = ctx.along
        if dim is not None and not keepdim and x.ndim:
            grad, result = grad.unsqueeze(dim), result.unsqueeze(dim)
        if not x.ndim or not x.numel():
            return grad.expand(x.shape), None, None
        zeros = (x == 0).sum()
        over_each = grad * (result / torch.where(zeros == 0, x, 1)).conj()
        if dim is None:
            of_others = (grad * others(x.reshape(-1), 0).conj()).view(x.shape)
            if not torch.is_grad_enabled():  # else they have gradients, which torch keeps
                of_others = torch.where(zeros > 1, torch.zeros_like(x), of_others)
        else:
            of_others = grad * others(x, dim).conj()
        return torch.where(zeros == 0, over_each, of_others), None, None


def others(x: Tensor, dim: int) -> Tensor:
    """For each element the product of the others along ``dim``."""
    size = x.shape[dim]
    one = torch.ones_like(x.narrow(dim, 0, 1))
    before = torch.cat([one, x.narrow(dim, 0, size - 1)], dim).cumprod(dim)
    after = torch.cat([one, x.narrow(dim, 1, size - 1).flip(dim)], dim).cumprod(dim).flip(dim)
    return before * after


def product(x: Tensor, dim: int | None = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    recorded = torch.is_grad_enabled() and x.requires_grad and forward_ad._current_level < 0
    if not recorded:
        return NotImplemented
    wanted = x if dtype is None else x.to(dtype)
    return Product.apply(wanted, dim, keepdim) if wanted.requires_grad else NotImplemented


class RealTransform(torch.autograd.Function):
    """A Fourier transform of real values. In the gradient of half a spectrum torch fills the other half in a plain buffer."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: list[int], normalization: int) -> Tensor:
        ctx.of = x.shape[dim[-1]], dim, normalization
        ctx.set_materialize_grads(False)
        return torch.ops.aten._fft_r2c(x, dim, normalization, True)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return None, None, None
        size, dim, normalization = ctx.of
        behind = [0, 0] * (grad.ndim - 1 - dim[-1] % grad.ndim) + [0, size - grad.shape[dim[-1]]]
        return torch.ops.aten._fft_c2c(F.pad(grad, behind), dim, normalization, False).real, None, None


def real_transform(x: Tensor, dim: list[int], normalization: int, onesided: bool) -> Any:
    recorded = torch.is_grad_enabled() and x.requires_grad and forward_ad._current_level < 0
    return RealTransform.apply(x, dim, normalization) if onesided and recorded else NotImplemented


_FILLING = (
    "msort.out",
    "log_sigmoid.out",
    "linalg_det.out",
    "linalg_cholesky.out",
    "linalg_eigvalsh.out",
    "linalg_ldl_factor.out",
    "linalg_lu_factor.out",
    "linalg_inv.out",
    "inverse.out",
    "linalg_matrix_power.out",
    "matrix_power.out",
    "linalg_slogdet.out",
    "slogdet.out",
    "linalg_svdvals.out",
)
if GOES_ON:
    recomposed("aten::prod", product)
    recomposed("aten::prod.dim_int", product)
    recomposed("aten::_fft_r2c", real_transform)
    recomposed("aten::diagonal_scatter", scattered_diagonal)
recomposed("aten::one_hot", one_hot)
recomposed("aten::matmul.out", matmul_into)
recomposed("aten::fill_diagonal_", fill_diagonal)
recomposed("aten::tensor_split.tensor_indices_or_sections", tensor_split)
for _name in _FILLING:
    into(_name)
recomposed("torch_nn::_linear_cross_entropy_batch_chunked_no_reduction", linear_cross_entropy)
for _overload in ("tol_tensor", "atol_rtol_tensor"):
    on_reduced(f"linalg_matrix_rank.{_overload}")
for _overload in ("out", "out_tol_tensor", "atol_rtol_tensor_out", "atol_rtol_float_out"):
    recomposed(f"aten::linalg_matrix_rank.{_overload}", rank_into)
