"""Parameters of data-parallel units that programs write, replace and read, in one process and on four."""

from __future__ import annotations

import unit_cases
from case_lists import make_case_tests

test_case_in_one_process, test_all_cases_on_four_processes = make_case_tests(unit_cases, gather=True)
