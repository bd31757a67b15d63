"""Optimizer database: each optimizer of torch's database steps on randomly placed parameters as on plain ones."""

from __future__ import annotations

import os

import optimizer_database as db
import pytest
from slow_case_marks import keep_every_nth_fast

SEED = int(os.environ.get("DTENSOR_SEED", "0"))
NAMES = ["Adadelta", "Adafactor", "Adagrad", "Adam", "Adamax", "AdamW", "ASGD", "LBFGS", "Muon", "NAdam", "RAdam", "RMSprop"]
NAMES += ["Rprop", "SGD"]


def test_names_are_all_optimizers_of_the_database() -> None:
    assert {info.optim_cls.__name__ for info in db.entries()} == set(NAMES)


@pytest.mark.parametrize("name", keep_every_nth_fast(NAMES))
def test_optimizers_with_one_option_equal_plain_torch(name: str) -> None:
    """Check one input of each optimizer in all implementations."""
    (info,) = db.entries(name)
    cases = list(db.cases_of(info, db.MESHES["4 and 2x2"], SEED))
    last = cases[-1].options
    for case in cases:
        if case.options == last:
            assert db.problems_of(case) == [], str(case)


@pytest.mark.parametrize("name", ["SGD", "Adam", "Adagrad"])
def test_gradients_through_steps_of_common_optimizers_equal_plain_torch(name: str) -> None:
    (info,) = db.entries(name)
    assert db.differentiable_problems(info, (2, 2), SEED) == []


@pytest.mark.slow
@pytest.mark.parametrize("meshes", db.MESHES)
@pytest.mark.parametrize("name", NAMES)
def test_optimizers_with_all_options_equal_plain_torch(name: str, meshes: str) -> None:
    (info,) = db.entries(name)
    for seed in range(SEED, SEED + 2):
        for case in db.cases_of(info, db.MESHES[meshes], seed):
            assert db.problems_of(case) == [], str(case)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_gradients_through_steps_of_all_optimizers_equal_plain_torch(name: str) -> None:
    (info,) = db.entries(name)
    for mesh in ((4,), (2, 2)):
        assert db.differentiable_problems(info, mesh, SEED) == []
