"""The verdict: what went wrong between ranks, in words that all of them raise."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from ..base.group_by import by_key
from .collective_log import lengths_in, unfitting
from .flight_recorder import DEPTH, Entry, entry_in
from .host_state import COUNT, ERROR, ERROR_COUNT, ERROR_LINE, FAILED, LEFT, STATE, Board, ring_page
from .levels import Level
from .state_file import Page

Verdict = dict[str, Any]


class Said(NamedTuple):
    """What one rank does: those that have the same hash agree."""

    hash: int
    over: str
    words: str


_BEFORE = {
    "watch": " in what was computed before this; check_ranks('strict') names the operation",
    "strict": " in which tensors were added in place before this, or how many",  # operations without an order have no step
}
_GATHERING_S = 1.0  # for ranks that are about to come, so that the verdict can name who agrees with whom


def differing(board: Board, key: int, ranks: Sequence[int], number: int) -> Verdict:
    """Who did what, where ranks took down different collectives under one number, or computed something else before it."""
    deadline = time.monotonic() + _GATHERING_S
    found = _entries(board, key, ranks, number)
    while len(found) < len(ranks) and time.monotonic() < deadline and board.found() is None:
        time.sleep(0.01)
        found = _entries(board, key, ranks, number)
    hashes = {rank: entry.hash for rank, entry in found.items()}
    if len(set(hashes.values())) < 2:
        return _unfit(board, key, ranks, number, found)
    before = _first_operation(board, found)
    if before is None:
        return differing_words(number, {rank: said_of(entry) for rank, entry in found.items()})
    number, operations = before
    said = {}
    for rank, entry in found.items():
        done = operations.get(rank)
        hashed = 0 if done is None else done.hash
        said[rank] = Said(hashed, entry.over if done is None else done.over, str(done or entry))
    return differing_words(number, said)


def said_of(entry: Entry) -> Said:
    """What a rank does, and what it has computed last."""
    after = f", after {entry.after}" if entry.after else ""
    return Said(entry.hash, entry.over, f"{entry.what}{after}   {entry.line}")


def _first_operation(board: Board, found: dict[int, Entry]) -> tuple[int, dict[int, Entry]] | None:
    """The first operation that the ranks which came to a collective did not do alike before it, by rank; its number."""
    for key in board.operations:
        pages = {rank: ring_page(board, "operations", key, rank) for rank in found}
        if any(page is None for page in pages.values()):
            continue
        counts = {rank: min(page.words[0], found[rank].operations) for rank, page in pages.items() if page is not None}
        for number in range(max(1, min(counts.values()) - DEPTH + 2), max(counts.values()) + 1):
            done = {rank: entry_in(pages[rank], number) if number <= counts[rank] else None for rank in found}
            if len({None if entry is None else entry.hash for entry in done.values()}) > 1:
                return number, {rank: entry for rank, entry in done.items() if entry is not None}
    return None


def _unfit(board: Board, key: int, ranks: Sequence[int], number: int, found: dict[int, Entry]) -> Verdict:
    """That ranks send other lengths than those expect to whom they send."""
    pages = {rank: ring_page(board, "chain", key, rank) for rank in found}
    read = {rank: lengths_in(page, number) for rank, page in pages.items() if page is not None}
    lengths = {rank: each for rank, each in read.items() if each is not None}
    return unfit_words(ranks, number, lengths, {rank: Said(0, entry.over, str(entry)) for rank, entry in found.items()})


def unfit_words(
    ranks: Sequence[int], number: int, lengths: dict[int, tuple[list[int], list[int]]], said: dict[int, Said]
) -> Verdict:
    """The same of what each rank sends and expects."""
    wrong = unfitting(ranks, lengths)
    parts = [f"rank {one} sends {sent} numbers to rank {other}, which expects {due}" for one, other, sent, due in wrong]
    words = f"{_head(number, said)}: {'; '.join(parts[:4])}"
    return {"kind": "differs", "words": "\n".join([words, *_listed({(rank,): said[rank].words for rank in sorted(said)})])}


def differing_words(number: int, said: dict[int, Said]) -> Verdict:
    """The same of what each rank has told."""
    groups = by_key((own.hash, rank) for rank, own in sorted(said.items()))
    by_size = sorted(groups.values(), key=lambda members: (-len(members), members))
    listed = {tuple(each): said[each[0]].words for each in by_size}
    before = _BEFORE.get(Level.now, "") if len(by_size) > 1 and len(set(listed.values())) == 1 else ""
    words = f"{_head(number, said)}: {_who_differs(by_size)}{before}"
    return {"kind": "differs", "words": "\n".join([words, *_listed(listed)])}


def _head(number: int, said: dict[int, Said]) -> str:
    over = next((each.over for each in said.values() if each.over), "")
    return f"step {number:,}{over and ' on '}{over or ''}"


def _listed(words: dict[tuple[int, ...], str]) -> list[str]:
    width = max(len(_short(members)) for members in words) + 1
    return [f"  {_short(members) + ':':<{width}} {what}" for members, what in words.items()]


def lost(board: Board, rank: int, needed: str, how: str = "") -> Verdict:
    """That a rank which others need has failed, left or died; ``needed`` says in what."""
    where, _ = board.where(rank)
    at = f", at {where}" if where else ""
    page, post = board.rank_page(rank), board.post_of(rank)
    if page is not None:
        words, silent = page.words, "has died: its process is gone"
        state = FAILED if words[STATE] == FAILED or _met_last(page) else words[STATE]
        error, line = page.text(words[ERROR]), page.text(words[ERROR_LINE])
    elif post is not None:  # on another host
        state, error, line, silent = post.state, post.error, post.line, "tells nothing: it is gone, or stopped"
    else:
        state, error, line, silent = LEFT, "", "", ""
    if not how and state == FAILED:
        return _failed(rank, error, line, at, needed)
    how = how or ("has left: its program ended, or it destroyed its groups" if state == LEFT else silent)
    return {"kind": "lost", "words": f"rank {rank} {how}{at}{_last(board, rank)}; {needed}"}


def _failed(rank: int, error: str, line: str, at: str, needed: str) -> Verdict:
    """That a rank has met an error."""
    module, name, said = json.loads(error or '["", "an error", ""]')
    if name == "KeyboardInterrupt":
        return {"kind": "lost", "words": f"rank {rank} was interrupted{at}; {needed}"}
    return {"kind": "error", "error": [module, name], "words": f"{said} (on rank {rank}{line and ', at '}{line})"}


def failed_here(board: Board) -> Verdict:
    """That this rank has met an error, where others did not."""
    page = board.page
    return _failed(board.rank, page.text(page.words[ERROR]), page.text(page.words[ERROR_LINE]), "", "others need it")


def _met_last(page: Page) -> bool:
    """Whether the last that is known of a rank is an error of an operation."""
    return bool(page.words[ERROR]) and page.words[COUNT] == page.words[ERROR_COUNT]


def stuck(waiting: dict[int, str]) -> Verdict:
    """That ranks wait for each other, each in another place."""
    words = ["no rank can go on: each waits for one that waits elsewhere"]
    places = by_key((where, rank) for rank, where in sorted(waiting.items()))
    words += _listed({tuple(members): where for where, members in places.items()})
    return {"kind": "differs", "words": "\n".join(words)}


def shown(board: Board, key: int, rank: int, number: int) -> str:
    """A collective of a rank, and its line."""
    entry = entry_of(board, key, rank, number)
    return "a collective" if entry is None else str(entry)


def entry_of(board: Board, key: int, rank: int, number: int) -> Entry | None:
    """A collective of a rank, from its page; of one of another host if it was its last."""
    found = entry_in(ring_page(board, "chain", key, rank), number)
    post = None if found is not None else board.post_of(rank)
    ring = None if post is None else post.rings.get(f"{key:016x}")
    return Entry.told(*ring[2:]) if ring is not None and ring[0] == number else found


def named(ranks: Sequence[int]) -> str:
    return f"rank{'' if len(ranks) == 1 else 's'} {', '.join(map(str, ranks))}"


def _entries(board: Board, key: int, ranks: Sequence[int], number: int) -> dict[int, Entry]:
    found = {rank: entry_of(board, key, rank, number) for rank in ranks}
    return {rank: entry for rank, entry in found.items() if entry is not None}


def _who_differs(by_size: list[list[int]]) -> str:
    first, *others = by_size
    if not others:
        return f"{named(first)} came"
    odd = [rank for members in others for rank in members]
    if len(first) == len(others[0]):
        return " and ".join(map(named, by_size)) + " differ"
    return f"{named(sorted(odd))} {'differs' if len(odd) == 1 else 'differ'} from {named(first)}"


def _short(ranks: Sequence[int]) -> str:
    return ",".join(map(str, ranks))


def _last(board: Board, rank: int) -> str:
    """What a rank did last, in whichever chain that this process knows, or that it has told of."""
    pages, post = [ring_page(board, "chain", chain, rank) for chain in board.chains], board.post_of(rank)
    found = [entry_in(page, page.words[0]) for page in pages if page is not None and page.words[0]]
    found += [] if post is None else [Entry.told(*ring[2:]) for ring in reversed(post.rings.values()) if ring[0]]
    last = max((entry for entry in found if entry is not None), key=lambda entry: entry.time, default=None)
    return "" if last is None else f", after {last}"
