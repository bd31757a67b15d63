"""A plugin of pytest's: tests that fail when somebody adds communication, arithmetic or memory.

``dtensor_budget`` gives a ``with`` block. With numbers it is :func:`dtensor.budget`; without, what it needs is
compared with what ``--dtensor-budgets=record`` wrote down before, in ``dtensor-budgets.json`` beside pytest's configuration file.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from .budget import Limits, counted, excess
from .program_recorder import Record

Recorded = dict[str, dict[str, int]]
Budget = Callable[..., AbstractContextManager[None]]


class Budgets:
    """What the tests of a session need, and what they did when it was recorded."""

    def __init__(self, path: Path, mode: str | None) -> None:
        self.path, self.mode = path, mode
        self.known: Recorded = json.loads(path.read_text()) if path.exists() else {}
        self.less: list[str] = []

    def met(self, name: str, record: Record) -> None:
        """What one block of a test needed; fails the test if that is more than recorded."""
        found = counted(record)._asdict()
        if self.mode == "record":
            self.known[name] = found
        elif self.mode == "compare":
            if name not in self.known:
                pytest.fail(f"{name} has no budget in {self.path}; run pytest --dtensor-budgets=record", pytrace=False)
            allowed = self.known[name]
            problem = excess(record, Limits(**allowed))
            if problem:
                pytest.fail(f"more than recorded in {self.path.name}: {problem}", pytrace=False)
            if any(found[what] != limit for what, limit in allowed.items()):
                self.less.append(name)

    def write(self) -> None:
        if self.mode == "record":
            self.path.write_text(json.dumps(dict(sorted(self.known.items())), indent=2) + "\n")


_BUDGETS = pytest.StashKey[Budgets]()


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("dtensor")
    group.addoption(
        "--dtensor-budgets",
        choices=("record", "compare"),
        help="write down what the blocks of the fixture dtensor_budget need, or fail where it is more than written down",
    )
    parser.addini("dtensor_budgets_file", "where that is written down", default="dtensor-budgets.json")


def pytest_configure(config: pytest.Config) -> None:
    mode = config.getoption("--dtensor-budgets")
    if mode == "record" and hasattr(config, "workerinput"):
        raise pytest.UsageError("--dtensor-budgets=record writes one file: run it without -n")
    config.stash[_BUDGETS] = Budgets(config.rootpath / config.getini("dtensor_budgets_file"), mode)


def pytest_sessionfinish(session: pytest.Session) -> None:
    session.config.stash[_BUDGETS].write()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    less = config.stash[_BUDGETS].less
    if less:
        terminalreporter.write_line(f"dtensor: {len(less)} budgets are larger than needed; record them anew: {', '.join(less)}")


@pytest.fixture
def dtensor_budget(request: pytest.FixtureRequest) -> Budget:
    """``with dtensor_budget(bytes=..., ...)``, as :func:`dtensor.budget`, or ``with dtensor_budget()`` for what was recorded."""
    budgets, entered = request.config.stash[_BUDGETS], [0]

    @contextmanager
    def block(**limits: Any) -> Iterator[None]:
        allowed = Limits(**limits)
        entered[0] += 1
        name = request.node.nodeid + (f" #{entered[0]}" if entered[0] > 1 else "")
        compared = allowed == Limits()
        with Record(computing=(compared and budgets.mode is not None) or allowed.computing) as record:
            yield
        if compared:
            budgets.met(name, record)
        elif problem := excess(record, allowed):
            pytest.fail(problem, pytrace=False)

    return block
