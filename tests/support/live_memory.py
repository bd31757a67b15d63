"""Live memory: count the bytes of this process's tensors, now and at the peak."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch

from dtensor.base.torch_internals import TorchDispatchMode, tree_leaves
from dtensor.base.tracing import has_no_values
from dtensor.comm import shards_of
from dtensor.tensor.dtensor import DTensor


class LiveTensorMemory(TorchDispatchMode):
    """Dispatch mode that counts the bytes of live storages: those of ``given`` plain tensors and of results of operators. Tensors
    without data count zero.

    Attributes:
        now, peak: bytes now, and the maximum so far.

    >>> import torch
    >>> given = torch.zeros(4)
    >>> with LiveTensorMemory([given]) as live:
    ...     x = torch.ones(8) + torch.ones(8)
    >>> live.peak, live.now
    (112, 48)
    """

    looks_on = True  # captured programs are replayed

    def __init__(self, given: Iterable[torch.Tensor] = ()) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: dict[int, Any] = {}
        for x in given:
            self._count(x)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator on local tensors and count the storages of its results."""
        if any(issubclass(kind, DTensor) for kind in types):
            return NotImplemented
        made = func(*args, **(kwargs or {}))
        for x in tree_leaves(made):
            if isinstance(x, torch.Tensor):
                self._count(x)
        return made

    def _count(self, x: torch.Tensor) -> None:
        """Add the bytes of each storage of ``x`` that is not counted yet; a weak reference subtracts them when it is freed."""
        for shard in shards_of(x._local if isinstance(x, DTensor) else x):
            if shard.device.type == "meta" or has_no_values(shard):  # an operator is asked what its results look like
                continue
            storage = shard.untyped_storage()
            key, nbytes = storage._cdata, storage.nbytes()
            if key not in self._known:
                self._known[key] = weakref.ref(storage, partial(self._freed, key, nbytes))
                self.now += nbytes
                self.peak = max(self.peak, self.now)

    def _freed(self, key: int, nbytes: int, _: Any) -> None:
        self._known.pop(key, None)
        self.now -= nbytes
