"""Functions of torch that create plain constants accept DTensors, in one process and on four."""

from __future__ import annotations

import torch_constants_cases
from case_lists import make_case_tests

test_case_in_one_process, test_all_cases_on_four_processes = make_case_tests(torch_constants_cases, gather=True)
