"""All model types of transformers that can be made tiny: a training step with parameters sharded along both mesh dims."""

from __future__ import annotations

import pytest
from shrink_model import NotShrunk, classes_of, shrunk
from training_step import PLANS, check
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import dtensor as dt

MESH = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in CONFIG_MAPPING_NAMES if classes_of(name)])
def test_training_step_of_each_model_type_equals_plain_model(model_type: str) -> None:
    try:
        family = shrunk(model_type)
    except NotShrunk as reason:
        pytest.skip(str(reason)[:150])
    check(family, PLANS["everywhere"], MESH)
