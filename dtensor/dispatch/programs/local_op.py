"""Local operator: the cheapest callable for the local part of an aten overload, and the dispatch keys that it runs under.

``torch.add(x, y)`` reaches the same kernel as ``torch.ops.aten.add.Tensor(x, y)`` at half the host time: its argument parser is
generated C++, while an overload object parses its schema at run time. The function is used only where its arguments are those of
the overload, in order. This is the one module that looks into ``torch._C`` for such functions.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from types import BuiltinFunctionType, MethodDescriptorType
from typing import Any, ParamSpec, TypeVar

import torch

from ...base.caches import memoize
from ...base.torch_internals import (
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
from ...layout.layout import Layout
from ...propagation.propagate import CallPlan
from ...rules.op_traits import traits_of

below_autograd = BelowAutograd  # a context in which torch functions record nothing, nor look whether to

P = ParamSpec("P")
T = TypeVar("T")
_AUTOGRAD, _CONJUGATE, _NEGATIVE = DispatchKey.AutogradFunctionality, DispatchKey.Conjugate, DispatchKey.Negative
_FUNCTION_MODULES = (torch, nn_functions, linalg_functions, fft_functions, special_functions)
_is_excluded, _set_excluded = is_key_excluded, set_key_excluded


@memoize(8192)
def local_function(func: Any) -> Any:
    """Return the callable for local tensors that means the overload ``func``: a generated C++ function where there is one."""
    callable_ = named_function_of(func)
    if callable_ is func and type(func) is OpOverload:
        callable_ = func._op  # the function that calling the overload calls
    return _decompose_under_modes(callable_) if has_kernel(func.name(), "CompositeImplicitAutograd") else callable_


def _decompose_under_modes(composite: Any) -> Any:
    """Wrap a composite operator so that dispatch modes see the operators that it is composed of, not the composite."""

    @wraps(composite)
    def run_decomposed(*args: Any, **kwargs: Any) -> Any:
        """Run the composite operator; under dispatch modes, include autograd's key, which decomposes it."""
        if not count_dispatch_modes() or not _is_excluded(_AUTOGRAD):
            return composite(*args, **kwargs)
        _set_excluded(_AUTOGRAD, False)
        try:
            with torch.no_grad():
                return composite(*args, **kwargs)
        finally:
            _set_excluded(_AUTOGRAD, True)

    return run_decomposed


def named_function_of(func: Any) -> Any:
    """Return a function that source code can name and that equals the overload ``func``; ``func`` itself if there is none."""
    schema, spelled = func._schema, traits_of(func).local_function
    namespace, _, name = schema.name.partition("::")
    if spelled is None or namespace != "aten" or any(a.is_out or a.name == "reduction" for a in schema.arguments):
        return func  # without a reduction argument the functions take "none", the overloads "mean"
    if len(schema.returns) > 1 and any("Tensor" not in str(result.type) for result in schema.returns):
        return func  # next to tensors, the functions return a number as a tensor
    if spelled is not False:
        return spelled
    if name.endswith("_") and not name.startswith("_"):
        method = getattr(TensorBase, name, None)
        return method if isinstance(method, MethodDescriptorType) else func
    for module in _FUNCTION_MODULES:
        function = getattr(module, name, None)
        if isinstance(function, BuiltinFunctionType):
            return function
    method = getattr(TensorBase, name, None)
    return method if isinstance(method, MethodDescriptorType) and schema.arguments[0].name == "self" else func


# --- lazy conjugation ---------------------------------------------------------------------------------------------------
# [Note: Lazy conjugation]
# ``x.conj()`` only sets a bit, which a dispatch key above the kernels resolves. ``__torch_dispatch__`` runs below that key, and
# so do the local operators of a plan. An operator that is composed of others (``linalg_pinv``) would lose the bits that its own
# parts set. So the keys are included again while a plan with complex numbers runs.
def has_complex(plan: CallPlan) -> bool:
    """Return True if an operand or a result of the plan is complex."""
    for group in (plan.call.operands, plan.results, *plan.results):
        for layout in group if isinstance(group, (list, tuple)) else ():
            if isinstance(layout, Layout) and layout.is_complex:
                return True
    return False


def resolve_conjugation(run: Callable[P, T]) -> Callable[P, T]:
    """Wrap ``run`` so that operators inside resolve lazy conjugation and negation: see [Note: Lazy conjugation]."""

    def run_resolved(*args: P.args, **kwargs: P.kwargs) -> Any:
        """Run with the dispatch keys included that resolve conjugate and negative views, as above autograd."""
        conjugate, negative = _is_excluded(_CONJUGATE), _is_excluded(_NEGATIVE)
        _set_excluded(_CONJUGATE, False)
        _set_excluded(_NEGATIVE, False)
        try:
            return run(*args, **kwargs)
        finally:
            _set_excluded(_CONJUGATE, conjugate)
            _set_excluded(_NEGATIVE, negative)

    return run_resolved
