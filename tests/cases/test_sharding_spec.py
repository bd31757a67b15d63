"""Every row of document 000, the RFC on model sharding, and the checkpoint rows of document 003 work."""

from __future__ import annotations

import sharding_spec_cases
from case_lists import here_and_on_four

test_case_in_one_process, test_all_cases_on_four_processes = here_and_on_four(sharding_spec_cases, folders=True)
