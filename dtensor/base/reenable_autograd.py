"""Re-enable autograd for code that is called from inside ``__torch_dispatch__``, where its dispatch keys are excluded."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from .torch_internals import DispatchKey, ForceDispatchKeyGuard, excluded_keys, included_keys

_AUTOGRAD_KEYS = (DispatchKey.AutogradFunctionality, DispatchKey.AutogradOther, DispatchKey.ADInplaceOrView)


def reenable_autograd() -> AbstractContextManager[Any]:
    """Return a context manager in which autograd records operations, also below the autograd dispatch keys."""
    excluded = excluded_keys()
    for key in _AUTOGRAD_KEYS:
        excluded = excluded.remove(key)
    guard: AbstractContextManager[Any] = ForceDispatchKeyGuard(included_keys(), excluded)
    return guard
