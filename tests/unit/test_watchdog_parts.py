"""Watchdog parts: state files, event logs, fingerprints, source locations, diagnosis texts and wait threads."""

from __future__ import annotations

import gc
import os
import shutil
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import repeat
from operator import call
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import dtensor as dt
from dtensor.__main__ import main
from dtensor.errors import ArgumentError, DivergenceError, LayoutError, RankLostError
from dtensor.watchdog import post_mortem, source_location
from dtensor.watchdog.collective_hooks import _ActiveWatchdog, wait_abandonably
from dtensor.watchdog.diagnosis import SAME_CALLS, RankReport, format_difference
from dtensor.watchdog.flight_recorder import LOG_SLOTS, EventLog, OperationHash, StateFile, fingerprint, read_event
from dtensor.watchdog.host_state import encode_error, is_process_alive, make_diagnosis_error, process_state, remove_stale_folders
from dtensor.watchdog.levels import CheckLevel
from dtensor.watchdog.watchdog import WaitThreads

NUMBERS = [2.5, -3, float("nan"), 2**70, 1j, float("nan")]


@pytest.fixture(scope="module")
def killed_writer(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Return the state file of a killed process, and the hash of ``NUMBERS`` that the process printed."""
    path = tmp_path_factory.mktemp("killed") / "state"
    program = f"""
import os, signal
from pathlib import Path
from dtensor.watchdog.flight_recorder import OperationHash, StateFile
operation_hash, nan = OperationHash({{1}}), float("nan")
operation_hash.numbers += {NUMBERS}
print(operation_hash.read_hash(), flush=True)
state = StateFile(Path({str(path)!r}), 4, writable=True)
state.slots[0], state.slots[1] = 2**64 - 1, state.add_text("what it did last")
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], check=False, capture_output=True, text=True)
    assert done.returncode == -9, done.stderr
    return path, int(done.stdout)


def test_state_file_can_be_read_after_its_writer_was_killed(killed_writer: tuple[Path, int]) -> None:
    state = StateFile(killed_writer[0], 4, writable=False)
    assert state.slots[0] == 2**64 - 1
    assert state.read_text(state.slots[1]) == "what it did last"


def test_a_full_state_file_drops_the_oldest_texts(tmp_path: Path) -> None:
    state = StateFile(tmp_path / "state", 4, writable=True)
    reader = StateFile(tmp_path / "state", 4, writable=False)
    texts = [f"{k} " * (1 + k % 997) for k in range(3000)]
    offsets = [state.add_text(text) for text in texts]
    assert [reader.read_text(offset) for offset in offsets[-100:]] == [text[:2000] for text in texts[-100:]]
    assert {reader.read_text(offset) for offset in offsets[:1000]} == {""}
    for text, offset in zip(texts, offsets, strict=True):
        assert reader.read_text(offset) in ("", text[:2000])
    again = state.add_text(texts[0])
    assert again > offsets[-1]
    assert reader.read_text(again) == texts[0]
    assert state.add_text(texts[-1]) == offsets[-1]


def test_replace_text_overwrites_the_text_of_a_slot(tmp_path: Path) -> None:
    state = StateFile(tmp_path / "state", 4, writable=True)
    assert state.read_text(state.replace_text(1, "first")) == "first"
    assert state.read_text(state.replace_text(1, "second")) == "second"
    assert state.replace_text(1, "") == 0


def test_fingerprint_is_equal_in_all_processes() -> None:
    assert fingerprint("all_reduce(sum)") == 1227811750619147766  # hash() differs between processes


def test_source_location_is_the_line_of_the_user() -> None:
    assert source_location.current_line().startswith("test_watchdog_parts.py:")
    assert "current_line()" in source_location.current_line()
    with pytest.raises(ArgumentError) as refused:
        dt.check_ranks("loud")
    assert 'dt.check_ranks("loud")' in source_location.line_of_error(refused.tb)


class _GarbageCycle:
    """Reference cycle that appends to ``ends`` when garbage collection frees it."""

    def __init__(self, ends: list[int]) -> None:
        self.cycle, self.ends = self, ends

    def __del__(self) -> None:
        self.ends.append(1)


