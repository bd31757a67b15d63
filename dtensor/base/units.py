"""Units for reports: bytes, seconds and FLOP as text with three digits and a scaled unit."""

from __future__ import annotations

from collections.abc import Sequence

_BYTES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_FLOP = ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP")


def bytes_text(count: float) -> str:
    """Return a number of bytes as text, in powers of 1024.

    >>> bytes_text(96), bytes_text(184_320), bytes_text(3_355_443)
    ('96 B', '180 KiB', '3.2 MiB')
    """
    return _scaled(count, 1024, _BYTES)


def flop_text(count: float) -> str:
    """Return a number of floating-point operations as text, in powers of 1000.

    >>> flop_text(384), flop_text(262_800_000)
    ('384 FLOP', '263 MFLOP')
    """
    return _scaled(count, 1000, _FLOP)


def seconds_text(seconds: float) -> str:
    """Return a duration as text, in seconds, milliseconds or microseconds.

    >>> seconds_text(0.00012), seconds_text(0.0619), seconds_text(72.4)
    ('120 us', '61.9 ms', '72.4 s')
    """
    size = abs(seconds)
    if size >= 0.9995:
        return f"{_digits(seconds)} s"
    return f"{_digits(seconds * 1e3)} ms" if size >= 0.9995e-3 else f"{_digits(seconds * 1e6)} us"


def _scaled(count: float, base: int, units: Sequence[str]) -> str:
    """Return ``count`` as text with the largest of ``units`` that fits; each unit is ``base`` times the one before."""
    power = 0
    while power + 1 < len(units) and abs(count) >= base - 0.5:
        count, power = count / base, power + 1
    return f"{_digits(count)} {units[power]}"


def _digits(value: float) -> str:
    """Return a number as text with three significant digits; integers and values from 1000 without a fraction."""
    return f"{value:,.0f}" if abs(value) >= 999.5 or value == int(value) else f"{value:.3g}"
