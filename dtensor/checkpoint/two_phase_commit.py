"""Two-phase commit: all ranks write into one folder under its lock, then the first rank commits what was written."""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Callable, Iterator
from typing import TypeVar

from ..errors import CheckpointError
from .coordinator import RankGroup, StateParts, first_differing_rank
from .files import RemotePath, StoragePath

T = TypeVar("T")


def write_and_commit(
    ranks: RankGroup,
    folder: StoragePath,
    what: str,
    state: StateParts | Exception,
    *,
    write: Callable[[str], T],
    commit: Callable[[list[T], str], None],
    discard: Callable[[str], None],
    left: str,
    begin: Callable[[str], None] = lambda token: None,
) -> None:
    """Call ``write`` on all ranks under the lock of ``folder``, then ``commit`` on the first rank; ``discard`` after an error.

    Args:
        what: the action, for errors.
        state: this rank's state, which must be equal on all ranks, or an error.
        begin, commit: called on the first rank, before any rank writes and after all have written.
        write: called on every rank with the token that names the files of this save.
        discard: called on every rank if the save failed.
        left: state of the folder, for the error, if the first rank is lost meanwhile.

    Raises:
        CheckpointError: on all ranks, with the same text.
    """

    def checked_state() -> StateParts:
        """Return this rank's state parts, or raise the error that preparing them gave."""
        if isinstance(state, Exception):
            raise state
        return state

    with contextlib.ExitStack() as stack:

        def open_folder() -> str:
            """Create and lock the folder on the first rank, call ``begin``, and return the token of this save."""
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_folder(folder))
            token = uuid.uuid4().hex[:12]
            begin(token)
            return token

        token = ranks.run_if_same(what, checked_state, open_folder)

        def commit_shares(shares: list[tuple[str, T]]) -> None:
            """Commit the results of all ranks; name a rank that writes to another folder in the error."""
            try:
                commit([share for _, share in shares], token)
            except CheckpointError as error:
                if (other := first_differing_rank([place for place, _ in shares])) is None:
                    raise
                raise CheckpointError(f"{error}; rank {other} saves into {shares[other][0]}") from error

        try:
            ranks.run_on_all(what, lambda: (str(folder), write(token)), commit_shares, left=left)
        except CheckpointError:
            discard(token)
            raise


_LOCK_DESCRIPTORS: set[int] = set()  # closed in forked children, which would otherwise hold the locks until they exit


def _close_locks_in_child() -> None:
    while _LOCK_DESCRIPTORS:
        os.close(_LOCK_DESCRIPTORS.pop())


os.register_at_fork(after_in_child=_close_locks_in_child)
_LOCKED_MESSAGE = "another save into this folder is under way; save into another folder, or wait for it"


@contextlib.contextmanager
def lock_folder(folder: StoragePath, otherwise: str = _LOCKED_MESSAGE) -> Iterator[None]:
    """Lock the folder against other saves inside of the context; the lock ends with this process, however it ends.

    Args:
        otherwise: error text if another process has the lock. Object stores have no locks, so nothing is locked there.
    """
    if isinstance(folder, RemotePath):
        yield
        return
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK)
    _LOCK_DESCRIPTORS.add(handle)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(otherwise) from None
        yield
    finally:
        _LOCK_DESCRIPTORS.discard(handle)
        os.close(handle)
