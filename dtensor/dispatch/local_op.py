"""The cheapest callable for the local part of an aten overload.

``torch.add(x, y)`` reaches the same kernel as ``torch.ops.aten.add.Tensor(x, y)`` at half the host time: its argument parser is
generated C++, an overload object parses its schema at run time. Used only where the function's arguments are the
overload's, in order. This is the one module that looks into ``torch._C`` for such functions.
"""

from __future__ import annotations

from collections.abc import Callable
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch

from ..base.caches import remembered
from ..base.torch_internals import (
    BelowAutograd,
    TensorBase,
    fft_functions,
    functorch_active,
    is_functorch_wrapped,
    is_legacy_batched,
    linalg_functions,
    nn_functions,
    special_functions,
)
from ..errors import UnsupportedOperationError

# Their Python signatures differ from the schema (argument order, packed lists, defaults), or they mean something else.
_DIFFERENT = frozenset(
    [
        "arange",
        "full",
        "empty",
        "zeros",
        "ones",
        "rand",
        "randn",
        "randint",
        "normal",
        "linspace",
        "logspace",
        "scalar_tensor",
        "tensor",
        "empty_like",
        "full_like",
        "index_put",
        "index_put_",
        "_index_put_impl_",
        "_unsafe_index",
        "_unsafe_index_put",
        "where",
        "index",
        "norm",
        "split",
        "to",
        "_to_copy",
        "set_",
        "data",
        "requires_grad_",
        "is_same_size",
    ]
)


def _slice(x: torch.Tensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> torch.Tensor:
    """``aten::slice``, which torch offers as indexing only."""
    if dim == 0:
        return x[start:end:step]
    return x[_sliced(dim % x.ndim, start, end, step)]


@remembered(4096)
def _sliced(dim: int, start: int | None, end: int | None, step: int) -> tuple[slice, ...]:
    return (*(slice(None),) * dim, slice(start, end, step))


def recorded(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for arguments that are DTensors: without a search for what a functorch transform left behind, which
    wraps plain tensors only. Inside a transform it is refused."""
    alone = super(torch.autograd.Function, function).apply  # type: ignore[misc]  # the C++ one

    def apply(*args: Any) -> Any:
        refuse_transforms("redistributing a DTensor or taking its pieces")
        return alone(*args)

    return apply


def refuse_transforms(what: str) -> None:
    """Raises UnsupportedOperationError inside a transform of ``torch.func``: it hides DTensors behind tensors of its own."""
    if functorch_active():
        raise UnsupportedOperationError(
            f"{what} inside torch.func.grad, vjp, jvp or vmap is not supported: they hide what is distributed. Operators on "
            "DTensors do run there, so a module without styles or units does (see distribute_module); otherwise differentiate by "
            "torch.autograd.grad, torch.autograd.functional or torch.autograd.forward_ad"
        )


def is_wrapped(x: torch.Tensor) -> bool:
    """Whether a transform (``vmap``, also the one of ``gradcheck``) hides what this tensor is."""
    return is_functorch_wrapped(x) or is_legacy_batched(x)


below_autograd = BelowAutograd  # a context in which torch functions record nothing, nor look whether to

_HOMES = (torch, nn_functions, linalg_functions, fft_functions, special_functions)
_SPELLED = {"aten::slice": _slice}


@remembered(8192)
def local_function(func: Any) -> Any:
    """A callable with the signature and meaning of overload ``func``, preferably generated C++."""
    schema = func._schema
    namespace, _, name = schema.name.partition("::")
    if schema.name in _SPELLED and not any(a.is_out for a in schema.arguments):
        return _SPELLED[schema.name]
    if namespace != "aten" or name in _DIFFERENT or any(a.is_out or a.name == "reduction" for a in schema.arguments):
        return func  # the functions take a reduction that is left out for "none", the overloads for "mean"
    if name.endswith("_") and not name.startswith("_"):
        method = getattr(TensorBase, name, None)
        return method if isinstance(method, MethodDescriptorType) else func
    for home in _HOMES:
        function = getattr(home, name, None)
        if isinstance(function, BuiltinFunctionType):
            return function
    method = getattr(TensorBase, name, None)
    return method if isinstance(method, MethodDescriptorType) and schema.arguments[0].name == "self" else func
