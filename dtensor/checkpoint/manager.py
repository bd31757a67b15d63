"""The checkpoints of a run: one in a folder of its own every so many steps, the last and the best kept."""

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
from .async_save import PendingSave, Staging, finish_pending
from .coordinator import Ranks
from .files import present
from .loading import find_manifest, load
from .manifest import NAME, read_manifest
from .remote import Address, Remote, place_of
from .saving import Beside, start
from .two_phase_commit import locked

_NAME = re.compile(r"step-(\d{9,})")


class Manager:
    """The checkpoints of a run: saved every so many steps, the last ones and the best kept, the last complete one resumed from.

    Each lies in a folder of its own below ``path`` and is one of :func:`save`: complete or not there, whoever is killed when. The
    first rank holds ``path`` from its first save until :meth:`close`, or until its process ends: processes that a killed
    launcher left behind and those that it starts anew do not both write.

    Args:
        path: on several machines, on a file system that they share; or an address that fsspec knows (``s3://bucket/run7``),
            where nothing keeps others from writing.
        every: steps between saves.
        keep: how many of the last checkpoints are kept.
        best: keep also the one with the least or greatest ``metric``.
        async_op: write in the background. A save then costs a step a copy of what this rank writes, into memory that is kept
            from save to save (pinned, of tensors on an accelerator: the copy goes on while the step does); the next save waits
            for it.
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
        if every < 1 or keep < 1 or best not in ("min", "max", None):
            raise CheckpointError(
                f"every= and keep= must be at least 1, and best= 'min', 'max' or None; got every={every}, "
                f"keep={keep}, best={best!r}"
            )
        self.path, self.every, self.keep, self.best = place_of(path), every, keep, best
        self._group = process_group
        self._staging: Staging | None = Staging() if async_op else None
        self._pending: PendingSave | None = None
        self._left_behind: set[int] = set()  # steps later than the one that was gone back to
        self._metrics: dict[int, float | None] = {}
        self._lock = contextlib.ExitStack()  # on the first rank, of the folder
        self._holds = False
        weakref.finalize(self, self._lock.close)

    def __enter__(self) -> Manager:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exception: object) -> None:
        try:
            self.wait()
        except CheckpointError:
            if kind is None:
                raise
        finally:
            self._lock.close()
            self._holds = False

    def close(self) -> None:
        """Wait for a save in the background and let go of the folder. Raises as :meth:`wait`."""
        self.__exit__(None)

    # --- saving ------------------------------------------------------------------------------------------------------------
    def due(self, step: int) -> bool:
        """Whether a checkpoint is wanted after ``step`` steps."""
        return step > 0 and step % self.every == 0

    def save(self, step: int, state: Any, *, metric: Any = None, force: bool = False) -> bool:
        """Save ``state`` as that after ``step`` steps, if one is due; whether it is (being) saved.

        All ranks call it, with the same step and metric.

        Args:
            state: as for :func:`save`.
            metric: what ``best`` goes by; a number or a tensor of one. Without one, or NaN, it is not the best.
            force: also where none is due: at the end, or before the job is taken down.

        Raises:
            CheckpointError: on all ranks, with the same words: as for :func:`save`, here or in the background before; a later
                checkpoint is there that was not resumed from; another process saves into the folder.

        Cost: see :func:`save`.
        """
        if not (force or self.due(step)):
            return False
        self.wait()
        finish_pending()
        measured = None if metric is None else float(metric)
        beside = Beside({"metric": measured}, lambda: self._begin(step), lambda: self._saved(step, measured))
        ranks = Ranks("Manager.save", self._group, apart=self._staging is not None)
        self._pending = start(state, self._folder(step), ranks, self._staging, beside)
        return True

    def wait(self) -> None:
        """Wait for the save that goes on in the background.

        Raises:
            CheckpointError: it could not be saved.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.wait()

    def _begin(self, step: int) -> None:
        """On the first rank: nobody else writes here, and nothing is there that this would come before."""
        if not self._holds:
            said = f"another process saves into {self.path}: end it, or save into another folder"
            self._lock.enter_context(locked(self.path, said))
            self._holds = True
        later = [found for found in self.steps() if found > step and found not in self._left_behind]
        if later:
            raise CheckpointError(
                f"there is a later checkpoint, of step {later[-1]}: resume() from it, return to an earlier one "
                "with resume(state, step=...), or save into another folder"
            )

    def _saved(self, step: int, metric: float | None) -> None:
        """On the first rank: what is no longer wanted is removed."""
        self._metrics[step] = metric
        steps = [found for found in self.steps() if found <= step]
        wanted = {*steps[-self.keep :], self._best_of(steps)}
        for found, folder in self._folders():
            if found not in wanted:
                _remove(folder)
        self._left_behind.clear()

    # --- what is there -----------------------------------------------------------------------------------------------------
    def steps(self) -> list[int]:
        """The steps of the complete checkpoints, as this rank sees the folder."""
        return [step for step, folder in self._folders() if present(folder / NAME)]

    def best_step(self) -> int | None:
        """The step of the checkpoint with the best metric, as this rank sees the folder."""
        return self._best_of(self.steps())

    def _best_of(self, steps: list[int]) -> int | None:
        if self.best is None:
            return None
        sign = 1 if self.best == "min" else -1
        measured = [(sign * metric, -step) for step in steps if (metric := self._metric(step)) is not None]
        return -min(measured)[1] if measured else None

    def _metric(self, step: int) -> float | None:
        if step not in self._metrics:
            notes = read_manifest(self._folder(step)).notes
            found = notes.get("metric") if isinstance(notes, dict) else None
            self._metrics[step] = found if isinstance(found, float) else None
        metric = self._metrics[step]
        return None if metric is None or math.isnan(metric) else metric

    def _folder(self, step: int) -> Address:
        return self.path / f"step-{step:09d}"

    def _folders(self) -> Iterator[tuple[int, Address]]:
        names = [place.name for place in self.path.iterdir()] if self.path.is_dir() else []
        found = {int(match[1]): self.path / name for name in names if (match := _NAME.fullmatch(name))}
        return iter(sorted(found.items()))

    # --- resuming ----------------------------------------------------------------------------------------------------------
    def resume(self, state: Any, *, step: int | None = None, **options: Any) -> int:
        """Fill ``state`` from the last complete checkpoint; the steps that it has made, 0 where there is no checkpoint.

        A checkpoint whose files are not as its manifest says (missing, truncated) is passed over with a warning. What comes after
        an older ``step`` that is asked for is removed by the next save.

        Args:
            options: those of :func:`load`.

        Raises:
            CheckpointError: on all ranks, with the same words, and nothing is changed: as for :func:`load`; all checkpoints are
                damaged; none of ``step``.

        Cost: a broadcast of a few bytes, and that of :func:`load`.
        """
        self.wait()
        finish_pending()
        ranks = Ranks("Manager.resume", self._group)
        chosen, damaged, known = ranks.together(f"resuming from {self.path}", lambda: None, lambda _: self._last_complete(step))
        for words in damaged:
            warnings.warn(f"skipped a damaged checkpoint: {words}", stacklevel=2)
        if chosen is None:
            return 0
        load(state, str(self._folder(chosen)), process_group=self._group, **options)
        self._left_behind = {found for found in known if found > chosen}
        return chosen

    def _last_complete(self, asked: int | None) -> tuple[int | None, list[str], list[int]]:
        """On the first rank: the step, what is wrong with later ones, and all steps."""
        steps, damaged = self.steps(), []
        if asked is not None and asked not in steps:
            raise CheckpointError(f"there is no complete checkpoint of step {asked}; complete steps: {steps}")
        for step in reversed(steps) if asked is None else (asked,):
            try:
                find_manifest(self._folder(step))
            except CheckpointError as error:
                damaged.append(str(error))
            else:
                return step, damaged, steps
        if damaged:
            raise CheckpointError("; ".join(damaged))
        return None, [], steps


def _remove(folder: Address) -> None:
    """The manifest first: what is left if this is interrupted is no checkpoint, and removed by the next save."""
    with contextlib.suppress(FileNotFoundError):
        (folder / NAME).unlink()
    if isinstance(folder, Remote):
        folder.remove_all()
    else:
        shutil.rmtree(folder)
