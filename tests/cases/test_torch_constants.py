"""Functions of torch that create plain constants accept DTensors, in one process and on four."""

from __future__ import annotations

import torch_constants_cases
from case_lists import here_and_on_four

test_case_in_one_process, test_all_cases_on_four_processes = here_and_on_four(torch_constants_cases, gather=True)
