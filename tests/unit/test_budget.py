"""Budget: limits on communication for blocks, functions and tests (pytest plugin)."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from case_lists import S0, S1, distribute_values, make_values

import dtensor as dt
from dtensor.debug import CommDebugMode
from dtensor.errors import ArgumentError, BudgetError


def test_budget_passes_at_the_limit_and_raises_with_the_line_above_it() -> None:
    x, y = distribute_values(make_values(5, 6), S0), distribute_values(make_values(5, 6), S1)
    with CommDebugMode() as comm:
        x + y
    received = sum(comm.get_comm_bytes().values())
    for exact in ({"bytes": received}, {"collectives": 1}, {"bytes": received, "collectives": 1}):
        with dt.budget(**exact):
            distribute_values(make_values(5, 6), S0) + distribute_values(make_values(5, 6), S1)
    for less in ({"bytes": received - 1}, {"collectives": 0}):
        with pytest.raises(BudgetError, match=r"test_budget.py:\d+  distribute_values.*# too much"), dt.budget(**less):
            distribute_values(make_values(5, 6), S0) + distribute_values(make_values(5, 6), S1)  # too much


def test_budget_decorator_limits_each_call() -> None:
    @dt.budget(collectives=1)
    def step(times: int) -> None:
        for _ in range(times):
            distribute_values(make_values(5), S0).full_tensor()

    step(1)
    step(1)
    with pytest.raises(BudgetError, match="2 collectives, limit 1"):
        step(2)


def test_budget_raises_the_error_of_its_block_and_raises_without_limits() -> None:
    with pytest.raises(ZeroDivisionError), dt.budget(bytes=0):
        _ = distribute_values(make_values(5), S0).full_tensor(), 1 / 0
    with pytest.raises(ArgumentError, match="at least one limit"), dt.budget():
        pass
    assert not torch.is_anomaly_enabled()


TEST_FILE = """
import torch, dtensor as dt
MESH = dt.init_device_mesh("cpu", (2,))
def test_step(dtensor_budget):
    x = dt.distribute_tensor(torch.ones(5, 6), MESH, [dt.Shard(0)])
    with dtensor_budget():
        {step}
    with dtensor_budget(collectives=0):
        x * 2
"""


def run_pytest(folder: Path, step: str, *options: str) -> int:
    (folder / "test_it.py").write_text(TEST_FILE.format(step=step))
    sys.modules.pop("test_it", None)
    plugin = ("-p", "dtensor.debug.pytest_plugin", "-p", "no:cacheprovider", "-p", "no:faulthandler")
    return int(pytest.main([str(folder), "-q", f"--rootdir={folder}", "-c", str(folder / "pytest.ini"), *plugin, *options]))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::pytest.PytestAssertRewriteWarning")
def test_pytest_plugin_records_budgets_and_fails_tests_that_exceed_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    once, twice = "x.full_tensor()", "x.full_tensor(), (x * 1).full_tensor()"
    assert run_pytest(tmp_path, once, "--dtensor-budgets=compare") == 1
    assert "has no budget" in capsys.readouterr().out
    assert run_pytest(tmp_path, once, "--dtensor-budgets=record") == 0
    recorded = json.loads((tmp_path / "dtensor-budgets.json").read_text())
    assert recorded == {"test_it.py::test_step": {"bytes": 72, "collectives": 1, "flops": 0, "memory": 192}}
    assert run_pytest(tmp_path, once, "--dtensor-budgets=compare") == 0
    assert run_pytest(tmp_path, twice) == 0  # without the option nothing is compared
    capsys.readouterr()
    assert run_pytest(tmp_path, twice, "--dtensor-budgets=compare") == 1
    assert "144 B received per rank, limit 72; 2 collectives, limit 1" in capsys.readouterr().out
    assert run_pytest(tmp_path, "x * 1", "--dtensor-budgets=compare") == 0
    assert "larger than needed" in capsys.readouterr().out
    assert run_pytest(tmp_path, "x.redistribute(placements=[dt.Replicate()]) + x, x[0] @ x.t()") == 0
    assert json.loads((tmp_path / "dtensor-budgets.json").read_text()) == recorded
