"""One thread per process: the tests run on few cores, and reductions then have one order."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator

import check_reported_bytes
import hypothesis
import pytest
import torch

torch.set_num_threads(1)
os.environ["DTENSOR_PROFILE"] = "off"  # plans as the built-in constants make them, whatever was measured here

# Under CI a failure must repeat: the examples are a function of the test alone. Elsewhere each run explores anew.
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.register_profile("local", deadline=None, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


check_reported_bytes.count()


@pytest.fixture(autouse=True)
def _what_arrives_is_what_is_reported(request: pytest.FixtureRequest) -> Iterator[None]:
    if request.node.get_closest_marker("own_collectives"):
        yield
        return
    with check_reported_bytes.compared():
        yield


def pytest_collection_finish() -> None:
    settle()


@pytest.fixture(scope="module")
def little_to_collect() -> None:
    """For tests that collect garbage often: they need not walk through what tests before them left."""
    settle()


def settle() -> None:
    """What stands by now stays: collections of garbage, which tests ask for, need not walk through it."""
    gc.collect()
    gc.freeze()
