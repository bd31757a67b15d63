"""Why a wait will not end: others do something else, are gone, or wait for those who wait for them.

Only what is certain counts. A rank that computes may come yet, so nothing is said of it, however long it takes.
"""

from __future__ import annotations

import ast
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from .blocked_call import Call, behind, is_cut_off
from .diagnosis import Verdict, differing, entry_of, lost, named, shown, stuck
from .flight_recorder import done_in
from .host_state import (
    BEAT,
    BEGUN,
    CHAIN,
    COUNT,
    ERROR_AT,
    ERROR_COUNT,
    ERRORS,
    FAILED,
    IN_TORCH,
    IN_TORCH_SINCE,
    NUMBER,
    SINCE,
    STATE,
    THREADS,
    WAITING,
    WHERE,
    WHERE_SINCE,
    Board,
    ended,
    ring_page,
    was_killed,
)
from .state_file import Page

PATIENCE_S = 2.0  # before ranks that wait for each other are said to be stuck
_SILENT_S = 15.0  # of a rank of another host: it may compute without letting another thread run
_BROKEN_S = 1.5  # the same of one whose connection broke
_GAVE_UP_S = 3.0  # after an error of which nothing followed
_ASK_S = 0.5  # between two questions whether a rank is there
_FRESH_S = 0.5  # how old a look of another rank's watcher may be
_AGAIN_S, _AGAIN_AFAR_S = 0.2, 1.2  # they are looked at twice: nothing may have moved
_FRESH_AFAR_S = 1.2  # how old the post of a rank of another host may be


class Wait(NamedTuple):
    """What a rank waits in: a collective of ours by chain and number, or one of torch's (``key`` 0).

    ``begun`` is how much it has begun in torch's own groups.
    """

    rank: int
    key: int
    number: int
    since: int
    waits: int
    call: str = ""
    begun: str = ""


def why(board: Board, ranks: tuple[int, ...], key: int, number: int) -> Verdict | None:
    """Why the wait of these ranks in collective ``number`` will not end; None where it may."""
    entries = {rank: entry_of(board, key, rank, number) for rank in ranks}
    if len({entry.hash for entry in entries.values() if entry is not None}) > 1:
        return differing(board, key, ranks, number)
    missing = [rank for rank in ranks if not has_come(board, key, rank, number)]
    came = next((rank for rank, entry in entries.items() if entry is not None), None)
    what = "" if came is None else shown(board, key, came, number)
    for rank in missing or ranks:
        how = why_unseen(board, rank)
        if how or _is_lost(board, rank, came=not missing):
            came_too = [other for other in ranks if other not in missing and other != rank]
            return lost(board, rank, f"{named(came_too)} {'needs' if len(came_too) == 1 else 'need'} it for {what}", how)
    return _circle(board)


def why_in_torch(board: Board) -> Verdict | None:
    """Why the wait of this rank in a function of torch.distributed will not end: one that it needs has been gone for a while, or
    waits for those who wait for it.
    """
    first = _wait_of(board, board.rank)
    if first is None or first.key or time.monotonic_ns() - first.since < PATIENCE_S * 1e9:
        return None
    lost_one = next((rank for rank in Call.read(first.call).ranks if rank != board.rank and board.has_ended(rank)), None)
    if lost_one is None:
        return _circle(board)
    time.sleep(_AGAIN_S)  # what it has sent before is there by now
    if first != _wait_of(board, board.rank):
        return None
    return lost(board, lost_one, f"{named([board.rank])} needs it for {_place(board, first)}")


def failed_elsewhere(board: Board) -> Verdict | None:
    """That a rank has failed while this one stays at one line: it may wait for a message that was begun, which nobody sees."""
    if time.monotonic_ns() - board.words[WHERE_SINCE] < PATIENCE_S * 1e9:
        return None
    for rank in range(board.size):
        page = board.rank_page(rank)
        if rank != board.rank and page is not None and page.words[STATE] == FAILED:
            return lost(board, rank, f"{named([board.rank])} is at {board.page.text(board.words[WHERE])}")
    return None


def needed_in_torch(board: Board) -> Sequence[int]:
    """The ranks that this one needs in a function of torch.distributed."""
    return Call.read(board.page.text(board.words[IN_TORCH])).ranks


def gone(board: Board, ranks: tuple[int, ...], key: int, number: int) -> Verdict | None:
    """As :func:`why`, of a connection that broke: it counts, too, who has come and is gone now."""
    for rank in ranks:
        silent = board.rank_page(rank) is None and board.spread and board.posts.silent_s(rank) > _BROKEN_S
        if rank != board.rank and (board.has_ended(rank) or silent):
            return lost(board, rank, f"{named([board.rank])} needs it for {shown(board, key, board.rank, number)}")
    return why(board, ranks, key, number)


def has_come(board: Board, key: int, rank: int, number: int) -> bool:
    """Whether a rank has come to a collective, perhaps long ago; one that has ended: whether it has done its part."""
    page, post = ring_page(board, "chain", key, rank), board.post_of(rank)
    if page is None:
        count, done = (0, 0) if post is None else post.rings.get(f"{key:016x}", [0, 0])[:2]
        return bool((done if board.has_ended(rank) else count) >= number)
    own = board.rank_page(rank)
    if own is not None and ended(own):
        return done_in(page) >= number
    return page.words[0] >= number


