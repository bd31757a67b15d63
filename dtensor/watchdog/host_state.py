"""The board: a folder in which each rank of one host has a page that says what it does, and where the verdict is left.

The ranks find it through the job's store, where the first of a host leaves its place. It outlives them if they are killed; the
last one to leave by itself takes it away.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
import uuid
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .. import errors
from ..base.torch_internals import default_store
from . import source_location
from .flight_recorder import WORDS, done_in, entry_in
from .state_file import Page
from .store_state import Post, Posts

RUNNING, WAITING, FAILED, LEFT = range(4)
# Words of a rank's page. WHERE it is, its last ERROR and that one's line are texts. COUNT is of its waits, ERROR_COUNT of those
# before that error, ERRORS of errors; BEAT is when its watcher looked last, THREADS whether several threads
# have waited, WHERE_SINCE since when it has been where it is, BEGUN a text: what it has begun in torch's own groups.
PID, STATE, CHAIN, NUMBER, SINCE, COUNT, WHERE = range(7)
ERROR, ERROR_LINE, ERROR_AT, ERROR_COUNT, ERRORS, IN_TORCH, IN_TORCH_SINCE, BEAT, THREADS, WHERE_SINCE, BEGUN = range(7, 18)
WORDS_OF_RANK = 32
WHERE_TEXT, CALL_TEXT, ERROR_TEXT, LINE_TEXT, BEGUN_TEXT = range(5)  # places of its changing texts


_NAME = "dtensor-ranks-"
_ROOM = 1 << 25  # bytes that must be free
_KEPT, _YOUNG_S = 2, 60.0  # jobs that did not end well; how long one may have no ranks yet


class Board:
    """What the ranks of one world show each other."""

    def __init__(self, world: Any) -> None:
        self.world = weakref.ref(world)  # its connections end with it
        self.rank, self.size, self.pid = dist.get_rank(), dist.get_world_size(), os.getpid()
        self.chains: list[int] = []  # keys of those that this process takes part in
        self.operations: list[int] = []  # keys of the ranks with which it computes
        self.host, self._hosts = _host(), dict[int, str]()
        self._store = default_store()
        self._key, self.folder = self._found_folder()
        self._pages: dict[str, Page] = {}
        self.page = self.own(f"rank-{self.rank}", WORDS_OF_RANK)
        self.words = self.page.words
        self.words[PID] = self.pid
        self._store.set(f"{self._key}/host/{self.rank}", self.host)
        self.thread = threading.get_ident()
        self.verdict: dict[str, Any] | None = None
        self.left = False
        self.spread = False  # whether some chain goes over several hosts: what this rank does is told in the store then
        self.asked: dict[int, float] = {}  # when it was last asked whether a rank is there that has told nothing
        self.circle: tuple[float, Any] | None = None  # of ranks that wait for each other, and when it was seen first
        self.posts = Posts(self._store, self._key, self.rank)

    def _found_folder(self) -> tuple[str, Path]:
        """The folder of this host's ranks, and what its keys in the store begin with, new in this world."""
        ours = Path(_shared(), f"{_NAME}{uuid.uuid4().hex[:16]}")
        ours.mkdir()
        for generation in itertools.count():
            key = f"dtensor/ranks/{generation}"
            folder = Path(self._store.compare_set(f"{key}/{self.host}", "", str(ours)).decode())
            if folder == ours:
                sweep(ours.parent)
                break
            if folder.exists() and not (folder / f"rank-{self.rank}").exists() and not (folder / "verdict").exists():
                ours.rmdir()
                break
        return key, folder

    # --- pages -----------------------------------------------------------------------------------------------------------
    def own(self, name: str, count: int) -> Page:
        """This rank's page of that name."""
        made = self._pages[name] = Page(self.folder / name, count, ours=True)
        return made

    def of(self, name: str, count: int = WORDS_OF_RANK) -> Page | None:
        """A page of any rank; None while it has not made it."""
        found = self._pages.get(name)
        if found is None:
            try:
                found = self._pages[name] = Page(self.folder / name, count, ours=False)
            except FileNotFoundError:  # not yet, or no more
                return None
        return found

    def rank_page(self, rank: int) -> Page | None:
        return self.of(f"rank-{rank}")

    def host_of(self, rank: int) -> str | None:
        """The host of a rank; None while it has not told."""
        if os.environ.get("LOCAL_WORLD_SIZE", "") == str(self.size):
            return self.host
        key = f"{self._key}/host/{rank}"
        if rank not in self._hosts and self._store.check([key]):
            self._hosts[rank] = self._store.get(key).decode()
        return self._hosts.get(rank)

    def settled(self, name: str, answer: str) -> str:
        """The answer of the rank that gave one first."""
        return str(self._store.compare_set(f"{self._key}/{name}", "", answer).decode())

    def has_said(self, key: str) -> bool:
        """Whether something stands in the job's store."""
        return bool(self._store.check([key]))

    @property
    def timeout_s(self) -> float:
        """How long a rank waits for others that say nothing."""
        return float(self._store.timeout.total_seconds())

    # --- the verdict -----------------------------------------------------------------------------------------------------
    def judge(self, verdict: dict[str, Any]) -> dict[str, Any]:
        """The verdict: this one, unless another rank was faster."""
        if self.spread:
            verdict = self.posts.judge(verdict)
        unnamed = self.folder / f".verdict.{uuid.uuid4().hex}"  # both threads of a rank may judge at once
        try:
            unnamed.write_text(json.dumps(verdict))
        except FileNotFoundError:  # all have left, and the folder with them
            self.verdict = self.verdict or verdict
            return self.verdict
        try:
            os.link(unnamed, self.folder / "verdict")
        except FileExistsError:
            pass
        finally:
            unnamed.unlink(missing_ok=True)
        return self.found() or verdict

    def found(self) -> dict[str, Any] | None:
        """The verdict, if there is one."""
        if self.verdict is None:
            path = self.folder / "verdict"
            if path.exists():
                self.verdict = json.loads(path.read_text())
        return self.verdict

    def go_on(self) -> None:
        """Raises the verdict instead of the next collective, as soon as this rank knows of it: also where it gave it itself."""
        if self.verdict is not None:
            raise error_of(self.verdict)

    def note(self, error: BaseException) -> None:
        """Leaves word of an error that an operation of this rank met; the program may go on after it."""
        words = self.words
        self._put_error(error, source_location.here(2))
        words[ERROR_AT], words[ERROR_COUNT] = time.monotonic_ns(), words[COUNT]
        words[ERRORS] += 1

    def _put_error(self, error: BaseException, line: str) -> None:
        self.words[ERROR], self.words[ERROR_LINE] = self.page.put(ERROR_TEXT, told(error)), self.page.put(LINE_TEXT, line)

    @property
    def present(self) -> bool:
        """Whether the world is still there."""
        return dist.is_initialized() and self.world() is dist.group.WORLD

    # --- the end ---------------------------------------------------------------------------------------------------------
    def leave(self) -> None:
        """Says that this rank has ended, and of what error."""
        if self.left or os.getpid() != self.pid:
            return
        self.left = True
        error = _under_way()
        if error is not None and not isinstance(error, SystemExit | GeneratorExit):
            self._put_error(error, source_location.of_error(error.__traceback__))
            self.words[STATE] = FAILED
        elif self.words[STATE] != WAITING:  # a mesh keeps its groups: it has left when this wait is over
            self.words[STATE] = LEFT
        if self.spread:
            self.tell()
        pages = (self.rank_page(rank) for rank in range(self.size))
        if all(page is not None and page.words[STATE] == LEFT for page in pages) and self.found() is None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def tell(self) -> None:
        """Posts what stands on this rank's page, for ranks of other hosts."""
        words, page, now = self.words, self.page, time.monotonic_ns()
        rings = {}
        for key in list(self.chains):
            ring = self._pages[f"chain-{key:016x}-{self.rank}"]
            last = entry_in(ring, ring.words[0])
            said = (0, "", "", "", "") if last is None else (last.hash, last.what, last.over, last.line, last.after)
            rings[f"{key:016x}"] = [ring.words[0], done_in(ring), *said]
        error, line = (page.text(words[place]) if words[STATE] == FAILED else "" for place in (ERROR, ERROR_LINE))
        waits = words[STATE] == WAITING
        self.posts.tell(
            Post(
                0,
                words[STATE],
                page.text(words[WHERE]),
                (now - words[WHERE_SINCE]) / 1e9,
                f"{words[CHAIN]:016x}",
                words[NUMBER],
                (now - words[SINCE]) / 1e9 if waits else 0.0,
                words[COUNT],
                words[THREADS],
                page.text(words[IN_TORCH]),
                words[IN_TORCH_SINCE],
                (now - words[IN_TORCH_SINCE]) / 1e9,
                error,
                line,
                rings,
                page.text(words[BEGUN]),
            )
        )

    def post_of(self, rank: int) -> Post | None:
        """What a rank of another host has told last; None of one of this host."""
        return self.posts.of(rank) if self.spread and self.rank_page(rank) is None else None

    def has_ended(self, rank: int) -> bool:
        """Whether a rank has said that it leaves, or is known to be gone."""
        page, post = self.rank_page(rank), self.post_of(rank)
        return ended(page) if page is not None else post is not None and post.state in (FAILED, LEFT)

    def where(self, rank: int) -> tuple[str, float]:
        """The line of its program at which a rank is, and for how many seconds."""
        page, post = self.rank_page(rank), self.post_of(rank)
        if page is not None:
            return page.text(page.words[WHERE]), (time.monotonic_ns() - page.words[WHERE_SINCE]) / 1e9
        return ("", 0.0) if post is None else (post.where, post.where_s + self.posts.silent_s(rank))


