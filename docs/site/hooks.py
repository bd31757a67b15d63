"""Hooks of MkDocs: version, code fences and search order."""

from __future__ import annotations

import re
from typing import Any

import dtensor

# The page that a search for one of these words finds first.
KEYWORDS = {
    "concepts.md": ["shard", "placement", "layout", "mesh"],
    "redistribution.md": ["redistribute"],
    "parallel/fsdp.md": ["FSDP", "fully_shard"],
    "parallel/tensor.md": ["parallelize_module"],
    "checkpoint.md": ["save", "load"],
    "capture.md": ["capture"],
}
# Pages with long lists of names come after the guides. Their search rank, 1 for other pages:
RANKS = {"ops.md": 0.2, "measurements/": 0.3, "api/": 0.5, "programs/": 0.4}


def on_config(config: Any) -> Any:
    config.site_name = f"dtensor {dtensor.__version__}"
    return config


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    path = page.file.src_uri
    rank = next((value for prefix, value in RANKS.items() if path.startswith(prefix)), None)
    if rank is not None:
        page.meta.setdefault("search", {})["boost"] = rank
    if path in KEYWORDS:
        page.meta["tags"] = KEYWORDS[path]
    markdown = markdown.replace("```python no-run", "```python").replace("```output", "```text")
    return re.sub(r"^```python\n(?=>>> )", "```pycon\n", markdown, flags=re.MULTILINE)


def on_nav(nav: Any, files: Any, **_: Any) -> Any:
    for file in [file for file in files if file.src_uri.endswith("SUMMARY.md")]:
        files.remove(file)  # literate-nav has read it
    return nav
