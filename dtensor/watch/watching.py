"""Collectives, watched: the way from ranks to their chain, and what goes around each collective."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist

from ..errors import DivergenceError, DTensorError
from .board import Board
from .chain import Chain
from .levels import Level
from .verdict import Verdict, differing, error_of
from .waits import gone
from .watcher import Watcher

T = TypeVar("T")

_UNWATCHED = ("fake", "threaded")  # backends whose ranks are no processes
_BROKEN = (
    "Connection",
    "pair closure",
    "Timed out waiting",
    "Broken pipe",
    "gloo/transport",
)  # torch has no class for them
_FIND_S = 2.0  # in which the reason is found why a connection broke

_LOCK = threading.Lock()


class _Watched:
    """Of the present world."""

    watcher: Watcher | None = None


def _in_child() -> None:
    """A forked child has its parent's groups, and no part in them."""
    if _Watched.watcher is not None:
        Level.now = "forked"


os.register_at_fork(after_in_child=_in_child)


def chain_among(ranks: Iterable[int], handle: Any, backend: str) -> Chain | None:
    """The chain of these ranks, which ``handle`` connects; None where they are no processes of their own."""
    if dist.get_backend() in _UNWATCHED or backend in _UNWATCHED:
        return None
    with _LOCK:
        watcher, ranks = _watcher(), tuple(sorted(ranks))
        chain = watcher.chains.get(ranks)
        if chain is None:
            chain = watcher.chains[ranks] = Chain(watcher.board, ranks, handle, backend)
            watcher.board.chains.append(chain.key)
            chain.apart = not watcher.board.here(ranks)
        return chain


def _watcher() -> Watcher:
    world, watcher = dist.group.WORLD, _Watched.watcher
    if watcher is not None and watcher.board.world() is world:
        return watcher
    if watcher is not None:
        watcher.stop()
    Level.operations.clear()
    _Watched.watcher = watcher = Watcher(Board(world))
    return watcher


def note(error: BaseException) -> None:
    """Leaves word of an error that an operation met, for ranks that did not."""
    watcher = _Watched.watcher
    if watcher is not None and Level.now in ("watch", "strict") and not isinstance(error, DivergenceError):
        watcher.board.note(error)


def refuse(chain: Chain, verdict: Verdict | None = None) -> Exception:
    """The error of a rank that does something else than another one that has come before."""
    board = chain.board
    found = board.found() or board.judge(verdict or differing(board, chain.key, chain.ranks, chain.count))
    return error_of(found)


def waited(chain: Chain, number: int, finish: Callable[[], T]) -> T:
    """``finish()``, a wait for others that is over when it cannot end."""
    chain.begin_wait(number)
    try:
        return finish()
    except RuntimeError as error:
        raise explained(chain, number, error) from error
    finally:
        chain.end_wait()


def explained(chain: Chain, number: int, error: RuntimeError) -> BaseException:
    """What to raise where a transfer failed: the verdict, if there is one; else the error."""
    if isinstance(error, DTensorError) or not any(word in str(error) for word in _BROKEN):
        return error
    board, deadline = chain.board, time.monotonic() + _FIND_S
    while time.monotonic() < deadline:
        verdict: Any = board.found()
        if verdict is None and (verdict := gone(board, chain.ranks, chain.key, number)) is not None:
            verdict = board.judge(verdict)
        if verdict is not None:
            return error_of(verdict)
        time.sleep(0.05)
    return error