@pytest.mark.parametrize("enabled", [True, False])
def test_run_uninterrupted_disables_garbage_collection(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        for uninterrupted in (False, True):
            ends: list[int] = []
            many = partial(list, map(list, repeat((), 10_000)))
            act = partial(list, map(call, (many, ends.__len__)))  # in C: allocates enough to trigger a collection, then counts
            _GarbageCycle(ends)
            found = source_location.run_uninterrupted(act)[1] if uninterrupted else act()[1]
            collects_in_c = sys.version_info < (3, 12)  # later versions collect only between bytecodes
            assert found == (enabled and not uninterrupted and collects_in_c)
        with pytest.raises(ZeroDivisionError):
            source_location.run_uninterrupted(partial(divmod, 1, 0))
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_main_thread_locations_hold_no_reference_to_local_variables() -> None:
    references: list[Any] = []

    def work(threads: ThreadPoolExecutor) -> list[Any]:
        tensor = torch.zeros(1)
        references.append(weakref.ref(tensor))
        return threads.submit(source_location.main_thread_locations).result()  # the line of the main thread

    with ThreadPoolExecutor(1) as threads:
        locations = work(threads)
    assert references[0]() is None
    assert source_location.innermost_user_line(locations).endswith(
        "return threads.submit(source_location.main_thread_locations).result()  # the line of the main thread"
    )


def test_diagnosis_of_differing_ranks_names_the_minority_first() -> None:
    mesh_dims = "('dp', 'tp')"
    found = {rank: RankReport(7, mesh_dims, "a   x.py:1") for rank in (0, 1, 3)} | {2: RankReport(8, mesh_dims, "b   x.py:3")}
    diagnosis = format_difference(1204, found)
    assert diagnosis["words"] == (
        "ranks diverged at step 1,204 on mesh dims ('dp', 'tp'): rank 2 differs from ranks 0, 1, 3\n"
        f"  0,1,3: a   x.py:1\n  2:     b   x.py:3\n{SAME_CALLS}"
    )
    assert "rank 0 and rank 1 differ" in format_difference(1, {0: RankReport(1, "", "a"), 1: RankReport(2, "", "b")})["words"]
    assert isinstance(make_diagnosis_error(diagnosis), DivergenceError)


class _ErrorWithoutMessage(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no message")


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        ("builtins", "IndexError", IndexError),
        ("dtensor.errors", "LayoutError", LayoutError),
        ("torch._C", "_LinAlgError", torch.linalg.LinAlgError),
        ("builtins", "UnicodeDecodeError", RankLostError),  # its constructor takes more than a message
        ("builtins", "print", RankLostError),
        ("builtins", "StopIteration", RankLostError),  # raised in an iterator, it would end the loop
        (__name__, "_ErrorWithoutMessage", RankLostError),
        ("somewhere", "Error", RankLostError),
    ],
)
def test_diagnosis_error_has_the_class_of_the_error_of_the_failed_rank(module: str, name: str, expected: type) -> None:
    error = make_diagnosis_error({"kind": "error", "error": [module, name], "words": "no (on rank 1)"})
    assert type(error) is expected
    assert str(error) == ("no (on rank 1)" if expected is not RankLostError else f"{name}: no (on rank 1)")


def test_encode_error_of_an_error_without_message_has_its_class() -> None:
    assert encode_error(_ErrorWithoutMessage()) == f'["{__name__}", "_ErrorWithoutMessage", ""]'


def test_remove_stale_folders_keeps_live_new_and_recent_folders(tmp_path: Path) -> None:
    for age, (name, pid) in enumerate({"alive": os.getpid(), "one": 2**22 + 7, "two": 2**22 + 7, "three": 2**22 + 7}.items()):
        folder = tmp_path / f"dtensor-ranks-{name}"
        folder.mkdir()
        StateFile(folder / "rank-0", 4, writable=True).slots[0] = pid
        os.utime(folder, (1e9 - age, 1e9 - age))
    (tmp_path / "dtensor-ranks-new").mkdir()  # its ranks have not written a file yet
    remove_stale_folders(tmp_path)
    assert {folder.name.rpartition("-")[2] for folder in tmp_path.iterdir()} == {"alive", "new", "one", "two"}


