"""Setup of all tests: one thread per process, hypothesis profiles, reported bytes compared with received bytes, garbage."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import check_reported_bytes
import hypothesis
import pytest
import torch

torch.set_num_threads(1)  # the tests run on few cores, and reductions then have one order
os.environ["DTENSOR_PROFILE"] = "off"  # plans depend on the built-in constants only

# Under CI the examples depend on the test only, so that a failure repeats. Elsewhere each run draws new examples.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("local", deadline=None, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


check_reported_bytes.install_byte_counters()


@pytest.fixture(autouse=True)
def _compare_reported_bytes(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("own_collectives"):
        yield
        return
    with check_reported_bytes.compare_reported_bytes():
        yield


def pytest_collection_finish() -> None:
    freeze_garbage()


@pytest.fixture(scope="module")
def frozen_garbage() -> None:
    """Freeze the objects of earlier tests, so that garbage collections of this module skip them."""
    freeze_garbage()


def freeze_garbage() -> None:
    """Collect garbage, and exclude all remaining objects from later collections."""
    gc.collect()
    gc.freeze()
