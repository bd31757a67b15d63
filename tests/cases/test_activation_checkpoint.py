"""Activation checkpointing in one process and on four."""

from __future__ import annotations

import activation_checkpoint_cases
from case_lists import make_case_tests

test_case_in_one_process, test_all_cases_on_four_processes = make_case_tests(activation_checkpoint_cases)
