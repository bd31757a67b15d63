"""Ignore warnings of transformers about itself and missing packages; warnings of this library stay errors."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        item.add_marker(pytest.mark.filterwarnings("error::dtensor.errors.GatherWarning"))
