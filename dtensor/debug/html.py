"""HTML of tensors, layouts, meshes, plans and explanations, for notebooks and for pages that need no network.

A plan or an explanation is shown as the program's lines, each with the bytes that it receives. Templates are rendered with
jinja2. Code is colored with pygments if it is installed.
"""

from __future__ import annotations

import importlib.util
import linecache
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..base.caches import memoize
from ..base.group_by import group_by_key
from ..base.units import bytes_text
from ..base.user_frames import SourceLine
from ..errors import ArgumentError
from ..plan import ProgramPlan, Sharding
from ..plan.program_plan import placement_texts
from ..tensor.dtensor import DTensor
from .explain import Explanation
from .layout_boxes import boxes_of
from .svg import svg_of

_CONTEXT_LINES = 3  # lines of the program shown before and after one that communicates


@dataclass(frozen=True, slots=True)
class CostlyLine:
    """A line of the program that communicates: bytes that one rank receives, a summary, and further lines of text."""

    place: SourceLine
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
        return _render_template(_PICTURE_TEMPLATE, picture=_as_markup(svg_of(boxes)), values=repr(x))
    match x:
        case ProgramPlan():
            return _listing_html(x, _program_plan_lines(x))
        case Sharding():
            rows = [*x.placements.items(), *((f"batch {i}", places) for i, places in enumerate(x.batch))]
            return _listing_html(
                x, _program_plan_lines(x.plan), placements=[(name, ", ".join(placement_texts(places))) for name, places in rows]
            )
        case Explanation():
            return _listing_html(x, _explanation_lines(x), modules=x.module_table)
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
    body = _as_markup(html_of(x))
    dark = _as_markup(_code_style("github-dark", "body "))
    text = _render_template(_PAGE_TEMPLATE, title=title or type(x).__name__, body=body, dark_colors=dark)
    path.write_text(text, encoding="utf-8")
    return path


# --- jinja2 and pygments ------------------------------------------------------------------------------------------------
@memoize(64)
def _compile_template(source: str) -> Any:
    """Return the compiled jinja2 template of ``source``, cached."""
    from jinja2 import Environment  # torch depends on it

    return Environment(autoescape=True, keep_trailing_newline=True).from_string(source)


def _render_template(source: str, **values: Any) -> str:
    return str(_compile_template(source).render(**values))


def _as_markup(text: str) -> Any:
    """Return text marked as HTML, which jinja2 inserts without escaping."""
    from markupsafe import Markup  # jinja2 depends on it

    return Markup(text)


@memoize(16)
def _code_style(style: str, within: str = "") -> str:
    """Return the CSS of syntax-colored code inside the element ``within``; "" without pygments."""
    if importlib.util.find_spec("pygments") is None:
        return ""
    from pygments.formatters import HtmlFormatter

    rules = HtmlFormatter(style=style).get_style_defs(f"{within}.dtensor .code").splitlines()
    return "\n".join(rule for rule in rules if ".dtensor .code ." in rule and "background" not in rule)


def _code_lines(file: str) -> list[Any]:
    """Return the lines of a source file, as colored HTML if pygments is installed."""
    lines = linecache.getlines(file) if file else []
    if not lines or importlib.util.find_spec("pygments") is None:
        return [line.rstrip() for line in lines]
    from pygments import highlight
    from pygments.formatters import HtmlFormatter
    from pygments.lexers import PythonLexer

    lexer = PythonLexer(stripnl=False, ensurenl=False)
    return [_as_markup(line.rstrip()) for line in highlight("".join(lines), lexer, HtmlFormatter(nowrap=True)).split("\n")]


# --- lines of the program -----------------------------------------------------------------------------------------------
def _explanation_lines(x: Explanation) -> Iterator[CostlyLine]:
    """Yield the source lines of an explanation with the bytes that they receive."""
    for line in x.lines:
        head, *details = str(line).splitlines()
        summary = head.removeprefix(f"{line.place.line}: ")
        yield CostlyLine(line.place, line.bytes, summary, tuple(text.removeprefix("  ") for text in details))


def _program_plan_lines(x: ProgramPlan) -> Iterator[CostlyLine]:
    """Yield the lines of a program plan with their costs."""
    for line in x.lines:
        summary = line.head.removeprefix(f"{line.place.line}: ")
        yield CostlyLine(line.place, line.nbytes, summary, tuple(line.details))


def _listing_html(x: Any, lines: Iterable[CostlyLine], **more: Any) -> str:
    """Return HTML with the first line of ``str(x)`` and, by file, the source lines near those that receive bytes."""
    files = group_by_key((line.place.file, line) for line in lines if line.nbytes)
    largest = max((line.nbytes for of_file in files.values() for line in of_file), default=1)
    shown = [{"name": file, "rows": list(_listing_rows(file, of_file, largest))} for file, of_file in files.items()]
    style = _render_template(_STYLE_TEMPLATE, colors=_as_markup(_code_style("default")))
    return _render_template(_LISTING_TEMPLATE, style=_as_markup(style), head=str(x).partition("\n")[0], files=shown, **more)


