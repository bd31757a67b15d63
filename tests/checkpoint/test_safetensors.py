"""Import and export of sharded models in the Hugging Face layout."""

from __future__ import annotations

import safetensors_cases
from case_lists import make_case_tests

test_case_in_one_process, test_all_cases_on_four_processes = make_case_tests(safetensors_cases, folders=True)
