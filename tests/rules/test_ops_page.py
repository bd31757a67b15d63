"""Operator page: docs/ops.md agrees with the registry of rules."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from ops_page import make_page

from dtensor.commands.operator_tables import FAMILIES, table_entry_of
from dtensor.rules import rules
from dtensor.rules.registry import family_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "ops.md").read_text()
SAME_TORCH = f"for torch {torch.__version__.partition('+')[0]}; " in PAGE


def test_operator_page_lists_every_rule() -> None:
    table = PAGE.partition("## Rules")[2].partition("## Decompositions")[0]
    listed = {
        name for line in table.splitlines() if line.startswith("| `") for name in re.findall(r"`([\w.]+)`", line.split("|")[1])
    }
    assert listed == {name.removeprefix("aten::") for name in rules() if name.startswith("aten::")}, "run `make docs`"


def test_every_family_of_rules_has_a_heading() -> None:
    assert {family_of(name) for name in rules() if name.startswith("aten::") and family_of(name)} == FAMILIES.keys()


@pytest.mark.skipif(not SAME_TORCH, reason="samples are planned as this torch dispatches them")
@pytest.mark.parametrize(
    "name", ["mm", "_softmax", "add", "addmm", "cumsum", "native_layer_norm", "sum", "max.dim", "convolution", "cat"]
)
def test_row_of_an_operator_equals_the_generated_row(name: str) -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith("|") and f"`{name}`" in line.split("|")[1]]
    entry = table_entry_of(f"aten::{name}", rules()[f"aten::{name}"])
    assert tuple(cell.strip() for cell in line.split("|")[2:-1]) == entry.cells


@pytest.mark.slow
@pytest.mark.skipif(not SAME_TORCH, reason="the page is for one version of torch")
def test_operator_page_equals_the_generated_page() -> None:
    assert make_page() == PAGE, "run `make docs`"
