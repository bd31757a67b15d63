"""Host state: what each rank publishes about itself to the other ranks of its job, and the diagnosis that all of them raise.

The ranks of one host share a folder in memory, in which each rank has a state file and log files. They find it by a key in the
job's store, under which the first rank of the host sets the folder's path. The files outlive killed ranks. If all ranks end
without an error, the last one removes the folder. If a group spans several hosts, each rank also publishes its state in the
job's store.
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
from typing import Any, NamedTuple

import torch.distributed as dist

from .. import errors
from ..base.torch_internals import default_store
from . import source_location
from .flight_recorder import LOG_SLOTS, StateFile, last_completed, read_event

# --- the state of a rank in the job's store --------------------------------------------------------------------------------
_PUBLISH_S = 0.5  # interval at which an unchanged state is published again; a changed one is published at once
_READ_S = 0.3  # minimum interval between two reads of one key of the store


class RemoteState(NamedTuple):
    """The state of a rank, as published for ranks of other hosts.

    Attributes:
        heartbeat: number of states that the rank published before.
        state: RUNNING, WAITING, FAILED or EXITED.
        location, location_s: the line of user code that runs, and for how many seconds.
        log, number, waited_s: the collective that the rank waits for: key of its log (16 hexadecimal digits), number, seconds.
        waits, multi_threaded: number of waits that ended, and whether several threads have waited.
        call, call_since, call_s: the function of torch.distributed in which the rank is, since when by its own clock (ns), and
            for how many seconds.
        error, error_line: the error of a rank that has failed, and its line.
        logs: by key of a log: the number of collectives logged, the last one in which the rank did its part, and hash, text,
            mesh dims, line and last operation of the last one.
        started: what the rank has started in process groups of the program, see :func:`.blocked_call.count_started`.
    """

    heartbeat: int
    state: int
    location: str
    location_s: float
    log: str
    number: int
    waited_s: float
    waits: int
    multi_threaded: int
    call: str
    call_since: int
    call_s: float
    error: str
    error_line: str
    logs: dict[str, list[Any]]
    started: str


class StateStore:
    """The states of the ranks of one job in its store, over a connection of its own: a thread may block in the shared one."""

    def __init__(self, store: Any, key: str, rank: int) -> None:
        self._store, self._key, self._rank = store.clone(), key, rank
        self._published: tuple[float, Any] = (0.0, None)
        self._heartbeat, self._start_time = 0, time.monotonic()
        self._read_times: dict[str, float] = {}
        self._received: dict[int, tuple[float, RemoteState]] = {}  # time at which a heartbeat was first read, and its state

    def publish_if_due(self, state: RemoteState) -> None:
        """Publish the state of this rank if it changed, or if the last publication is old."""
        content = state._replace(location_s=0.0, waited_s=0.0, call_s=0.0)
        if self._published[1] == content and time.monotonic() - self._published[0] < _PUBLISH_S:
            return
        self._published, self._heartbeat = (time.monotonic(), content), self._heartbeat + 1
        with suppress(RuntimeError):  # the process that serves the store may be gone
            self._store.set(f"{self._key}/{self._rank}", json.dumps(state._replace(heartbeat=self._heartbeat)))

    def latest_of(self, rank: int) -> RemoteState | None:
        """Return the last state that a rank published in the store, None if there is none."""
        text = self._read(str(rank))
        if text is not None:
            state, previous = RemoteState(*json.loads(text)), self._received.get(rank)
            if previous is None or previous[1].heartbeat != state.heartbeat:
                self._received[rank] = time.monotonic(), state
        return self._received[rank][1] if rank in self._received else None

    def silent_s(self, rank: int) -> float:
        """Return for how many seconds a rank has published nothing new."""
        return time.monotonic() - (self._start_time if self.latest_of(rank) is None else self._received[rank][0])

    def publish_diagnosis(self, diagnosis: dict[str, Any]) -> dict[str, Any]:
        """Publish a diagnosis for all hosts, and return the first one that any host published."""
        with suppress(RuntimeError):  # the process that serves the store may be gone
            text = self._store.compare_set(f"{self._key}/diagnosis", "", json.dumps(diagnosis)).decode()
            first: dict[str, Any] = json.loads(text)
            return first
        return diagnosis

    def read_diagnosis(self) -> dict[str, Any] | None:
        """Return the diagnosis of any host, None if there is none or the store was read just now."""
        text = self._read("diagnosis")
        return None if text is None else json.loads(text)

    def _read(self, name: str) -> str | None:
        """Return the value of a key; None if it has none, or was read less than ``_READ_S`` ago."""
        if time.monotonic() - self._read_times.get(name, 0.0) < _READ_S:
            return None
        self._read_times[name] = time.monotonic()
        with suppress(RuntimeError):
            if self._store.check([f"{self._key}/{name}"]):
                return str(self._store.get(f"{self._key}/{name}").decode())
        return None


# --- the state of a rank on its host ---------------------------------------------------------------------------------------
RUNNING, WAITING, FAILED, EXITED = range(4)
# Slots of a rank's state file: process id, state; key of the log and number of the collective it waits for, since when (ns),
# number of waits that ended; id of the text of the user line that runs.
PID, STATE, WAIT_LOG, WAIT_NUMBER, WAIT_SINCE, WAIT_COUNT, LOCATION = range(7)
# Ids of the texts of the last error and its line, its time (ns), WAIT_COUNT at that time, number of errors; id of the text of the
# c10d call in which the main thread is, since when (ns); time of the watchdog's last look (ns); whether several threads have
# waited; since when LOCATION has its value (ns); id of the text of ``count_started``.
ERROR, ERROR_LINE, ERROR_TIME, ERROR_WAIT_COUNT, ERROR_COUNT, C10D_CALL, C10D_CALL_SINCE = range(7, 14)
HEARTBEAT, MULTI_THREADED, LOCATION_SINCE, C10D_STARTED = range(14, 18)
RANK_SLOTS = 32
LOCATION_TEXT, CALL_TEXT, ERROR_TEXT, LINE_TEXT, STARTED_TEXT = range(5)  # fixed places of texts in a rank's state file

_FOLDER_PREFIX = "dtensor-ranks-"
_MIN_FREE_BYTES = 1 << 25  # free bytes that shared memory must have
_KEPT_FOLDERS, _NEW_FOLDER_S = 2, 60.0  # folders of failed jobs to keep; age until which a folder may have no ranks yet


class HostState:
    """The states of all ranks of one world, and the state files of this rank.

    Attributes:
        world: weak reference to the default process group; a strong one would keep its connections open.
        logs: keys of the collective logs in which this process takes part.
        operations: keys of the operation logs (under "strict") in which this process takes part.
        file, slots: the state file of this rank.
        thread: the thread in which this rank was set up; a wait in another thread sets MULTI_THREADED.
        diagnosis: the diagnosis of this world, once this rank knows it.
        spans_hosts: whether a group of this rank spans several hosts, so that the rank publishes its state in the store.
        probe_times: by rank without a state: when its connection was last probed.
        cycle_candidate: a set of ranks that wait for each other, and when it was first seen.
    """

    def __init__(self, world: Any) -> None:
        self.world = weakref.ref(world)
        self.rank, self.size, self.pid = dist.get_rank(), dist.get_world_size(), os.getpid()
        self.logs: list[int] = []
        self.operations: list[int] = []
        self.host_name, self._host_names = _host_identity(), dict[int, str]()
        self._store = default_store()
        self._key, self.folder = self._join_folder()
        self._files: dict[str, StateFile] = {}
        self.file = self.create_file(f"rank-{self.rank}", RANK_SLOTS)
        self.slots = self.file.slots
        self.slots[PID] = self.pid
        self._store.set(f"{self._key}/host/{self.rank}", self.host_name)
        self.thread = threading.get_ident()
        self.diagnosis: dict[str, Any] | None = None
        self.has_ended_here = False
        self.spans_hosts = False
        self.probe_times: dict[int, float] = {}
        self.cycle_candidate: tuple[float, Any] | None = None
        self.remote_states = StateStore(self._store, self._key, self.rank)

    def _join_folder(self) -> tuple[str, Path]:
        """Return the prefix of this world's keys in the store, and the folder of this host, which the first rank creates.

        A store may have keys of an earlier world: the prefix has a number, and a folder that has this rank's file or a diagnosis
        belongs to an earlier world.
        """
        own_folder = Path(_shared_folder(), f"{_FOLDER_PREFIX}{uuid.uuid4().hex[:16]}")
        own_folder.mkdir()
        for generation in itertools.count():
            key = f"dtensor/ranks/{generation}"
            folder = Path(self._store.compare_set(f"{key}/{self.host_name}", "", str(own_folder)).decode())
            if folder == own_folder:
                remove_stale_folders(own_folder.parent)
                break
            if folder.exists() and not (folder / f"rank-{self.rank}").exists() and not (folder / "diagnosis").exists():
                own_folder.rmdir()
                break
        return key, folder

    # --- files -----------------------------------------------------------------------------------------------------------
    def create_file(self, name: str, slot_count: int) -> StateFile:
        """Create and return a state file that this rank writes."""
        file = self._files[name] = StateFile(self.folder / name, slot_count, writable=True)
        return file

    def open_file(self, name: str, slot_count: int = RANK_SLOTS) -> StateFile | None:
        """Return the state file with this name, None if no rank of this host has created it."""
        file = self._files.get(name)
        if file is None:
            try:
                file = self._files[name] = StateFile(self.folder / name, slot_count, writable=False)
            except FileNotFoundError:  # not created yet, or removed with the folder
                return None
        return file

    def rank_file(self, rank: int) -> StateFile | None:
        """Return the state file of a rank, None if the rank is on another host or has not created it."""
        return self.open_file(f"rank-{rank}")

    def host_of(self, rank: int) -> str | None:
        """Return the host name of a rank, None while it has not published it."""
        if os.environ.get("LOCAL_WORLD_SIZE", "") == str(self.size):
            return self.host_name
        key = f"{self._key}/host/{rank}"
        if rank not in self._host_names and self._store.check([key]):
            self._host_names[rank] = self._store.get(key).decode()
        return self._host_names.get(rank)

    def elect_value(self, name: str, value: str) -> str:
        """Propose ``value`` for a key of the store, and return the value that a rank proposed first."""
        return str(self._store.compare_set(f"{self._key}/{name}", "", value).decode())

    def has_store_key(self, key: str) -> bool:
        """Return True if the job's store has this key."""
        return bool(self._store.check([key]))

    @property
    def timeout_s(self) -> float:
        """The timeout of the job's store in seconds: how long a rank waits for ranks that publish nothing."""
        return float(self._store.timeout.total_seconds())

    # --- the diagnosis ---------------------------------------------------------------------------------------------------
    def publish_diagnosis(self, diagnosis: dict[str, Any]) -> dict[str, Any]:
        """Publish a diagnosis for all ranks, and return the first one that any rank published."""
        if self.spans_hosts:
            diagnosis = self.remote_states.publish_diagnosis(diagnosis)
        unnamed = self.folder / f".diagnosis.{uuid.uuid4().hex}"  # unique: both threads of a rank may publish at once
        try:
            unnamed.write_text(json.dumps(diagnosis))
        except FileNotFoundError:  # all ranks have ended, and the folder was removed
            self.diagnosis = self.diagnosis or diagnosis
            return self.diagnosis
        try:
            os.link(unnamed, self.folder / "diagnosis")
        except FileExistsError:
            pass
        finally:
            unnamed.unlink(missing_ok=True)
        return self.find_diagnosis() or diagnosis

    def find_diagnosis(self) -> dict[str, Any] | None:
        """Return the diagnosis that a rank of this host published, None if there is none."""
        if self.diagnosis is None:
            path = self.folder / "diagnosis"
            if path.exists():
                self.diagnosis = json.loads(path.read_text())
        return self.diagnosis

    def raise_diagnosis(self) -> None:
        """Raise the diagnosis if this rank knows one. Each further collective raises it, also on the rank that published it."""
        if self.diagnosis is not None:
            raise make_diagnosis_error(self.diagnosis)

    def write_operation_error(self, error: BaseException) -> None:
        """Write an error of an operation, its user line and time to this rank's state. The program may catch it and go on."""
        slots = self.slots
        self._write_error(error, source_location.current_line(2))
        slots[ERROR_TIME], slots[ERROR_WAIT_COUNT] = time.monotonic_ns(), slots[WAIT_COUNT]
        slots[ERROR_COUNT] += 1

    def _write_error(self, error: BaseException, line: str) -> None:
        self.slots[ERROR] = self.file.replace_text(ERROR_TEXT, encode_error(error))
        self.slots[ERROR_LINE] = self.file.replace_text(LINE_TEXT, line)

    @property
    def is_current(self) -> bool:
        """Whether the process groups of this world still exist."""
        return dist.is_initialized() and self.world() is dist.group.WORLD

    # --- the end ---------------------------------------------------------------------------------------------------------
    def mark_ended(self) -> None:
        """Publish that this rank has ended, with the error that ended it. The last rank to end removes the folder."""
        if self.has_ended_here or os.getpid() != self.pid:
            return
        self.has_ended_here = True
        error = _pending_exception()
        if error is not None and not isinstance(error, SystemExit | GeneratorExit):
            self._write_error(error, source_location.line_of_error(error.__traceback__))
            self.slots[STATE] = FAILED
        elif self.slots[STATE] != WAITING:  # a mesh may still wait in its groups: the end of that wait sets EXITED
            self.slots[STATE] = EXITED
        if self.spans_hosts:
            self.publish_state()
        files = (self.rank_file(rank) for rank in range(self.size))
        if all(file is not None and file.slots[STATE] == EXITED for file in files) and self.find_diagnosis() is None:
            shutil.rmtree(self.folder, ignore_errors=True)

    def publish_state(self) -> None:
        """Publish the content of this rank's state file and logs in the job's store, for ranks of other hosts."""
        slots, file, now = self.slots, self.file, time.monotonic_ns()
        logs = {}
        for key in list(self.logs):
            log = self._files[f"log-{key:016x}-{self.rank}"]
            last = read_event(log, log.slots[0])
            event = (0, "", "", "", "")
            if last is not None:
                event = (last.hash, last.text, last.mesh_dims, last.line, last.last_operation)
            logs[f"{key:016x}"] = [log.slots[0], last_completed(log), *event]
        error, error_line = (file.read_text(slots[slot]) if slots[STATE] == FAILED else "" for slot in (ERROR, ERROR_LINE))
        state = RemoteState(
            heartbeat=0,
            state=slots[STATE],
            location=file.read_text(slots[LOCATION]),
            location_s=(now - slots[LOCATION_SINCE]) / 1e9,
            log=f"{slots[WAIT_LOG]:016x}",
            number=slots[WAIT_NUMBER],
            waited_s=(now - slots[WAIT_SINCE]) / 1e9 if slots[STATE] == WAITING else 0.0,
            waits=slots[WAIT_COUNT],
            multi_threaded=slots[MULTI_THREADED],
            call=file.read_text(slots[C10D_CALL]),
            call_since=slots[C10D_CALL_SINCE],
            call_s=(now - slots[C10D_CALL_SINCE]) / 1e9,
            error=error,
            error_line=error_line,
            logs=logs,
            started=file.read_text(slots[C10D_STARTED]),
        )
        self.remote_states.publish_if_due(state)

    def remote_state_of(self, rank: int) -> RemoteState | None:
        """Return the last published state of a rank of another host; None for a rank of this host, or without a state."""
        return self.remote_states.latest_of(rank) if self.spans_hosts and self.rank_file(rank) is None else None

    def has_ended(self, rank: int) -> bool:
        """Return True if a rank has published that it ended, or if its process is gone."""
        file, remote = self.rank_file(rank), self.remote_state_of(rank)
        return has_rank_ended(file) if file is not None else remote is not None and remote.state in (FAILED, EXITED)

    def location_of(self, rank: int) -> tuple[str, float]:
        """Return the line of user code that runs on a rank (empty if unknown), and for how many seconds."""
        file, remote = self.rank_file(rank), self.remote_state_of(rank)
        if file is not None:
            return file.read_text(file.slots[LOCATION]), (time.monotonic_ns() - file.slots[LOCATION_SINCE]) / 1e9
        return ("", 0.0) if remote is None else (remote.location, remote.location_s + self.remote_states.silent_s(rank))


