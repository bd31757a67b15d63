"""Fused projections sharded part by part (``parts=``): each rank has columns of every part, and using the parts needs no
communication."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo
from slow_case_marks import keep_chosen_fast, keep_every_nth_fast
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.nn import functional as F

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.debug import CommDebugMode
from dtensor.errors import ArgumentError, DTensorError, StyleError, UnitError
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module


def full_tensors(x: Any) -> list[Tensor]:
    """Return the full value on each rank."""
    x = x.full_tensor() if isinstance(x, dt.DTensor) else x
    return list(x.shards) if isinstance(x, dt.PerRank) else [x]


def assert_equals(found: Any, expected: Tensor) -> None:
    for own in full_tensors(found):
        torch.testing.assert_close(own, expected)


class Gated(nn.Module):
    """Gated MLP with gate and up projection in one layer, 20 columns each."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.down = nn.Linear(6, 40, dtype=torch.float64), nn.Linear(20, 6, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.both(x).chunk(2, -1)
        return self.down(F.silu(gate) * up)


def make_gated(ranks: int, local: bool) -> tuple[Gated, nn.Module]:
    torch.manual_seed(0)
    plain = Gated()
    plan = {"both": ColwiseParallel(parts=2, use_local_output=local), "down": RowwiseParallel()}
    return plain, parallelize_module(copy.deepcopy(plain), dt.init_device_mesh("cpu", (ranks,)), plan)


def check_gated(ranks: int, local: bool, tracked: bool) -> None:
    plain, model = make_gated(ranks, local)
    x = torch.randn(3, 5, 6, dtype=torch.float64, requires_grad=tracked)
    expected = plain(x)
    with CommDebugMode() as forward:
        found = model(x)
    assert_equals(found, expected)
    expected.square().sum().backward()
    with CommDebugMode() as backward:
        found.square().sum().backward()
    assert forward.get_total_counts() == 1  # reduction of the row-wise layer's output
    assert backward.get_total_counts() == tracked  # reduction of the gradient of the column-wise layer's input
    kept = model.both.parametrizations
    assert kept.weight.original.placements == (Shard(1),)
    assert kept.weight.original.grad.placements == (Shard(1),)
    assert_equals(kept.weight.original.grad.flatten(0, 1), plain.both.weight.grad)
    assert_equals(kept.bias.original.grad.flatten(0, 1), plain.both.bias.grad)
    assert_equals(model.down.weight.grad, plain.down.weight.grad)


@pytest.mark.parametrize(
    ("ranks", "local", "tracked"),
    keep_chosen_fast([(4, True, True), (4, False, False), (3, True, False), (3, False, True)], [(3, False, True)]),
)
def test_gated_mlp_with_fused_projection_equals_plain_model(ranks: int, local: bool, tracked: bool) -> None:
    check_gated(ranks, local, tracked)


@pytest.mark.gloo
@pytest.mark.slow
def test_gated_mlp_with_fused_projection_equals_plain_on_process_groups() -> None:
    run_gloo(check_gated, 3, 3, True, True)
    run_gloo(check_gated, 2, 2, False, True)


# --- uses of the parts --------------------------------------------------------------------------------------------------
PartsProgram = Callable[[Tensor], list[Tensor]]
PARTS_PROGRAMS: dict[str, tuple[PartsProgram, int]] = {  # and the largest number of collectives of both passes
    "chunk": (lambda y: [part.sin() for part in y.chunk(3, -1)], 0),
    "split": (lambda y: [part.sin() for part in y.split(8, 2)], 0),
    "split and slice": (lambda y: [part[..., :8].sin() for part in y.split([16, 8], -1)], 0),
    "one part": (lambda y: [y.chunk(3, -1)[1].view(5, 4, 4, 2).transpose(1, 2).sin()], 0),
    "slices": (lambda y: [y[..., :8].sin(), y[:, :, 8:16].cos(), y[..., -8:].exp()], 0),
    "slice of two": (lambda y: [y[..., 8:].chunk(2, -1)[1].sin(), y[..., :8].cos()], 0),
    "unflatten and select": (lambda y: [y.unflatten(-1, (3, 8)).select(2, 1).sin()], 0),
    "odd parts": (lambda y: [part.sin() for part in y.split([10, 14], -1)], 1),
    "without parts": (lambda y: [y.sin(), y.sum((0, 1)), y[1:, ..., 3]], 3),
    "slices with steps": (lambda y: [y[..., ::2].cos(), y[..., None, 8:16].tan(), y[1:3, :, 8:16].sin(), y[0]], 4),
    "row index": (
        lambda y: [y[2], y[1:3, 1, 8:].sin(), y[torch.tensor([4, 0, 4])].chunk(3, -1)[1], y[torch.tensor(3), 1:, :8]],
        0,
    ),
    "index of two dims": (
        lambda y: [y[:, torch.tensor([[1, 3], [0, 1]])].cos(), y[torch.tensor([1, 2]), torch.tensor([3, 0])].tan()],
        4,
    ),
    "narrow": (lambda y: [y.narrow(-1, 8, 8).sin()], 3),
}


