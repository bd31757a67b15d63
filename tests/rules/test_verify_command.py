"""Command ``python -m dtensor verify``: it imports user modules, reports unknown names, and its exit status gives the result."""

from __future__ import annotations

import subprocess
import sys
import zlib
from pathlib import Path

import pytest
import torch

import dtensor as dt
from dtensor.__main__ import main
from dtensor.errors import RuleError
from dtensor.rules import rules, unregister
from dtensor.testing import verify_rule
from dtensor.testing.rule_selection import rule_name

MODULE = """
import torch
import dtensor as dt
from dtensor.testing import Sample

@torch.library.custom_op("{ns}::halve", mutates_args=())
def halve(x: torch.Tensor) -> torch.Tensor:
    return x / 2

@torch.library.custom_op("{ns}::largest_first", mutates_args=())
def largest_first(x: torch.Tensor) -> torch.Tensor:
    return x.sort(dim=-1, descending=True).values

@torch.library.custom_op("{ns}::unsampled", mutates_args=())
def unsampled(x: torch.Tensor) -> torch.Tensor:
    return x + 1

for op in (halve, largest_first, unsampled):
    op.register_fake(lambda x: torch.empty_like(x))

def table(x):
    return [(dt.Shard(d), dt.Shard(d)) for d in range(x.ndim)]

dt.register_sharding(halve, samples=[(torch.randn(5, 6),), Sample((torch.randn(7),), gradients=False)])(table)
dt.register_sharding(largest_first, samples=[lambda: Sample((torch.randn(5, 6),), gradients=False)])(table)  # a row too many
dt.register_sharding(unsampled)(table)
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """Yield the name of a module with its own rules, and unregister them afterwards."""
    name = f"users_{zlib.crc32(request.node.name.encode())}"  # random samples depend on the name
    (tmp_path / f"{name}.py").write_text(MODULE.format(ns=name))
    monkeypatch.syspath_prepend(tmp_path)
    yield name
    for rule in [rule for rule in rules() if rule.startswith(f"{name}::")]:
        unregister(rule)
    sys.modules.pop(name, None)


def run_verify(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    status = main(["verify", *words, "--budget", "60"])
    said = capsys.readouterr()
    return status, said.out, said.err


def test_correct_rule_of_user_module_passes(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in ((module, f"{module}::halve"), (f"{module}::halve",), (f"{module}.halve",), (module, f"{module[:-1]}*::halv?")):
        status, out, _ = run_verify(capsys, *words)
        assert (status, out.split(",")[0]) == (0, "1 rule"), (words, out)
        assert ", 0 wrong" in out


def test_wrong_rule_and_rule_without_samples_fail(module: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    status, out, _ = run_verify(capsys, f"{tmp_path}/{module}.py")
    assert status == 1
    assert "largest_first" in out
    assert f"{module}::unsampled: no sample" in out
    assert "2 rules" in out
    assert run_verify(capsys, f"{module}::unsampled")[0] == 1
    assert run_verify(capsys, f"{module}::largest_first")[0] == 1


def test_rule_without_strategies_for_its_samples_fails(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    __import__(module)
    dt.register_sharding(getattr(torch.ops, module).halve, "b m n -> b m n", samples=[(torch.randn(5, 6),)])
    status, out, _ = run_verify(capsys, f"{module}::halve")
    assert status == 1
    assert "0 of 0 strategies run" in out
    assert "nothing was verified" in out


def test_unknown_rule_name_exits_with_2_and_suggests_a_name(module: str, capsys: pytest.CaptureFixture[str]) -> None:
    __import__(module)
    status, _, err = run_verify(capsys, f"{module}::halv")
    assert (status, f"did you mean {module}::halve" in err) == (2, True), err
    status, _, err = run_verify(capsys, "aten::sofmax")
    assert (status, "aten::_softmax" in err) == (2, True), err
    for words in (("nothing::*",), ("no_such_file.py",), ("json",)):
        status, _, err = run_verify(capsys, *words)
        assert status == 2
        assert err
    with pytest.raises(RuleError, match=f"did you mean {module}::halve"):
        verify_rule(f"{module}.halv")


def test_rule_name_accepts_all_spellings_of_an_operator(module: str) -> None:
    imported = __import__(module)
    packet = getattr(torch.ops, module).halve
    for spelled in (f"{module}::halve", f"{module}.halve", packet, packet.default, imported.halve):
        assert rule_name(spelled) == f"{module}::halve"
        assert verify_rule(spelled, meshes=[(2,)], budget=6)
    dt.register_sharding(torch.ops.aten.prod.default, samples=[(torch.randn(3, 4),)])(lambda x, *, dtype: [])
    try:
        assert rule_name(torch.ops.aten.prod.default) == "aten::prod.default"
        assert verify_rule("prod.default", meshes=[(2,)], budget=4)
    finally:
        unregister("prod.default")
        dt.dispatch.dispatcher.clear_plans()
    assert rule_name("mm") == rule_name("aten.mm") == rule_name("aten::mm") == rule_name(torch.ops.aten.mm.default) == "aten::mm"


@pytest.mark.slow
def test_verify_command_in_a_subprocess_verifies_a_rule_of_a_user_module(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(MODULE.format(ns="mine"))
    command = [sys.executable, "-m", "dtensor", "verify", "--budget", "4"]
    root = str(Path(dt.__file__).parents[1])
    environment = {"PYTHONPATH": root, "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run(
        [*command, "mine", "mine::h*"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert (ran.returncode, ran.stdout.split(",")[0]) == (0, "1 rule"), ran.stdout + ran.stderr
