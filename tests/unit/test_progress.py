"""Progress of long work: lines on stderr without a terminal, nothing for short work."""

from __future__ import annotations

import sys
import threading

import pytest

from dtensor.commands import progress as module
from dtensor.commands.progress import iterate_with_progress, report_periodically


class LineRecorder:
    """A stderr that is no terminal and sets an event at each line."""

    def __init__(self) -> None:
        self.text = ""
        self.written = threading.Event()

    def isatty(self) -> bool:
        return False

    def write(self, text: str) -> None:
        self.text += text
        if text.endswith("\n"):
            self.written.set()

    def flush(self) -> None:
        pass


def test_progress_of_long_work_reports_the_number_of_items(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = LineRecorder()
    monkeypatch.setattr(sys, "stderr", stderr)
    monkeypatch.setattr(module, "_FIRST_WAIT", 0.0)
    monkeypatch.setattr(module, "_NEXT_WAIT", 0.001)
    done = []
    for item in iterate_with_progress(range(3), 3, "verifying"):
        stderr.written.clear()
        assert stderr.written.wait(60)  # a line is printed while this item is processed
        done.append(item)
    assert done == [0, 1, 2]
    assert "verifying: 2 of 3, 0 s\n" in stderr.text


def test_progress_of_short_work_reports_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    stderr = LineRecorder()
    monkeypatch.setattr(sys, "stderr", stderr)
    assert list(iterate_with_progress(range(3), 3, "verifying")) == [0, 1, 2]
    with pytest.raises(ZeroDivisionError), report_periodically(lambda: "planning"):
        _ = 1 / 0
    assert stderr.text == ""
    assert not [thread for thread in threading.enumerate() if thread.name == "dtensor-progress"]