def error_of(verdict: dict[str, Any]) -> Exception:
    """The error that all ranks raise: of the class of a rank's own error where that is known, takes words, and ends no loop."""
    words = verdict["words"]
    if verdict["kind"] != "error":
        return (errors.RankLostError if verdict["kind"] == "lost" else errors.DivergenceError)(words)
    module, name = verdict["error"]
    kind = getattr(sys.modules.get(module), name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, StopIteration | StopAsyncIteration):
        with suppress(Exception):  # it takes more than words
            if "(on rank " in str(made := kind(words)):
                return made
    return errors.RankLostError(f"{name}: {words}")


def ring_page(board: Board, kind: str, key: int, rank: int) -> Page | None:
    """A rank's page of collectives (``kind`` "chain") or "operations"; None while it has none."""
    return board.of(f"{kind}-{key:016x}-{rank}", WORDS)


def boards(shared: Path | None = None) -> list[Path]:
    """The folders of jobs, the newest first."""
    found = []
    for folder in (shared or Path(_shared())).glob(f"{_NAME}*"):
        with suppress(OSError):  # on its way out
            found.append((folder.stat().st_mtime, folder))
    return [folder for _, folder in sorted(found, reverse=True)]


def sweep(shared: Path) -> None:
    """Takes away what jobs have left that did not end well, but for the last ones, which can be looked at."""
    ended_badly = 0
    for folder in boards(shared):
        with suppress(OSError):  # another's, or on its way out
            pids = [int.from_bytes(page.read_bytes()[:8], "little") for page in folder.glob("rank-*")]
            if any(pid and alive(pid) for pid in pids) or (not pids and time.time() - folder.stat().st_mtime < _YOUNG_S):
                continue  # its ranks are at work, or about to come
            ended_badly += 1
            if ended_badly > _KEPT:
                shutil.rmtree(folder, ignore_errors=True)


