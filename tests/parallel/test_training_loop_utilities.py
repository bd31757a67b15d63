"""Utilities of training loops on parameters of mixed layouts: clipping, scaling, averages, schedules, optimizers and hooks."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from compare_with_one_device import assert_same_parameters_and_gradients, full_value
from gloo_processes import run_gloo
from slow_case_marks import keep_every_nth_fast
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtensor as dt
from dtensor import DTensor, Replicate, Shard
from dtensor.debug import CommDebugMode
from dtensor.parallel import ColwiseParallel, RowwiseParallel, SequenceParallel, fully_shard, parallelize_module, replicate

pytestmark = pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(4)
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(4, 3)).double()


def mesh_2d() -> dt.DeviceMesh:
    return dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def tensor_parallel(model: nn.Sequential, mesh: Any) -> nn.Module:
    """Parallelize the model with row-wise, column-wise and replicated parameters that compute on DTensors."""
    between = {"use_local_output": False}
    plan = {
        "[01].norm": SequenceParallel(),
        "[01].up": ColwiseParallel(**between),
        "[01].down": RowwiseParallel(**between),
        "2": ColwiseParallel(output_layouts=Replicate(), **between),
    }
    return parallelize_module(model, mesh["tp"], plan)


def mixed() -> tuple[nn.Module, nn.Module, Callable[[Tensor], Tensor]]:
    """Return a model with parameters of different placements, the plain model, and a function that distributes inputs."""
    mesh, model = mesh_2d(), net()
    alone = copy.deepcopy(model)
    ways = [[Shard(0), Replicate()], [Replicate(), Shard(0)], [Shard(0), Shard(0)], [Replicate(), Replicate()]]
    for k, (name, p) in enumerate(list(model.named_parameters())):
        owner = model.get_submodule(name.rpartition(".")[0])
        owner.register_parameter(name.rpartition(".")[2], nn.Parameter(dt.distribute_tensor(p.detach(), mesh, ways[k % 4])))
    return model, alone, lambda x: dt.distribute_tensor(x, mesh, [Shard(0), Replicate()])


def sharded() -> tuple[nn.Module, nn.Module, Callable[[Tensor], Tensor]]:
    """Return a fully sharded tensor-parallel model, the plain model, and a function that distributes inputs."""
    mesh, model = mesh_2d(), net()
    alone = copy.deepcopy(model)
    plan = {"[01].up": ColwiseParallel(), "[01].down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], plan)
    for block in model:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    return model, alone, lambda x: dt.map_ranks(lambda at: x.chunk(2)[at[0]].clone(), mesh=mesh)


def replicated() -> tuple[nn.Module, nn.Module, Callable[[Tensor], Tensor]]:
    mesh, model = mesh_2d(), net()
    alone = copy.deepcopy(model)
    replicate(model, mesh["dp"])
    return model, alone, lambda x: dt.map_ranks(lambda at: x.chunk(2)[at[0]].clone(), mesh=mesh)


EVERY_LAYOUT = pytest.mark.parametrize("make", [mixed, sharded, replicated])
X = torch.randn(4, 5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def loss_of(out: Tensor) -> Tensor:
    return (out**2).mean() * 50


@EVERY_LAYOUT
@pytest.mark.parametrize("norm_type", [2.0, 1.0, float("inf")])
@pytest.mark.parametrize("foreach", [None, False])
def test_clip_grad_norm_equals_plain_torch(make: Any, norm_type: float, foreach: bool | None) -> None:
    model, alone, given = make()
    loss_of(model(given(X))).backward()
    loss_of(alone(X)).backward()
    norms = [nn.utils.clip_grad_norm_(m.parameters(), 0.5, norm_type, foreach=foreach) for m in (model, alone)]
    torch.testing.assert_close(full_value(norms[0]), norms[1])
    assert_same_parameters_and_gradients(model, alone)


@EVERY_LAYOUT
def test_clip_grad_value_equals_plain_torch(make: Any) -> None:
    model, alone, given = make()
    for m, x in ((model, given(X)), (alone, X)):
        loss_of(m(x)).backward()
        nn.utils.clip_grad_value_(m.parameters(), 0.1)
    assert_same_parameters_and_gradients(model, alone)


def test_clip_grad_norm_of_mixed_layouts_issues_few_collectives() -> None:
    model, _, given = mixed()
    loss_of(model(given(X))).backward()
    with CommDebugMode() as comm:
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    assert comm.get_total_counts() <= 6


OPTIMIZERS = [
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    (torch.optim.Adam, {"lr": 0.1}),
    (torch.optim.AdamW, {"lr": 0.1, "amsgrad": True}),
    (torch.optim.Adagrad, {"lr": 0.1}),
    (torch.optim.RMSprop, {"lr": 0.1, "centered": True}),
    (torch.optim.Adafactor, {"lr": 0.1}),
]


@pytest.mark.parametrize("make", keep_every_nth_fast([mixed, sharded, replicated], 3))
@pytest.mark.parametrize(
    "mode",
    keep_every_nth_fast([{}, {"foreach": True}, {"foreach": False}, {"fused": True}]),
    ids=["default", "foreach", "loop", "fused"],
)
@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS, ids=[o.__name__ for o, _ in OPTIMIZERS])
def test_optimizers_and_schedulers_equal_plain_torch(
    make: Any, mode: dict[str, bool], optimizer: Any, options: dict[str, Any]
) -> None:
    if "fused" in mode and optimizer not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad):
        pytest.skip("has no fused form")
    model, alone, given = make()
    optimizers = [optimizer(m.parameters(), **options, **mode) for m in (model, alone)]
    schedulers = [torch.optim.lr_scheduler.StepLR(o, 1, gamma=0.5) for o in optimizers]
    for _ in range(3):
        for m, o, s, x in zip((model, alone), optimizers, schedulers, (given(X), X), strict=True):
            o.zero_grad()
            loss_of(m(x)).backward()
            o.step()
            s.step()
    assert_same_parameters_and_gradients(model, alone)


@EVERY_LAYOUT
def test_grad_scaler_skips_overflowing_steps_like_plain_torch(make: Any) -> None:
    model, alone, given = make()
    losses = []
    for m, x in ((model, given(X)), (alone, X)):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=1)
        for step in range(3):
            optimizer.zero_grad()
            loss = loss_of(m(x))
            scaler.scale(loss * (float("inf") if step == 1 else 1.0)).backward()  # the second step overflows, so it is skipped
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(m.parameters(), 10.0)
            scaler.step(optimizer)
            scaler.update()
        losses.append(scaler.get_scale())
    assert losses[0] == losses[1] == 128.0
    assert_same_parameters_and_gradients(model, alone)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
@pytest.mark.parametrize("said", [nullcontext, dt.implicit_replication])
def test_unscale_operator_accepts_found_inf_of_any_shape(shape: tuple[int, ...], said: Any) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    for largest, expected in ((1.0, 0.0), (float("inf"), 1.0)):
        gradients = [dt.distribute_tensor(torch.tensor([2.0, 4.0, largest]), mesh, [where]) for where in (Shard(0), Replicate())]
        found = torch.zeros(shape)
        with said():
            torch._amp_foreach_non_finite_check_and_unscale_(gradients, found, torch.full(shape, 0.5))
        assert found.shape == shape
        assert found.item() == expected
        assert [g.full_tensor().tolist() for g in gradients] == [[1.0, 2.0, largest / 2]] * 2


@EVERY_LAYOUT
def test_averaged_model_equals_plain_torch(make: Any) -> None:
    model, alone, given = make()
    averages = []
    for m, x in ((model, given(X)), (alone, X)):
        optimizer = torch.optim.SGD(m.parameters(), lr=0.01)
        average = torch.optim.swa_utils.AveragedModel(m, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
        for _ in range(3):
            optimizer.zero_grad()
            loss_of(m(x)).backward()
            optimizer.step()
            average.update_parameters(m)
        averages.append(average)
    for ours, theirs in zip(*(average.module.parameters() for average in averages), strict=True):
        torch.testing.assert_close(full_value(ours), theirs.detach())


@EVERY_LAYOUT
def test_activation_checkpointing_equals_plain_torch(make: Any) -> None:
    model, alone, given = make()

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        for layer in m:
            x = checkpoint(layer, x, use_reentrant=False)
        return x

    model.forward = lambda x: forward(model, x)
    loss_of(model(given(X))).backward()
    loss_of(alone(X)).backward()
    assert_same_parameters_and_gradients(model, alone)


@EVERY_LAYOUT
def test_training_step_with_frozen_parameters_equals_plain_torch(make: Any) -> None:
    model, alone, given = make()
    for m, x in ((model, given(X)), (alone, X)):
        m[0].requires_grad_(False)
        m[1].up.weight.requires_grad_(False)
        optimizer = torch.optim.Adam([p for p in m.parameters() if p.requires_grad], lr=0.1)
        loss_of(m(x)).backward()
        optimizer.step()
    assert all((p.grad is None) == (q.grad is None) for p, q in zip(model.parameters(), alone.parameters(), strict=True))
    assert_same_parameters_and_gradients(model, alone)


def test_full_backward_hooks_get_and_change_gradients_of_plain_torch() -> None:
    model, alone, given = mixed()
    seen: list[list[Any]] = []
    for m, x in ((model, given(X).requires_grad_()), (alone, X.clone().requires_grad_())):
        caught: list[Any] = []
        m[1].register_full_backward_hook(lambda _, into, out, caught=caught: caught.extend((*into, *out)))
        m[1].register_full_backward_pre_hook(lambda _, out: tuple(grad * 2 for grad in out))
        loss_of(m(x)).backward()
        seen.append(caught)
    for ours, theirs in zip(*seen, strict=True):
        torch.testing.assert_close(full_value(ours), theirs)
    assert_same_parameters_and_gradients(model, alone)


def tensor_parallelize(mesh: Any, model: nn.Module) -> None:
    parallelize_module(model, mesh, {"[01].up": ColwiseParallel(), "[01].down": RowwiseParallel()})


def fully_shard_blocks(mesh: Any, model: Any) -> None:
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def replicate_model(mesh: Any, model: nn.Module) -> None:
    replicate(model, mesh)


def gradients_seen_by_hooks(model: nn.Module, x: Tensor) -> list[Any]:
    """Return the gradients that full backward hooks see, and the input's gradient; hooks also change gradients."""
    seen: list[Any] = []

    def halved(module: nn.Module, into: Any, out: Any) -> Any:
        seen.extend((*into, *out))
        return tuple(grad / 2 for grad in into)

    for module in model.modules():
        if isinstance(module, (Block, nn.Linear)):
            module.register_full_backward_hook(halved)
            module.register_full_backward_pre_hook(lambda _, out: tuple(grad * 3 for grad in out))
    x.requires_grad_()
    loss_of(model(x)).backward()
    return [*seen, x.grad]


