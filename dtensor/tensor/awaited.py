"""DTensors whose local is still on its way."""

from __future__ import annotations

from typing import Any

from ..base.torch_internals import make_wrapper_subclass
from ..dispatch.wrapping import install_pending
from ..layout.layout import Layout
from .dtensor import DTensor

_make = make_wrapper_subclass


class _Awaited(DTensor):
    """A DTensor whose local is still on its way; it becomes a plain DTensor when the local is first needed."""

    _pending: Any  # in the instance dictionary: the class can change only while slots are alike

    @property
    def _local(self) -> Any:
        made: Any = self
        arrived, layout = made._pending.wait(), made._layout
        del made._pending
        made.__class__ = DTensor
        made._local, made._layout = arrived, layout
        return arrived


def _await(pending: Any, layout: Layout, like: Any) -> DTensor:
    made = _make(_Awaited, layout.shape, strides=layout.stride, dtype=layout.dtype, device=like.device)
    made._pending, made._layout = pending, layout
    return made


install_pending(_await)
