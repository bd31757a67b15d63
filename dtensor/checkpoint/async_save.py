"""Saves that go on in the background, from memory that is kept for the next one."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch


class PendingSave:
    """A save that goes on in the background; the saved state may be changed meanwhile.

    ``wait`` raises on all ranks what went wrong on one; it communicates as ``save`` does.

    >>> import tempfile, torch, dtensor as dt
    >>> pending = dt.checkpoint.save({"w": torch.ones(5, 3)}, tempfile.mkdtemp(), async_op=True)
    >>> pending.wait()
    >>> pending.done()
    True
    """

    def __init__(self, future: Future[None]) -> None:
        self._future = future
        self.told = False  # whether somebody has seen how it ended

    def wait(self) -> None:
        """Wait until the checkpoint is complete.

        Raises:
            CheckpointError: it could not be saved.
        """
        self.told = True
        self._future.result()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._future.done()


_WORKER = ThreadPoolExecutor(1, "checkpoint")  # one: saves end in the order of their calls, on all ranks
_PENDING: list[PendingSave] = []


def in_background(work: Callable[[], None]) -> PendingSave:
    """``work``, after whatever goes on already."""
    pending = PendingSave(_WORKER.submit(work))
    _PENDING.append(pending)
    return pending


def finish_pending() -> None:
    """Wait for saves in the background; warn of those that failed and that nobody waited for."""
    while _PENDING:
        pending = _PENDING.pop(0)
        error = pending._future.exception()
        if error is not None and not pending.told:
            warnings.warn(f"an earlier asynchronous save failed: {error}", stacklevel=3)


class Staging:
    """Memory for copies of what is saved in the background. It is kept: new memory costs more than the copy.

    Copies from an accelerator go to pinned memory, in the order of its current stream: the program goes on at once, and what it
    does next to the tensors comes after the copy.
    """

    def __init__(self) -> None:
        self._kept: dict[Any, torch.Tensor] = {}
        self._copied: list[torch.Event] = []

    def copies(self, pieces: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Row-major copies on the CPU, complete after :meth:`wait`; those that were made before are written over."""
        self._kept = {
            key: self._room(self._kept.get(key), piece).copy_(piece, non_blocking=True) for key, piece in pieces.items()
        }
        for device in {piece.device for piece in pieces.values() if piece.device.type != "cpu"}:
            with torch.accelerator.device_index(device.index):
                event = torch.Event(device)
                event.record()
            self._copied.append(event)
        return self._kept

    @staticmethod
    def _room(kept: torch.Tensor | None, piece: torch.Tensor) -> torch.Tensor:
        if kept is not None and kept.shape == piece.shape and kept.dtype == piece.dtype:
            return kept
        return torch.empty(piece.shape, dtype=piece.dtype, pin_memory=piece.device.type == "cuda", device="cpu")

    def wait(self) -> None:
        """Until the copies are there."""
        while self._copied:
            self._copied.pop().synchronize()