def _compare_hooks(make: Any, parts: int) -> None:
    mesh, model = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), net()
    make(mesh, model)
    batch = [part.clone() for part in X.chunk(parts)]
    ours = gradients_seen_by_hooks(model, dt.map_ranks(lambda at: batch[at[0] % parts].clone(), mesh=mesh))
    for rank in [mesh.get_local_rank()] if mesh.kind == "process_group" else range(2):
        for mine, theirs in zip(ours, gradients_seen_by_hooks(net(), batch[rank % parts].clone()), strict=True):
            mine = mine.full_tensor() if isinstance(mine, DTensor) else mine
            mine = mine.shards[rank] if isinstance(mine, dt.PerRank) else mine
            cut = mine.shape != theirs.shape  # sharded between column-wise and row-wise layers
            torch.testing.assert_close(mine, theirs.chunk(2, -1)[rank] if cut else theirs)


HOOK_CASES = pytest.mark.parametrize(("make", "parts"), [(tensor_parallelize, 1), (fully_shard_blocks, 2), (replicate_model, 2)])


@HOOK_CASES
def test_full_backward_hooks_of_parallel_modules_equal_plain_torch(make: Any, parts: int) -> None:
    _compare_hooks(make, parts)


@pytest.mark.gloo
@HOOK_CASES
def test_full_backward_hooks_equal_plain_torch_on_process_groups(make: Any, parts: int) -> None:
    run_gloo(_compare_hooks, 2, make, parts)