@pytest.mark.parametrize("name", keep_every_nth_fast(list(PARTS_PROGRAMS), 3))
def test_uses_of_fused_projection_parts_equal_plain_torch(name: str) -> None:
    taken, most = PARTS_PROGRAMS[name]
    torch.manual_seed(0)
    plain, x = nn.Linear(6, 24, dtype=torch.float64), torch.randn(5, 4, 6, dtype=torch.float64)
    mesh = dt.init_device_mesh("cpu", (2,))
    model = parallelize_module(copy.deepcopy(plain), mesh, ColwiseParallel(parts=3, use_local_output=False))
    expected, y = taken(plain(x)), model(dt.distribute_tensor(x, mesh, [Replicate()]))
    with CommDebugMode() as moved:
        found = taken(y)
        torch.autograd.backward(found, [each.detach().cos() for each in found])
    torch.autograd.backward(expected, [each.detach().cos() for each in expected])
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.stride() == theirs.stride()
        assert_equals(ours, theirs)
    assert_equals(model.parametrizations.weight.original.grad.flatten(0, 1), plain.weight.grad)
    assert_equals(model.parametrizations.bias.original.grad.flatten(0, 1), plain.bias.grad)
    assert moved.get_total_counts() <= most


def test_writes_to_parts_of_a_fused_projection_change_its_base() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    stack = dt.distribute_tensor(torch.arange(24.0).view(3, 2, 4), mesh, [Shard(2)])
    y = stack.view(3, 8)
    first, second = y.split(4, -1)
    first.mul_(-1)
    y[:, 4:].add_(100)
    with torch.inference_mode():
        assert_equals(y.chunk(2, -1)[1], torch.arange(24.0).view(3, 8)[:, 4:] + 100)
    expected = torch.arange(24.0).view(3, 2, 4) * torch.tensor([-1.0, 1.0])[:, None] + torch.tensor([0.0, 100.0])[:, None]
    assert_equals(stack, expected)
    assert_equals(y, expected.view(3, 8))
    assert_equals(second, expected[:, 1])


@pytest.mark.slow
def test_fused_parts_of_conv1d_and_embedding_do_not_communicate() -> None:
    conv = pytest.importorskip("transformers").pytorch_utils.Conv1D(24, 6)
    mesh, x, tokens = dt.init_device_mesh("cpu", (2,)), torch.randn(5, 4, 6), torch.randint(7, (3, 4))
    table = nn.Embedding(7, 12)
    for module, given, dim in ((conv, x, 1), (table, tokens, 1)):
        model = parallelize_module(copy.deepcopy(module), mesh, ColwiseParallel(parts=3, use_local_output=False))
        assert model.parametrizations.weight.original.placements == (Shard(dim + 1),)
        with CommDebugMode() as moved:
            found = model(given).chunk(3, -1)
        assert moved.get_total_counts() == 0
        for ours, theirs in zip(found, module(given).chunk(3, -1), strict=True):
            assert_equals(ours, theirs)
        local = parallelize_module(copy.deepcopy(module), mesh, ColwiseParallel(parts=3))(given)
        for rank, own in enumerate(local.shards):
            torch.testing.assert_close(own, torch.cat([part.chunk(2, -1)[rank] for part in module(given).chunk(3, -1)], -1))


