"""Collectives, watched: the way from ranks to their chain, and what goes around each collective."""

from __future__ import annotations

import atexit
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from multiprocessing import util
from typing import Any, NoReturn, TypeVar
from weakref import WeakKeyDictionary

import torch.distributed as dist

from ..base.torch_internals import default_store
from ..errors import DivergenceError, DTensorError
from . import source_location
from .collective_log import Chain, Deed
from .deadlock import gone, has_come, has_issued, why_unseen
from .diagnosis import Said, Verdict, differing, differing_words, entry_of, failed_here, lost, named
from .flight_recorder import BROKEN_OFF, FAILED, ISSUED, WORDS, Ring, fingerprint
from .host_state import Board, ended, error_of
from .levels import Level, arm, computed_in
from .watchdog import Watcher

T = TypeVar("T")

_UNWATCHED = {"fake", "threaded"}  # backends whose ranks are no processes
_BROKEN = (
    "Connection",
    "pair closure",
    "Timed out waiting",
    "Broken pipe",
    "gloo/transport",
)  # torch has no class for them
_MEET_S = 0.002  # between two looks whether others have come
_ASK_S = 0.5  # between two questions to the store
_MET: WeakKeyDictionary[Any, Counter[tuple[int, ...]]] = WeakKeyDictionary()  # by world, how often groups of ranks were made
_FIND_S = 3.0  # in which the reason is found why a connection broke

_LOCK = threading.Lock()


class _Watched:
    """Of the present world."""

    watcher: Watcher | None = None


def _in_child() -> None:
    """A forked child has its parent's groups, and no part in them."""
    if _Watched.watcher is not None:
        Level.now = "forked"


os.register_at_fork(after_in_child=_in_child)


def _end_unseen() -> None:
    """Leaves word of a rank that ends before it has made a mesh: others may be waiting for it in theirs."""
    if _Watched.watcher is None and dist.is_initialized() and dist.get_world_size() > 1:
        with suppress(Exception):  # the process that keeps the store may be gone
            if dist.get_backend() not in _UNWATCHED and Level.now in ("watch", "strict"):
                Board(dist.group.WORLD).leave()


atexit.register(_end_unseen)
util.Finalize(None, _end_unseen, exitpriority=100)  # of a process of multiprocessing, which ends without atexit


def chain_among(ranks: Iterable[int], handle: Any, backend: str) -> Chain | None:
    """The chain of these ranks, which ``handle`` connects; None where they are no processes of their own."""
    if dist.get_backend() in _UNWATCHED or backend in _UNWATCHED:
        return None
    with _LOCK:
        watcher, ranks = _watcher(), tuple(sorted(ranks))
        chain = watcher.chains.get(ranks)
        if chain is None:
            chain = watcher.chains[ranks] = Chain(watcher.board, ranks, backend)
            watcher.board.chains.append(chain.key)
            chain.apart = _apart(watcher.board, ranks)
            if chain.apart:
                watcher.board.spread = True
                watcher.board.tell()
        chain.connect(handle)
        return chain


