"""Register overrides: kernels that run before autograd and before torch decomposes an operator, instead of torch's.

Torch runs the dispatch key ``PythonTLSSnapshot`` first for tensors that dispatch to Python. A kernel registered there sees the
operator before autograd and before torch decomposes it. Operators without a DTensor argument go on to torch's own kernel.
The operators and their functions are listed in :mod:`.table`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from threading import local as thread_local
from typing import Any

import torch
from torch import Tensor

from ...base.caches import memoize
from ...base.patches import patch_applied
from ...base.tensor_tree import iter_tree_leaves, tensor_leaves
from ...base.torch_internals import (
    DispatchKey,
    DispatchKeySet,
    OpOverload,
    OpOverloadPacket,
    count_dispatch_modes,
    has_kernel,
    keys_after,
)
from ...rules.registry import lookup
from ..dtensor import DTensor

_KEY = "PythonTLSSnapshot"
KEYS_BELOW = keys_after(DispatchKey.PythonTLSSnapshot)
_LIBRARIES: list[torch.library.Library] = []  # torch removes the registrations of a library that is freed
HAS_REDISPATCH = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
"""Whether an operator that is not a composite can be redispatched from a kernel of this key (torch 2.13 and later)."""


@memoize(1024)
def overload_named(name: str) -> Any:
    """Return the operator overload of a full name, for example ``"aten::lstm.input"``."""
    namespace, _, full = name.partition("::")
    packet, _, overload = full.partition(".")
    return getattr(getattr(getattr(torch.ops, namespace), packet), overload or "default")


def register_kernel(name: str, kernel: Callable[..., Any]) -> None:
    """Register ``kernel(keys, *args, **kwargs)`` for an operator name. The operator may be defined later, or never."""
    namespace, _, full = name.partition("::")
    library = torch.library.Library(namespace, "IMPL")
    library.impl(full, kernel, _KEY, with_keyset=True)
    _LIBRARIES.append(library)
    patch_applied("dispatch key PythonTLSSnapshot")


def register_override(name: str, function: Callable[..., Any]) -> None:
    """Make calls of the operator ``name`` with a DTensor run ``function``, before autograd; it may return NotImplemented.

    Torch's own kernel runs for all other calls, and if ``function`` returns NotImplemented.
    """

    def call_override(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """Run the override if an argument is a DTensor; redispatch the operator otherwise, or if it returns NotImplemented."""
        if (args and type(args[0]) is DTensor) or any(
            isinstance(x, DTensor) for x in iter_tree_leaves([*args, *kwargs.values()])
        ):
            result = function(*args, **kwargs)
            if result is not NotImplemented:
                return result
        redispatch, below = overload_named(name).redispatch, keys & KEYS_BELOW
        if HAS_REDISPATCH or has_kernel(name, "CompositeImplicitAutograd"):
            return redispatch(below, *args, **kwargs)
        return call_with_snapshot(redispatch, below, *args, **kwargs)

    register_kernel(name, call_override)


def keep_operators_with_rules() -> None:
    """Stop torch.compile's Python kernels from decomposing operators that have a rule.

    These kernels run above autograd. Their decompositions make plain constants next to DTensors, for example the weights of a
    bilinear interpolation. Only operators that a program has looked up are in ``torch.ops.aten``.
    """
    if not HAS_REDISPATCH:
        return
    for packet in list(vars(torch.ops.aten).values()):
        for operator in list(vars(packet).values()) if isinstance(packet, OpOverloadPacket) else ():
            if not isinstance(operator, OpOverload) or DispatchKey.Autograd not in operator.py_kernels:
                continue
            if not has_kernel(operator.name(), _KEY):
                _skip_python_kernel(operator)


def _skip_python_kernel(operator: Any) -> None:
    """Dispatch an operator of DTensors that has a rule past the Python kernel that decomposes it."""

    def skip_decomposition(keys: DispatchKeySet, *args: Any, **kwargs: Any) -> Any:
        """Redispatch the operator, without the Python kernel if a DTensor has a rule for it."""
        below = keys & KEYS_BELOW
        if any(isinstance(x, DTensor) for x in args) and lookup(operator) is not None:
            below = below.remove(DispatchKey.PythonDispatcher)
        return operator.redispatch(below, *args, **kwargs)

    register_kernel(operator.name(), skip_decomposition)


class _PendingCalls(thread_local):
    """Calls that wait to run inside the operator ``dtensor::enter``, and their results, the innermost last."""

    def __init__(self) -> None:
        self.calls: list[Callable[[], Any]] = []
        self.results: list[Any] = []


_PENDING = _PendingCalls()
_ENTER: list[torch.library.Library] = []


def call_with_snapshot(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` inside an operator, so that torch before 2.13 has stored its thread-local dispatch state.

    Torch stores this state when an operator is called with a tensor that dispatches to Python. A kernel of our own replaces the
    kernel that stores it. So the function runs inside another operator, ``dtensor::enter``, which stores it.
    """
    has_mode, own = count_dispatch_modes() > 0, Tensor.__torch_dispatch__
    python_tensor = next((x for x in tensor_leaves([args, kwargs]) if has_mode or type(x).__torch_dispatch__ is not own), None)
    if python_tensor is None:
        return function(*args, **kwargs)
    if not _ENTER:
        library = torch.library.Library("dtensor", "FRAGMENT")
        library.define("enter(Tensor x) -> ()")
        for key in ("CompositeImplicitAutograd", "Python"):  # "Python": in inference mode
            library.impl("enter", _run_pending_call, key)
        _ENTER.append(library)
        patch_applied("torch.ops.dtensor")
    _PENDING.calls.append(partial(function, *args, **kwargs))
    torch.ops.dtensor.enter(python_tensor)
    return _PENDING.results.pop()


def _run_pending_call(x: Tensor) -> None:
    _PENDING.results.append(_PENDING.calls.pop()())