def test_full_backward_hook_without_differentiable_input_warns_and_runs() -> None:
    model, seen = fully_shard(nn.Linear(2, 3), mesh=dt.init_device_mesh("cpu", (2,))), []
    model.register_full_backward_hook(lambda _, into, out: seen.append((into, out[0])))
    with pytest.warns(UserWarning, match="no inputs require gradients"):
        model(dt.per_rank([torch.ones(1, 2), torch.ones(1, 2)])).sum().backward()
    assert seen[0][0] == (None,)
    assert torch.equal(seen[0][1].shards[1], torch.ones(1, 3))


@EVERY_LAYOUT
@pytest.mark.parametrize("swap", [False, True], ids=["replaced", "swapped"])
@pytest.mark.parametrize("with_gradients", [False, True])
def test_dtype_change_between_steps_equals_plain_torch(make: Any, swap: bool, with_gradients: bool) -> None:
    """Check both ways of torch: parameters are replaced, or swapped so that optimizers keep them."""
    model, alone, given = make()
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]
    loss_of(model(given(X))).backward()
    loss_of(alone(X)).backward()
    torch.__future__.set_swap_module_params_on_conversion(swap)
    try:
        for m, optimizer in zip((model, alone), optimizers, strict=True):
            if not with_gradients:
                optimizer.zero_grad()
            before = [id(p) for p in m.parameters()]
            m.float()
            if swap:
                assert [id(p) for p in m.parameters()] == before
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    for m in (model, alone):
        assert {p.dtype for p in m.parameters()} == {torch.float32}
    for _ in range(2):
        loss_of(model(given(X.float()))).backward()
        loss_of(alone(X.float())).backward()
        assert_same_parameters_and_gradients(model, alone, rtol=1e-5, atol=1e-4)
        for optimizer in optimizers if swap else [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, alone)]:
            optimizer.step()
            optimizer.zero_grad()
    assert_same_parameters_and_gradients(model, alone, rtol=1e-5, atol=1e-4)


