"""PyTorch DTensor's known defects and reported issues do not occur here, in one process and on four."""

from __future__ import annotations

from types import ModuleType

import pytest
import pytorch_defect_cases
import reported_operator_cases
import reported_recent_cases
import reported_tensor_cases
import torch_feature_cases
from case_lists import run_cases_on_four_processes
from slow_case_marks import keep_every_nth_fast

MODULES = (pytorch_defect_cases, torch_feature_cases, reported_operator_cases, reported_recent_cases, reported_tensor_cases)
ON_PROCESSES = tuple(module for module in MODULES if module is not torch_feature_cases)  # programs of torch's, not of ranks
ALL = {name: fn for module in MODULES for name, fn in module.CASES.items()}


@pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")
@pytest.mark.parametrize("name", keep_every_nth_fast(list(ALL)))
def test_reported_pytorch_issue_gives_the_expected_result_in_one_process(name: str) -> None:
    ALL[name]()


@pytest.mark.gloo
@pytest.mark.parametrize("module", ON_PROCESSES, ids=lambda module: module.__name__)
def test_reported_pytorch_issues_give_the_expected_results_on_four_processes(module: ModuleType) -> None:
    run_cases_on_four_processes(module)
