"""Parsed modules: the syntax trees of the package, which the tests that read its source share."""

from __future__ import annotations

import ast
import functools
import gc
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "dtensor"


def parse_source(source: str) -> ast.Module:
    """Return the syntax tree of a module of the package, parsed once per process, or of any other text."""
    trees = _parse_package()
    return trees[source] if source in trees else ast.parse(source)


@functools.cache
def _parse_package() -> dict[str, ast.Module]:
    gc.collect()
    trees = {source: ast.parse(source) for source in (path.read_text() for path in PACKAGE.rglob("*.py"))}
    gc.freeze()  # garbage collections of later tests skip the nodes
    return trees
