"""Hooks of MkDocs: version, code fences, search order and pictures."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from pictures import with_pictures

import dtensor

# Search rank of pages, 1 if not listed: the guide to a word comes before pages that use it often.
BOOSTS = {
    "concepts.md": 4.0,
    "redistribution.md": 12.0,
    "parallel/fsdp.md": 8.0,
    "how_to/from_fsdp2.md": 4.0,
    "tutorial.md": 2.0,
    "ops.md": 0.2,
    "measurements/": 0.3,
    "api/": 0.5,
    "programs/": 0.4,
}


def on_config(config: Any) -> Any:
    config.site_name = f"dtensor {dtensor.__version__}"
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    path = page.file.src_uri
    boost = next((value for prefix, value in BOOSTS.items() if path.startswith(prefix)), None)
    if boost is not None:
        page.meta.setdefault("search", {})["boost"] = boost
    markdown = with_pictures(markdown, path)
    markdown = markdown.replace("```python no-run", "```python").replace("```output", "```text")
    return re.sub(r"^```python\n(?=>>> )", "```pycon\n", markdown, flags=re.MULTILINE)


def on_nav(nav: Any, files: Any, **_: Any) -> Any:
    for file in [file for file in files if file.src_uri.endswith("SUMMARY.md")]:
        files.remove(file)  # literate-nav has read it
    return nav