def make_diagnosis_error(diagnosis: dict[str, Any]) -> Exception:
    """Return the error that all ranks raise for a diagnosis.

    For an error of one rank it has the class of that error, if the class exists here, takes a text as its only argument, and is
    not one that would end a loop. Otherwise it is a ``RankLostError``.
    """
    text = diagnosis["words"]
    if diagnosis["kind"] != "error":
        return (errors.RankLostError if diagnosis["kind"] == "lost" else errors.DivergenceError)(text)
    module, name = diagnosis["error"]
    kind = getattr(sys.modules.get(module), name, None)
    if isinstance(kind, type) and issubclass(kind, Exception) and not issubclass(kind, StopIteration | StopAsyncIteration):
        with suppress(Exception):  # the class may take other arguments
            if "(on rank " in str(error := kind(text)):
                return error
    return errors.RankLostError(f"{name}: {text}")


def open_log(host_state: HostState, kind: str, key: int, rank: int) -> StateFile | None:
    """Return the log of a rank: its collectives (``kind`` "log") or "operations"; None if it has none on this host."""
    return host_state.open_file(f"{kind}-{key:016x}-{rank}", LOG_SLOTS)


def list_folders(shared: Path | None = None) -> list[Path]:
    """Return the folders of the jobs of this host, newest first."""
    folders = []
    for folder in (shared or Path(_shared_folder())).glob(f"{_FOLDER_PREFIX}*"):
        with suppress(OSError):  # a rank may remove it meanwhile
            folders.append((folder.stat().st_mtime, folder))
    return [folder for _, folder in sorted(folders, reverse=True)]


