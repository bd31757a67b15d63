"""Plans by name: modules and single parameters, in one process and on processes."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo
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
    with pytest.raises(PlacementError, match="has no tensor-parallel plan"):
        parallelize_module(Gated(), mesh, "auto")


class Tied(nn.Module):
    """One table for the tokens that go in and those that come out, and a module that computes with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.out, self.mix = nn.Embedding(7, 6), nn.Linear(6, 7, bias=False), Mixed()
        self.out.weight = self.table.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.mix(self.table(tokens)))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Parameter(torch.rand(5, 6)), nn.Parameter(torch.rand(6, 5))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.silu(x @ self.up.t()) @ self.down.t()


MIXED = {"mix.up": "colwise", "mix.down": "rowwise", "mix": "all_reduce"}
TIED: list[list[dict[str, str]]] = [
    [{"out": "colwise_gather_output"}],
    [{"table": "embedding_rowwise"}],
    [{"out": "colwise_gather_output", **MIXED}],
    [{"out": "colwise_gather_output", "table": "embedding_rowwise"}],
]


def check_tied(plans: list[dict[str, str]]) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    plain = Tied()
    model = copy.deepcopy(plain)
    for plan in plans:
        parallelize_module(model, mesh, plan)
    assert model.out.weight is model.table.weight
    tokens = torch.randint(7, (3, 5))
    losses = [nn.functional.cross_entropy(one(tokens).flatten(0, 1), tokens.flatten()) for one in (plain, model)]
    for loss in losses:
        loss.backward()
    for own in whole(losses[1]):
        torch.testing.assert_close(own, losses[0])
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        for own in whole(ours.grad):
            torch.testing.assert_close(own, theirs.grad)


@pytest.mark.parametrize("plans", TIED)
def test_a_module_without_a_style_that_shares_a_parameter_runs_along(plans: list[dict[str, str]]) -> None:
    check_tied(plans)


def _all_tied() -> None:
    for plans in TIED:
        check_tied(plans)


@pytest.mark.gloo
def test_tied_modules_on_process_groups() -> None:
    run_gloo(_all_tied, 2)


class Experts(nn.Module):
    """Two experts for each token, whose gate and up projection are one stack."""

    def __init__(self, width: int, bias: bool) -> None:
        super().__init__()
        self.gate_up, self.down = nn.Parameter(torch.rand(3, 2 * width, 5) - 0.5), nn.Parameter(torch.rand(3, 5, width))
        self.bias = nn.Parameter(torch.rand(3, 5)) if bias else None
        self.spare = nn.Identity()

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        out = 0.5 * self.spare(x)
        for k, column in enumerate(chosen.unbind(1)):
            gate, up = torch.einsum("tk,tnk->tn", x, self.gate_up[column]).chunk(2, -1)
            made = torch.einsum("tn,tkn->tk", nn.functional.silu(gate) * up, self.down[column])
            made = made if self.bias is None else made + self.bias[column]
            out = out + made * weights[:, k, None]
        return out


EXPERTS = {"gate_up": "packed_colwise", "down": "rowwise", "": "moe_tp_experts", "spare": "moe_identity_expert"}


def check_experts(width: int, bias: bool) -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    torch.manual_seed(0)
    plain = Experts(width, bias)
    model = parallelize_module(copy.deepcopy(plain), mesh, EXPERTS)
    given = torch.rand(4, 5), torch.randint(3, (4, 2)), torch.rand(4, 2)
    found, expected = [], []
    for one, results in ((model, found), (plain, expected)):
        x, weights = given[0].clone().requires_grad_(), given[2].clone().requires_grad_()
        with dt.debug.CommDebugMode() as comm:
            made = one(x, given[1], weights)
            if (
                one is model and width == 12 and not bias
            ):  # rows are weighed and added before they are reduced: the tokens' bytes, not the rows'
                assert [event.bytes for event in comm.events] == [-(-2 * 4 * 5 * 4 * 2 // 3)]
            made.square().sum().backward()
        results += [made, x.grad, weights.grad]
    for ours, theirs in zip(found, expected, strict=True):
        for own in whole(ours):
            torch.testing.assert_close(own, theirs)
    for name, theirs in plain.named_parameters():
        held = getattr(model, "parametrizations", {})
        grad = held[name][0](held[name].original.grad) if name in held else getattr(model, name).grad
        for own in whole(grad):
            torch.testing.assert_close(own, theirs.grad)
    assert all(isinstance(p, dt.DTensor) for name, p in model.named_parameters() if name != "bias")


@pytest.mark.parametrize(("width", "bias"), [(12, False), (12, True), (7, False)])
def test_experts_whose_matrices_are_cut(width: int, bias: bool) -> None:
    """With biases, which nobody cut, or rows that products of groups refuse, they are computed on the whole."""
    check_experts(width, bias)


@pytest.mark.slow
@pytest.mark.gloo
def test_experts_on_process_groups() -> None:
    run_gloo(check_experts, 3, 12, False)
