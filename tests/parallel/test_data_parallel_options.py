"""Options of data parallelism and of input and output styles: nested layouts, named mesh dims, divisors; and their errors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare_with_one_device import assert_same_gradients, assert_same_parameters, full_value, make_dp_mesh, make_per_rank_batch
from gloo_processes import run_gloo
from torch import Tensor, nn

import dtensor as dt
from dtensor import DTensor, Partial, Replicate, Shard
from dtensor.debug import CommDebugMode
from dtensor.errors import DTensorError, MeshError, PlacementError, UnitError
from dtensor.parallel import (
    ColwiseParallel,
    DataParallelMeshDims,
    FSDPModule,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    ZeroRedundancyOptimizer,
    fully_shard,
    parallelize_module,
    replicate,
    units_by_size,
)
from dtensor.parallel.data.units.unit import unit_of

pytestmark = pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()


X = torch.randn(4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def rows(x: Tensor, mesh: dt.DeviceMesh) -> Tensor:
    """Return the rows of ``x`` of each rank."""
    return make_per_rank_batch(x.chunk(mesh.size()), mesh)


def grads(model: nn.Module) -> list[Tensor]:
    return [full_value(p.grad) for p in model.parameters()]


def alone_grads(x: Tensor, parts: int) -> list[Tensor]:
    """Return the plain gradients of the mean loss of ``parts`` chunks."""
    model = net()
    torch.stack([(model(part) ** 2).sum() for part in x.chunk(parts)]).mean().backward()
    return [p.grad for p in model.parameters()]


# --- boundaries --------------------------------------------------------------------------------------------------------
class Echo(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return (*args, *kwargs.values())


def test_prepare_module_input_takes_nested_layouts() -> None:
    style = PrepareModuleInput(
        input_layouts=((Shard(0), None), Replicate()),
        desired_input_layouts=((Replicate(), None), Shard(1)),
        input_kwarg_layouts={"extra": {"mask": Shard(0), "bias": [Replicate()]}},
        desired_input_kwarg_layouts={"extra": {"mask": Replicate(), "bias": [Shard(0)]}},
    )
    module = parallelize_module(Echo(), make_dp_mesh(), style)
    piece = dt.per_rank([torch.zeros(2, 1), torch.ones(1, 1)])
    (x, plain), y, extra = module((piece, "text"), torch.ones(3, 5), extra={"mask": piece, "bias": [torch.ones(4)], "scale": 2})
    assert x.placements == (Replicate(),)
    assert x.full_tensor().flatten().tolist() == [0, 0, 1]
    assert plain == "text"
    assert y.placements == (Shard(1),)
    assert extra["mask"].placements == (Replicate(),)
    assert extra["bias"][0].placements == (Shard(0),)
    assert extra["scale"] == 2


def test_prepare_module_output_takes_lists_and_dicts() -> None:
    class Named(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return {"logits": x, "kept": 3}

    style = PrepareModuleOutput(
        output_layouts={"logits": Replicate()}, desired_output_layouts={"logits": Shard(0)}, use_local_output=False
    )
    out = parallelize_module(Named(), make_dp_mesh(), style)(torch.arange(3))
    assert out["logits"].placements == (Shard(0),)
    assert out["kept"] == 3

    class Listed(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return [x, (x, None)]

    both = PrepareModuleInputOutput(
        input_layouts=Replicate(),
        desired_input_layouts=Shard(0),
        output_layouts=(None, (Shard(0), None)),
        desired_output_layouts=(None, (Replicate(), None)),
        use_local_output=False,
    )
    first, (second, nothing) = parallelize_module(Listed(), make_dp_mesh(), both)(torch.arange(3))
    assert first.placements == (Shard(0),)
    assert second.placements == (Replicate(),)
    assert nothing is None


def test_layouts_that_do_not_match_the_arguments_raise() -> None:
    with pytest.raises(PlacementError, match="a layout is a Placement such as"):
        PrepareModuleInput(input_layouts=(0,), desired_input_layouts=(Shard(0),))
    with pytest.raises(PlacementError, match="same length"):
        PrepareModuleInput(input_layouts=((Shard(0), None),), desired_input_layouts=(Shard(0),))
    with pytest.raises(PlacementError, match="same nesting"):
        PrepareModuleInput(input_kwarg_layouts={"x": (Shard(0),)}, desired_input_kwarg_layouts={"x": Shard(0)})
    for style in (ColwiseParallel, RowwiseParallel):
        with pytest.raises(PlacementError, match=r"takes output_layouts=Shard\(dim\) or Replicate\(\)"):
            style(output_layouts=1)
    simple = parallelize_module(
        Echo(), make_dp_mesh(), PrepareModuleInput(input_layouts=Shard(0), desired_input_layouts=Replicate())
    )
    with pytest.raises(PlacementError, match="is given for a list"):
        simple([torch.ones(2)])
    nested = PrepareModuleInput(input_layouts=({"x": Shard(0)},), desired_input_layouts=({"x": Replicate()},))
    with pytest.raises(PlacementError, match=r"layouts for the keys \['x'\], but the argument is a dict with the keys \['y'\]"):
        parallelize_module(Echo(), make_dp_mesh(), nested)({"y": torch.ones(2)})
    with pytest.raises(TypeError, match=r"write ColwiseParallel\(\)"):
        parallelize_module(nn.Linear(2, 2), make_dp_mesh(), {"": ColwiseParallel})


# --- how gradients are averaged ----------------------------------------------------------------------------------------
def test_set_gradient_divide_factor_scales_gradients() -> None:
    mesh = make_dp_mesh()
    model = net()
    for unit in (model[0], model):
        fully_shard(unit, mesh=mesh)
        unit.set_gradient_divide_factor(0.5)
    model.set_is_last_backward(True)
    (model(rows(X, mesh)) ** 2).sum().backward()
    for ours, theirs in zip(grads(model), alone_grads(X, 2), strict=True):
        torch.testing.assert_close(ours, theirs * 4)
    with pytest.raises(ValueError, match="a number above 0"):
        model.set_gradient_divide_factor(0)


def test_set_requires_all_reduce_false_accumulates_reduce_scattered_gradients() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "part"))
    model = net()
    for unit in (model[0], model):
        fully_shard(unit, mesh=mesh)
    expected = [torch.zeros_like(g) for g in alone_grads(X, 4)]
    for k in range(3):
        x = X * (k + 1)
        model.set_requires_all_reduce(k == 2)
        with CommDebugMode() as comm:
            (model(rows(x, mesh)) ** 2).sum().backward()
        counts = dict(comm.get_comm_counts())
        assert counts["reduce_scatter"] == 2
        assert counts.get("all_reduce", 0) == (2 if k == 2 else 0)
        assert k == 2 or all(p.grad is None for p in model.parameters())
        expected = [a + b for a, b in zip(expected, alone_grads(x, 4), strict=True)]
    for ours, theirs in zip(grads(model), expected, strict=True):
        torch.testing.assert_close(ours, theirs)


# --- meshes ------------------------------------------------------------------------------------------------------------
def test_fully_shard_with_dp_mesh_dims_shards_and_replicates_named_dims() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replica", "part", "tp"))
    model = parallelize_module(net(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    dims = DataParallelMeshDims(shard="part", replicate="replica")
    fully_shard(model, mesh=mesh, dp_mesh_dims=dims)
    assert model[2].weight.placements == (Replicate(), Shard(0), Shard(1))
    part = mesh["replica", "part"]
    (model(dt.map_ranks(lambda at: X[2 * at[0] + at[1]][None].clone(), mesh=part)) ** 2).sum().backward()
    for ours, theirs in zip(grads(model), alone_grads(X, 4), strict=True):
        torch.testing.assert_close(ours, theirs)
    flat = net()
    fully_shard(flat, mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=("replica", "part")))
    assert flat[0].weight.placements == (Shard(0), Shard(0))


@pytest.mark.parametrize("reshard", [None, False, True, 2])
def test_fully_shard_with_only_a_replicate_dim_averages_gradients(reshard: bool | int | None) -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(net(), mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    dims = DataParallelMeshDims(replicate="dp")
    for unit in (model[0], model):
        fully_shard(unit, mesh=mesh, dp_mesh_dims=dims, reshard_after_forward=reshard)
    assert isinstance(model, FSDPModule)
    assert model[2].weight.placements == (Replicate(), Shard(1))
    local = dt.map_ranks(lambda at: X[2 * at[0] : 2 * at[0] + 2].clone(), mesh=mesh["dp"])
    for last in (False, True):  # the second pass adds the gradients of the first
        model.set_requires_gradient_sync(last)
        with CommDebugMode() as comm:
            (model(local) ** 2).sum().backward()
        assert comm.get_comm_counts()["reduce_scatter"] == 0
    for ours, theirs in zip(grads(model), alone_grads(X, 2), strict=True):
        torch.testing.assert_close(ours, 2 * theirs)
    with pytest.raises(MeshError, match="needs shard=, replicate= or both"):
        fully_shard(net(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims())


def test_fully_shard_over_two_mesh_dims_equals_plain_model() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    model = fully_shard(net(), mesh=mesh, dp_mesh_dims=DataParallelMeshDims(shard=("a", "b")))
    with CommDebugMode() as comm:
        (model(rows(X, mesh)) ** 2).sum().backward()
    assert dict(comm.get_comm_counts()) == {"all_gather": 1, "reduce_scatter": 1}
    for ours, theirs in zip(grads(model), alone_grads(X, 4), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_units_by_size_train_like_plain_model() -> None:
    model, mesh = net(), make_dp_mesh()
    units = units_by_size(model, 15)
    assert units == [model[0], model]
    for unit in units:
        fully_shard(unit, mesh=mesh)
    (model(rows(X, mesh)) ** 2).sum().backward()
    for ours, theirs in zip(grads(model), alone_grads(X, 2), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_shard_placement_fn_chooses_the_sharded_dim() -> None:
    model, mesh = net(), make_dp_mesh()
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(-1) if p.ndim == 2 else None)
    assert [p.placements[0] for p in model.parameters()] == [Shard(1), Shard(0), Shard(1), Shard(0)]
    (model(rows(X, mesh)) ** 2).sum().backward()
    for ours, theirs in zip(grads(model), alone_grads(X, 2), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU])
@pytest.mark.parametrize("wrapped", [True, False])
def test_recurrent_modules_under_data_parallelism_equal_plain_model(make: Any, wrapped: bool) -> None:
    torch.manual_seed(0)
    alone, mesh = make(3, 4, num_layers=2).double(), make_dp_mesh()
    model = fully_shard(copy.deepcopy(alone), mesh=mesh) if wrapped else replicate(copy.deepcopy(alone), mesh)
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    (model(dt.map_ranks(lambda at: x[:, at[0]][:, None].clone(), mesh=mesh))[0] ** 2).sum().backward()
    torch.stack([(alone(x[:, k : k + 1])[0] ** 2).sum() for k in range(2)]).mean().backward()
    assert_same_gradients(model, alone)


# --- optimizer with sharded state ---------------------------------------------------------------------------------------
def test_zero_consolidated_state_dict_equals_plain_optimizer() -> None:
    model, alone, mesh = replicate(net(), make_dp_mesh()), net(), make_dp_mesh()
    ours = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    theirs = torch.optim.Adam(alone.parameters(), lr=0.1)
    (model(rows(X, mesh)) ** 2).sum().backward()
    torch.stack([(alone(part) ** 2).sum() for part in X.chunk(2)]).mean().backward()
    for optimizer in (ours, theirs):
        optimizer.step()
    assert isinstance(ours.state_dict()["state"][0]["exp_avg"], DTensor)
    ours.consolidate_state_dict()
    for k, state in theirs.state_dict()["state"].items():
        for name, value in state.items():
            torch.testing.assert_close(ours.state_dict()["state"][k][name], value)
    ours.step()
    assert isinstance(ours.state_dict()["state"][0]["exp_avg"], DTensor)


@pytest.mark.parametrize("spread", [False, True])
def test_zero_optimizer_uses_parameters_written_between_steps(spread: bool) -> None:
    """Check parameters that change after the optimizer was made, or are clamped between steps."""
    model, alone, mesh = net(), net(), make_dp_mesh()
    if spread:
        replicate(model, mesh)
    ours = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, mesh=mesh, lr=0.1)
    theirs = torch.optim.Adam(alone.parameters(), lr=0.1)
    for m in (model, alone):
        for p in m.parameters():
            with torch.no_grad():
                p.mul_(0.5)
    for _ in range(2):
        for m, x in ((model, rows(torch.cat([X, X]), mesh) if spread else X), (alone, X)):
            (m(x) ** 2).sum().backward()
        for m, optimizer in ((model, ours), (alone, theirs)):
            optimizer.step()
            optimizer.zero_grad()
            for p in m.parameters():
                with torch.no_grad():
                    p.clamp_(-0.1, 0.1)
    assert_same_parameters(model, alone)


def _train_on_process_group() -> list[float]:
    model = net()
    world: Any = dist.group.WORLD
    ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, process_group=world, lr=0.1)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, world, parameters_as_bucket_view=True, lr=0.1)
    (model(X) ** 2).sum().backward()
    optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    state = optimizer.state_dict()["state"]
    return [p.sum().item() for p in model.parameters()] + [state[k]["exp_avg"].sum().item() for k in state]


@pytest.mark.gloo
def test_zero_optimizer_takes_a_process_group() -> None:
    alone = net()
    optimizer = torch.optim.Adam(alone.parameters(), lr=0.1)
    (alone(X) ** 2).sum().backward()
    optimizer.step()
    expected = [p.sum().item() for p in alone.parameters()] + [s["exp_avg"].sum().item() for s in optimizer.state.values()]
    for there in run_gloo(_train_on_process_group, 2):
        assert there == pytest.approx(expected, rel=1e-10)


# --- errors -------------------------------------------------------------------------------------------------------------
def test_modules_that_cannot_be_units_raise() -> None:
    for wrap, name in (
        (lambda m: fully_shard(m, mesh=make_dp_mesh()), "fully_shard"),
        (lambda m: replicate(m, make_dp_mesh()), "replicate"),
    ):
        with pytest.raises(DTensorError, match=f"^{name} of a ModuleList: it is a container"):
            wrap(nn.ModuleList([nn.Linear(2, 2)]))
        with pytest.raises(DTensorError, match=f"call {name} once per module"):
            wrap(wrap(nn.Linear(2, 2)))
        with pytest.raises(TypeError, match="takes a module, got Parameter"):
            wrap(nn.Linear(2, 2).weight)
    with pytest.raises(MeshError, match="no device mesh: pass mesh="):
        fully_shard(nn.Linear(2, 2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mp_policy": torch.bfloat16}, "mp_policy takes a MixedPrecisionPolicy"),
        ({"offload_policy": True}, "offload_policy takes CPUOffloadPolicy"),
        ({"reshard_after_forward": 1.5}, "or a number of ranks"),
        ({"shard_placement_fn": lambda p: Replicate()}, r"return Shard\(dim\) with a dim below 2"),
        ({"shard_placement_fn": lambda p: Shard(5)}, r"return Shard\(dim\) with a dim below 2"),
        ({"shard_placement_fn": lambda p: Partial()}, r"return Shard\(dim\) with a dim below 2"),
    ],
)
def test_invalid_data_parallel_options_raise(options: dict[str, Any], message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        fully_shard(nn.Linear(2, 2), mesh=make_dp_mesh(), **options)
    with pytest.raises(ValueError, match="a number of mebibytes above 0"):
        replicate(nn.Linear(2, 2), make_dp_mesh(), bucket_cap_mb=0)
    with pytest.raises(TypeError, match="mp_policy takes a MixedPrecisionPolicy"):
        replicate(nn.Linear(2, 2), make_dp_mesh(), mp_policy=torch.float16)


def test_invalid_zero_optimizer_arguments_raise() -> None:
    with pytest.raises(TypeError, match=r"a class such as torch\.optim\.AdamW"):
        ZeroRedundancyOptimizer([nn.Parameter(torch.ones(3))], "adam", mesh=make_dp_mesh())
    with pytest.raises(NotImplementedError, match="overlap_with_ddp"):
        ZeroRedundancyOptimizer([nn.Parameter(torch.ones(3))], torch.optim.Adam, mesh=make_dp_mesh(), overlap_with_ddp=True)
    with pytest.raises(ValueError, match="got no parameters"):
        ZeroRedundancyOptimizer([], torch.optim.Adam, mesh=make_dp_mesh())


def test_step_after_a_failed_forward_has_correct_gradients() -> None:
    mesh, model = make_dp_mesh(), net()
    broken = model[2].register_forward_pre_hook(lambda module, args: 1 / 0)
    for unit in (model[0], model):
        fully_shard(unit, mesh=mesh)
    with pytest.raises(ZeroDivisionError):
        model(rows(X, mesh))
    broken.remove()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    assert unit_of(model).schedule.depth == 0
    (model(rows(X, mesh)) ** 2).sum().backward()
    for ours, theirs in zip(grads(model), alone_grads(X, 2), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_step_after_a_failed_backward_has_correct_gradients() -> None:
    mesh, model = make_dp_mesh(), net()
    for unit in (model[0], model[2], model):
        fully_shard(unit, mesh=mesh)
    loss = model[2](broken := model[1](model[0](rows(X, mesh)))).sum()
    broken.register_hook(lambda grad: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    model.zero_grad()
    (model(rows(X, mesh)) ** 2).sum().backward()
    for ours, theirs in zip(grads(model), alone_grads(X, 2), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("make", [fully_shard, replicate])
def test_state_dict_load_and_dtype_change_reshard_an_unsharded_module(make: Any) -> None:
    mesh, other = make_dp_mesh(), fully_shard(net(), mesh=make_dp_mesh())
    model = make(net(), mesh=mesh)
    out = model(rows(X, mesh))
    state = {name: value * 2 for name, value in model.state_dict().items()}
    model.unshard()
    assert all(isinstance(value, DTensor) for value in model.state_dict().values())
    model.unshard()
    model.load_state_dict(state)
    model.unshard()
    model.float()
    assert all(isinstance(p, DTensor) and p.dtype is torch.float32 for p in model.parameters())
    with torch.no_grad():
        for p in other.parameters():
            p.mul_(2)
    torch.testing.assert_close(full_value(model(rows(X.float(), mesh))), full_value(other(rows(X, mesh))).float())
    assert not torch.equal(full_value(out), full_value(other(rows(X, mesh))))


def test_state_dict_assigned_before_the_first_forward_is_used_after_reshard() -> None:
    model, state = fully_shard(net(), mesh=make_dp_mesh()), fully_shard(net(), mesh=make_dp_mesh()).state_dict()
    model.load_state_dict(state, assign=True)
    assert all(torch.equal(p._local.shards[0], state[n]._local.shards[0]) for n, p in model.state_dict().items())
    model.reshard()
    assert all(torch.equal(p._local.shards[0], state[n]._local.shards[0]) for n, p in model.named_parameters())


@pytest.mark.parametrize("make", [fully_shard, replicate])
def test_buffers_written_in_inference_mode_can_be_used_in_training(make: Any) -> None:
    mesh, model = make_dp_mesh(), make(nn.Sequential(nn.BatchNorm1d(3), nn.Linear(3, 2)).double(), mesh=make_dp_mesh())
    with torch.inference_mode():
        model(rows(X, mesh))
    model(rows(X, mesh)).sum().backward()
    assert int(full_value(model[0].num_batches_tracked)) == 2


def test_removed_parameter_raises_in_forward() -> None:
    mesh, model = make_dp_mesh(), fully_shard(net(), mesh=make_dp_mesh())
    del model[0].bias
    with pytest.raises(MeshError, match="parameter 'bias' of Linear was removed"):
        model(rows(X, mesh))


@pytest.mark.parametrize(
    "invalid",
    [{"reshard_after_forward": 3}, {"shard_placement_fn": lambda p: Shard(1)}, {"shard_placement_fn": lambda p: Replicate()}],
)
def test_failed_fully_shard_leaves_the_module_unchanged(invalid: dict[str, Any]) -> None:
    mesh, model = make_dp_mesh(), net()
    with pytest.raises((ValueError, DTensorError)):
        fully_shard(model, mesh=mesh, **invalid)
    assert not any(isinstance(p, DTensor) for p in model.parameters())
    (fully_shard(model, mesh=mesh)(rows(X, mesh)) ** 2).sum().backward()
    for ours, theirs in zip(grads(model), alone_grads(X, 2), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_fully_shard_of_inner_module_after_outer_raises() -> None:
    model = fully_shard(net(), mesh=make_dp_mesh())
    with pytest.raises(UnitError, match="wrap inner modules first: call fully_shard on this one, then on that"):
        fully_shard(model[0], mesh=make_dp_mesh())


def test_fully_shard_state_lists_modules_and_parameters() -> None:
    mesh, inner = make_dp_mesh(), nn.Linear(3, 4)
    model = nn.Sequential(inner, nn.Linear(4, 5))
    fully_shard(inner, mesh=mesh)
    fully_shard(model, mesh=mesh)
    state = fully_shard.state(model)
    assert state == model._get_fsdp_state()
    assert state.modules == (model,)
    assert set(map(id, state.parameters)) == set(map(id, model[1].parameters()))
    assert not state.gathered
    kept = [id(p) for p in inner.parameters()]
    inner.unshard()
    assert fully_shard.state(inner).gathered
    assert sorted(map(id, fully_shard.state(inner).parameters)) == sorted(kept)
    inner.reshard()
    assert not fully_shard.state(inner).gathered
    assert fully_shard.state(model[1]) is None
    assert replicate.state(replicate(nn.Linear(2, 2), mesh)).parameters