def remove_stale_folders(shared: Path) -> None:
    """Remove folders of failed jobs but the newest ``_KEPT_FOLDERS``, which the post-mortem reader may read."""
    stale = 0
    for folder in list_folders(shared):
        with suppress(OSError):  # a folder of another user, or one that a rank removes meanwhile
            pids = [int.from_bytes(file.read_bytes()[:8], "little") for file in folder.glob("rank-*")]
            is_new = not pids and time.time() - folder.stat().st_mtime < _NEW_FOLDER_S
            if is_new or any(pid and is_process_alive(pid) for pid in pids):
                continue
            stale += 1
            if stale > _KEPT_FOLDERS:
                shutil.rmtree(folder, ignore_errors=True)


def _pending_exception() -> BaseException | None:
    """Return the exception that the main thread handles or that ended it, None if there is none."""
    error: Any = source_location.run_uninterrupted(sys._current_exceptions).get(threading.main_thread().ident or 0)
    if isinstance(error, tuple):  # Python 3.11
        error = error[1]
    return error or getattr(sys, "last_value", None)


def encode_error(error: BaseException) -> str:
    """Return module, class name and message of an error as JSON; an empty message if the error cannot format itself."""
    message = ""
    with suppress(Exception):
        message = str(error)[:1500]
    return json.dumps([type(error).__module__, type(error).__qualname__, message])


