"""Everything that the README, the pages of docs/ and the docstrings show is run, and prints what they say it prints."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import os
import pkgutil
import re
import runpy
import subprocess
import sys
import tempfile
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo
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
def test_page_runs_as_written(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where a page saves a checkpoint under a name of its own
    wrong = run_page(page.name, page.read_text())
    assert not wrong, "\n\n".join(wrong)


BLOCK_END = "== end of block"
ON_PROCESSES = (
    "README.md",
    "docs/index.md",
    "docs/ten_minutes.md",
    "docs/tutorial.md",
)  # pages that say that their program runs under torchrun


def torchrun(script: Path, count: int, logs: Path) -> tuple[int, list[str], str]:
    """Run a script on ``count`` processes; return the exit status, what each rank printed, and all error output."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "--log-dir", str(logs), "-r", "3"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TMPDIR": str(script.parent)}
    command = [sys.executable, *launch, str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)
    printed = [next(logs.glob(f"*/attempt_0/{rank}/stdout.log")).read_text() for rank in range(count)]
    errors = [path.read_text() for path in sorted(logs.glob("*/attempt_0/*/stderr.log"))]
    return done.returncode, printed, done.stderr + "\n".join(errors)


@pytest.mark.gloo
@pytest.mark.parametrize("page", ON_PROCESSES)
def test_page_prints_the_same_on_each_of_4_processes(page: str, tmp_path: Path) -> None:
    blocks = blocks_of((ROOT / page).read_text())
    assert blocks
    assert not any(">>> " in block.code for block in blocks), "a session is no program"
    script = tmp_path / "page.py"
    script.write_text("\n".join(f"{block.code}\nprint({BLOCK_END!r})" for block in blocks))
    status, printed, errors = torchrun(script, 4, tmp_path / "logs")
    assert status == 0, errors
    for text in printed:
        for block, found in zip(blocks, text.split(BLOCK_END + "\n"), strict=False):
            assert doctest.OutputChecker().check_output(block.output or "", found, FLAGS), (block.code, found)


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


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md", "docs/measurements/README.md"])
def test_files_that_are_named_are_there(page: str) -> None:
    named = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.[a-z]+)?)`", (ROOT / page).read_text())
    missing = [name for name in named if not any((ROOT / room / name).exists() for room in ("", "dtensor", "tests"))]
    assert named
    assert not missing


def test_figures_are_those_that_their_script_draws() -> None:
    """After a change of the drawing: ``python docs/pictures/draw.py``."""
    folder = ROOT / "docs" / "pictures"
    for name, text in runpy.run_path(str(folder / "draw.py"))["figures"]().items():
        assert (folder / name).read_text() == text, name


DIVERGENCES = {"README.md": "## A deadlock that is an error", "docs/debugging.md": "## Ranks that differ"}


@pytest.mark.gloo
@pytest.mark.parametrize("page", DIVERGENCES)
def test_ranks_that_differ_raise_the_error_that_the_page_shows(page: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text().partition(DIVERGENCES[page])[2]
    program, shown = re.findall(r"```(?:python no-run|text)\n(.*?)```", text, re.DOTALL)[:2]
    script = tmp_path / "train.py"
    script.write_text(program)
    status, _, errors = torchrun(script, 2, tmp_path / "logs")
    assert status
    for line in shown.splitlines():
        assert errors.count(line) >= 2, errors  # each rank says it
