"""Pytest plugin: tests that fail if a change adds communication, FLOP or memory.

The fixture ``dtensor_budget`` makes a ``with`` block. With limits it is :func:`dtensor.budget`. Without limits, what the block
needs is compared with the file that ``--dtensor-budgets=record`` wrote: ``dtensor-budgets.json`` next to pytest's configuration
file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from ..recorders.run_recorder import RunRecorder
from .budget import Limits, excess_message, usage_of

RecordedBudgets = dict[str, dict[str, int]]
Budget = Callable[..., AbstractContextManager[None]]


class BudgetFile:
    """File of recorded budgets, with which the blocks of this test session are compared or from which it is written.

    Attributes:
        mode: ``"record"``, ``"compare"``, or None: do neither.
        larger_than_needed: names of the blocks that need less than recorded.
    """

    def __init__(self, path: Path, mode: str | None) -> None:
        self.path, self.mode = path, mode
        self.recorded: RecordedBudgets = json.loads(path.read_text()) if path.exists() else {}
        self.larger_than_needed: list[str] = []

    def check_budget(self, name: str, record: RunRecorder) -> None:
        """Record what one block of a test needs, or fail the test if that exceeds the recorded budget."""
        used = usage_of(record)._asdict()
        if self.mode == "record":
            self.recorded[name] = used
        elif self.mode == "compare":
            if name not in self.recorded:
                pytest.fail(f"{name} has no budget in {self.path}; run pytest --dtensor-budgets=record", pytrace=False)
            allowed = self.recorded[name]
            problem = excess_message(record, Limits(**allowed))
            if problem:
                pytest.fail(f"more than recorded in {self.path.name}: {problem}", pytrace=False)
            if any(used[what] != limit for what, limit in allowed.items()):
                self.larger_than_needed.append(name)

    def write_file(self) -> None:
        if self.mode == "record":
            self.path.write_text(json.dumps(dict(sorted(self.recorded.items())), indent=2) + "\n")


_BUDGETS = pytest.StashKey[BudgetFile]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option ``--dtensor-budgets`` and the setting ``dtensor_budgets_file`` to pytest."""
    group = parser.getgroup("dtensor")
    group.addoption(
        "--dtensor-budgets",
        choices=("record", "compare"),
        help="record what the blocks of the fixture dtensor_budget need, or fail tests that need more than recorded",
    )
    parser.addini("dtensor_budgets_file", "file of the recorded budgets", default="dtensor-budgets.json")


def pytest_configure(config: pytest.Config) -> None:
    """Read the budget file that the options of this session name; raise if workers would record into one file."""
    mode = config.getoption("--dtensor-budgets")
    if mode == "record" and hasattr(config, "workerinput"):
        raise pytest.UsageError("--dtensor-budgets=record writes one file: run it without -n")
    config.stash[_BUDGETS] = BudgetFile(config.rootpath / config.getini("dtensor_budgets_file"), mode)


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.stash[_BUDGETS].write_file()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print the names of the recorded budgets that are larger than needed."""
    names = config.stash[_BUDGETS].larger_than_needed
    if names:
        terminalreporter.write_line(f"dtensor: {len(names)} budgets are larger than needed; record them anew: {', '.join(names)}")


@pytest.fixture
def dtensor_budget(request: pytest.FixtureRequest) -> Budget:
    """Return a context manager: ``dtensor_budget(bytes=..., ...)`` limits a block; without limits the recorded budget applies."""
    budgets, entered = request.config.stash[_BUDGETS], [0]

    @contextmanager
    def block(**limits: Any) -> Iterator[None]:
        """Record the block; fail the test if it exceeds the given limits, or else compare it with the recorded budget."""
        allowed = Limits(**limits)
        entered[0] += 1
        name = request.node.nodeid + (f" #{entered[0]}" if entered[0] > 1 else "")
        compared = allowed == Limits()
        with RunRecorder(with_operators=(compared and budgets.mode is not None) or allowed.with_operators) as record:
            yield
        if compared:
            budgets.check_budget(name, record)
        elif problem := excess_message(record, allowed):
            pytest.fail(problem, pytrace=False)

    return block
