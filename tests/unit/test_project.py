"""Project metadata: version, license, extras and make targets agree across files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import dtensor as dt

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
TARGETS = set(re.findall(r"^([a-z][a-z0-9-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))


def test_version_and_license_agree_across_files() -> None:
    citation = (ROOT / "CITATION.cff").read_text()
    assert re.fullmatch(r"\d+\.\d+\.\d+", dt.__version__)
    assert f"\nversion: {dt.__version__}\n" in citation
    assert PROJECT["license"] == "BSD-3-Clause" == re.search(r"license: (.*)", citation)[1]
    assert (ROOT / "LICENSE").read_text().startswith("BSD 3-Clause License")
    assert f"## {dt.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_extras_named_in_the_package_and_docs_exist() -> None:
    extras = PROJECT["optional-dependencies"]
    files = [path for folder in ("dtensor", "docs", "benchmarks") for path in (ROOT / folder).rglob("*.*")] + [ROOT / "README.md"]
    text = "\n".join(path.read_text() for path in files if path.suffix in (".py", ".md"))
    named = {name for found in re.findall(r"(?:dtensor|\.)\[([a-z,]+)\]'?\"?[`\s)]", text) for name in found.split(",")}
    assert {"plan", "terminal", "examples", "notebook"} <= named
    assert named <= {*extras}
    nested = {name for extra in extras.values() for word in extra for name in re.findall(r"^dtensor\[(.*)\]$", word)}
    assert {name for found in nested for name in found.split(",")} <= {*extras}


def test_make_targets_of_the_workflow_and_pages_exist() -> None:
    workflow = (ROOT / "docs/examples/workflow.yml").read_text()
    runs = re.findall(r"- run: make (.*)", workflow)
    assert runs
    assert {target for run in runs for target in run.split()} <= TARGETS
    versions = {word.rpartition(" ")[2] for word in PROJECT["classifiers"] if "Python :: 3." in word}
    assert set(re.findall(r'"(3\.\d+)"', workflow)) == versions
    for page in ("README.md", "CONTRIBUTING.md"):
        assert set(re.findall(r"^make ([a-z0-9-]+)", (ROOT / page).read_text(), re.MULTILINE)) <= TARGETS
