"""Manager of the checkpoints of a run: periodic saves in separate folders, retention of the last and the best, and resume."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import warnings
import weakref
from collections.abc import Iterator
from typing import Any, Literal

from ..errors import CheckpointError
from .async_save import PendingSave, Staging, finish_pending_saves
from .coordinator import RankGroup
from .files import RemotePath, StoragePath, parse_path, path_exists
from .loading import find_manifest, load
from .manifest import MANIFEST_NAME, read_manifest
from .saving import SaveExtras, start_save
from .two_phase_commit import lock_folder

_FOLDER_NAME = re.compile(r"step-(\d{9,})")


class Manager:
    """Checkpoints of a run: saves every few steps, keeps the last and the best, and resumes from the last complete one.

    Each checkpoint has a folder below ``path`` and is one of :func:`save`: complete or absent, whenever a process is killed.
    The first rank holds a lock on ``path`` from its first save until :meth:`close` or the end of its process. So processes that
    a killed launcher left behind and restarted processes do not both write.

    Args:
        path: a folder; on several machines, on a file system that they share. Or an address of fsspec (``s3://bucket/run7``),
            where no lock prevents other processes from writing.
        every: steps between saves.
        keep: number of last checkpoints to keep.
        best: also keep the checkpoint with the least or greatest ``metric``.
        async_op: write in the background. A save then costs a step one copy of this rank's blocks, into memory that is reused
            (pinned, for tensors on an accelerator: the copy overlaps the step). The next save waits for it.
        process_group: the ranks that save together, default all.

    >>> import tempfile, dtensor as dt
    >>> mesh, folder = dt.init_device_mesh("cpu", (2,)), tempfile.mkdtemp()
    >>> state = {"w": dt.zeros(5, 3, device_mesh=mesh, placements=[dt.Shard(0)])}
    >>> with dt.checkpoint.Manager(folder, every=2, keep=2, best="min") as manager:
    ...     for step in range(manager.resume(state), 9):
    ...         state["w"] += 1
    ...         saved = manager.save(step + 1, state, metric=abs(step - 2))
    >>> manager.steps(), manager.best_step()
    ([4, 6, 8], 4)
    >>> state["w"].zero_().sum().item(), manager.resume(state), state["w"].sum().item()
    (0.0, 8, 120.0)

    Raises:
        CheckpointError: wrong options; and from its methods as ``save`` and ``load`` do.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        every: int = 1,
        keep: int = 1,
        best: Literal["min", "max"] | None = None,
        async_op: bool = True,
        process_group: Any = None,
    ) -> None:
        """Check the options; nothing is read or locked before the first save or resume."""
        if every < 1 or keep < 1 or best not in ("min", "max", None):
            raise CheckpointError(
                f"every= and keep= must be at least 1, and best= 'min', 'max' or None; got every={every}, "
                f"keep={keep}, best={best!r}"
            )
        self.path, self.every, self.keep, self.best = parse_path(path), every, keep, best
        self._group = process_group
        self._staging: Staging | None = Staging() if async_op else None
        self._pending: PendingSave | None = None
        self.discarded_steps: set[int] = set()  # steps after the resumed one, to be removed by the next save
        self._metrics: dict[int, float | None] = {}
        self._lock = contextlib.ExitStack()  # lock of the folder, on the first rank
        self.owns_folder = False
        weakref.finalize(self, self._lock.close)

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        """Wait for the background save and release the lock; drop the save's error if the block raised one itself."""
        try:
            self.wait()
        except CheckpointError:
            if kind is None:
                raise
        finally:
            self._lock.close()
            self.owns_folder = False

    def close(self) -> None:
        """Wait for a save in the background and release the folder. Raises as :meth:`wait`."""
        self.__exit__(None)

    # --- saving ------------------------------------------------------------------------------------------------------------
    def due(self, step: int) -> bool:
        """Return True if :meth:`save` saves after ``step`` steps without ``force``: every ``every`` steps."""
        return step > 0 and step % self.every == 0

    def save(self, step: int, state: Any, *, metric: Any = None, force: bool = False) -> bool:
        """Save ``state`` in the folder of ``step`` if a checkpoint is due; return True if it is saved, or being saved.

        All ranks call it, with the same step and metric.

        Args:
            state: as for :func:`save`.
            metric: the value that ``best`` compares; a number or a tensor of one. Without a metric, or with NaN, a checkpoint
                is not the best.
            force: also save if no checkpoint is due: at the end, or before the job is stopped.

        Raises:
            CheckpointError: on all ranks, with the same text: as for :func:`save`, here or in the background before; a later
                checkpoint exists that was not resumed from; another process saves into the folder.

        Cost: see :func:`save`.
        """
        if not (force or self.due(step)):
            return False
        self.wait()
        finish_pending_saves()
        metric_value = None if metric is None else float(metric)
        extras = SaveExtras(
            {"metric": metric_value}, lambda: self._check_folder(step), lambda: self._remove_old(step, metric_value)
        )
        ranks = RankGroup("Manager.save", self._group, separate_group=self._staging is not None)
        self._pending = start_save(state, self._folder_of(step), ranks, self._staging, extras)
        return True

    def wait(self) -> None:
        """Wait for the save in the background.

        Raises:
            CheckpointError: the save failed.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def _check_folder(self, step: int) -> None:
        """Lock the folder at the first save, and raise if another process has it or a later checkpoint exists."""
        if not self.owns_folder:
            message = f"another process saves into {self.path}: end it, or save into another folder"
            self._lock.enter_context(lock_folder(self.path, message))
            self.owns_folder = True
        later = [other for other in self.steps() if other > step and other not in self.discarded_steps]
        if later:
            raise CheckpointError(
                f"there is a later checkpoint, of step {later[-1]}: resume() from it, return to an earlier one "
                "with resume(state, step=...), or save into another folder"
            )

    def _remove_old(self, step: int, metric: float | None) -> None:
        """Remove checkpoints that are neither among the last ``keep`` nor the best, and those after ``step``."""
        self._metrics[step] = metric
        steps = [other for other in self.steps() if other <= step]
        kept_steps = {*steps[-self.keep :], self._find_best(steps)}
        for other, folder in self._list_folders():
            if other not in kept_steps:
                _remove_checkpoint(folder)
        self.discarded_steps.clear()

    # --- existing checkpoints ----------------------------------------------------------------------------------------------
    def steps(self) -> list[int]:
        """Return the steps of the complete checkpoints, as this rank sees the folder."""
        return [step for step, folder in self._list_folders() if path_exists(folder / MANIFEST_NAME)]

    def best_step(self) -> int | None:
        """Return the step of the checkpoint with the best metric, as this rank sees the folder; None if there is none."""
        return self._find_best(self.steps())

    def _find_best(self, steps: list[int]) -> int | None:
        """Return the step with the best metric among ``steps``, the latest of equal ones; None if none has a metric."""
        if self.best is None:
            return None
        sign = 1 if self.best == "min" else -1
        measured = [(sign * metric, -step) for step in steps if (metric := self._read_metric(step)) is not None]
        return -min(measured)[1] if measured else None

    def _read_metric(self, step: int) -> float | None:
        """Return the metric that was saved with a step, or None if there is none or it is NaN."""
        if step not in self._metrics:
            notes = read_manifest(self._folder_of(step)).notes
            found = notes.get("metric") if isinstance(notes, dict) else None
            self._metrics[step] = found if isinstance(found, float) else None
        metric = self._metrics[step]
        return None if metric is None or math.isnan(metric) else metric

    def _folder_of(self, step: int) -> StoragePath:
        return self.path / f"step-{step:09d}"

    def _list_folders(self) -> Iterator[tuple[int, StoragePath]]:
        """Return the (step, folder) pairs of all folders of checkpoints, complete or not, by step."""
        names = [place.name for place in self.path.iterdir()] if self.path.is_dir() else []
        found = {int(match[1]): self.path / name for name in names if (match := _FOLDER_NAME.fullmatch(name))}
        return iter(sorted(found.items()))

    # --- resuming ----------------------------------------------------------------------------------------------------------
    def resume(self, state: Any, *, step: int | None = None, **options: Any) -> int:
        """Fill ``state`` from the last complete checkpoint. Return its number of steps, or 0 if there is no checkpoint.

        A checkpoint with files that do not match its manifest (missing, truncated) is skipped with a warning. If an older
        ``step`` is requested, the next save removes the checkpoints after it.

        Args:
            options: those of :func:`load`.

        Raises:
            CheckpointError: on all ranks, with the same text, and nothing is changed: as for :func:`load`; all checkpoints are
                damaged; there is none of ``step``.

        Cost: a broadcast of a few bytes, and that of :func:`load`.
        """
        self.wait()
        finish_pending_saves()
        ranks = RankGroup("Manager.resume", self._group)
        chosen, damaged, steps = ranks.run_on_all(
            f"resuming from {self.path}", lambda: None, lambda _: self._find_last_complete(step)
        )
        for problem in damaged:
            warnings.warn(f"skipped a damaged checkpoint: {problem}", stacklevel=2)
        if chosen is None:
            return 0
        load(state, str(self._folder_of(chosen)), process_group=self._group, **options)
        self.discarded_steps = {other for other in steps if other > chosen}
        return chosen

    def _find_last_complete(self, requested: int | None) -> tuple[int | None, list[str], list[int]]:
        """Return the step to resume from or None, the problems of damaged later checkpoints, and all complete steps."""
        steps, damaged = self.steps(), []
        if requested is not None and requested not in steps:
            raise CheckpointError(f"there is no complete checkpoint of step {requested}; complete steps: {steps}")
        for step in reversed(steps) if requested is None else (requested,):
            try:
                find_manifest(self._folder_of(step))
            except CheckpointError as error:
                damaged.append(str(error))
            else:
                return step, damaged, steps
        if damaged:
            raise CheckpointError("; ".join(damaged))
        return None, [], steps


def _remove_checkpoint(folder: StoragePath) -> None:
    """Remove a checkpoint's folder, manifest first: if this is interrupted, the rest is no checkpoint."""
    with contextlib.suppress(FileNotFoundError):
        (folder / MANIFEST_NAME).unlink()
    if isinstance(folder, RemotePath):
        folder.remove_all()
    else:
        shutil.rmtree(folder)
