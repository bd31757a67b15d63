"""Errors are caught by the clauses that a program written for torch's DTensor has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.errors import ContradictionError
from dtensor.parallel import PrepareModuleInput, PrepareModuleOutput, fully_shard, replicate

MESH = dt.init_device_mesh("cpu", (2,))
X = dt.distribute_tensor(torch.ones(4, 2), MESH, [Shard(0)])
TWO: Any = (Replicate(), None)


def twice(make: Callable[..., nn.Module]) -> None:
    model = make(nn.Linear(2, 2), mesh=MESH)
    make(model, mesh=MESH)


def mapped(function: Callable[..., Any], ins: Any, outs: Any) -> None:
    dt.local_map(function, out_placements=outs, in_placements=ins, device_mesh=MESH)(X, X)


CONTRADICTIONS: dict[str, Callable[[], Any]] = {
    "inputs of other numbers": lambda: PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=TWO),
    "inputs without wishes": lambda: PrepareModuleInput(input_layouts=Shard(0)),
    "outputs of other numbers": lambda: PrepareModuleOutput(output_layouts=Shard(0), desired_output_layouts=TWO),
    "sharded twice": lambda: twice(fully_shard),
    "replicated twice": lambda: twice(replicate),
    "None for a DTensor": lambda: mapped(torch.add, ([Shard(0)], None), [Shard(0)]),
    "arguments of another number": lambda: mapped(torch.add, ([Shard(0)],), [Shard(0)]),
    "outputs of another number": lambda: mapped(torch.add, None, ([Shard(0)], [Shard(0)])),
    "placements for a number": lambda: mapped(lambda x, y: 3, None, ([Shard(0)],)),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
def test_a_contradiction_is_an_assertion_error_as_in_torch(name: str) -> None:
    with pytest.raises(AssertionError) as caught:
        CONTRADICTIONS[name]()
    assert isinstance(caught.value, ContradictionError)
