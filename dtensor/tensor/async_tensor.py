"""DTensors whose local is still on its way."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..base.torch_internals import make_wrapper_subclass
from ..dispatch.version_counters import SHARED, shared
from ..dispatch.wrap import SHOWN, install_pending
from ..layout.layout import Layout
from .dtensor import DTensor

_make = make_wrapper_subclass
_DETACH = torch.ops.aten.detach.default


class AsyncCollectiveTensor(DTensor):
    """A DTensor whose local is still on its way; it becomes a plain DTensor when the local is first needed.

    Whatever asks for the local waits, ``to_local()`` too: a local that a program holds has arrived, and a program that asks
    ``isinstance(x, AsyncCollectiveTensor)`` before it waits need not wait for one that is none.

    >>> from dtensor import AsyncCollectiveTensor, DeviceMesh, Replicate, Shard, distribute_tensor
    >>> x = distribute_tensor(torch.ones(4), DeviceMesh("cpu", 2), [Shard(0)])
    >>> y = x.redistribute(placements=[Replicate()], async_op=True)
    >>> isinstance(y, AsyncCollectiveTensor), type(y.wait()).__name__
    (True, 'DTensor')

    The communication is that of the redistribution; what it raises shows where the local is needed.
    """

    _pending: Any  # in the instance dictionary: the class can change only while slots are alike

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's stub
        if func is _DETACH and type(args[0]) is AsyncCollectiveTensor:  # the same memory, still on its way
            made = _await(args[0]._pending, args[0]._layout, args[0])
            made.__dict__[SHARED] = shared(args[0])
            if (shown := args[0].__dict__.get(SHOWN)) is not None:
                made.__dict__[SHOWN] = shown
                shown.append(weakref.ref(made))
            return made
        return super().__torch_dispatch__(func, types, args, kwargs)

    @property
    def _local(self) -> Any:
        made: Any = self
        arrived, layout = made._pending.wait(), made._layout
        del made._pending
        made.__dict__.pop(SHOWN, None)
        made.__class__ = DTensor
        made._local, made._layout = arrived, layout
        return arrived

    def wait(self) -> DTensor:
        """Itself, arrived."""
        self._local  # noqa: B018  it waits
        return self


def _await(pending: Any, layout: Layout, like: Any) -> DTensor:
    made = _make(AsyncCollectiveTensor, layout.shape, strides=layout.stride, dtype=layout.dtype, device=like.device)
    made._pending, made._layout = pending, layout
    return made


install_pending(_await)