def _listing_rows(file: str, lines: Sequence[CostlyLine], largest: int) -> Iterator[dict[str, Any]]:
    """Yield the template rows of one file's listing: its costly source lines and the lines near them."""
    by_number = group_by_key((line.place.number, line) for line in lines)
    code = _code_lines(file)
    near = {number for at in by_number for number in range(max(at - _CONTEXT_LINES, 1), min(at + _CONTEXT_LINES, len(code)) + 1)}
    before = 0
    for number in sorted({*near, *by_number}):
        here = by_number.get(number, [])
        nbytes = sum(line.nbytes for line in here)
        yield {
            "gap": before and number > before + 1,
            "number": number,
            "code": code[number - 1] if 1 <= number <= len(code) else "",
            "size": bytes_text(nbytes),
            "width": f"{5 * nbytes / largest:.2f}",
            "summary": "; ".join(line.summary for line in here),
            "details": "\n".join(text for line in here for text in line.details),
        }
        before = number


# --- templates (jinja2) -------------------------------------------------------------------------------------------------
_STYLE_TEMPLATE = """<style>
.dtensor { --dim: #6b6b78; --rule: #8884; --bar: #4a90d9; line-height: 1.4; }
.dtensor h3 { margin: 1.2em 0 0.3em; font-weight: 600; font-size: 1em; overflow-wrap: anywhere; }
.dtensor table { border-collapse: collapse; }
.dtensor table.listing { width: 100%; }
.dtensor td, .dtensor th { padding: 0 0.8em 0 0; text-align: left !important; vertical-align: top; border: 0; background: none; }
.dtensor .modules td, .dtensor .modules th { padding: 0.1em 1.6em 0.1em 0; border-bottom: 1px solid var(--rule); }
.dtensor .modules :not(:first-child) { text-align: right !important; }
.dtensor pre, .dtensor .code { font: 12.5px/1.45 ui-monospace, Menlo, Consolas, 'DejaVu Sans Mono', monospace; margin: 0; }
.dtensor .code { white-space: pre-wrap; }
.dtensor .number, .dtensor .gap { color: var(--dim); text-align: right !important; width: 3em; }
.dtensor .bytes { white-space: nowrap; width: 12em; }
@media (max-width: 45em) { .dtensor .bytes { width: auto; } .dtensor .bar { display: none; } }
.dtensor .bar { display: inline-block; height: 0.7em; background: var(--bar); margin-right: 0.5em; border-radius: 2px; }
.dtensor .moving .code { font-weight: 700; }
.dtensor summary { cursor: pointer; color: var(--dim); }
.dtensor .detail pre { border-left: 2px solid var(--rule); padding-left: 0.8em; white-space: pre-wrap; }
{{ colors }}
</style>"""

_LISTING_TEMPLATE = """<div class="dtensor">{{ style }}<p>{{ head }}</p>
{%- if placements %}
<details><summary>placements of {{ placements|length }} tensors</summary><table>
{%- for name, text in placements %}<tr><td>{{ name }}</td><td>{{ text }}</td></tr>{% endfor -%}
</table></details>
{%- endif %}
{%- for file in files %}
<h3>{{ file.name or "outside of the program" }}</h3><table class="listing">
{%- for row in file.rows %}
{%- if row.gap %}<tr><td class="gap">⋮</td></tr>{% endif %}
<tr class="{{ 'moving' if row.details else 'still' }}"><td class="number">{{ row.number or "" }}</td><td class="bytes">
{%- if row.details %}<span class="bar" style="width:{{ row.width }}em"></span>{{ row.size }}{% endif -%}
</td><td class="code">{{ row.code }}</td></tr>
{%- if row.details %}
<tr class="detail"><td colspan="2"></td><td>
<details><summary>{{ row.summary }}</summary><pre>{{ row.details }}</pre></details></td></tr>
{%- endif %}
{%- endfor %}
</table>
{%- else %}<p>Nothing is redistributed.</p>
{%- endfor %}
{%- if modules %}
<details><summary>by module</summary><table class="modules">
<tr>{% for name in modules[0] %}<th>{{ name }}</th>{% endfor %}</tr>
{%- for row in modules[1:] %}<tr>{% for cell in row %}<td>{{ cell }}</td>{% endfor %}</tr>{% endfor -%}
</table></details>
{%- endif %}
</div>"""

_PICTURE_TEMPLATE = (
    """<div class="dtensor">{{ picture }}<details><summary>values</summary><pre>{{ values }}</pre></details></div>"""
)

_PAGE_TEMPLATE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{{ title }}</title><style>
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75em; margin: 2em auto; padding: 0 1em; }
@media (prefers-color-scheme: dark) {
body .dtensor { --dim: #a0a0ae; }
{{ dark_colors }}
}
</style></head><body>
<h1>{{ title }}</h1>
{{ body }}
</body></html>
"""
