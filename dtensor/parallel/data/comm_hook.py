"""Reductions of whole gradients by a function of the user's, as ``DistributedDataParallel.register_comm_hook`` has it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...comm import Communicator, Pending, shards_of

CommHook = Callable[[Any, Any], torch.futures.Future[Any]]


class Bucket:
    """What a hook gets: the methods of ``torch.distributed.GradBucket``."""

    def __init__(self, flat: Tensor, parameters: Sequence[nn.Parameter], index: int, last: bool) -> None:
        self._flat, self._parameters, self._index, self._last = flat, list(parameters), index, last

    def buffer(self) -> Tensor:
        """The gradients of this rank, flat; a hook may write to it."""
        return self._flat

    def set_buffer(self, buffer: Tensor) -> None:
        """Have :meth:`buffer` give another tensor."""
        self._flat = buffer

    def gradients(self) -> list[Tensor]:
        """Views of :meth:`buffer`, in the shapes of this rank's parameters."""
        locals_: list[Any] = [p._local for p in self._parameters]  # type: ignore[attr-defined]  # DTensors
        shapes = [shards_of(x)[0].shape for x in locals_]
        pieces = self._flat.split([shape.numel() for shape in shapes])
        return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    def parameters(self) -> list[nn.Parameter]:
        """The parameters, DTensors."""
        return self._parameters

    def index(self) -> int:
        """Which bucket it is, in the order in which they are reduced."""
        return self._index

    def is_last(self) -> bool:
        """Whether it is the last of a backward pass."""
        return self._last


@dataclass(frozen=True, eq=False, slots=True)
class Reducer:
    """A hook, its state, and the bucket that it reduces."""

    hook: CommHook
    state: Any
    index: int
    last: bool

    def _guarded(self) -> list[Any]:
        """For ``capture``."""
        return [self.hook, self.state]

    def __call__(
        self, comm: Communicator, mesh_dims: Sequence[int], flat: Any, parameters: Sequence[nn.Parameter]
    ) -> Pending[Any]:
        """The reduced gradients and, behind them, flags: those are ours, and travel by themselves."""
        count = len(parameters)
        flags = comm.all_reduce(comm.map(lambda member, x: x[x.numel() - count :].clone(), flat), mesh_dims, "avg")
        own = comm.map(lambda member, x: x[: x.numel() - count].clone(), flat)
        coming = self.hook(self.state, Bucket(own, parameters, self.index, self.last))

        def finish() -> Any:
            found = coming.wait() if hasattr(coming, "wait") else coming  # torch's own futures have no common class
            found = found[0] if isinstance(found, (list, tuple)) else found
            return comm.map(lambda member, x, marks: torch.cat([x.view(-1).to(marks.dtype), marks]), found, flags.wait())

        return Pending(finish)
