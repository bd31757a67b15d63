"""What a notebook shows of tensors, layouts, meshes and plans; a program's lines beside what they move, as a page of its own."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from ..base.by_key import by_key
from ..base.callers import NOWHERE, Place
from ..errors import ArgumentError
from ..plan import PlannedCall, ProgramPlan, Sharding
from ..plan.program_plan import spelled
from ..tensor.dtensor import DTensor
from .boxes import boxes_of
from .explain import Explanation
from .svg import svg_of

_AROUND = 3  # lines of the program before and after one that moves something

_STYLE = """<style>
.dtensor { --dim: #7a7a88; --rule: #8884; --bar: #4a90d9; line-height: 1.35; }
.dtensor h3, .dtensor h4 { margin: 0.8em 0 0.3em; font-weight: 600; }
.dtensor table { border-collapse: collapse; width: 100%; }
.dtensor td, .dtensor th { padding: 0 0.8em 0 0; text-align: left !important; vertical-align: top; border: 0; background: none; }
.dtensor pre, .dtensor .code { font: 12.5px/1.45 ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; margin: 0; }
.dtensor .code { white-space: pre-wrap; }
.dtensor .number, .dtensor .gap { color: var(--dim); text-align: right !important; width: 3em; }
.dtensor .bytes { white-space: nowrap; width: 13em; }
.dtensor .bar { display: inline-block; height: 0.7em; background: var(--bar); margin-right: 0.5em; border-radius: 2px; }
.dtensor .moving .code { font-weight: 700; }
.dtensor .detail pre { color: var(--dim); border-left: 2px solid var(--rule); padding-left: 0.8em; white-space: pre-wrap; }
</style>"""
_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{title}</title><style>
:root {{ color-scheme: light dark; }}
body {{ font: 15px/1.5 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; }}
</style></head><body>
<h1>{title}</h1>
{body}
</body></html>
"""


@dataclass(frozen=True, slots=True)
class Told:
    """What one line of the program moves: bytes that a rank receives, and how, line by line."""

    place: Place
    nbytes: int
    text: tuple[str, ...]


def html_of(x: Any) -> str:
    """An element for a page: of a tensor, layout or mesh its picture, of a plan or an explanation the program's lines.

    Raises:
        ArgumentError: it is none of these.
    """
    if (boxes := boxes_of(x)) is not None:
        if not isinstance(x, DTensor):
            return svg_of(boxes)
        return (
            f'<div class="dtensor">{svg_of(boxes)}<details><summary>values</summary><pre>{escape(repr(x))}</pre></details></div>'
        )
    match x:
        case ProgramPlan():
            return _element(str(x).partition("\n")[0], _listing(_planned(x.calls)))
        case Sharding():
            return _element(str(x).partition("\n")[0], _placements(x), _listing(_planned(x.plan.calls)))
        case Explanation():
            told = [Told(line.place, line.bytes, tuple(str(line).splitlines()[1:])) for line in x.lines]
            return _element(str(x).partition("\n")[0], _listing(told))
    raise ArgumentError(f"no picture of a {type(x).__name__}: a DTensor, Layout, DeviceMesh, plan or explanation has one")


def save_html(x: Any, path: str | Path, title: str = "") -> Path:
    """Writes a page that needs nothing else, no network: what a notebook shows of ``x``; gives its path.

    Of a :class:`dtensor.ProgramPlan`, of what ``auto_shard`` found and of an explanation these are the program's lines beside
    what they move. No communication; on processes one rank writes it.

    Args:
        x: a DTensor, Layout, DeviceMesh, plan or explanation.
        path: of the file; its folder is there.
        title: default the kind of ``x``.

    Raises:
        ArgumentError: ``x`` has no picture.

    >>> import tempfile, torch, dtensor as dt
    >>> x = dt.ones(4, 6, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     page = dt.debug.save_html(dt.explain(lambda: x @ x.t()), f"{folder}/moved.html").read_text()
    >>> "48 B" in page, "http" in page.replace("http://www.w3.org/2000/svg", "")
    (True, False)
    """
    path = Path(path)
    path.write_text(_PAGE.format(title=escape(title or type(x).__name__), body=html_of(x)), encoding="utf-8")
    return path


def _element(head: str, *parts: str) -> str:
    return f'{_STYLE}<div class="dtensor"><p>{escape(head)}</p>{"".join(parts)}</div>'


def _placements(found: Sharding) -> str:
    rows = [*found.placements.items(), *((f"batch {i}", places) for i, places in enumerate(found.batch))]
    cells = "".join(f"<tr><td>{escape(name)}</td><td>{escape(', '.join(spelled(places)))}</td></tr>" for name, places in rows)
    return f"<details><summary>placements of {len(rows)} tensors</summary><table>{cells}</table></details>"


def _planned(calls: Sequence[PlannedCall]) -> list[Told]:
    """By the user's line, in order of first use."""
    told = []
    for line, own in by_key((call.line, call) for call in calls if call.moves).items():
        file, _, number = line.rpartition(":")
        text = tuple(row.removeprefix("  ") for call in own for row in str(call).splitlines())
        told.append(Told(Place(file, int(number)) if file else NOWHERE, sum(m.nbytes for call in own for m in call.moves), text))
    return told


# --- lines of code ------------------------------------------------------------------------------------------------------
def _listing(told: Iterable[Told]) -> str:
    """The program's lines near those that move something, file by file, each with its bytes and what it moves."""
    files = by_key((each.place.file, each) for each in told)
    most = max((each.nbytes for own in files.values() for each in own), default=0)
    if not files:
        return "<p>Nothing is moved.</p>"
    return "".join(
        f"<h3>{escape(file) or 'outside of the program'}</h3><table>{''.join(_rows(file, own, most))}</table>"
        for file, own in files.items()
    )


def _rows(file: str, told: Sequence[Told], most: int) -> Iterator[str]:
    by_number = by_key((each.place.number, each) for each in told)
    source = linecache.getlines(file) if file else []
    near = {number for at in by_number for number in range(max(at - _AROUND, 1), min(at + _AROUND, len(source)) + 1)}
    shown = sorted({*near, *by_number})
    before = shown[0] - 1
    for number in shown:
        if number > before + 1:
            yield '<tr><td class="gap">⋮</td></tr>'
        before = number
        code = escape(source[number - 1].rstrip()) if 1 <= number <= len(source) else ""
        own = by_number.get(number, [])
        cells = f'<td class="number">{number or ""}</td><td class="bytes">{_bar(own, most)}</td><td class="code">{code}</td>'
        yield f'<tr class="{"moving" if own else "still"}">{cells}</tr>'
        for each in own:
            yield f'<tr class="detail"><td colspan="2"></td><td><pre>{escape(chr(10).join(each.text))}</pre></td></tr>'


def _bar(told: Sequence[Told], most: int) -> str:
    if not told:
        return ""
    total = sum(each.nbytes for each in told)
    return f'<span class="bar" style="width:{5 * total / max(most, 1):.2f}em"></span>{total:,} B'
