"""Docstrings as Markdown: their sessions and their references to other names."""

from __future__ import annotations

import re
from typing import Any

import griffe

_ROLE = re.compile(r":(?:meth|class|func|mod|data|attr):`~?([^`]+)`")


class AsMarkdown(griffe.Extension):
    """Applied to every object that has a docstring, before its sections are told apart."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Sessions become fenced blocks, up to the next empty line that no prompt follows."""
    lines, fenced = [], False
    source = text.splitlines()
    for at, line in enumerate(source):
        if not fenced and line.startswith(">>> "):
            lines += ["```pycon"]
            fenced = True
        elif fenced and not line.strip() and not source[at + 1].startswith(">>> "):
            lines += ["```"]
            fenced = False
        lines.append(line if fenced else _ROLE.sub(r"`\1`", line))
    return "\n".join(lines + ["```"] * fenced)
