"""Lazy conjugation and negation, carried out while local operators run.

``x.conj()`` only sets a bit, which a dispatch key above the kernels looks at. ``__torch_dispatch__`` runs below that key, and so
would the local operators of a plan: one that is composed of others (``linalg_pinv``) would lose the bits that its own parts set.
The keys are switched on again for plans with complex numbers. This is the one module that touches them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

from ..base.torch_internals import DispatchKey, is_key_excluded, set_key_excluded
from ..layout.layout import Layout
from ..propagation.propagate import Plan

P = ParamSpec("P")
T = TypeVar("T")
_CONJUGATE, _NEGATIVE = DispatchKey.Conjugate, DispatchKey.Negative
_is_off = is_key_excluded
_set_off = set_key_excluded


def is_complex(plan: Plan) -> bool:
    """Whether complex numbers take part."""
    for each in (plan.call.operands, plan.results, *plan.results):
        for layout in each if isinstance(each, (list, tuple)) else ():
            if isinstance(layout, Layout) and layout.is_complex:
                return True
    return False


def carried_out(run: Callable[P, T]) -> Callable[P, T]:
    """``run`` with lazy conjugations and negations carried out wherever an operator inside needs it."""

    def running(*args: P.args, **kwargs: P.kwargs) -> Any:
        conjugate, negative = _is_off(_CONJUGATE), _is_off(_NEGATIVE)
        _set_off(_CONJUGATE, False)
        _set_off(_NEGATIVE, False)
        try:
            return run(*args, **kwargs)
        finally:
            _set_off(_CONJUGATE, conjugate)
            _set_off(_NEGATIVE, negative)

    return running
