"""Docs: the examples of the README, of the pages in docs/ and of docstrings run and print the shown output."""

from __future__ import annotations

import contextlib
import doctest
import importlib
import io
import os
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
from torch_version_marks import needs_undecomposed_linear

import dtensor

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("README.md"), *ROOT.glob("docs/**/*.md")])
MODULES = sorted(  # without __main__, which would run at import
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for path in (ROOT / "dtensor").rglob("*.py")
    if path.stem != "__main__"
)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE

_FENCE = re.compile(r"^```(?P<kind>[^\n]*)\n(?P<text>.*?)^```[ \t]*$", re.MULTILINE | re.DOTALL)
_OUTPUT = ("text", "output")


@dataclass(frozen=True, slots=True)
class Block:
    """A ```python block of a page, and its output: the ```text or ```output block directly after it."""

    line: int
    code: str
    output: str | None


def blocks_of(page: str) -> list[Block]:
    """Return the python blocks in order, without those marked ```python no-run."""
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
    """Run the blocks of a page from top to bottom in one namespace, and return the problems."""
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
    test.globs = namespace  # the parser copies it, but later blocks need the names of this block
    report: list[str] = []
    doctest.DocTestRunner(optionflags=FLAGS, verbose=False).run(test, out=report.append, clear_globs=False)
    return "".join(report)


SHOWS_OPERATOR_NAMES = ("debugging.md",)  # they depend on the torch version


@pytest.mark.parametrize(
    "page",
    [pytest.param(page, marks=needs_undecomposed_linear) if page.name in SHOWS_OPERATOR_NAMES else page for page in PAGES],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_examples_of_page_print_the_shown_output(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # pages save checkpoints here
    wrong = run_page(page.name, page.read_text())
    assert not wrong, "\n\n".join(wrong)


BLOCK_END = "== end of block"
TORCHRUN_PAGES = (
    "README.md",
    "docs/index.md",
    "docs/ten_minutes.md",
    "docs/tutorial.md",
)  # pages with programs that run under torchrun too


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
@pytest.mark.parametrize("page", TORCHRUN_PAGES)
def test_page_prints_the_shown_output_on_each_of_4_processes(page: str, tmp_path: Path) -> None:
    blocks = blocks_of((ROOT / page).read_text())
    assert blocks
    assert not any(">>> " in block.code for block in blocks), "sessions do not run under torchrun"
    script = tmp_path / "page.py"
    script.write_text("\n".join(f"{block.code}\nprint({BLOCK_END!r})" for block in blocks))
    status, printed, errors = torchrun(script, 4, tmp_path / "logs")
    assert status == 0, errors
    for text in printed:
        for block, found in zip(blocks, text.split(BLOCK_END + "\n"), strict=False):
            assert doctest.OutputChecker().check_output(block.output or "", found, FLAGS), (block.code, found)


EXTRAS = {"dtensor.hf.pretrained": "transformers", "dtensor.hf.training": "peft"}  # extras that `make test` does not install


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_print_the_shown_output(name: str) -> None:
    if name in EXTRAS:
        pytest.importorskip(EXTRAS[name])
    report: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    module = importlib.import_module(name)
    names = {name: getattr(dtensor, name) for name in dtensor.__all__} | {"torch": torch, "dt": dtensor}
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name, extraglobs=names):
        runner.run(test, out=report.append)
    assert not report, "".join(report)


def _run_porting_page() -> Any:
    """Run the scripts of docs/porting.md without its sessions, and return the losses, ``same`` and the output."""
    scripts = [block for block in blocks_of((ROOT / "docs" / "porting.md").read_text()) if ">>> " not in block.code]
    namespace: dict[str, Any] = {"__name__": "__main__"}
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for block in scripts:
            exec(compile(block.code, "porting.md", "exec"), namespace)
    return namespace["losses"], namespace["same"], printed.getvalue()


@pytest.mark.gloo
def test_porting_page_gives_equal_losses_on_processes() -> None:
    losses, same, printed = _run_porting_page()
    first, second = run_gloo(_run_porting_page, 2)
    assert first[0] == second[0] == pytest.approx(losses, abs=1e-6)
    assert (same, first[1], second[1]) == (True, True, True)
    assert (printed, "") == (first[2], second[2])


def test_run_page_reports_wrong_output_and_keeps_names_between_blocks() -> None:
    page = "```python\nx = 2\nprint(x)\n```\n\n```text\n2\n```\nwords\n```python\n>>> x + 1\n3\n>>> y = 7\n```\n"
    page += "```python\nprint(x * y)\n```\n"
    assert run_page("page", page) == []
    assert run_page("page", page.replace("text\n2", "text\n3"))
    assert run_page("page", page.replace("+ 1\n3", "+ 1\n4"))
    assert run_page("page", page.replace("x * y", "x * z"))
    assert len(blocks_of(page.replace("```python\nx", "```python no-run\nx"))) == 2


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md", "docs/measurements/README.md"])
def test_files_named_on_a_page_exist(page: str) -> None:
    named = re.findall(r"`((?:[a-z_]+/)+(?:[a-z_]+\.[a-z]+)?)`", (ROOT / page).read_text())
    missing = [name for name in named if not any((ROOT / room / name).exists() for room in ("", "dtensor", "tests"))]
    assert named
    assert not missing


def test_figures_of_the_docs_equal_those_of_draw_py() -> None:
    """If this fails after a change of a drawing, run ``python docs/pictures/draw.py``."""
    folder = ROOT / "docs" / "pictures"
    for name, text in runpy.run_path(str(folder / "draw.py"))["figures"]().items():
        assert (folder / name).read_text() == text, name


DIVERGENCES = {"README.md": "## A deadlock that is an error", "docs/debugging.md": "## Ranks that differ"}


@pytest.mark.gloo
@pytest.mark.parametrize("page", DIVERGENCES)
def test_divergence_example_raises_the_error_shown_on_the_page(page: str, tmp_path: Path) -> None:
    text = (ROOT / page).read_text().partition(DIVERGENCES[page])[2]
    program, error_text = re.findall(r"```(?:python no-run|text)\n(.*?)```", text, re.DOTALL)[:2]
    script = tmp_path / "train.py"
    script.write_text(program)
    status, _, errors = torchrun(script, 2, tmp_path / "logs")
    assert status
    for line in error_text.splitlines():
        assert errors.count(line) >= 2, errors  # each rank prints the error


PARALLEL_PAGES = sorted((ROOT / "docs" / "parallel").glob("*.md"))


def _failures(page: str) -> list[str]:
    return run_page(page, (ROOT / page).read_text())


@pytest.mark.gloo
@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PARALLEL_PAGES])
def test_parallelism_page_runs_on_four_processes(page: str) -> None:
    assert run_gloo(_failures, 4, page) == [[]] * 4
