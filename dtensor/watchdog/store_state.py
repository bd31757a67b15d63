"""Posts: what a rank tells those of other hosts over the job's store, as its page tells those of its own."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from typing import Any, NamedTuple

_OFTEN_S = 0.5  # how often a rank posts to which nothing happens; else at each look of its watcher
_ASK_S = 0.3  # between two questions to the store


class Post(NamedTuple):
    """The last word of a rank.

    Attributes:
        beat: how many posts before this one.
        state: as on a page; ``where``: the program's line that runs, for ``where_s`` seconds.
        chain, number, waited_s, waits, threads: what it waits for (its chain's key, 16 hexadecimal digits), for how long, how
            many waits it has ended, and whether several threads have waited.
        call, since: the function of torch.distributed that it is in, and by its clock since when; ``call_s`` seconds ago.
        error, line: of a rank that has failed.
        rings: by chain how many collectives it came to, the last one in which it has done its part, and that one's hash, words,
            mesh dims and line, and what was computed before it.
        begun: how much it has begun in torch's own groups.
    """

    beat: int
    state: int
    where: str
    where_s: float
    chain: str
    number: int
    waited_s: float
    waits: int
    threads: int
    call: str
    since: int
    call_s: float
    error: str
    line: str
    rings: dict[str, list[Any]]
    begun: str


class Posts:
    """Of the ranks of one job, over a connection of their own: one thread may wait for the store in another."""

    def __init__(self, store: Any, key: str, rank: int) -> None:
        self._store, self._key, self._rank = store.clone(), key, rank
        self._told: tuple[float, Any] = (0.0, None)
        self._beat, self._begun = 0, time.monotonic()
        self._asked: dict[str, float] = {}
        self._found: dict[int, tuple[float, Post]] = {}  # when its beat was first seen, and the post

    def tell(self, post: Post) -> None:
        """Posts, if there is news or it is time."""
        news = post._replace(where_s=0.0, waited_s=0.0, call_s=0.0)
        if self._told[1] == news and time.monotonic() - self._told[0] < _OFTEN_S:
            return
        self._told, self._beat = (time.monotonic(), news), self._beat + 1
        with suppress(RuntimeError):  # the process that keeps the store may be gone
            self._store.set(f"{self._key}/{self._rank}", json.dumps(post._replace(beat=self._beat)))

    def of(self, rank: int) -> Post | None:
        """The last post of a rank, if it has told anything."""
        text = self._get(str(rank))
        if text is not None:
            post, before = Post(*json.loads(text)), self._found.get(rank)
            if before is None or before[1].beat != post.beat:
                self._found[rank] = time.monotonic(), post
        return self._found[rank][1] if rank in self._found else None

    def silent_s(self, rank: int) -> float:
        """For how long a rank has told nothing new."""
        return time.monotonic() - (self._begun if self.of(rank) is None else self._found[rank][0])

    def judge(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """The verdict of all hosts: this one, unless another was faster."""
        with suppress(RuntimeError):  # the process that keeps the store may be gone
            told: dict[str, Any] = json.loads(self._store.compare_set(f"{self._key}/verdict", "", json.dumps(verdict)).decode())
            return told
        return verdict

    def verdict(self) -> dict[str, Any] | None:
        """The verdict of another host, if there is one."""
        text = self._get("verdict")
        return None if text is None else json.loads(text)

    def _get(self, name: str) -> str | None:
        """What stands there; None if nothing does, or it was asked just now."""
        if time.monotonic() - self._asked.get(name, 0.0) < _ASK_S:
            return None
        self._asked[name] = time.monotonic()
        with suppress(RuntimeError):
            if self._store.check([f"{self._key}/{name}"]):
                return str(self._store.get(f"{self._key}/{name}").decode())
        return None
