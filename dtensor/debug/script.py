"""Scripts as they are, watched: ``python -m dtensor explain script.py``, ``plan``."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..errors import ArgumentError
from ..plan import plan
from .explain import Explanation
from .html import save_html
from .seen import Record


def run(script: Path, arguments: Sequence[str]) -> int:
    """Runs a script as Python would; its exit status."""
    before, path = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.parent.resolve())
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as left:
        return left.code if isinstance(left.code, int) else int(left.code is not None)
    finally:
        sys.argv, sys.path[:] = before, path
    return 0


def explained(script: Path, arguments: Sequence[str], html: Path | None = None) -> int:
    """Run a script, then print what it moved; its exit status. Where it raises, what it moved until then is printed first."""
    with told(html) as tell, Record() as record:
        tell(lambda: Explanation.of(record))
        return run(script, arguments)


def planned(script: Path, arguments: Sequence[str], html: Path | None = None, json: Path | None = None) -> int:
    """Run a script once, then print how all of its calls together should run; its exit status."""
    status: list[int] = []
    found = plan(lambda: status.append(run(script, arguments)))
    with told(html) as tell:
        tell(lambda: found)
    if json is not None and first():
        found.save(json)
    return status[0]


def first() -> bool:
    """Whether this process speaks for all."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def told(html: Path | None) -> Iterator[Callable[[Callable[[], Any]], None]]:
    """At the end one rank prints what it was handed, and writes it as a page if a path is given."""
    handed: list[Callable[[], Any]] = []
    try:
        yield handed.append
    finally:
        for make in handed if first() else ():
            print(found := make(), flush=True)
            if html is not None:
                print(f"written to {save_html(found, html, title='What the program moves')}")


def asked(script: Path) -> Path:
    """``script``, if it is there.

    Raises:
        ArgumentError: it is not.
    """
    if not script.is_file():
        raise ArgumentError(f"{script} is no file")
    return script