def _under_way() -> BaseException | None:
    """The error that the main thread is leaving with, or has left with."""
    error: Any = source_location.undisturbed(sys._current_exceptions).get(threading.main_thread().ident or 0)
    if isinstance(error, tuple):  # Python 3.11
        error = error[1]
    return error or getattr(sys, "last_value", None)


def told(error: BaseException) -> str:
    """An error for others: its class and its words, if it has any."""
    said = ""
    with suppress(Exception):
        said = str(error)[:1500]
    return json.dumps([type(error).__module__, type(error).__qualname__, said])


def ended(page: Page) -> bool:
    """Whether a rank has said that it leaves, or its process is gone."""
    return page.words[STATE] in (FAILED, LEFT) or not alive(page.words[PID])


def was_killed(page: Page) -> bool:
    """Whether a rank's process is gone, and its program had not ended well."""
    return page.words[STATE] != LEFT and not alive(page.words[PID])


def alive(pid: int) -> bool:
    """Whether a process runs; one that nobody has asked for its end does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process_state(pid) not in ("Z", "X")


def process_state(pid: int) -> str:
    """``"R"`` ``"S"`` ``"T"`` (stopped) ``"Z"``, ..., as Linux says; empty elsewhere."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _shared() -> str:
    """Memory where there is some: nothing is to be written to a disk."""
    memory = "/dev/shm"
    return memory if os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > _ROOM else tempfile.gettempdir()


def _host() -> str:
    """What processes share that see the same files and processes."""
    said = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/mnt", "/proc/self/ns/pid"):
        try:
            said.append(os.readlink(path) if "ns" in path else Path(path).read_text().strip())
        except OSError:
            said.append("")
    return "/".join(said)
