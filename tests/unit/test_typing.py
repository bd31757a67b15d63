"""Typing: mypy and pyright accept a correct user program and report each error of a wrong one."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

CORRECT_PROGRAM = """
from collections.abc import Sequence

import torch
from torch import nn

import dtensor as dt
import dtensor.testing
from dtensor.parallel import FSDPModule, fully_shard


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 4)

    def own(self) -> int:
        return 3


def table(x: dt.Layout) -> Sequence[tuple[dt.Placement, dt.Placement]]:
    return [(dt.Shard(d), dt.Shard(d)) for d in range(x.ndim)]


mesh: dt.DeviceMesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
model: Model = dt.parallel.fully_shard(Model(), mesh=mesh)
number: int = fully_shard(Model(), mesh=mesh).own()
if isinstance(model, FSDPModule):
    model.set_requires_gradient_sync(False)
several: list[nn.Linear] = fully_shard([nn.Linear(3, 4)], mesh=mesh)
copied: Model = dt.parallel.replicate(Model(), mesh)
placed: Model = dt.distribute_module(Model(), mesh)
real: Model = dt.parallel.materialize(Model())
x: dt.DTensor = dt.distribute_tensor(torch.ones(4), mesh, [dt.Shard(0)])
gathered: torch.Tensor = x.full_tensor()
layout: dt.Layout = x.layout
with dt.debug.CommDebugMode() as comm:
    total: torch.Tensor = (x + 1).sum()
dt.checkpoint.save({"x": x}, "/tmp/nowhere")
redistributed: list[dt.DTensor] = dt.redistribute_many([x], [[dt.Replicate()]])
dt.register_sharding(torch.ops.aten.relu.default)(table)
report = dt.testing.verify_rule("mm")
print(report.wrong, number, dt.sharding_spec, dt.sharded_tensor, dt.shard_model)
"""

WRONG_LINES = {
    "dt.no_such_name": "no_such_name",
    "dt.parallel.no_such_name": "no_such_name",
    "dt.parallel.fully_shard(nn.Linear(3, 4), mesh=mesh).no_such_name()": "not callable",  # a tensor or a module
    "dt.parallel.fully_shard(3, mesh=mesh)": "int",
    'dt.parallel.fully_shard(nn.Linear(3, 4), mesh=mesh, mp_policy="float16")': "str",
    "dt.checkpoint.no_such_name": "no_such_name",
    'dt.Shard("0")': "str",
    "dt.shard_model(3, None)": "int",
}
PREAMBLE = """
from torch import nn
import dtensor as dt
mesh = dt.init_device_mesh("cpu", (2,))
"""
WRONG_PROGRAM = PREAMBLE + "".join(f"{line}\n" for line in WRONG_LINES)


Errors = dict[str, dict[int, str]]  # by the name of the file and the line
ROOT = Path(__file__).parents[2]


def _run_mypy(folder: Path) -> Errors:
    """Run mypy with the strict settings and the cache of the project."""
    command = [sys.executable, "-m", "mypy", *map(str, folder.glob("*.py"))]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode in (0, 1), ran.stdout + ran.stderr
    found: Errors = {}
    for name, line, message in re.findall(r"(\w+)\.py:(\d+): error: (.*)$", ran.stdout, re.MULTILINE):
        found.setdefault(name, {})[int(line)] = message
    assert bool(found) == bool(ran.returncode), ran.stdout
    return found


def _run_pyright(folder: Path) -> Errors:
    settings = {"extraPaths": [str(ROOT)], "typeCheckingMode": "strict", "reportUnknownMemberType": False}
    (folder / "pyrightconfig.json").write_text(json.dumps(settings))
    command = ["pyright", "--outputjson", "--pythonpath", sys.executable, "-p", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    found: Errors = {}
    for item in json.loads(ran.stdout)["generalDiagnostics"]:
        if item["severity"] == "error":
            found.setdefault(Path(item["file"]).stem, {})[item["range"]["start"]["line"] + 1] = item["message"]
    return found


CHECKERS = [
    pytest.param(
        _run_mypy,
        id="mypy",
        marks=pytest.mark.skipif(not shutil.which("mypy", path=str(Path(sys.executable).parent)), reason="no mypy"),
    ),
    pytest.param(_run_pyright, id="pyright", marks=pytest.mark.skipif(not shutil.which("pyright"), reason="no pyright")),
]


@pytest.mark.parametrize("checker", CHECKERS)
def test_type_checker_reports_exactly_the_wrong_lines(checker: Callable[[Path], Errors], tmp_path: Path) -> None:
    (tmp_path / "right.py").write_text(CORRECT_PROGRAM)
    (tmp_path / "wrong.py").write_text(WRONG_PROGRAM)
    found = checker(tmp_path)
    assert found.keys() == {"wrong"}
    first = PREAMBLE.count("\n") + 1
    for k, (line, name) in enumerate(WRONG_LINES.items()):
        assert name in found["wrong"].get(first + k, ""), (line, found)
    assert len(found["wrong"]) == len(WRONG_LINES)
