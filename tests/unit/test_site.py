"""The site: what it says of the environment, what its notebooks print, and that it builds without a broken link."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(ROOT.glob("docs/notebooks/*.ipynb"))


def test_environment_variables_that_are_read_stand_on_their_page() -> None:
    page = set(re.findall(r"`([A-Z_]+)(?:=1)?`", (ROOT / "docs/environment.md").read_text()))
    source = "\n".join(path.read_text() for path in (ROOT / "dtensor").rglob("*.py"))
    read = set(re.findall(r"environ(?:\.get\(|\[)\"([A-Z_]+)\"", source)) | set(
        re.findall(r"^VARIABLE = \"([A-Z_]+)\"", source, re.M)
    )
    assert {"DTENSOR_PROFILE", "DTENSOR_CHECK_RANKS"} <= read <= page


def said(cells: dict[str, Any]) -> list[str]:
    """What the cells of a notebook have printed, drawn and given."""
    outputs = [output for cell in cells["cells"] for output in cell.get("outputs", ())]
    rows = [output.get("data", {"text/plain": output.get("text", "")}) for output in outputs]
    return ["".join(row.get("text/html") or row.get("text/plain", "")) for row in rows]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_give_what_they_show(path: Path) -> None:
    client, formats = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    shown = json.loads(path.read_text())
    run = client.NotebookClient(formats.reads(path.read_text(), 4), timeout=120, kernel_name="python3").execute()
    assert said(run) == said(shown) != []


@pytest.mark.slow
def test_the_site_builds_and_has_every_public_name(tmp_path: Path) -> None:
    pytest.importorskip("mkdocs")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    inventory = (tmp_path / "api" / "dtensor.html").read_text()
    for name in (
        "dtensor.tensor.dtensor.DTensor.redistribute",
        "dtensor.placement.Shard",
        "dtensor.mesh.device_mesh.init_device_mesh",
    ):
        assert f'id="{name}"' in inventory
    index = json.loads((tmp_path / "search" / "search_index.json").read_text())["docs"]
    places = {entry["location"].partition("#")[0] for entry in index}
    assert {"index.html", "tutorial.html", "api/checkpoint.html", "notebooks/placements.html", "examples.html"} <= places
    fetched = [
        path.name
        for path in tmp_path.rglob("*.html")
        if re.search(r'<(?:script|link)[^>]+(?:src|href)="https?:', path.read_text())
    ]
    assert not fetched  # nothing but what lies here