def has_issued(board: Board, key: int, rank: int, number: int) -> bool:
    """Whether a rank has done its part in a collective."""
    page, post = ring_page(board, "chain", key, rank), board.post_of(rank)
    if page is None:
        return post is not None and bool(post.rings.get(f"{key:016x}", [0, 0])[1] >= number)
    return done_in(page) >= number


def _is_lost(board: Board, rank: int, came: bool) -> bool:
    """Whether a rank will not do its part; one that has come and was killed may have sent some of it only."""
    page = board.rank_page(rank)
    if page is not None:
        return was_killed(page) if came else ended(page) or _gave_up(board, page)
    silent = board.post_of(rank) is not None and board.posts.silent_s(rank) > _SILENT_S
    return silent or (not came and board.has_ended(rank))


def why_unseen(board: Board, rank: int) -> str:
    """Why a rank that has told nothing will not; empty where it may, or does."""
    world, now = board.world(), time.monotonic()
    if board.rank_page(rank) is not None or board.post_of(rank) is not None or now - board.asked.get(rank, 0.0) < _ASK_S:
        return ""
    board.asked[rank] = now
    return "is gone: its connections are closed, and it had made no mesh" if world and is_cut_off(world, rank) else ""


def _gave_up(board: Board, page: Page) -> bool:
    """Whether a rank met an error that this one did not, and no line of its program runs any more, as in a notebook."""
    words, now = page.words, time.monotonic_ns()
    long_ago = now - words[ERROR_AT] > _GAVE_UP_S * 1e9
    if not long_ago or words[ERRORS] <= board.words[ERRORS] or words[COUNT] != words[ERROR_COUNT]:
        return False
    return not words[WHERE] and now - words[BEAT] < _FRESH_S * 1e9


# --- circles -------------------------------------------------------------------------------------------------------------
def _circle(board: Board) -> Verdict | None:
    found, now = _closure(board), time.monotonic()
    if found is None or board.circle is None or board.circle[1] != found:
        board.circle = None if found is None else (now, found)
        return None
    again = _AGAIN_S if all(board.rank_page(rank) is not None for rank in found) else _AGAIN_AFAR_S
    if now - board.circle[0] < again:
        return None
    return stuck({wait.rank: _place(board, wait) for wait in found.values()})


def _closure(board: Board) -> dict[int, Wait] | None:
    """All that this rank waits for, directly or not; None unless each of them waits, and for somebody."""
    found: dict[int, Wait] = {}
    to_see = [board.rank]
    while to_see:
        rank = to_see.pop()
        if rank in found:
            continue
        wait = _wait_of(board, rank)
        if wait is None or time.monotonic_ns() - wait.since < PATIENCE_S * 1e9:
            return None
        awaited = list(_awaited(board, wait))
        if not awaited:  # everybody has come: it is under way
            return None
        found[rank] = wait
        to_see += awaited
    return found


def _wait_of(board: Board, rank: int) -> Wait | None:
    page = board.rank_page(rank)
    if page is None:
        return _wait_afar(board, rank)
    if page.words[THREADS]:  # while one thread waits another may be at work
        return None
    words, begun = page.words, page.text(page.words[BEGUN])
    if words[STATE] == WAITING:
        return Wait(rank, words[CHAIN], words[NUMBER], words[SINCE], words[COUNT], "", begun)
    if not words[IN_TORCH] or time.monotonic_ns() - words[BEAT] > _FRESH_S * 1e9:  # its watcher does not get to look
        return None
    call = page.text(words[IN_TORCH])
    return Wait(rank, 0, words[IN_TORCH], words[IN_TORCH_SINCE] + Call.read(call).patience_ns, words[COUNT], call, begun)


def _wait_afar(board: Board, rank: int) -> Wait | None:
    """The same of a rank of another host, whose clock is another: it has waited for long enough."""
    post = board.post_of(rank)
    if post is None or post.threads or board.posts.silent_s(rank) > _FRESH_AFAR_S:
        return None
    if post.state == WAITING:
        here = Wait(rank, int(post.chain, 16), post.number, 0, post.waits, "", post.begun)
        return here if post.waited_s > PATIENCE_S else None
    if not post.call or post.call_s - Call.read(post.call).patience_ns / 1e9 < PATIENCE_S:
        return None
    return Wait(rank, 0, post.since, 0, post.waits, post.call, post.begun)


def _awaited(board: Board, wait: Wait) -> Iterator[int]:
    if wait.key:
        ranks = ast.literal_eval((board.folder / f"chain-{wait.key:016x}").read_text())
        yield from (rank for rank in ranks if not has_come(board, wait.key, rank, wait.number))
        return
    call = Call.read(wait.call)
    for rank in call.ranks:
        other = _wait_of(board, rank)
        if rank != wait.rank and not _meets(call, wait, other):  # it has not come to this one
            yield rank


def _meets(call: Call, wait: Wait, other: Wait | None) -> bool:
    """Whether another rank, in what it waits in or before, may have done what ``call`` waits for."""
    if other is None:
        return False
    theirs = Call.read(other.call)
    return theirs.ends(wait.rank, call) if call.is_message else not behind(other.begun, theirs, wait.begun)


def _place(board: Board, wait: Wait) -> str:
    if wait.key:
        return shown(board, wait.key, wait.rank, wait.number)
    return f"torch.distributed.{Call.read(wait.call).name}   {board.where(wait.rank)[0]}"
