"""Async tensors: DTensors with a local tensor that has not arrived yet."""

from __future__ import annotations

import weakref
from typing import Any

import torch

from ..base.torch_internals import make_wrapper_subclass
from ..comm import Pending
from ..layout.layout import Layout
from ..state.shared_memory import MEMORY_STATE, memory_state_of
from ..state.wrap import BATCH_TENSORS, install_pending
from .compile_protocol import FlattenMethod, GraphConstants, flatten_dtensor, unflatten_dtensor
from .dtensor import DTensor

_make = make_wrapper_subclass
_DETACH = torch.ops.aten.detach.default


class AsyncCollectiveTensor(DTensor):
    """A DTensor with a pending redistribution. It becomes a plain DTensor when its local tensor is first needed.

    Every read of the local tensor waits, also ``to_local()``. A local tensor has arrived and is no ``AsyncCollectiveTensor``, so
    a program that tests for this class before it waits does not wait for it.

    >>> from dtensor import AsyncCollectiveTensor, DeviceMesh, Replicate, Shard, distribute_tensor
    >>> x = distribute_tensor(torch.ones(4), DeviceMesh("cpu", 2), [Shard(0)])
    >>> y = x.redistribute(placements=[Replicate()], async_op=True)
    >>> isinstance(y, AsyncCollectiveTensor), type(y.wait()).__name__
    (True, 'DTensor')

    The communication is that of the redistribution. Its errors are raised where the local tensor is needed.
    An argument of a function that ``torch.compile`` has compiled keeps this class until ``wait()``.
    """

    _pending: Any  # in the instance dictionary: the class can change only if both classes have equal slots
    _compared = False  # True after guards of torch.compile, which name the class, have read it

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's stub
        if func is _DETACH and type(args[0]) is AsyncCollectiveTensor:  # the result shares the memory, and is pending too
            result = _make_pending(args[0]._pending, args[0]._layout, args[0])
            result.__dict__[MEMORY_STATE], result._compared = memory_state_of(args[0]), args[0]._compared
            if (waiting := args[0].__dict__.get(BATCH_TENSORS)) is not None:
                result.__dict__[BATCH_TENSORS] = waiting
                waiting.append(weakref.ref(result))
            return result
        return super().__torch_dispatch__(func, types, args, kwargs)

    @property
    def _local(self) -> Any:
        return self._pending.wait() if self._compared else self.wait()._local

    @_local.setter
    def _local(self, local: Any) -> None:
        self.wait()._local = local

    @property
    def _local_for_guards(self) -> Any:
        """Return the local tensor to ``torch.compile``. From now on only ``wait()`` and writes change the class.

        Guards name the class of an argument and read its local tensor. If that read changed the class, no later argument
        would pass them.
        """
        self._compared = True
        return self._pending.wait()

    __tensor_flatten__ = FlattenMethod(flatten_dtensor, "_local_for_guards")

    @staticmethod
    def __tensor_unflatten__(inner_tensors: dict[str, Any], constants: GraphConstants, size: Any, stride: Any) -> Any:
        """Return a tensor of this class: graphs check that an argument has the class that was traced."""
        x = unflatten_dtensor(inner_tensors, constants, size, stride)
        result = _make_pending(Pending.of(x._local), x._layout, x)
        result._compared = True
        return result

    def wait(self) -> DTensor:
        """Return this tensor, a plain DTensor now, once its local tensor has arrived."""
        this: Any = self
        arrived, layout = this._pending.wait(), this._layout
        for name in ("_pending", "_compared", BATCH_TENSORS):
            this.__dict__.pop(name, None)
        this.__class__ = DTensor
        this._local, this._layout = arrived, layout
        return self


def _make_pending(pending: Any, layout: Layout, like: Any) -> Any:
    """Return an async tensor of ``layout`` that waits for ``pending`` at its first use; its device is that of ``like``."""
    result: Any = _make(AsyncCollectiveTensor, layout.shape, strides=layout.stride, dtype=layout.dtype, device=like.device)
    result._pending, result._layout = pending, layout
    return result


install_pending(_make_pending)