def meet(ranks: list[int], backend: str) -> None:
    """Waits until these processes have come to make a group: while torch makes it, no wait can be ended."""
    among = tuple(sorted(ranks))
    times = _MET.setdefault(dist.group.WORLD, Counter())
    times[among] += 1
    key = f"dtensor/unwatched/{among}/{times[among]}"
    if Level.now == "off" and not {dist.get_backend(), backend} & _UNWATCHED:
        default_store().set(f"{key}/{dist.get_rank()}", "")  # for ranks that would meet this one here
    chain = None if Level.now == "off" else chain_among(ranks, None, backend)
    if chain is None:
        return
    if not chain.take_down(Deed.of(f"a process group of ranks {', '.join(map(str, chain.ranks))} is made", "")):
        raise refuse(chain)
    board, number, hashed = chain.board, chain.count, chain.hash

    def is_here(rank: int) -> bool:
        if not has_come(board, chain.key, rank, number):
            return False
        entry = entry_of(board, chain.key, rank, number)  # only now: it comes before, and is gone where many came after it
        return entry is None or entry.hash == hashed

    def refuse_unwatched() -> None:
        for rank in chain.ranks:
            if not is_here(rank) and board.has_said(f"{key}/{rank}"):
                how = "compares nothing, under check_ranks('off')"
                raise refuse(chain, lost(board, rank, f"{named([board.rank])} is under {Level.now!r}: ranks say one level", how))

    def came() -> None:
        all_are_here, deadline = False, time.monotonic() + _ASK_S
        try:
            while not all_are_here and board.verdict is None:
                time.sleep(_MEET_S)
                all_are_here = all(map(is_here, chain.ranks))
                if not all_are_here and time.monotonic() > deadline:
                    deadline = time.monotonic() + _ASK_S
                    refuse_unwatched()
        finally:  # one answer for all of them: who goes on alone would wait for ever
            together = board.settled(f"{chain.name}/{number}", "go" if all_are_here else "stop") == "go"
        while not together:
            board.go_on()
            time.sleep(_MEET_S)

    waited(chain, number, came)
    chain.words[ISSUED] = number


def begin() -> None:
    """This process's page, from which others learn that it is there and what becomes of it."""
    if dist.get_backend() not in _UNWATCHED and Level.now != "off":
        with _LOCK:
            _watcher()
        arm()


def _apart(board: Board, ranks: tuple[int, ...]) -> bool:
    """Whether ranks are on several hosts: it waits until they tell, or one of them is gone."""
    deadline = time.monotonic() + board.timeout_s
    for rank in ranks:
        while board.host_of(rank) is None:
            page = board.rank_page(rank)
            if (found := board.found()) is not None:
                raise error_of(found)
            how = why_unseen(board, rank)
            if time.monotonic() > deadline:
                how = f"has not come to a collective for {board.timeout_s:.0f} s"
            if how or (page is not None and ended(page)):
                raise error_of(board.judge(lost(board, rank, f"{named([board.rank])} needs it", how)))
            time.sleep(0.005)
    return len({board.host_of(rank) for rank in ranks}) > 1


def _watcher() -> Watcher:
    world, watcher = dist.group.WORLD, _Watched.watcher
    if watcher is not None and watcher.board.world() is world:
        return watcher
    if watcher is not None:
        watcher.stop()
    _Watched.watcher = watcher = Watcher(Board(world))
    return watcher


def _tell_level() -> None:
    """Another level is a thing that ranks compare, as collectives are: what differs after it would not be seen."""
    watcher = _Watched.watcher
    if watcher is None or watcher.level == Level.now or not watcher.board.present or os.getpid() != watcher.board.pid:
        return
    watcher.level = Level.now
    begun = [chain for chain in list(watcher.chains.values()) if chain.count and watcher.board.verdict is None]
    for chain in begun:
        _agree(chain, f"check_ranks({Level.now!r})")


Level.changed.append(_tell_level)


def agree(ranks: Iterable[int], what: str) -> None:
    """These processes, this one among them, begin something together that is no collective: if they have communicated before,
    who does something else is named by whoever comes later. Nobody waits. Other threads than the main one begin things in no
    order, and compare nothing.
    """
    watcher = _Watched.watcher
    if watcher is None or Level.now not in ("watch", "strict") or threading.current_thread() is not threading.main_thread():
        return
    chain = watcher.chains.get(tuple(sorted(ranks)))
    if chain is not None and watcher.board.present:
        _agree(chain, what)


def _agree(chain: Chain, what: str) -> None:
    if not chain.take_down(Deed.of(what, "")):
        raise refuse(chain)
    chain.words[ISSUED] = chain.count