@pytest.mark.parametrize("signal", ["SIGKILL", pytest.param("SIGABRT", marks=pytest.mark.slow)])
def test_rank_log_of_a_killed_process_shows_its_last_operations(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], signal: str
) -> None:
    program = f"""
import os, signal, torch
import torch.distributed as dist, dtensor as dt
from dtensor.watchdog import collective_hooks
dist.init_process_group("gloo", init_method="file://{tmp_path}/store", rank=0, world_size=1)
dt.check_ranks("strict")
mesh = dt.init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
x = dt.distribute_tensor(torch.ones(6, 5), mesh, [dt.Shard(0)], src_data_rank=None)
for k in range(5000):
    x.sum(dim=0)
x.amax(1)
print(collective_hooks._ActiveWatchdog.watchdog.host_state.folder, flush=True)
os.kill(os.getpid(), signal.{signal})
"""
    script = tmp_path / "program.py"
    script.write_text(program)
    killed = subprocess.run([sys.executable, script], check=False, capture_output=True, text=True)
    assert killed.returncode < 0
    log = post_mortem.format_rank_logs(Path(killed.stdout.strip()), 9000)
    *_, before, last = log.splitlines()
    assert "rank 0 was killed" in log
    assert "aten.sum.dim_IntList(dim=0)  float32[6, 5] (S(0))   program.py:10  x.sum(dim=0)" in before
    assert "#5001" in last
    assert "aten.amax.default(dim=1)  float32[6, 5] (S(0))   program.py:11  x.amax(1)" in last
    assert len(log.splitlines()) == 2 + 4096
    assert main(["ranks", killed.stdout.strip(), "--last", "1"]) == 0
    assert "amax" in capsys.readouterr().out
    shutil.rmtree(killed.stdout.strip())


def test_check_ranks_sets_off_strict_and_watch_and_other_levels_raise() -> None:
    before = CheckLevel.now
    try:
        for level in ("off", "strict", "watch"):
            dt.check_ranks(level)
            assert CheckLevel.now == level
        with pytest.raises(ArgumentError, match="takes one of"):
            dt.check_ranks("loud")
    finally:
        dt.check_ranks(before)


def test_process_state_and_is_process_alive_recognize_a_finished_process() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_state(child.pid) in ("Z", "")
        assert is_process_alive(os.getpid())
    finally:
        child.wait()
    assert not is_process_alive(child.pid)


def test_read_event_ignores_an_event_that_is_being_written() -> None:
    event_log = EventLog(StateFile(None, LOG_SLOTS, writable=True))
    slot, read_text = event_log.add_event(1, "all_reduce(sum)", "", "train.py:1"), event_log.file.read_text
    event_log.slots[slot] = 0

    def read_text_while_written(offset: int) -> str:
        event_log.slots[slot] = 1  # the writer finishes while the reader reads the texts
        return read_text(offset)

    event_log.file.read_text = read_text_while_written
    assert read_event(event_log.file, 1) is None


def hash_numbers(numbers: list[Any], read_after: tuple[int, ...] = ()) -> int:
    operation_hash = OperationHash(frozenset({0, 1}))
    for index, number in enumerate(numbers):
        operation_hash.numbers.append(number)
        if index in read_after:
            operation_hash.read_hash()
    return operation_hash.read_hash()


def test_operation_hash_of_numbers_is_equal_in_all_processes_and_for_each_read_order(killed_writer: tuple[Path, int]) -> None:
    assert killed_writer[1] == hash_numbers(NUMBERS) == hash_numbers(NUMBERS, (0, 3))
    others = [-2.0, -1.0, 0.0, -0.0, 0, 1, 2, -1, -2, 0.5, 1e300, float("inf"), float("-inf"), float("nan"), 1j]
    assert len({hash_numbers([number]) for number in others}) == len(others)
    assert hash_numbers([1, 2]) != hash_numbers([2, 1])


class _Work:
    """Work of a process group that records the thread which waits for it."""

    def __init__(self, completed: bool, error: Exception | None = None) -> None:
        self.completed, self.error = completed, error
        self.waited_in: int | None = None

    def is_completed(self) -> bool:
        return self.completed

    def wait(self) -> None:
        self.waited_in = threading.get_ident()
        if self.error is not None:
            raise self.error


def test_completed_works_are_waited_for_in_the_calling_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    waiters = WaitThreads()
    monkeypatch.setattr(_ActiveWatchdog, "watchdog", SimpleNamespace(wait_threads=waiters))
    try:
        for completed in ([True, True], [True, False]):
            works = [_Work(each) for each in completed]
            wait_abandonably([*works], None)
            assert {work.waited_in == threading.get_ident() for work in works} == {all(completed)}
        with pytest.raises(RuntimeError, match="Connection closed"):
            wait_abandonably([_Work(True, RuntimeError("Connection closed"))], None)
    finally:
        waiters.stop(lambda: None)
