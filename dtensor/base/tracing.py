"""Whether a program is being traced: then values are not there yet, and what is done is recorded for later."""

from __future__ import annotations

from typing import Any

from .torch_internals import DISPATCH_MODE_KEYS, FakeTensor, FunctionalTensor, infra_mode

_STAND_INS = (FakeTensor, FunctionalTensor)
_PROXY = DISPATCH_MODE_KEYS.PROXY


def has_no_values(x: Any) -> bool:
    """Whether ``x`` stands for a tensor that comes later."""
    return isinstance(x, _STAND_INS)


def is_traced(x: Any) -> bool:
    """Whether ``x`` does, or operators are being recorded for a graph."""
    return isinstance(x, _STAND_INS) or infra_mode(_PROXY) is not None
