"""Parallelism pages: their code gives the same on four processes as it gives in one."""

from __future__ import annotations

from pathlib import Path

import pytest
from gloo_processes import run_gloo
from test_docs import run_page

ROOT = Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs" / "parallel").glob("*.md"))


def _failures(page: str) -> list[str]:
    return run_page(page, (ROOT / page).read_text())


@pytest.mark.gloo
@pytest.mark.parametrize("page", [str(page.relative_to(ROOT)) for page in PAGES])
def test_page_of_parallelism_runs_on_four_processes(page: str) -> None:
    assert run_gloo(_failures, 4, page) == [[]] * 4