def test_fully_shard_after_dtype_swap_of_an_inner_unit_equals_plain_torch() -> None:
    mesh, model = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), net()
    alone = copy.deepcopy(model).float()
    fully_shard(model[0], mesh=mesh)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    fully_shard(model, mesh=mesh)
    loss_of(model(dt.map_ranks(lambda at: X.float().chunk(2)[at[0]].clone(), mesh=mesh))).backward()
    loss_of(alone(X.float())).backward()
    assert_same_parameters_and_gradients(model, alone, rtol=1e-5, atol=1e-4)


def test_optimizer_states_have_the_placements_of_parameters() -> None:
    model, _, given = mixed()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    loss_of(model(given(X))).backward()
    optimizer.step()
    for p, state in optimizer.state.items():
        assert state["exp_avg"].placements == state["exp_avg_sq"].placements == p.placements


def test_optimizer_step_in_backward_hook_equals_plain_torch() -> None:
    model, alone, given = sharded()
    made = {p: torch.optim.SGD([p], lr=0.1) for p in model.parameters()}

    def step(p: nn.Parameter) -> None:
        made[p].step()
        made[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(step)
    plain = torch.optim.SGD(alone.parameters(), lr=0.1)
    for _ in range(2):
        loss_of(model(given(X))).backward()
        loss_of(alone(X)).backward()
        plain.step()
        plain.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    assert_same_parameters_and_gradients(model, alone)


def test_to_dtype_with_swap_converts_parameters_with_data_aliases() -> None:
    model = fully_shard(nn.Linear(3, 5), mesh=dt.init_device_mesh("cpu", (2,)))
    weight, data = model.weight, model.weight.data
    before = data.full_tensor().double()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        model.to(torch.float64)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    assert model.weight is weight
    assert weight.dtype is torch.float64
    torch.testing.assert_close(weight.detach().full_tensor(), before)
    view = weight.data[1:4]  # a view made after the swap
    with torch.no_grad():
        weight.add_(1)
    torch.testing.assert_close(view.full_tensor(), before[1:4] + 1)
