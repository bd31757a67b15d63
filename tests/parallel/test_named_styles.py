"""Plans by name: modules and single parameters, in one process and on processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gloo import run_gloo
from torch import Tensor, nn

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.errors import PlacementError
from dtensor.parallel import parallelize_module


def whole(x: Any) -> list[Tensor]:
    """Each rank's value of the whole."""
    x = x.full_tensor() if isinstance(x, dt.DTensor) else x
    return list(x.shards) if isinstance(x, dt.PerRank) else [x]


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(11, 6), nn.Linear(6, 8), nn.Linear(8, 6)
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.down(self.up(self.table(tokens)) * self.scale)


def check_names(table: str) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    plain = Gated()
    plan = {"table": table, "up": "colwise", "scale": "colwise", "": "local_params", "down": "rowwise"}
    model = parallelize_module(copy.deepcopy(plain), mesh, plan)
    assert model.scale.placements == (Shard(0),)
    assert model.down.bias.placements == (Replicate(),)
    tokens = torch.randint(11, (3, 5))
    expected, found = plain(tokens), model(tokens)
    for own in whole(found):
        torch.testing.assert_close(own, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    for own in whole(model.scale.grad):
        torch.testing.assert_close(own, plain.scale.grad)


@pytest.mark.parametrize("table", ["embedding_rowwise", "embedding_colwise"])
def test_names_of_modules_and_of_parameters(table: str) -> None:
    check_names(table)


def test_a_copy_computes_with_its_own_parameters() -> None:
    """As the mean of a model over its steps does."""
    mesh, plan = dt.init_device_mesh("cpu", (2,)), {"up": "colwise", "scale": "colwise", "": "local_params", "down": "rowwise"}
    model = parallelize_module(Gated(), mesh, plan)
    twin, tokens = copy.deepcopy(model), torch.randint(11, (3, 5))
    expected = whole(model(tokens))
    with torch.no_grad():
        model.scale.zero_()
    for own, wanted in zip(whole(twin(tokens)), expected, strict=True):
        torch.testing.assert_close(own, wanted)
    twin(tokens).sum().backward()
    assert model.scale.grad is None
    assert twin.scale.grad.placements == (Shard(0),)


@pytest.mark.gloo
def test_on_process_groups() -> None:
    run_gloo(check_names, 2, "embedding_rowwise")


def test_an_unknown_name_lists_the_known() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    with pytest.raises(PlacementError, match="colwise_gather_output"):
        parallelize_module(Gated(), mesh, {"up": "columnwise"})
    with pytest.raises(PlacementError, match="packed_colwise"):
        parallelize_module(Gated(), mesh, {"scale": "columnwise"})
    with pytest.raises(PlacementError, match="no plan of its own"):
        parallelize_module(Gated(), mesh, "auto")
