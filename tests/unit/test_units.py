"""Units and tables of reports: scaled numbers with three digits, aligned columns."""

from __future__ import annotations

import sys

import pytest

from dtensor.base.text_tables import print_table, table_text
from dtensor.base.units import bytes_text, flop_text, seconds_text

ROWS = [("module", "received"), ("MLP", "96 B"), ("MLP.down", "1,020 KiB")]


@pytest.mark.parametrize(
    ("count", "expected"),
    [(0, "0 B"), (1023, "1,023 B"), (1024, "1 KiB"), (184_320, "180 KiB"), (1_048_064, "1 MiB"), (5 * 2**40, "5 TiB")],
)
def test_bytes_are_scaled_by_1024(count: int, expected: str) -> None:
    assert bytes_text(count) == expected


@pytest.mark.parametrize(
    ("count", "expected"), [(384, "384 FLOP"), (999_600, "1 MFLOP"), (262_800_000, "263 MFLOP"), (10**24, "1,000,000 EFLOP")]
)
def test_flop_are_scaled_by_1000(count: int, expected: str) -> None:
    assert flop_text(count) == expected


@pytest.mark.parametrize(
    ("seconds", "expected"), [(0, "0 us"), (0.00012, "120 us"), (0.9996e-3, "1 ms"), (0.99960, "1 s"), (-0.002, "-2 ms")]
)
def test_seconds_have_the_largest_unit_that_fits(seconds: float, expected: str) -> None:
    assert seconds_text(seconds) == expected


def test_columns_of_numbers_are_aligned_to_the_right() -> None:
    assert table_text(ROWS, numbers=True).splitlines() == ["module     received", "MLP            96 B", "MLP.down  1,020 KiB"]
    assert table_text(ROWS).splitlines()[1] == "MLP       96 B"


def test_print_table_uses_rich_only_on_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    print_table(ROWS, numbers=True)
    assert capsys.readouterr().out == table_text(ROWS, numbers=True) + "\n"
    pytest.importorskip("rich")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    print_table([("[a]", "b"), ("[red]", "96 B")])  # square brackets are not rich markup
    output = capsys.readouterr().out
    assert "─" in output
    assert "[red]" in output