# --- names, checkpoints, data parallelism ------------------------------------------------------------------------------------
def train(model: nn.Module, x: Any, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(x).square().mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("ways", keep_every_nth_fast(["tp", "fsdp"]))
def test_state_dicts_of_fused_projections_equal_plain_model(ways: str, tmp_path: Path) -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    plain, x = Gated(), torch.randn(4, 5, 6, dtype=torch.float64)

    def cut() -> nn.Module:
        plan = {"both": ColwiseParallel(parts=2), "down": RowwiseParallel()}
        model = parallelize_module(Gated(), mesh["tp"], plan)
        return fully_shard(model, mesh=mesh["dp"]) if ways == "fsdp" else model

    dt.checkpoint.save(plain, tmp_path / "plain")
    model = cut()
    read = dt.checkpoint.load(model, tmp_path / "plain").bytes_read
    assert read == sum(p.nbytes for p in plain.parameters())  # over all ranks, each block is read once
    train(model, dt.per_rank([x[:2], x[:2], x[2:], x[2:]]) if ways == "fsdp" else x)
    train(plain, x)
    state = plain.state_dict()
    assert {name: value.shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in state.items()
    }
    for name, value in model.state_dict().items():
        assert_equals(value, state[name])
    dt.checkpoint.save(model, tmp_path / "cut")
    dt.checkpoint.save_safetensors(model.state_dict(), tmp_path / "other")
    for folder in ("cut", "other"):
        back = Gated()
        dt.checkpoint.load(back, tmp_path / folder)
        for name, value in back.state_dict().items():
            torch.testing.assert_close(value, state[name])
    other = cut()
    other.load_state_dict(model.state_dict())
    for name, value in other.state_dict().items():
        assert_equals(value, state[name])
    twin = copy.deepcopy(model)
    with torch.no_grad():
        model.state_dict()["both.weight"].mul_(2)  # state_dict shares memory with the parameter
    assert_equals(model.state_dict()["both.weight"], 2 * state["both.weight"])
    assert_equals(twin.state_dict()["both.weight"], state["both.weight"])


@pytest.mark.slow
def test_fused_projection_on_meta_device_loads_from_safetensors(tmp_path: Path) -> None:
    plain = Gated()
    dt.checkpoint.save_safetensors(plain.state_dict(), tmp_path)
    with torch.device("meta"):
        model: nn.Module = Gated()
    plan = {"both": ColwiseParallel(parts=2), "down": RowwiseParallel()}
    model = parallelize_module(model, dt.init_device_mesh("cpu", (4,)), plan)
    state = model.state_dict()
    dt.checkpoint.load(state, tmp_path)
    model.load_state_dict(state, assign=True)
    assert model.both.parametrizations.weight.original.placements == (Shard(1),)
    x = torch.randn(3, 6, dtype=torch.float64)
    assert_equals(model(x), plain(x))


@pytest.mark.parametrize("on", keep_every_nth_fast(["cpu", "meta"]))
def test_full_state_dicts_of_fused_projections_have_plain_shapes(on: str) -> None:
    """Check torch's functions for full state dicts."""
    plain, options = Gated(), StateDictOptions(full_state_dict=True)
    with torch.device(on):
        model: nn.Module = Gated()
    plan = {"both": ColwiseParallel(parts=2), "down": RowwiseParallel()}
    model = parallelize_module(model, dt.init_device_mesh("cpu", (2,)), plan)
    set_model_state_dict(model, plain.state_dict(), options=options)
    assert model.both.parametrizations.weight.original.placements == (Shard(1),)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(3, 6, dtype=torch.float64)).sum().backward()
    optimizer.step()
    state, steps = get_model_state_dict(model, options=options), get_optimizer_state_dict(model, optimizer, options=options)
    assert {name: value.shape for name, value in state.items()} == {name: x.shape for name, x in plain.state_dict().items()}
    assert_equals(model.both.weight, state["both.weight"])
    set_model_state_dict(model, plain.state_dict(), options=options)
    set_optimizer_state_dict(model, optimizer, steps, options=options)
    assert_equals(model.both.weight, plain.both.weight)
    with pytest.raises(RuntimeError, match="size mismatch"):
        model.load_state_dict({**model.state_dict(), "both.weight": torch.zeros(30, 6)})


# --- errors -------------------------------------------------------------------------------------------------------------
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)
        self.other.weight = self.one.weight


def test_invalid_fused_projections_raise() -> None:
    mesh, cut = dt.init_device_mesh("cpu", (2,)), ColwiseParallel(parts=2)
    with pytest.raises(StyleError, match="not divisible into 3 parts"):
        parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel(parts=3))
    with pytest.raises(StyleError, match="at least 1"):
        ColwiseParallel(parts=0)
    with pytest.raises(ArgumentError, match="ints"):
        ColwiseParallel(parts=1.5)  # type: ignore[arg-type]
    with pytest.raises(StyleError, match="distributed already"):
        parallelize_module(parallelize_module(nn.Linear(4, 4), mesh, ColwiseParallel()), mesh, cut)
    with pytest.raises(StyleError, match="is parametrized"):
        parallelize_module(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), mesh, cut)
    with pytest.raises(UnitError, match="the two would no longer be shared"):
        parallelize_module(Tied(), mesh, {"one": cut})
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    parallelize_module(layer, mesh, cut)
    with pytest.raises(DTensorError, match="were replaced by parallelize_module"):
        optimizer.step()
