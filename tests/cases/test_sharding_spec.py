"""Sharding specs of document 000 (the RFC on model sharding) and the checkpoint rows of document 003."""

from __future__ import annotations

import sharding_spec_cases
from case_lists import make_case_tests

test_case_in_one_process, test_all_cases_on_four_processes = make_case_tests(sharding_spec_cases, folders=True)
