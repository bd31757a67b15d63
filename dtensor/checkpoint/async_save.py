"""Async save: saves in a background thread, and the staging memory that they copy from."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch


class PendingSave:
    """Save that runs in the background. The saved state may be changed meanwhile.

    ``wait`` raises on all ranks what went wrong on one. It communicates as ``save`` does.

    >>> import tempfile, torch, dtensor as dt
    >>> pending = dt.checkpoint.save({"w": torch.ones(5, 3)}, tempfile.mkdtemp(), async_op=True)
    >>> pending.wait()
    >>> pending.done()
    True
    """

    def __init__(self, future: Future[None]) -> None:
        self._future = future
        self.observed = False  # True once ``wait`` was called, so that the caller knows about an error

    def wait(self) -> None:
        """Wait until the checkpoint is complete.

        Raises:
            CheckpointError: the save failed.
        """
        self.observed = True
        self._future.result()

    def done(self) -> bool:
        """Return True if the save has ended, also if it failed."""
        return self._future.done()


_SAVE_THREAD = ThreadPoolExecutor(1, "checkpoint")  # one thread, so that saves end in the order of their calls on all ranks
_PENDING_SAVES: list[PendingSave] = []


def submit_save(work: Callable[[], None]) -> PendingSave:
    """Run ``work``, which writes a checkpoint, in the background thread after all pending saves; return the pending save."""
    pending = PendingSave(_SAVE_THREAD.submit(work))
    _PENDING_SAVES.append(pending)
    return pending


def finish_pending_saves() -> None:
    """Wait for all background saves of this process, and warn of failed ones that no caller waited for."""
    while _PENDING_SAVES:
        pending = _PENDING_SAVES.pop(0)
        error = pending._future.exception()
        if error is not None and not pending.observed:
            warnings.warn(f"an earlier asynchronous save failed: {error}", stacklevel=3)


class Staging:
    """Reused memory for copies of the blocks that are saved in the background. New memory would cost more than the copy.

    Copies from an accelerator go to pinned memory, in the order of its current stream. The program continues at once, and its
    next operations on the tensors run after the copy.
    """

    def __init__(self) -> None:
        self.buffers: dict[Any, torch.Tensor] = {}
        self.pending_copies: list[torch.Event] = []

    def start_copies(self, shards: Mapping[Any, torch.Tensor]) -> dict[Any, torch.Tensor]:
        """Start copying shards to reused row-major CPU memory; the copies are complete after :meth:`wait`."""
        self.buffers = {
            key: self._get_or_allocate(self.buffers.get(key), shard).copy_(shard, non_blocking=True)
            for key, shard in shards.items()
        }
        for device in {shard.device for shard in shards.values() if shard.device.type != "cpu"}:
            with torch.accelerator.device_index(device.index):
                event = torch.Event(device)
                event.record()
            self.pending_copies.append(event)
        return self.buffers

    @staticmethod
    def _get_or_allocate(buffer: torch.Tensor | None, shard: torch.Tensor) -> torch.Tensor:
        """Return ``buffer`` if it has the shape and dtype of ``shard``, else new CPU memory, pinned for a CUDA shard."""
        if buffer is not None and buffer.shape == shard.shape and buffer.dtype == shard.dtype:
            return buffer
        return torch.empty(shard.shape, dtype=shard.dtype, pin_memory=shard.device.type == "cuda", device="cpu")

    def wait(self) -> None:
        """Wait until the copies that :meth:`start_copies` started are complete."""
        while self.pending_copies:
            self.pending_copies.pop().synchronize()
