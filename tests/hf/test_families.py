"""Unmodified Hugging Face models with distributed parameters: outputs, loss and all gradients are those of one device."""

from __future__ import annotations

import pytest
from families import FAMILIES
from training_step import PLANS, check

import dtensor as dt

MESH = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_training_step_is_that_of_one_device(family: str, plan: str) -> None:
    check(FAMILIES[family], PLANS[plan], MESH)
