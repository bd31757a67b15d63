"""Activation checkpointing in one process and on four."""

from __future__ import annotations

import activation_checkpoint_cases
from case_lists import here_and_on_four

test_case_in_one_process, test_all_cases_on_four_processes = here_and_on_four(activation_checkpoint_cases)