def operations_among(world: Any, ranks: frozenset[int]) -> Ring | None:
    """Return the operations that these processes do together; None where they are no processes, or of a world that has ended."""
    if not ranks or not dist.is_initialized() or world is not dist.group.WORLD or dist.get_backend() in _UNWATCHED:
        return None
    operations = computed_in(world).operations
    found = operations.get(ranks)
    if found is None:
        with _LOCK:
            board, key = _watcher().board, fingerprint(repr(sorted(ranks)))
            found = operations[ranks] = Ring(board.own(f"operations-{key:016x}-{board.rank}", WORDS))
            board.operations.append(key)
    return found


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


def left_out(chain: Chain, number: int, error: BaseException) -> BaseException:
    """What to raise where this rank could not issue a collective that it took down."""
    note(error)
    chain.leave_out(number)
    return explained(chain, number, error)


def come_to_next(chain: Chain) -> None:
    """After a collective that this rank left out: waits until the others come to the one after it, having left it out too.

    Raises:
        DivergenceError: they have not, or the error that was met here, on all ranks.
    """
    board, number, hashed = chain.board, chain.count, chain.hash

    def came() -> None:
        to_come = [rank for rank in chain.ranks if rank != board.rank]
        while to_come:
            board.go_on()
            for rank in list(to_come):
                entry = entry_of(board, chain.key, rank, number)
                if entry is not None and entry.hash != hashed:
                    raise refuse(chain)
                if entry is None and has_issued(board, chain.key, rank, chain.left_out):
                    raise refuse(chain, failed_here(board))
                if entry is not None or has_come(board, chain.key, rank, number):
                    to_come.remove(rank)
            time.sleep(_MEET_S)

    waited(chain, number, came)
    chain.left_out = 0


def parted(step: int, over: str, found: dict[int, tuple[int, str]]) -> NoReturn:
    """Raises, on all ranks, that copies differ; by rank its version, and what that is."""
    said = {rank: Said(version, over, f"{what}   {source_location.here()}") for rank, (version, what) in found.items()}
    board = _watcher().board
    raise error_of(board.found() or board.judge(differing_words(step, said)))


def waited(chain: Chain, number: int, finish: Callable[[], T]) -> T:
    """``finish()``, a wait for others that is over when it cannot end."""
    chain.begin_wait(number)
    try:
        return finish()
    except Exception as error:
        chain.mix(FAILED)  # on others it may have ended well
        raise explained(chain, number, error) from error
    except BaseException:  # an interrupt: others may be waiting for what this rank still had to send
        chain.words[BROKEN_OFF] = number
        raise
    finally:
        chain.end_wait()


def waited_beside(works: list[Any], handle: Any) -> None:
    """Waits for works of a group that are under way in another thread, so that this one can be told of a verdict meanwhile."""
    watcher = _Watched.watcher
    if watcher is not None and Level.now in ("watch", "strict") and not all(work.is_completed() for work in works):
        watcher.waiters.end(works, handle)
    while works:
        works.pop(0).wait()


def explained(chain: Chain, number: int, error: BaseException) -> BaseException:
    """What to raise where a transfer failed: the verdict, if there is one; else the error."""
    if isinstance(error, DTensorError) or not any(word in str(error) for word in _BROKEN):
        return error
    board = chain.board

    def find() -> Verdict | None:
        found = gone(board, chain.ranks, chain.key, number)
        return None if found is None else board.judge(found)

    verdict = _found_in_time(board, find)
    return error if verdict is None else error_of(verdict)


def why_lost(ranks: Iterable[int]) -> Verdict | None:
    """The verdict, where messages with these ranks broke; else what has become of one of them, if anything is known."""
    watcher = _Watched.watcher
    if watcher is None or Level.now not in ("watch", "strict"):
        return None
    board = watcher.board
    return _found_in_time(
        board, lambda: next((lost(board, rank, "others need it") for rank in ranks if board.has_ended(rank)), None)
    )


def _found_in_time(board: Board, find: Callable[[], Verdict | None]) -> Verdict | None:
    deadline = time.monotonic() + _FIND_S
    while time.monotonic() < deadline:
        verdict = board.found() or find()
        if verdict is not None:
            return verdict
        time.sleep(0.05)
    return None
