"""DTensors whose local is still on its way."""

from __future__ import annotations

from typing import Any

from ..base.torch_internals import make_wrapper_subclass
from ..dispatch.wrapping import install_pending
from ..layout.layout import Layout
from .dtensor import DTensor

_make = make_wrapper_subclass


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

    @property
    def _local(self) -> Any:
        made: Any = self
        arrived, layout = made._pending.wait(), made._layout
        del made._pending
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
