"""The peer's known defects and what its users reported: none of them here, in one process and on four."""

from __future__ import annotations

from types import ModuleType

import cases_defects
import cases_interplay
import cases_reports_operators
import cases_reports_recent
import cases_reports_tensors
import pytest
from case_lists import on_four
from halves import some

MODULES = (cases_defects, cases_interplay, cases_reports_operators, cases_reports_recent, cases_reports_tensors)
ON_PROCESSES = tuple(module for module in MODULES if module is not cases_interplay)  # programs of torch's, not of ranks
ALL = {name: fn for module in MODULES for name, fn in module.CASES.items()}


@pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")
@pytest.mark.parametrize("name", some(list(ALL)))
def test_case(name: str) -> None:
    ALL[name]()


@pytest.mark.gloo
@pytest.mark.parametrize("module", ON_PROCESSES, ids=lambda module: module.__name__)
def test_all_cases_on_four_processes(module: ModuleType) -> None:
    on_four(module)
