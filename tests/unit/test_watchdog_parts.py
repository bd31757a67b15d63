"""Pages, lines and words: what the watch over ranks is made of."""

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


def test_a_page_is_read_by_others_and_after_its_writer_was_killed(tmp_path: Path) -> None:
    program = f"""
import os, signal
from pathlib import Path
from dtensor.watchdog.flight_recorder import StateFile
page = StateFile(Path({str(tmp_path / "page")!r}), 4, writable=True)
page.slots[0], page.slots[1] = 2**64 - 1, page.add_text("what it did last")
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == -9
    page = StateFile(tmp_path / "page", 4, writable=False)
    assert page.slots[0] == 2**64 - 1
    assert page.read_text(page.slots[1]) == "what it did last"


def test_in_a_full_page_the_oldest_texts_give_way(tmp_path: Path) -> None:
    page = StateFile(tmp_path / "page", 4, writable=True)
    other = StateFile(tmp_path / "page", 4, writable=False)
    texts = [f"{k} " * (1 + k % 997) for k in range(3000)]
    places = [page.add_text(text) for text in texts]
    assert [other.read_text(place) for place in places[-100:]] == [text[:2000] for text in texts[-100:]]
    assert {other.read_text(place) for place in places[:1000]} == {""}
    for text, place in zip(texts, places, strict=True):
        assert other.read_text(place) in ("", text[:2000])
    again = page.add_text(texts[0])
    assert again > places[-1]
    assert other.read_text(again) == texts[0]
    assert page.add_text(texts[-1]) == places[-1]


def test_a_text_is_written_over_another(tmp_path: Path) -> None:
    page = StateFile(tmp_path / "page", 4, writable=True)
    assert page.read_text(page.replace_text(1, "over")) == "over"
    assert page.read_text(page.replace_text(1, "and over")) == "and over"
    assert page.replace_text(1, "") == 0


def test_fingerprints_are_the_same_in_all_processes() -> None:
    assert fingerprint("all_reduce(sum)") == 1227811750619147766  # as hash() would not be


def test_the_users_line_is_this_one() -> None:
    assert source_location.current_line().startswith("test_watchdog_parts.py:")
    assert "current_line()" in source_location.current_line()
    with pytest.raises(ArgumentError) as refused:
        dt.check_ranks("loud")
    assert 'dt.check_ranks("loud")' in source_location.line_of_error(refused.tb)


class _Rubbish:
    """Ends where a collection finds it."""

    def __init__(self, ends: list[int]) -> None:
        self.itself, self.ends = self, ends

    def __del__(self) -> None:
        self.ends.append(1)


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_in_an_undisturbed_call(enabled: bool) -> None:
    (gc.enable if enabled else gc.disable)()
    try:
        for undisturbed in (False, True):
            ends: list[int] = []
            many = partial(list, map(list, repeat((), 10_000)))
            act = partial(list, map(call, (many, ends.__len__)))  # of C: makes enough for a collection, and counts
            _Rubbish(ends)
            found = source_location.run_uninterrupted(act)[1] if undisturbed else act()[1]
            assert found == (enabled and not undisturbed and sys.version_info < (3, 12))  # later ones collect between steps
        with pytest.raises(ZeroDivisionError):
            source_location.run_uninterrupted(partial(divmod, 1, 0))
        assert gc.isenabled() == enabled
    finally:
        gc.enable()


def test_where_the_main_thread_is_is_known_without_holding_what_it_holds() -> None:
    held: list[Any] = []

    def work(threads: ThreadPoolExecutor) -> list[Any]:
        thing = torch.zeros(1)
        held.append(weakref.ref(thing))
        return threads.submit(source_location.main_thread_locations).result()  # here it is

    with ThreadPoolExecutor(1) as threads:
        places = work(threads)
    assert held[0]() is None
    assert source_location.innermost_user_line(places).endswith(
        "return threads.submit(source_location.main_thread_locations).result()  # here it is"
    )


def test_the_words_name_the_few() -> None:
    over = "('dp', 'tp')"
    found = {rank: RankReport(7, over, "a   x.py:1") for rank in (0, 1, 3)} | {2: RankReport(8, over, "b   x.py:3")}
    verdict = format_difference(1204, found)
    assert verdict["words"] == (
        "ranks diverged at step 1,204 on mesh dims ('dp', 'tp'): rank 2 differs from ranks 0, 1, 3\n"
        f"  0,1,3: a   x.py:1\n  2:     b   x.py:3\n{SAME_CALLS}"
    )
    assert "rank 0 and rank 1 differ" in format_difference(1, {0: RankReport(1, "", "a"), 1: RankReport(2, "", "b")})["words"]
    assert isinstance(make_diagnosis_error(verdict), DivergenceError)


class _Wordless(Exception):
    def __str__(self) -> str:
        raise RuntimeError("it has no words")


@pytest.mark.parametrize(
    ("module", "name", "expected"),
    [
        ("builtins", "IndexError", IndexError),
        ("dtensor.errors", "LayoutError", LayoutError),
        ("torch._C", "_LinAlgError", torch.linalg.LinAlgError),
        ("builtins", "UnicodeDecodeError", RankLostError),  # it takes more than words
        ("builtins", "print", RankLostError),
        ("builtins", "StopIteration", RankLostError),  # where a loop asks for more, it would end it
        (__name__, "_Wordless", RankLostError),
        ("somewhere", "Error", RankLostError),
    ],
)
def test_a_ranks_error_is_that_of_all(module: str, name: str, expected: type) -> None:
    error = make_diagnosis_error({"kind": "error", "error": [module, name], "words": "no (on rank 1)"})
    assert type(error) is expected
    assert str(error) == ("no (on rank 1)" if expected is not RankLostError else f"{name}: no (on rank 1)")


def test_an_error_without_words_is_told_by_its_class() -> None:
    assert encode_error(_Wordless()) == f'["{__name__}", "_Wordless", ""]'


def test_what_killed_jobs_left_is_swept_up(tmp_path: Path) -> None:
    for age, (name, pid) in enumerate({"alive": os.getpid(), "one": 2**22 + 7, "two": 2**22 + 7, "three": 2**22 + 7}.items()):
        folder = tmp_path / f"dtensor-ranks-{name}"
        folder.mkdir()
        StateFile(folder / "rank-0", 4, writable=True).slots[0] = pid
        os.utime(folder, (1e9 - age, 1e9 - age))
    (tmp_path / "dtensor-ranks-new").mkdir()  # its ranks are about to come
    remove_stale_folders(tmp_path)
    assert {folder.name.rpartition("-")[2] for folder in tmp_path.iterdir()} == {"alive", "new", "one", "two"}


@pytest.mark.parametrize("signal", ["SIGKILL", pytest.param("SIGABRT", marks=pytest.mark.slow)])
def test_what_a_killed_rank_did_last_can_be_read(tmp_path: Path, capsys: pytest.CaptureFixture[str], signal: str) -> None:
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
    said = post_mortem.format_rank_logs(Path(killed.stdout.strip()), 9000)
    *_, before, last = said.splitlines()
    assert "rank 0 was killed" in said
    assert "aten.sum.dim_IntList(dim=0)  float32[6, 5] (S(0))   program.py:10  x.sum(dim=0)" in before
    assert "#5001" in last
    assert "aten.amax.default(dim=1)  float32[6, 5] (S(0))   program.py:11  x.amax(1)" in last
    assert len(said.splitlines()) == 2 + 4096
    assert main(["ranks", killed.stdout.strip(), "--last", "1"]) == 0
    assert "amax" in capsys.readouterr().out
    shutil.rmtree(killed.stdout.strip())


def test_levels_are_these() -> None:
    before = CheckLevel.now
    try:
        for level in ("off", "strict", "watch"):
            dt.check_ranks(level)
            assert CheckLevel.now == level
        with pytest.raises(ArgumentError, match="takes one of"):
            dt.check_ranks("loud")
    finally:
        dt.check_ranks(before)


def test_processes_that_are_gone_are_known() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    try:
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert process_state(child.pid) in ("Z", "")
        assert is_process_alive(os.getpid())
    finally:
        child.wait()
    assert not is_process_alive(child.pid)


def test_a_thing_that_is_being_written_down_is_not_read() -> None:
    ring = EventLog(StateFile(None, LOG_SLOTS, writable=True))
    at, text = ring.add(1, "all_reduce(sum)", "", "train.py:1"), ring.file.read_text
    ring.slots[at] = 0

    def finishing(place: int) -> str:
        ring.slots[at] = 1  # the writer has come to the end while the reader is among the texts
        return text(place)

    ring.file.read_text = finishing
    assert read_event(ring.file, 1) is None


def trail_of(numbers: list[Any], stops: tuple[int, ...] = ()) -> int:
    trail = OperationHash(frozenset({0, 1}))
    for place, number in enumerate(numbers):
        trail.numbers.append(number)
        if place in stops:
            trail.read_hash()
    return trail.read_hash()


def test_a_trail_of_numbers_is_the_same_in_all_processes_wherever_it_is_settled() -> None:
    numbers = [2.5, -3, float("nan"), 2**70, 1j, float("nan")]
    start = "from dtensor.watchdog.flight_recorder import *; t, nan = OperationHash({1}), float('nan')"
    program = f"{start}; t.numbers += {numbers}; print(t.read_hash())"
    told = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert int(told) == trail_of(numbers) == trail_of(numbers, (0, 3))
    others = [-2.0, -1.0, 0.0, -0.0, 0, 1, 2, -1, -2, 0.5, 1e300, float("inf"), float("-inf"), float("nan"), 1j]
    assert len({trail_of([number]) for number in others}) == len(others)
    assert trail_of([1, 2]) != trail_of([2, 1])


class _Work:
    """A work of a group that tells in which thread it was waited for."""

    def __init__(self, completed: bool, error: Exception | None = None) -> None:
        self.completed, self.error = completed, error
        self.waited_in: int | None = None

    def is_completed(self) -> bool:
        return self.completed

    def wait(self) -> None:
        self.waited_in = threading.get_ident()
        if self.error is not None:
            raise self.error


def test_what_has_come_is_waited_for_without_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
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
