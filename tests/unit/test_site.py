"""Documentation site: environment variables, notebook outputs, API pages, pictures and search."""

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


def test_environment_variables_that_the_library_reads_are_documented() -> None:
    page = set(re.findall(r"`([A-Z_]+)(?:=1)?`", (ROOT / "docs/environment.md").read_text()))
    source = "\n".join(path.read_text() for path in (ROOT / "dtensor").rglob("*.py"))
    read = set(re.findall(r"environ(?:\.get\(|\[)\"([A-Z_]+)\"", source)) | set(
        re.findall(r"^VARIABLE = \"([A-Z_]+)\"", source, re.M)
    )
    assert {"DTENSOR_PROFILE", "DTENSOR_CHECK_RANKS"} <= read <= page


def cell_outputs(cells: dict[str, Any]) -> list[str]:
    """Return the outputs of the cells of a notebook."""
    outputs = [output for cell in cells["cells"] for output in cell.get("outputs", ())]
    rows = [output.get("data", {"text/plain": output.get("text", "")}) for output in outputs]
    return ["".join(row.get("text/html") or row.get("text/plain", "")) for row in rows]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_print_their_committed_outputs(path: Path) -> None:
    client, formats = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    committed = json.loads(path.read_text())
    run = client.NotebookClient(formats.reads(path.read_text(), 4), timeout=120, kernel_name="python3").execute()
    assert cell_outputs(run) == cell_outputs(committed) != []


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of the built site."""
    for plugin in ("mkdocs", "mkdocs_jupyter", "mkdocs_gen_files", "mkdocs_literate_nav"):
        pytest.importorskip(plugin)
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
def test_api_pages_of_the_site_describe_main_public_names_once(site: Path) -> None:
    described = "".join(path.read_text() for path in site.glob("api/*.html"))
    for name in (
        "dtensor.tensor.dtensor.DTensor.redistribute",
        "dtensor.placement.Shard",
        "dtensor.mesh.device_mesh.init_device_mesh",
        "dtensor.parallel.data.fully_shard.fully_shard",
    ):
        assert described.count(f'id="{name}"') == 1
    fsdp, hf = (site / "api" / page for page in ("fsdp.html", "hf.html"))
    assert ">fully_shard</code></a>" in fsdp.read_text()  # a table of names that links to the description
    assert ">from_pretrained</code></a>" in hf.read_text()


@pytest.mark.slow
def test_site_has_a_page_for_each_program_and_notebook(site: Path) -> None:
    programs = {path.stem for path in ROOT.glob("docs/examples/*.py")}
    assert programs <= {path.stem for path in site.glob("programs/*.html")}
    assert {path.stem for path in NOTEBOOKS} == {path.stem for path in site.glob("notebooks/*.html")}
    assert not list(site.rglob("SUMMARY.html"))


@pytest.mark.slow
def test_site_loads_no_remote_scripts_or_styles(site: Path) -> None:
    remote = r'<(?:script|link)[^>]+(?:src|href)="https?:'
    assert not [path.name for path in site.rglob("*.html") if re.search(remote, path.read_text())]


@pytest.mark.slow
def test_site_has_pictures_on_ten_pages(site: Path) -> None:
    pages = [path for path in site.rglob("*.html") if re.search(r'<svg[^>]+role="img"|<img[^>]+\.svg" ?/?>', article_text(path))]
    assert len(pages) >= 10


def article_text(page: Path) -> str:
    """Return the text of a page without the theme's header, which has icons."""
    return page.read_text().partition("<article")[2].partition("</article>")[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("query", "page"),
    [("redistribute", "redistribution.html"), ("FSDP", "parallel/fsdp.html"), ("shard", "concepts.html")],
)
def test_search_finds_the_guide_first(site: Path, query: str, page: str) -> None:
    lunr = pytest.importorskip("lunr")
    documents = json.loads((site / "search" / "search_index.json").read_text())["docs"]
    boosts = {"tags": 1_000_000, "title": 1000, "text": 1}  # those of the theme
    fields = [{"field_name": name, "boost": boost} for name, boost in boosts.items()]
    entries = [({"tags": []} | entry, {"boost": entry.get("boost", 1)}) for entry in documents]
    found = lunr.lunr(ref="location", fields=fields, documents=entries).search(query)
    assert found[0]["ref"].partition("#")[0] == page, [entry["ref"] for entry in found[:5]]
