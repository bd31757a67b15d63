"""Pictures of tensors on a page, drawn by the library while the site is built.

A page asks for a picture by the comment ``<!-- picture: x -->``. The expression is evaluated after the python blocks
above it have run, in one namespace for the page. On GitHub the comment is invisible.
"""

from __future__ import annotations

import contextlib
import doctest
import io
import re
from typing import Any

_PART = re.compile(
    r"^```(?P<kind>[^\n]*)\n(?P<code>.*?)^```[ \t]*$|^<!-- picture: (?P<picture>.*?) -->$", re.MULTILINE | re.DOTALL
)


def with_pictures(markdown: str, name: str) -> str:
    """Return the page with each picture comment replaced by an SVG."""
    if "<!-- picture: " not in markdown:
        return markdown
    namespace: dict[str, Any] = {"__name__": "__main__"}

    def replacement(part: re.Match[str]) -> str:
        if part["picture"] is not None:
            return f'<div class="picture">{_drawn(eval(part["picture"], namespace))}</div>'
        if part["kind"].strip() == "python":
            _run(part["code"], name, namespace)
        return part[0]

    return _PART.sub(replacement, markdown)


def _drawn(value: Any) -> str:
    """Return the HTML of a DTensor's layout, or of another object that a notebook can draw."""
    html = getattr(value, "layout", value)._repr_html_()
    assert isinstance(html, str)
    return html


def _run(code: str, name: str, namespace: dict[str, Any]) -> None:
    with contextlib.redirect_stdout(io.StringIO()):
        if ">>> " not in code:
            exec(compile(code, name, "exec"), namespace)
            return
        for example in doctest.DocTestParser().get_examples(code, name):
            with contextlib.suppress(Exception) if example.exc_msg else contextlib.nullcontext():
                exec(compile(example.source, name, "single"), namespace)