def has_rank_ended(file: StateFile) -> bool:
    """Return True if a rank has published that it ended, or if its process is gone."""
    return file.slots[STATE] in (FAILED, EXITED) or not is_process_alive(file.slots[PID])


def was_killed(file: StateFile) -> bool:
    """Return True if the process of a rank is gone and had not published a normal end."""
    return file.slots[STATE] != EXITED and not is_process_alive(file.slots[PID])


def is_process_alive(pid: int) -> bool:
    """Return True if a process runs; a zombie does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return process_state(pid) not in ("Z", "X")


def process_state(pid: int) -> str:
    """Return the state of a process as Linux reports it: "R", "S", "T" (stopped), "Z" ...; empty on other systems."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return ""


def _shared_folder() -> str:
    """Return the folder of shared memory if it has space, else the folder of temporary files."""
    memory = "/dev/shm"
    has_space = os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > _MIN_FREE_BYTES
    return memory if has_space else tempfile.gettempdir()


def _host_identity() -> str:
    """Return a text that is equal for processes that share files and process ids (one host, one container)."""
    parts = [socket.gethostname()]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/mnt", "/proc/self/ns/pid"):
        try:
            parts.append(os.readlink(path) if "ns" in path else Path(path).read_text().strip())
        except OSError:
            parts.append("")
    return "/".join(parts)
