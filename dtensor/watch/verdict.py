"""The verdict: what went wrong between ranks, in words that all of them raise."""

from __future__ import annotations

import builtins
import json
import time
from collections.abc import Sequence
from typing import Any, NoReturn

from .. import errors
from .board import COUNT, ERROR, ERROR_COUNT, ERROR_LINE, FAILED, LEFT, STATE, WHERE, Board
from .chain import Entry, entry_of, last_of
from .pages import Page

Verdict = dict[str, Any]

_GATHERING_S = 1.0  # for ranks that are about to come, so that the verdict can name who agrees with whom


def raised(verdict: Verdict, cause: BaseException | None = None) -> NoReturn:
    """Raises it."""
    raise error_of(verdict) from cause


def error_of(verdict: Verdict) -> Exception:
    """The error that all ranks raise: of the class of a rank's own error where that is known everywhere."""
    words = verdict["words"]
    if verdict["kind"] != "error":
        return (errors.RankLostError if verdict["kind"] == "lost" else errors.DivergenceError)(words)
    module, name = verdict["error"]
    home = {"builtins": builtins, "dtensor.errors": errors}.get(module)
    kind = getattr(home, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(words)
        except TypeError:  # it takes more than words
            pass
    return errors.RankLostError(words)


def differing(board: Board, key: int, ranks: Sequence[int], number: int) -> Verdict:
    """Who did what, where ranks took down different collectives under one number."""
    deadline = time.monotonic() + _GATHERING_S
    found = _entries(board, key, ranks, number)
    while len(found) < len(ranks) and time.monotonic() < deadline and board.found() is None:
        time.sleep(0.01)
        found = _entries(board, key, ranks, number)
    return differing_words(ranks, number, {rank: (entry.hash, str(entry)) for rank, entry in found.items()})


def differing_words(ranks: Sequence[int], number: int, found: dict[int, tuple[int, str]]) -> Verdict:
    """The same of what each rank has told: its hash, and what it does."""
    groups: dict[int, list[int]] = {}
    for rank, (hashed, _) in sorted(found.items()):
        groups.setdefault(hashed, []).append(rank)
    by_size = sorted(groups.values(), key=lambda members: (-len(members), members))
    head = f"collective {number:,} of {named(ranks)}: {_who_differs(by_size)}"
    width = max(len(_short(members)) for members in by_size) + 1
    lines = [f"  {_short(members) + ':':<{width}} {found[members[0]][1]}" for members in by_size]
    return {"kind": "differs", "words": "\n".join([head, *lines])}


def lost(board: Board, rank: int, needed: str, how: str = "") -> Verdict:
    """That a rank which others need has failed, left or died; ``needed`` says in what."""
    page = board.rank_page(rank)
    assert page is not None
    words = page.words
    where = page.text(words[WHERE])
    at = f", at {where}" if where else ""
    if not how and (words[STATE] == FAILED or _met_last(page)):
        module, name, said = json.loads(page.text(words[ERROR]) or '["", "an error", ""]')
        if name == "KeyboardInterrupt":
            return {"kind": "lost", "words": f"rank {rank} was interrupted{at}; {needed}"}
        met = page.text(words[ERROR_LINE])
        return {"kind": "error", "error": [module, name], "words": f"{said} (on rank {rank}{met and ', at '}{met})"}
    if not how:
        left = words[STATE] == LEFT
        how = "has left: its program ended, or it destroyed its groups" if left else "has died: its process is gone"
    return {"kind": "lost", "words": f"rank {rank} {how}{at}{_last(board, rank)}; {needed}"}


def _met_last(page: Page) -> bool:
    """Whether the last that is known of a rank is an error of an operation."""
    return bool(page.words[ERROR]) and page.words[COUNT] == page.words[ERROR_COUNT]


def stuck(board: Board, waiting: dict[int, str]) -> Verdict:
    """That ranks wait for each other, each in another place."""
    words = ["no rank can go on: each waits for one that waits elsewhere"]
    places: dict[str, list[int]] = {}
    for rank, where in sorted(waiting.items()):
        places.setdefault(where, []).append(rank)
    width = max(len(_short(members)) for members in places.values()) + 1
    words += [f"  {_short(members) + ':':<{width}} {where}" for where, members in places.items()]
    return {"kind": "differs", "words": "\n".join(words)}


def shown(board: Board, key: int, rank: int, number: int) -> str:
    """A collective of a rank, and its line."""
    entry = entry_of(board, key, rank, number)
    return "a collective" if entry is None else str(entry)


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
    """What a rank did last, in whichever chain that this process knows."""
    found = [last_of(board, chain, rank) for chain in board.chains]
    last = max((entry for entry in found if entry is not None), key=lambda entry: entry.time, default=None)
    return "" if last is None else f", after {last}"
