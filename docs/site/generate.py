"""Pages that are generated for the site (mkdocs-gen-files): the API of each module, and the example programs."""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mkdocs_gen_files

SITE = Path(__file__).parent
sys.path.insert(0, str(SITE))

from docstrings import as_markdown  # noqa: E402  (MkDocs runs this file by its path)

MODULES = (
    "dtensor",
    "dtensor.parallel",
    "dtensor.fsdp",
    "dtensor.checkpoint",
    "dtensor.debug",
    "dtensor.plan",
    "dtensor.rules",
    "dtensor.sharding_spec",
    "dtensor.clusters",
    "dtensor.hf",
    "dtensor.experimental",
    "dtensor.testing",
    "dtensor.testing.strategies",
    "dtensor.functional",
    "dtensor.errors",
)


def public_names(module: Any) -> Iterator[tuple[str, str]]:
    """Yield (name, full path) of the classes and functions that a module exports."""
    for name in getattr(module, "__all__", None) or sorted(vars(module)):
        value = getattr(module, name)
        is_own = str(getattr(value, "__module__", None)).startswith("dtensor")
        if is_own and not name.startswith("_") and getattr(value, "__name__", "") == name:
            yield name, f"{value.__module__}.{name}"


def summary_of(value: Any) -> str:
    """Return the first sentence of a docstring, as the cell of a table."""
    first = as_markdown((value.__doc__ or "").strip().partition("\n\n")[0]).replace("\n", " ")
    return first.replace("|", "\\|").replace("``", "`")


def api_page(name: str, described: dict[str, str]) -> str:
    """Return the page of a module: a table of its names, then each name that no earlier page describes."""
    module = importlib.import_module(name)
    table, entries = ["| name | purpose |", "|---|---|"], []
    for key, path in public_names(module):
        table.append(f"| [`{key}`][{path}] | {summary_of(getattr(module, key))} |")
        if path not in described:
            described[path] = name
            entries.append(f"::: {path}")
    return "\n\n".join([f"# {name}", as_markdown(module.__doc__ or ""), "\n".join(table), *entries]) + "\n"


def program_page(path: Path) -> tuple[str, str]:
    """Return (first line of its docstring, page) of an example program."""
    source = path.read_text()
    tree = ast.parse(source)
    text = ast.get_docstring(tree) or ""
    start = tree.body[1].lineno - 1 if text else 0
    code = "\n".join(source.splitlines()[start:]).strip()
    page = f"# {path.name}\n\n{as_markdown(text)}\n\n```python\n{code}\n```\n"
    return text.partition("\n")[0], page


def write_all() -> None:
    described: dict[str, str] = {}
    navigation = []
    for name in MODULES:
        page = "api/" + (name.removeprefix("dtensor.").replace(".", "_")) + ".md"
        navigation.append(f"* [{name}]({page.removeprefix('api/')})")
        with mkdocs_gen_files.open(page, "w") as file:
            file.write(api_page(name, described))
    with mkdocs_gen_files.open("api/SUMMARY.md", "w") as file:
        file.write("\n".join(navigation) + "\n")
    rows, navigation = [], ["* [Programs](index.md)"]
    for path in sorted((SITE.parent / "examples").glob("*.py")):
        title, page = program_page(path)
        with mkdocs_gen_files.open(f"programs/{path.stem}.md", "w") as file:
            file.write(page)
        rows.append(f"| [{path.name}]({path.stem}.md) | {title.replace('|', chr(92) + '|')} |")
        navigation.append(f"* [{path.name}]({path.stem}.md)")
    with mkdocs_gen_files.open("programs/index.md", "w") as file:
        file.write(
            "# Programs\n\nFind a complete program to start from. Each is a file of `docs/examples`. Run it with `python`"
            " in one process, or under `torchrun`; its first lines say which.\n\n| program | shows |\n|---|---|\n"
            + "\n".join(rows)
            + "\n"
        )
    with mkdocs_gen_files.open("programs/SUMMARY.md", "w") as file:
        file.write("\n".join(navigation) + "\n")


write_all()
