"""All ranks write into one folder, under its lock; then the first one makes what was written count."""

from __future__ import annotations

import contextlib
import fcntl
import os
import uuid
from collections.abc import Callable, Iterator
from typing import TypeVar

from ..errors import CheckpointError
from .coordinator import Parts, Ranks, other_rank
from .remote import Address, Remote

T = TypeVar("T")


def in_two_steps(
    ranks: Ranks,
    folder: Address,
    what: str,
    state: Parts | Exception,
    *,
    write: Callable[[str], T],
    commit: Callable[[list[T], str], None],
    discard: Callable[[str], None],
    left: str,
    begin: Callable[[str], None] = lambda token: None,
) -> None:
    """All ranks write into ``folder``, under its lock, and the first one makes what was written count.

    Args:
        what: what is done, for errors.
        state: what this rank brings, all of which must be alike, or why it cannot bring it.
        begin, commit: called on the first rank, before any rank writes and after all have written.
        write: called on every rank; each gets the token that names this save's files.
        discard: called on every rank where it has gone wrong.
        left: what holds if the first rank is lost meanwhile.

    Raises:
        CheckpointError: on all ranks, with the same words.
    """

    def told() -> Parts:
        if isinstance(state, Exception):
            raise state
        return state

    with contextlib.ExitStack() as stack:

        def opened() -> str:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(locked(folder))
            token = uuid.uuid4().hex[:12]
            begin(token)
            return token

        token = ranks.alike(what, told, opened)

        def committed(shares: list[tuple[str, T]]) -> None:
            try:
                commit([share for _, share in shares], token)
            except CheckpointError as error:
                if (other := other_rank([place for place, _ in shares])) is None:
                    raise
                raise CheckpointError(f"{error}; rank {other} saves into {shares[other][0]}") from error

        try:
            ranks.together(what, lambda: (str(folder), write(token)), committed, left=left)
        except CheckpointError:
            discard(token)
            raise


_HELD: set[int] = set()  # a child that is forked meanwhile would hold the locks for as long as it lives


def _let_go() -> None:
    while _HELD:
        os.close(_HELD.pop())


os.register_at_fork(after_in_child=_let_go)
_ANOTHER = "another save into this folder is under way; save into another folder, or wait for it"


@contextlib.contextmanager
def locked(folder: Address, otherwise: str = _ANOTHER) -> Iterator[None]:
    """Hold the folder against other saves; the system lets go of it when this process ends, however it ends.

    Args:
        otherwise: what to say where somebody else holds it. Object stores have no locks: nobody is kept away there.
    """
    if isinstance(folder, Remote):
        yield
        return
    handle = os.open(folder / ".lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK)
    _HELD.add(handle)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CheckpointError(otherwise) from None
        yield
    finally:
        _HELD.discard(handle)
        os.close(handle)
