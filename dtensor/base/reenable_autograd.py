"""What runs below autograd, shown to it again."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from .torch_internals import DispatchKey, ForceDispatchKeyGuard, excluded_keys, included_keys

_KEYS = (DispatchKey.AutogradFunctionality, DispatchKey.AutogradOther, DispatchKey.ADInplaceOrView)


def seen_by_autograd() -> AbstractContextManager[Any]:
    """A block whose operations autograd records, also where they are called from below it."""
    excluded = excluded_keys()
    for key in _KEYS:
        excluded = excluded.remove(key)
    guard: AbstractContextManager[Any] = ForceDispatchKeyGuard(included_keys(), excluded)
    return guard
