"""Plans with style names of Hugging Face: modules and single parameters, in one process and on processes."""

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


def full_tensors(x: Any) -> list[Tensor]:
    """Return the full value on each rank."""
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
    for own in full_tensors(found):
        torch.testing.assert_close(own, expected)
    expected.square().sum().backward()
    found.square().sum().backward()
    for own in full_tensors(model.scale.grad):
        torch.testing.assert_close(own, plain.scale.grad)


@pytest.mark.parametrize("table", ["embedding_rowwise", "embedding_colwise"])
def test_plan_with_style_names_equals_plain_model(table: str) -> None:
    check_names(table)


def test_deepcopy_of_planned_model_uses_its_own_parameters() -> None:
    """Check a deepcopy, as for averaged models."""
    mesh, plan = dt.init_device_mesh("cpu", (2,)), {"up": "colwise", "scale": "colwise", "": "local_params", "down": "rowwise"}
    model = parallelize_module(Gated(), mesh, plan)
    twin, tokens = copy.deepcopy(model), torch.randint(11, (3, 5))
    expected = full_tensors(model(tokens))
    with torch.no_grad():
        model.scale.zero_()
    for own, wanted in zip(full_tensors(twin(tokens)), expected, strict=True):
        torch.testing.assert_close(own, wanted)
    twin(tokens).sum().backward()
    assert model.scale.grad is None
    assert twin.scale.grad.placements == (Shard(0),)


@pytest.mark.gloo
def test_plan_with_style_names_equals_plain_model_on_process_groups() -> None:
    run_gloo(check_names, 2, "embedding_rowwise")


def test_unknown_style_name_raises_with_the_known_names() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    with pytest.raises(PlacementError, match="colwise_gather_output"):
        parallelize_module(Gated(), mesh, {"up": "columnwise"})
    with pytest.raises(PlacementError, match="packed_colwise"):
        parallelize_module(Gated(), mesh, {"scale": "columnwise"})
    with pytest.raises(PlacementError, match="has no tensor-parallel plan"):
        parallelize_module(Gated(), mesh, "auto")


class Tied(nn.Module):
    """Model with one table for input and output tokens, and a module with its own parameters."""

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
    for own in full_tensors(losses[1]):
        torch.testing.assert_close(own, losses[0])
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        for own in full_tensors(ours.grad):
            torch.testing.assert_close(own, theirs.grad)


@pytest.mark.parametrize("plans", TIED)
def test_tied_modules_with_a_style_on_one_of_them_equal_plain_model(plans: list[dict[str, str]]) -> None:
    check_tied(plans)


def _check_all_tied() -> None:
    for plans in TIED:
        check_tied(plans)


@pytest.mark.gloo
def test_tied_modules_under_plans_equal_plain_model_on_process_groups() -> None:
    run_gloo(_check_all_tied, 2)


class Experts(nn.Module):
    """Mixture of experts with two experts for each token and stacked gate and up projections."""

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
            ):  # rows are weighted and added before the reduction: bytes of the tokens, not of the rows
                assert [event.bytes for event in comm.events] == [-(-2 * 4 * 5 * 4 * 2 // 3)]
            made.square().sum().backward()
        results += [made, x.grad, weights.grad]
    for ours, theirs in zip(found, expected, strict=True):
        for own in full_tensors(ours):
            torch.testing.assert_close(own, theirs)
    for name, theirs in plain.named_parameters():
        held = getattr(model, "parametrizations", {})
        grad = held[name][0](held[name].original.grad) if name in held else getattr(model, name).grad
        for own in full_tensors(grad):
            torch.testing.assert_close(own, theirs.grad)
    assert all(isinstance(p, dt.DTensor) for name, p in model.named_parameters() if name != "bias")


@pytest.mark.parametrize(("width", "bias"), [(12, False), (12, True), (7, False)])
def test_experts_with_sharded_matrices_equal_plain_model(width: int, bias: bool) -> None:
    """Check sharded experts, and cases that run unsharded: unsharded biases, or rows that grouped matmul refuses."""
    check_experts(width, bias)


@pytest.mark.slow
@pytest.mark.gloo
def test_experts_with_sharded_matrices_equal_plain_model_on_process_groups() -> None:
    run_gloo(check_experts, 3, 12, False)
