"""Everything that the README, the pages of docs/ and the docstrings show is run, and prints what they say it prints."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import pkgutil
import re
import subprocess
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo import run_gloo
from torch_versions import needs_whole

import dtensor

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("README.md"), *ROOT.glob("docs/**/*.md")])
# importing a __main__ would run it
MODULES = ["dtensor"] + [info.name for info in pkgutil.walk_packages(dtensor.__path__, "dtensor.") if "__main__" not in info.name]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

_FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<text>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_OUTPUT = ("text", "output")


@dataclass(frozen=True, slots=True)
class Block:
    """A ```python block of a page, and the ```text or ```output block right behind it: what it prints."""

    line: int
    code: str
    output: str | None


def blocks_of(page: str) -> list[Block]:
    """The python blocks in order. A block marked ```python no-run is for reading only."""
    fences = list(_FENCE.finditer(page))
    blocks = []
    for i, fence in enumerate(fences):
        if fence["kind"].strip() != "python":
            continue
        output = None
        if i + 1 < len(fences):
            between = page[fence.end() : fences[i + 1].start()]
            if fences[i + 1]["kind"].strip() in _OUTPUT and not between.strip():
                output = fences[i + 1]["text"]
        blocks.append(Block(page.count("\n", 0, fence.start()) + 2, fence["text"], output))
    return blocks


def run_page(name: str, text: str) -> list[str]:
    """What is wrong with a page: its blocks run top to bottom in one namespace."""
    namespace: dict[str, Any] = {"__name__": "__main__"}
    wrong = []
    for block in blocks_of(text):
        problem = _run_session(name, block, namespace) if ">>> " in block.code else _run_script(name, block, namespace)
        if problem:
            wrong.append(f"{name}:{block.line}\n{problem}")
    return wrong


def _run_script(name: str, block: Block, namespace: dict[str, Any]) -> str:
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            exec(compile("\n" * (block.line - 1) + block.code, name, "exec"), namespace)
    except Exception:
        return traceback.format_exc()
    if block.output is None or doctest.OutputChecker().check_output(block.output, printed.getvalue(), FLAGS):
        return ""
    example = doctest.Example(block.code, block.output)
    return doctest.OutputChecker().output_difference(example, printed.getvalue(), FLAGS)


def _run_session(name: str, block: Block, namespace: dict[str, Any]) -> str:
    test = doctest.DocTestParser().get_doctest(block.code, namespace, name, name, block.line - 1)
    test.globs = namespace  # the parser copied it; the page goes on with what this block defines
    report: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=report.append, clear_globs=False)
    return "".join(report)


TELLS_NAMES = ("debugging.md",)  # of operators


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=needs_whole) if page.name in TELLS_NAMES else page for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_page_runs_as_written(page: Path) -> None:
    wrong = run_page(page.name, page.read_text())
    assert not wrong, "\n\n".join(wrong)


NEEDS = {"dtensor.hf": "transformers"}  # an extra that `make test` does not install


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_hold(name: str) -> None:
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    module = importlib.import_module(name)
    names = {name: getattr(dtensor, name) for name in dtensor.__all__} | {"torch": torch, "dt": dtensor}
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name, extraglobs=names):
        runner.run(test, out=report.append)
    assert not report, "".join(report)


def _ported() -> Any:
    """What the scripts of the page leave, without its sessions, which show one process."""
    scripts = [block for block in blocks_of((ROOT / "docs" / "porting.md").read_text()) if ">>> " not in block.code]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in scripts:
            exec(compile(block.code, "porting.md", "exec"), namespace)
    return namespace["losses"], namespace["same"], printed.getvalue()


@pytest.mark.gloo
def test_the_ported_script_gives_the_same_on_processes() -> None:
    losses, same, printed = _ported()
    first, second = run_gloo(_ported, 2)
    assert first[0] == second[0] == pytest.approx(losses, abs=1e-6)
    assert (same, first[1], second[1]) == (True, True, True)
    assert (printed, "") == (first[2], second[2])


def test_a_wrong_block_is_caught_and_names_live_on() -> None:
    page = "```python\nx = 2\nprint(x)\n```\n\n```text\n2\n```\nwords\n```python\n>>> x + 1\n3\n>>> y = 7\n```\n"
    page += "```python\nprint(x * y)\n```\n"
    assert run_page("page", page) == []
    assert run_page("page", page.replace("text\n2", "text\n3"))
    assert run_page("page", page.replace("+ 1\n3", "+ 1\n4"))
    assert run_page("page", page.replace("x * y", "x * z"))
    assert len(blocks_of(page.replace("```python\nx", "```python no-run\nx"))) == 2


@pytest.mark.parametrize("page", ["docs/house.md", "CONTRIBUTING.md", "docs/measurements/README.md"])
def test_files_that_are_named_are_there(page: str) -> None:
    named = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.[a-z]+)?)`", (ROOT / page).read_text())
    missing = [name for name in named if not any((ROOT / room / name).exists() for room in ("", "dtensor", "tests"))]
    assert named
    assert not missing


@pytest.mark.gloo
def test_ranks_that_differ_say_what_the_page_says(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "debugging.md").read_text()
    program, told = re.findall(r"```(?:python no-run|text)\n(.*?)```", page.partition("## A divergence")[2], re.DOTALL)[:2]
    script = tmp_path / "train.py"
    script.write_text(program)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(torchrun, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode
    for rank in (0, 1):
        said = [line.partition(": ")[2] for line in done.stderr.splitlines() if line.startswith(f"[rank{rank}]: ")]
        assert said[-3:] == told.splitlines(), done.stderr
