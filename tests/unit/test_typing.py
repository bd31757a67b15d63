"""Typing: the types that mypy and pyright infer in programs with DTensors."""

from __future__ import annotations

import ast
import json
import re
import runpy
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from gloo_processes import run_gloo
from tensor_methods_stub import STUB, make_stub

import dtensor as dt
from dtensor import functional

ROOT = Path(__file__).parents[2]
PROGRAM = ROOT / "tests" / "typing" / "user_program.py"
TYPES = ROOT / "tests" / "typing" / "revealed_types.py"
Messages = dict[int, str]  # of a line: the type that it reveals, or "error: ..."


def check_with_mypy(file: Path, folder: Path) -> Messages:
    """Return the messages of mypy about ``file``; it runs outside of the repository, without its settings."""
    options = [
        "--strict",
        "--config-file=",
        "--no-error-summary",
        "--no-color-output",
        f"--cache-dir={ROOT / '.mypy_cache' / 'user_program'}",
    ]
    output = run_checker("mypy", [*options, f"--python-executable={sys.executable}", str(file)], folder)
    found: Messages = {}
    for line, kind, text in re.findall(r"^.*\.py:(\d+): (error|note): (.*)$", output, re.MULTILINE):
        revealed = re.fullmatch(r'Revealed type is "(.*)"', text)
        if kind == "error":
            found[int(line)] = f"error: {text}"
        elif revealed:
            found.setdefault(int(line), re.sub(r"\b(?:\w+\.)+(?=\w)", "", revealed[1]))
    return found


def check_with_pyright(file: Path, folder: Path) -> Messages:
    """Return the messages of pyright in strict mode about ``file``."""
    (folder / "pyrightconfig.json").write_text(json.dumps({"typeCheckingMode": "strict", "include": [str(file)]}))
    output = run_checker("basedpyright", ["--outputjson", f"--pythonpath={sys.executable}", "-p", str(folder)], folder)
    found: Messages = {}
    for message in json.loads(output)["generalDiagnostics"]:
        line, text = message["range"]["start"]["line"] + 1, message["message"]
        revealed = re.fullmatch(r'Type of ".*" is "(.*)"', text)
        if message["severity"] == "error":
            found[line] = f"error: {text}"
        elif revealed:
            found.setdefault(line, revealed[1])
    return found


def run_checker(name: str, options: list[str], folder: Path) -> str:
    if find_spec(name) is None:
        pytest.skip(f"{name} is not installed: pip install dtensor[dev]")
    process = subprocess.run([sys.executable, "-m", name, *options], cwd=folder, capture_output=True, text=True, check=False)
    assert process.returncode in (0, 1), process.stdout + process.stderr
    return process.stdout


CHECKERS = pytest.mark.parametrize("check", [check_with_mypy, check_with_pyright])


@pytest.mark.slow
@CHECKERS
def test_strict_type_checker_accepts_the_program_of_a_user(check: Callable[[Path, Path], Messages], tmp_path: Path) -> None:
    assert "cast" not in PROGRAM.read_text().partition("import")[2]
    assert check(PROGRAM, tmp_path) == {}


@pytest.mark.slow
@CHECKERS
def test_type_checker_infers_the_types_in_the_comments_of_revealed_types_py(
    check: Callable[[Path, Path], Messages], tmp_path: Path
) -> None:
    lines = TYPES.read_text().splitlines()
    expected = {n: line.rpartition("  # ")[2] for n, line in enumerate(lines, 1) if re.search(r"\S  # ", line)}
    messages = {n: text.partition(":")[0] for n, text in check(TYPES, tmp_path).items()}
    assert len(expected) > 80
    assert {n: (lines[n - 1], text) for n, text in messages.items() if expected.get(n) != text} == {}
    assert expected.keys() == messages.keys()


def gradient_of_the_program() -> list[float]:
    gradient = runpy.run_path(str(PROGRAM))["main"]()
    return gradient.to_local().flatten().tolist()


@pytest.mark.gloo
def test_program_of_a_user_gives_one_result_in_one_process_and_on_processes() -> None:
    expected = pytest.approx(gradient_of_the_program(), abs=1e-6)
    assert run_gloo(gradient_of_the_program, 4) == [expected] * 4


def test_program_of_a_user_runs(capsys: pytest.CaptureFixture[str]) -> None:
    gradient = runpy.run_path(str(PROGRAM))["main"]()
    assert type(gradient) is dt.DTensor
    assert gradient.placements == (dt.Replicate(), dt.Replicate())
    assert "(Replicate(), Shard(dim=1))" in capsys.readouterr().out


@pytest.mark.skipif(torch.__version__.partition("+")[0] not in STUB.read_text(), reason="the stub is for one version of torch")
def test_stub_of_tensor_methods_equals_the_generated_stub() -> None:
    assert ast.unparse(ast.parse(STUB.read_text())) == ast.unparse(ast.parse(make_stub())), "run `make stubs`"


def test_methods_of_the_stub_are_methods_of_tensors() -> None:
    classes = {node.name: node for node in ast.parse(STUB.read_text()).body if isinstance(node, ast.ClassDef)}
    names = {node.name for node in classes["TensorMethods"].body if isinstance(node, ast.FunctionDef)}
    assert len(names) > 500
    assert [name for name in names if not hasattr(dt.DTensor, name)] == []


def test_functions_of_dtensor_functional_are_those_of_torch() -> None:
    names = {
        name
        for name, value in vars(functional).items()
        if callable(value) and name.islower() and value.__module__ != functional.__name__
    }
    names -= {"overload"}
    assert len(names) > 90
    assert [
        name for name in names if getattr(functional, name) is not getattr(torch.nn.functional, name, getattr(torch, name, 0))
    ] == []


def test_program_with_dtensor_functional_is_captured_and_has_plain_gradients() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    weight = dt.distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [dt.Shard(0)]).requires_grad_()

    def loss(x: dt.DTensor) -> dt.DTensor:
        return functional.gelu(functional.linear(x, weight)).sum()

    x = dt.ones(2, 3, device_mesh=mesh, placements=[dt.Replicate()])
    captured = dt.capture(loss)
    losses = []
    for _ in range(3):
        losses.append(captured(x))
        losses[-1].backward()
    assert weight.grad is not None
    assert [each.item() for each in losses] == [loss(x).item()] * 3
    expected = weight.detach().full_tensor().requires_grad_()
    torch.nn.functional.gelu(torch.ones(2, 3) @ expected.T).sum().backward()
    torch.testing.assert_close(weight.grad.full_tensor(), 3 * expected.grad)
