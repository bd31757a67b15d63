"""The cheapest callable for the local part of an aten overload.

``torch.add(x, y)`` reaches the same kernel as ``torch.ops.aten.add.Tensor(x, y)`` at half the host time: its argument parser is
generated C++, an overload object parses its schema at run time. Used only where the function's arguments are the
overload's, in order. This is the one module that looks into ``torch._C`` for such functions.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any

import torch

from ..base.caches import remembered
from ..base.torch_internals import (
    BelowAutograd,
    DispatchKey,
    OpOverload,
    TensorBase,
    count_dispatch_modes,
    fft_functions,
    functorch_active,
    functorch_unwrapped,
    has_kernel,
    is_functorch_batched,
    is_functorch_wrapped,
    is_key_excluded,
    is_legacy_batched,
    linalg_functions,
    nn_functions,
    set_key_excluded,
    special_functions,
)
from ..errors import UnsupportedOperationError
from ..layout.layout import Layout
from ..rules.facts import facts_of


class Transformed(torch.autograd.Function):
    """A function of DTensors that transforms of ``torch.func`` go through: with ``setup_context``, where arguments may be hidden
    (see :func:`seen`). Not ``vmap``, which hides a dim of the layout.
    """

    @staticmethod
    def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
        raise UnsupportedOperationError(_UNDER_VMAP)


def recorded(function: type[torch.autograd.Function]) -> Callable[..., Any]:
    """``function.apply`` for arguments that are DTensors: without a search for what a functorch transform left behind, which
    wraps plain tensors only. Inside a transform, torch's own, or refused if the function is not :class:`Transformed`."""
    alone = super(torch.autograd.Function, function).apply  # type: ignore[misc]  # the C++ one
    if not issubclass(function, Transformed):

        def apply(*args: Any) -> Any:
            if functorch_active():
                raise UnsupportedOperationError(
                    f"{function.__name__} inside torch.func.grad, vjp, jvp or vmap is not supported; differentiate by "
                    "torch.autograd.grad, torch.autograd.functional or torch.autograd.forward_ad"
                )
            return alone(*args)

        return apply
    within = _with_boxes(function)
    return lambda *args: within.apply(*map(_Box.of, args)) if functorch_active() else alone(*args)


class _Box:
    """A layout among arguments that torch looks through for those that override its functions: a layout does."""

    __slots__ = ("layout",)

    def __init__(self, layout: Layout) -> None:
        self.layout = layout

    @staticmethod
    def of(x: Any) -> Any:
        return _Box(x) if isinstance(x, Layout) else x


def _with_boxes(function: type[Transformed]) -> type[Transformed]:
    """The same function of boxed layouts."""

    def opened(args: Sequence[Any]) -> tuple[Any, ...]:
        return tuple(x.layout if isinstance(x, _Box) else x for x in args)

    def forward(*args: Any) -> Any:
        return function.forward(*opened(args))

    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        function.setup_context(ctx, opened(inputs), output)

    methods = {"forward": staticmethod(forward), "setup_context": staticmethod(setup_context)}
    return type(function.__name__, (function,), methods)


def seen(x: Any) -> Any:
    """What ``x`` is, where transforms of ``torch.func`` hide it: a DTensor keeps its layout there.

    Raises:
        UnsupportedOperationError: ``vmap`` does, and it is a DTensor, of one dim more; or the old one, which tells of nothing.
    """
    if hasattr(x, "_layout"):
        return x
    found, batched = x, False
    while is_functorch_wrapped(found):
        batched = batched or is_functorch_batched(found)
        found = functorch_unwrapped(found)
    if (batched and hasattr(found, "_layout")) or is_legacy_batched(found):
        raise UnsupportedOperationError(_UNDER_VMAP)
    return found


_UNDER_VMAP = (
    "redistributing a DTensor or taking its pieces inside torch.func.vmap (so also jacrev, jacfwd, hessian, and where gradients "
    "come in batches: is_grads_batched=True, vectorize=True) is not supported: vmap hides a dim, and with it how the DTensor "
    "lies. Call the module with the batch as a dim of its input, and for derivatives torch.func.jvp, vjp or grad, or "
    "torch.autograd.functional"
)


def is_wrapped(x: torch.Tensor) -> bool:
    """Whether a transform (``vmap``, also the one of ``gradcheck``) hides what this tensor is."""
    return is_functorch_wrapped(x) or is_legacy_batched(x)


below_autograd = BelowAutograd  # a context in which torch functions record nothing, nor look whether to

_AUTOGRAD = DispatchKey.AutogradFunctionality
_HOMES = (torch, nn_functions, linalg_functions, fft_functions, special_functions)


@remembered(8192)
def local_function(func: Any) -> Any:
    """A callable with the signature and meaning of overload ``func``, preferably generated C++."""
    found = spelling(func)
    if found is func and type(func) is OpOverload:
        found = func._op  # what the overload's own call calls
    return _shown_in_parts(found) if has_kernel(func.name(), "CompositeImplicitAutograd") else found


def _shown_in_parts(whole: Any) -> Any:
    """Dispatch modes are to see what a composite of plain tensors is made of: autograd takes it apart above them."""

    @wraps(whole)
    def run(*args: Any, **kwargs: Any) -> Any:
        if not count_dispatch_modes() or not is_key_excluded(_AUTOGRAD):
            return whole(*args, **kwargs)
        set_key_excluded(_AUTOGRAD, False)
        try:
            with torch.no_grad():
                return whole(*args, **kwargs)
        finally:
            set_key_excluded(_AUTOGRAD, True)

    return run


def spelling(func: Any) -> Any:
    """The same under a name that source can have: a function of torch's or ours, else the overload itself."""
    schema, spelled = func._schema, facts_of(func).spelled
    namespace, _, name = schema.name.partition("::")
    if spelled is None or namespace != "aten" or any(a.is_out or a.name == "reduction" for a in schema.arguments):
        return func  # the functions take a reduction that is left out for "none", the overloads for "mean"
    if len(schema.returns) > 1 and any("Tensor" not in str(given.type) for given in schema.returns):
        return func  # the functions give a number beside tensors as a tensor
    if spelled is not False:
        return spelled
    if name.endswith("_") and not name.startswith("_"):
        method = getattr(TensorBase, name, None)
        return method if isinstance(method, MethodDescriptorType) else func
    for home in _HOMES:
        function = getattr(home, name, None)
        if isinstance(function, BuiltinFunctionType):
            return function
    method = getattr(TensorBase, name, None)
    return method if isinstance(method, MethodDescriptorType) and schema.arguments[0].name == "self" else func
