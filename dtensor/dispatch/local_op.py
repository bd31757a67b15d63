"""The cheapest callable for the local part of an aten overload.

``torch.add(x, y)`` reaches the same kernel as ``torch.ops.aten.add.Tensor(x, y)`` at half the host time: its argument parser is
generated C++, an overload object parses its schema at run time. Used only where the function's arguments are the
overload's, in order. This is the one module that looks into ``torch._C`` for such functions.
"""

from __future__ import annotations

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
    has_kernel,
    is_key_excluded,
    linalg_functions,
    nn_functions,
    set_key_excluded,
    special_functions,
)
from ..rules.op_traits import facts_of

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
