"""What mkdocs does not do by itself: pages of the API for every public name, notebooks as pages, marks of code blocks."""

from __future__ import annotations

import importlib
import json
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

DOCS = Path(__file__).parents[1]
sys.path.insert(0, str(DOCS / "site"))

from docstrings import as_markdown  # noqa: E402  (it lies beside this file, which mkdocs runs by its path)

ROOMS = ("", "parallel", "checkpoint", "debug", "sharding_spec", "testing", "rules", "plan", "clusters", "errors", "experimental")


def on_files(files: Files, config: Any) -> Files:
    shown: dict[str, str] = {}
    pages = {f"api/{room or 'dtensor'}.md": _room(f"dtensor.{room}".rstrip("."), shown) for room in ROOMS}
    pages |= {
        f"notebooks/{path.stem}.md": notebook(json.loads(path.read_text())) for path in sorted(DOCS.glob("notebooks/*.ipynb"))
    }
    pages["examples.md"] = _examples()
    for old in [file for file in files if file.src_uri.endswith((".ipynb", ".py", ".yml"))]:
        files.remove(old)
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    config.nav = _filled(config.nav, files)
    return files


def on_page_markdown(markdown: str, **_: Any) -> str:
    markdown = markdown.replace("```python no-run", "```python").replace("```output", "```text")
    return re.sub(r"^```python\n(?=>>> )", "```pycon\n", markdown, flags=re.MULTILINE)


def _filled(nav: Any, files: Files) -> Any:
    """A folder in the navigation stands for its pages."""
    match nav:
        case list():
            return [_filled(item, files) for item in nav]
        case dict():
            return {name: _filled(item, files) for name, item in nav.items()}
        case str() if nav.endswith("/"):
            return sorted(file.src_uri for file in files if file.src_uri.startswith(nav) and file.src_uri.endswith(".md"))
    return nav


def _room(name: str, shown: dict[str, str]) -> str:
    """All public names of a room; those that were shown already are referred to."""
    room = importlib.import_module(name)
    parts = [f"# {name}", as_markdown(room.__doc__ or "")]
    for key in getattr(room, "__all__", None) or sorted(vars(room)):
        value = getattr(room, key)
        if key.startswith("_") or getattr(value, "__name__", "") != key or not str(value.__module__).startswith("dtensor"):
            continue
        path = f"{value.__module__}.{key}"
        parts.append(f"[`{key}`][{path}] is a name of `{shown[path]}`." if path in shown else f"::: {path}")
        shown.setdefault(path, name)
    return "\n\n".join(parts) + "\n"


def _examples() -> str:
    """The programs of docs/examples, whole."""
    parts = ["# Programs", "Each runs in one process with `python`, those that need no process per rank, and under `torchrun`."]
    for path in sorted(DOCS.glob("examples/*.py")):
        parts.append(f"## {path.name}\n\n```python\n{path.read_text().rstrip()}\n```")
    return "\n\n".join(parts) + "\n"


def notebook(cells: dict[str, Any]) -> str:
    """A notebook as a page: words, code, and what it printed or drew."""
    parts = []
    for cell in cells["cells"]:
        text = "".join(cell["source"])
        parts.append(text if cell["cell_type"] == "markdown" else f"```python\n{text}\n```")
        for output in cell.get("outputs", ()):
            data = output.get("data", {"text/plain": output.get("text", "")})
            html, plain = ("".join(data.get(kind, "")) for kind in ("text/html", "text/plain"))
            parts.append(f"<div>{html}</div>" if html else f"```text\n{plain.rstrip()}\n```")
    return "\n\n".join(parts) + "\n"
