"""HTML of tensors, layouts, meshes, plans and explanations: what a notebook shows, and pages that need no network.

A plan or an explanation is shown as the program's lines, each with the bytes that it receives. Rendered with jinja2, and the code
colored with pygments if it is installed.
"""

from __future__ import annotations

import importlib.util
import linecache
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.caches import remembered
from ..base.group_by import by_key
from ..base.units import bytes_text
from ..base.user_frames import Place
from ..errors import ArgumentError
from ..plan import ProgramPlan, Sharding
from ..plan.program_plan import spelled
from ..tensor.dtensor import DTensor
from . import html_templates as templates
from .explain import Explanation
from .layout_boxes import boxes_of
from .svg import svg_of

_AROUND = 3  # lines of the program shown before and after one that communicates


@dataclass(frozen=True, slots=True)
class CostlyLine:
    """A line of the program that communicates: bytes that one rank receives, and lines of text about it, the first a summary."""

    place: Place
    nbytes: int
    summary: str
    details: tuple[str, ...]


def html_of(x: Any) -> str:
    """Return an HTML element: a picture of a tensor, layout or mesh; the program's lines of a plan or an explanation.

    Raises:
        ArgumentError: ``x`` is none of these.
    """
    if (boxes := boxes_of(x)) is not None:
        if not isinstance(x, DTensor):
            return svg_of(boxes)
        return _rendered(templates.PICTURE, picture=_markup(svg_of(boxes)), values=repr(x))
    match x:
        case ProgramPlan():
            return _listing(x, _planned(x))
        case Sharding():
            rows = [*x.placements.items(), *((f"batch {i}", places) for i, places in enumerate(x.batch))]
            return _listing(x, _planned(x.plan), placements=[(name, ", ".join(spelled(places))) for name, places in rows])
        case Explanation():
            return _listing(x, _explained(x), modules=x.module_table)
    raise ArgumentError(
        f"a {type(x).__name__} has no picture; pass a DTensor, Layout, DeviceMesh, ProgramPlan, Sharding or Explanation"
    )


def save_html(x: Any, path: str | Path, title: str = "") -> Path:
    """Write a page that shows ``x`` as a notebook does and needs no other file and no network. Return its path.

    A :class:`dtensor.ProgramPlan`, the result of ``auto_shard`` and an explanation are shown as the program's lines, each with
    the bytes that it receives. A click opens the details. No communication; on processes call it on one rank.

    Args:
        x: a DTensor, Layout, DeviceMesh, plan or explanation.
        path: of the file; its folder must exist.
        title: defaults to the type of ``x``.

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
    body = _markup(html_of(x))
    dark = _markup(_colors("github-dark", "body "))
    text = _rendered(templates.PAGE, title=title or type(x).__name__, body=body, dark_colors=dark)
    path.write_text(text, encoding="utf-8")
    return path


# --- jinja2 and pygments ------------------------------------------------------------------------------------------------
@remembered(64)
def _template(source: str) -> Any:
    from jinja2 import Environment  # torch depends on it

    return Environment(autoescape=True, keep_trailing_newline=True).from_string(source)


def _rendered(source: str, **values: Any) -> str:
    return str(_template(source).render(**values))


def _markup(text: str) -> Any:
    """Mark text as HTML that jinja2 inserts unchanged."""
    from markupsafe import Markup  # jinja2 depends on it

    return Markup(text)


@remembered(16)
def _colors(style: str, within: str = "") -> str:
    """Return the style sheet of colored code inside the element ``within``; "" without pygments."""
    if importlib.util.find_spec("pygments") is None:
        return ""
    from pygments.formatters import HtmlFormatter

    rules = HtmlFormatter(style=style).get_style_defs(f"{within}.dtensor .code").splitlines()
    return "\n".join(rule for rule in rules if ".dtensor .code ." in rule and "background" not in rule)


def _code_of(file: str) -> list[Any]:
    """Return the lines of a file, colored if pygments is installed."""
    lines = linecache.getlines(file) if file else []
    if not lines or importlib.util.find_spec("pygments") is None:
        return [line.rstrip() for line in lines]
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    lexer = PythonLexer(stripnl=False, ensurenl=False)
    return [_markup(line.rstrip()) for line in highlight("".join(lines), lexer, HtmlFormatter(nowrap=True)).split("\n")]


# --- lines of the program -----------------------------------------------------------------------------------------------
def _explained(x: Explanation) -> Iterator[CostlyLine]:
    for line in x.lines:
        head, *details = str(line).splitlines()
        summary = head.removeprefix(f"{line.place.line}: ")
        yield CostlyLine(line.place, line.bytes, summary, tuple(text.removeprefix("  ") for text in details))


def _planned(x: ProgramPlan) -> Iterator[CostlyLine]:
    for line in x.lines:
        summary = line.head.removeprefix(f"{line.place.line}: ")
        yield CostlyLine(line.place, line.nbytes, summary, tuple(line.details))


def _listing(x: Any, lines: Iterable[CostlyLine], **more: Any) -> str:
    """Return the first line of ``str(x)``, then file by file the program's lines near those that receive something."""
    files = by_key((line.place.file, line) for line in lines if line.nbytes)
    most = max((line.nbytes for own in files.values() for line in own), default=1)
    shown = [{"name": file, "rows": list(_listing_rows(file, own, most))} for file, own in files.items()]
    style = _rendered(templates.STYLE, colors=_markup(_colors("default")))
    return _rendered(templates.LISTING, style=_markup(style), head=str(x).partition("\n")[0], files=shown, **more)


def _listing_rows(file: str, lines: Sequence[CostlyLine], most: int) -> Iterator[dict[str, Any]]:
    by_number = by_key((line.place.number, line) for line in lines)
    code = _code_of(file)
    near = {number for at in by_number for number in range(max(at - _AROUND, 1), min(at + _AROUND, len(code)) + 1)}
    before = 0
    for number in sorted({*near, *by_number}):
        own = by_number.get(number, [])
        nbytes = sum(line.nbytes for line in own)
        yield {
            "gap": before and number > before + 1,
            "number": number,
            "code": code[number - 1] if 1 <= number <= len(code) else "",
            "size": bytes_text(nbytes),
            "width": f"{5 * nbytes / most:.2f}",
            "summary": "; ".join(line.summary for line in own),
            "details": "\n".join(text for line in own for text in line.details),
        }
        before = number
