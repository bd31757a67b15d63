"""Whether a program is being traced: then values are not there yet, and what is done is recorded for later."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from .torch_internals import (
    DISPATCH_MODE_KEYS,
    FakeTensor,
    FunctionalTensor,
    WrappedConstant,
    count_dispatch_modes,
    current_dispatch_modes,
    infra_mode,
    without_modes,
)

_STAND_INS = (FakeTensor, FunctionalTensor)
_PROXY = DISPATCH_MODE_KEYS.PROXY
_TRACING = (_PROXY, DISPATCH_MODE_KEYS.FUNCTIONAL, DISPATCH_MODE_KEYS.FAKE)


def has_no_values(x: Any) -> bool:
    """Whether ``x`` stands for a tensor that comes later."""
    return isinstance(x, _STAND_INS)


def is_traced(x: Any) -> bool:
    """Whether ``x`` does, or operators are being recorded for a graph."""
    if type(x) is Tensor and not count_dispatch_modes():  # most often
        return False
    return isinstance(x, _STAND_INS) or infra_mode(_PROXY) is not None


def under_way() -> bool:
    """Whether some program is being traced here."""
    return any(infra_mode(key) is not None for key in _TRACING)


def aside() -> AbstractContextManager[Any]:
    """A block that is no part of the program that is traced, or looked at: what is computed there is computed now."""
    return without_modes() if count_dispatch_modes() and (under_way() or _looked_at()) else nullcontext()


def _looked_at() -> bool:
    return any(not getattr(mode, "sees_planning", True) for mode in current_dispatch_modes())


def constant_of_graph(x: Any) -> Any:
    """``x``; where a graph broke, torch may hand on a constant that was made in it in a wrapper of its own."""
    return x.real_obj if type(x) is WrappedConstant else x
