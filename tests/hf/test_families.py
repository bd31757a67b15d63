"""Unmodified Hugging Face models with distributed parameters: outputs, loss and all gradients equal those of plain models."""

from __future__ import annotations

import pytest
from families import FAMILIES
from training_step import PLANS, check

import dtensor as dt

MESH = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("family", FAMILIES)
def test_training_step_of_each_family_equals_plain_model(family: str, plan: str) -> None:
    check(FAMILIES[family], PLANS[plan], MESH)
