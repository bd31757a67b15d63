"""What a project that is adopted says of itself agrees with what is there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import dtensor as dt

ROOT = Path(__file__).parents[2]
ABOUT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_one_version_and_one_licence() -> None:
    cited = (ROOT / "CITATION.cff").read_text()
    assert re.fullmatch(r"\d+\.\d+\.\d+", dt.__version__)
    assert f"\nversion: {dt.__version__}\n" in cited
    assert ABOUT["license"] == "BSD-3-Clause" == re.search(r"license: (.*)", cited)[1]
    assert (ROOT / "LICENSE").read_text().startswith("BSD 3-Clause License")
    assert f"## {dt.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_extras_that_the_package_and_its_docs_name_are_there() -> None:
    extras = ABOUT["optional-dependencies"]
    files = [path for room in ("dtensor", "docs", "benchmarks") for path in (ROOT / room).rglob("*.*")] + [ROOT / "README.md"]
    text = "\n".join(path.read_text() for path in files if path.suffix in (".py", ".md"))
    named = {name for found in re.findall(r"(?:dtensor|\.)\[([a-z,]+)\]'?\"?[`\s)]", text) for name in found.split(",")}
    assert {"plan", "terminal", "examples", "notebook"} <= named
    assert named <= {*extras}
    inner = {name for extra in extras.values() for word in extra for name in re.findall(r"^dtensor\[(.*)\]$", word)}
    assert {name for found in inner for name in found.split(",")} <= {*extras}


def test_the_workflow_and_the_pages_run_targets_that_make_has() -> None:
    workflow = (ROOT / "docs/examples/workflow.yml").read_text()
    runs = re.findall(r"- run: make (.*)", workflow)
    assert runs
    assert {target for run in runs for target in run.split()} <= TARGETS
    versions = {word.rpartition(" ")[2] for word in ABOUT["classifiers"] if "Python :: 3." in word}
    assert set(re.findall(r'"(3\.\d+)"', workflow)) == versions
    for page in ("README.md", "CONTRIBUTING.md"):
        assert set(re.findall(r"^make ([a-z0-9-]+)", (ROOT / page).read_text(), re.MULTILINE)) <= TARGETS
