"""transformers warns about itself, and at import about what is not installed; what this library announces stays an error."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        item.add_marker(pytest.mark.filterwarnings("ignore"))
        item.add_marker(pytest.mark.filterwarnings("error::dtensor.errors.GatherWarning"))
