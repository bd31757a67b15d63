"""Writes to the parameters of data-parallel units; cases for one process and for four."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

import torch
import torch.distributed as dist
from case_lists import (
    S0,
    CaseList,
    R,
    assert_raises,
    distribute_values,
    get_line_mesh,
    get_square_mesh,
    local_tensors_by_rank,
    make_per_rank,
    make_values,
)
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.utils.checkpoint import checkpoint

import dtensor as dt
from dtensor import DTensor
from dtensor.errors import ArgumentError, DTensorError, MeshError, MixedTensorError, UnitError
from dtensor.parallel import (
    ColwiseParallel,
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    RowwiseParallel,
    fully_shard,
    materialize,
    parallelize_module,
    replicate,
)

CASES = CaseList()


def make_network() -> Any:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.Linear(6, 5, bias=False)).double()


@functools.cache
def get_named_square_mesh() -> dt.DeviceMesh:
    return dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def _make_tensor_parallel_network() -> Any:
    mesh = get_named_square_mesh()
    parallelize_module(model := make_network(), mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
    return fully_shard(model, mesh=mesh["dp"])


WAYS: dict[str, Callable[[], Any]] = {
    "fully_shard": lambda: fully_shard(make_network(), mesh=get_line_mesh()),
    "offloaded": lambda: fully_shard(make_network(), mesh=get_line_mesh(), offload_policy=CPUOffloadPolicy()),
    "copied and sharded": lambda: fully_shard(make_network(), mesh=get_square_mesh()),
    "tensor parallel": _make_tensor_parallel_network,
    "replicate": lambda: replicate(make_network(), get_line_mesh()),
}


def _make_rank_batch(rank: int) -> torch.Tensor:
    """Return a rank's batch. Ranks 0 and 1 share one, as do 2 and 3, since they may be tensor-parallel."""
    return make_values(2, 3, seed=rank // 2) / 4


def make_batch() -> torch.Tensor:
    return make_per_rank(_make_rank_batch)


def assert_same_step(alone: Any, model: Any) -> None:
    """Assert that a step of ``model`` gives the gradients and values of ``alone``, which has the mean of all ranks' losses."""
    for x in (model, alone):
        x.zero_grad()
    model(make_batch()).square().mean().backward()
    torch.stack([alone(_make_rank_batch(rank)).square().mean() for rank in range(4)]).mean().backward()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert isinstance(ours, DTensor)
        for x, y in ((ours.detach(), theirs.detach()), (ours.grad, theirs.grad)):
            for piece in _list_local_tensors(cast(DTensor, x).full_tensor()):
                torch.testing.assert_close(piece, y)


def _list_local_tensors(x: Any) -> Any:
    return x.shards if isinstance(x, dt.PerRank) else (x,)


# --- values that a program gives parameters ------------------------------------------------------------------------------
@CASES.case
def assigned_data_with_other_placements_is_used_in_the_next_pass() -> None:
    for name, make in WAYS.items():
        for ran in (False, True):
            model, alone = make(), make_network()
            if ran:
                model(make_batch())
            where = [p.placements for p in model.parameters()]
            for p in model.parameters():
                p.data = (p.data * 2).redistribute(placements=[R] * p.device_mesh.ndim)
            for p in alone.parameters():
                p.data = p.data * 2
            assert_same_step(alone, model)
            assert [p.placements for p in model.parameters()] == where, name


@CASES.case
def vector_to_parameters_changes_the_next_step() -> None:
    for make in WAYS.values():
        model, alone = make(), make_network()
        model(make_batch())
        for each in (model, alone):
            vector_to_parameters(parameters_to_vector(each.parameters()) * 2, each.parameters())
        assert_same_step(alone, model)


@CASES.case
def replacing_a_parameter_by_one_of_another_layout_keeps_the_placements() -> None:
    model, alone = fully_shard(make_network(), mesh=get_line_mesh()), make_network()
    model[1].weight = nn.Parameter(distribute_values(make_values(5, 6) / 8, R))
    alone[1].weight = nn.Parameter(make_values(5, 6) / 8)
    assert_same_step(alone, model)
    assert model[1].weight.placements == (S0,)


@CASES.case
def replacing_a_parameter_by_another_shape_or_mesh_raises() -> None:
    def with_data(model: Any, x: DTensor) -> None:
        model[1].weight.data = x

    def with_parameter(model: Any, x: DTensor) -> None:
        model[1].weight = nn.Parameter(x)

    for assign in (with_data, with_parameter):
        for ran in (False, True):
            for x, told in (
                (distribute_values(make_values(7, 6), S0), r"float64\[7, 6\].*gathers one of float64\[5, 6\]"),
                (distribute_values(make_values(5, 6), S0, R), "Mesh"),
            ):
                model = fully_shard(make_network(), mesh=get_line_mesh())
                if ran:
                    model(make_batch())
                assign(model, x)
                assert_raises(MeshError, f"'weight' of Linear was replaced by.*{told}", functools.partial(model, make_batch()))


@CASES.case
def a_tied_weight_replaced_in_one_module_only_raises() -> None:
    model: Any = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False)).double()
    model[1].weight = model[0].weight
    fully_shard(model, mesh=get_line_mesh())
    model(make_batch())
    model[1].weight = nn.Parameter(distribute_values(make_values(3, 3), S0))
    assert_raises(
        MeshError, "'weight' of Linear was replaced, but parameter 'weight' of Linear was not", lambda: model(make_batch())
    )


# --- attributes ------------------------------------------------------------------------------------------------------------
def _shard_weight(name: str, module: nn.Module, mesh: dt.DeviceMesh) -> None:
    if isinstance(module, nn.Linear):
        module.weight = nn.Parameter(dt.distribute_tensor(module.weight.detach(), mesh, [S0]))  # without the attributes


DISTRIBUTED: dict[str, Callable[[Any], Any]] = {
    "fully_shard": lambda m: fully_shard(m, mesh=get_line_mesh()),
    "replicate": lambda m: replicate(m, get_line_mesh()),
    "distribute_module": lambda m: dt.distribute_module(m, get_line_mesh()),
    "a partition function": lambda m: dt.distribute_module(m, get_line_mesh(), _shard_weight),
    "parallelize_module": lambda m: parallelize_module(m, get_line_mesh(), {"0": ColwiseParallel(), "1": RowwiseParallel()}),
    "tensor and data parallel": lambda m: fully_shard(
        parallelize_module(m, get_named_square_mesh()["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()}),
        mesh=get_named_square_mesh()["dp"],
    ),
}


@CASES.case
def attributes_of_parameters_remain_after_distribution() -> None:
    for name, distribute in DISTRIBUTED.items():
        model: Any = make_network().bfloat16()
        for at, p in enumerate(model.parameters()):
            p.no_decay, p.grad_dtype = at, torch.float32
        distribute(model)
        assert [(p.no_decay, p.grad_dtype) for p in model.parameters()] == [(at, torch.float32) for at in range(3)], name
        assert all(isinstance(p, DTensor) for p in model.parameters())
        for _ in range(2):
            model(
                distribute_values(make_values(4, 3).bfloat16(), R)
                if "module" in name or "function" in name
                else make_batch().bfloat16()
            ).sum().backward()
        assert all(p.grad.dtype is torch.float32 for p in model.parameters()), name


@CASES.case
def grad_dtype_set_after_distribution_takes_effect() -> None:
    for distribute in (DISTRIBUTED["fully_shard"], DISTRIBUTED["replicate"]):
        model, alone = distribute(make_network()), make_network()
        for each in (model, alone):
            each[0].weight.grad_dtype = torch.float32
        assert_same_step(alone, model)
        assert model[0].weight.grad.dtype is torch.float32


# --- written while they are unsharded ---------------------------------------------------------------------------------------
def _write_to_parameters(model: Any) -> None:
    with torch.no_grad():
        model[0].weight.mul_(2)
        model[1].weight[1] = 3.0
        model[0].bias.data = model[0].bias.data + 1


@CASES.case
def writes_to_unsharded_parameters_are_used_after_reshard() -> None:
    def reshard(model: Any) -> None:
        model.reshard()

    def infer(model: Any) -> None:
        with torch.no_grad():
            model(make_batch())

    for make in WAYS.values():
        for then in (reshard, infer, nn.Module.state_dict, lambda model: model(make_batch())):
            model, alone = make(), make_network()
            model(make_batch()).sum().backward()
            model.unshard()
            for each in (model, alone):
                _write_to_parameters(each)
            then(model)
            assert_same_step(alone, model)
            assert_same_step(alone, model)


@CASES.case
def unsharded_parameters_without_writes_are_unchanged() -> None:
    for make in WAYS.values():
        model = make()
        before = [p._version for p in model.parameters()]
        model.unshard()
        out = model(make_batch())
        model.reshard()
        out.sum().backward()
        assert [p._version for p in model.parameters()] == before


@CASES.case
def writes_to_unsharded_parameters_of_another_dtype_raise() -> None:
    model = fully_shard(make_network(), mesh=get_line_mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    model.unshard()
    with torch.no_grad():
        model[0].weight.zero_()
    assert_raises(DTensorError, "'weight' of Linear was written to while it was unsharded.*cannot keep", model.reshard)
    model.reshard()
    assert all(isinstance(p, DTensor) for p in model.parameters())
    model(make_batch())


@CASES.case
def parameters_written_to_between_forward_and_backward_raise() -> None:
    model = fully_shard(make_network(), mesh=get_line_mesh())
    loss = model(make_batch()).sum()
    model.unshard()
    with torch.no_grad():
        model[0].weight.mul_(2)
    assert_raises(DTensorError, "written to in between", loss.backward)


@CASES.case
def replacing_a_parameter_by_another_shape_under_transforms_raises() -> None:
    model = fully_shard(nn.Linear(3, 5, bias=False).double(), mesh=get_line_mesh())

    def loss(w: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = torch.func.functional_call(model, {"weight": w}, (make_batch(),))
        return out.square().sum()

    assert_raises(
        MeshError,
        r"'weight' of FSDPLinear was replaced by",
        lambda: torch.func.grad(loss)(distribute_values(make_values(7, 3), S0)),
    )


# --- optimizers that step in backward -----------------------------------------------------------------------------------------
class Chunked(nn.Module):
    """A hidden layer, and an output layer that is called once for each chunk of rows."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.hidden, self.out = nn.Linear(3, 4).double(), nn.Linear(4, 5).double()

    def forward(self, x: torch.Tensor) -> Any:
        return self.hidden(x)

    def loss(self, x: torch.Tensor, call: Callable[..., Any] = lambda fn, *args: fn(*args)) -> Any:
        chunks = self(x).split(1)
        return sum(call(self.out, chunk).square().sum() for chunk in chunks)


@CASES.case
def an_optimizer_in_backward_steps_after_all_chunks() -> None:
    again = functools.partial(checkpoint, use_reentrant=False)
    for distribute in (DISTRIBUTED["fully_shard"], DISTRIBUTED["replicate"]):
        for options in ({}, {"call": again}):
            model, alone, calls = Chunked(), Chunked(), list[Any]()
            distribute(model.out)
            distribute(model)
            for each in (model, alone):
                for p in each.parameters():
                    _register_step_in_backward(p, calls)
            for _ in range(3):
                calls.clear()
                model.loss(make_batch(), **options).backward()
                assert len(calls) == 4
                torch.stack([alone.loss(_make_rank_batch(rank)) for rank in range(4)]).mean().backward()
            for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
                for piece in _list_local_tensors(cast(DTensor, ours).full_tensor()):
                    torch.testing.assert_close(piece, theirs)


def _register_step_in_backward(p: nn.Parameter, calls: list[Any]) -> None:
    """Register a hook that runs an SGD step on a parameter in the backward pass, and records its calls."""
    optimizer = torch.optim.SGD([p], lr=0.01, momentum=0.9)

    def step(own: torch.Tensor) -> None:
        calls.append(own)
        optimizer.step()
        optimizer.zero_grad()

    p.register_post_accumulate_grad_hook(step)


@CASES.case
def hooks_of_parameters_get_the_sum_over_all_calls() -> None:
    for distribute in (DISTRIBUTED["fully_shard"], DISTRIBUTED["replicate"]):
        model, alone = Chunked(), Chunked()
        distribute(model)
        for each in (model, alone):
            for p in each.parameters():
                p.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        out = sum(model(make_batch()).square().sum() for _ in range(2))
        out.backward()
        torch.stack([sum(alone(_make_rank_batch(rank)).square().sum() for _ in range(2)) for rank in range(4)]).mean().backward()
        for ours, theirs in zip(model.hidden.parameters(), alone.hidden.parameters(), strict=True):
            for piece in _list_local_tensors(cast(Any, ours.grad).full_tensor()):
                torch.testing.assert_close(piece, theirs.grad)


@CASES.case
def gradients_are_reduced_after_a_backward_without_some_calls() -> None:
    for distribute in (DISTRIBUTED["fully_shard"], DISTRIBUTED["replicate"]):
        model, alone, calls = Chunked(), Chunked(), list[Any]()
        distribute(model)
        model.hidden.weight.register_post_accumulate_grad_hook(lambda p, calls=calls: calls.append(p))
        losses = [model(make_batch()).square().sum() for _ in range(3)]
        theirs = [torch.stack([alone(_make_rank_batch(rank)).square().sum() for rank in range(4)]).mean() for _ in range(3)]
        for at in (0, 2):
            losses[at].backward()
            theirs[at].backward()
            for piece in _list_local_tensors(cast(Any, model.hidden.weight.grad).full_tensor()):
                torch.testing.assert_close(piece, alone.hidden.weight.grad)
        assert len(calls) == 2


# --- meshes of fewer ranks ----------------------------------------------------------------------------------------------------
def _normalized() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 6), nn.BatchNorm1d(6), nn.Linear(6, 5))


@CASES.case
def a_model_on_some_ranks_raises_in_forward_on_others() -> None:
    mesh = dt.DeviceMesh("cpu", [0, 2])
    outside = dist.is_initialized() and dist.get_rank() in (1, 3)
    for distribute in (fully_shard, replicate):
        for device in ("meta", "cpu"):
            with torch.device(device):
                model: Any = _normalized()
            distribute(model[0], mesh=mesh)
            distribute(model, mesh=mesh)
            shapes = {name: tuple(x.shape) for name, x in _normalized().state_dict().items()}
            assert {name: tuple(x.shape) for name, x in model.state_dict().items()} == shapes
            materialize(model)
            if outside:
                assert all(not p.to_local().numel() for p in model.parameters())
                assert_raises(
                    UnitError, "a rank that is not in this mesh.*ranks.*0, 2", functools.partial(model, make_values(4, 3).float())
                )
            else:
                model(make_values(4, 3).float()).sum().backward()
                assert all(p.grad.layout is p.layout for p in model.parameters())


# --- values on the first rank only ---------------------------------------------------------------------------------------------
@CASES.on_processes
def values_of_the_first_rank_are_used_where_others_have_meta_tensors() -> None:
    full = {name: x + 1 for name, x in _normalized().state_dict().items()}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    first = dist.get_rank() == 0
    ways: tuple[Callable[[Any], Any], ...] = (
        lambda m: fully_shard(m, mesh=get_line_mesh()),
        lambda m: fully_shard(m, mesh=get_square_mesh()),
        lambda m: fully_shard(m, mesh=get_line_mesh(), offload_policy=CPUOffloadPolicy()),
        lambda m: replicate(m, get_line_mesh()),
    )
    for way in ways:
        for empty in (False, True):
            with torch.device("cpu" if first else "meta"):
                model: Any = _normalized()
            way(model[0])
            way(model)
            for name, x in model.state_dict().items():
                for piece in _list_local_tensors(x.full_tensor()):
                    torch.testing.assert_close(piece, _normalized().state_dict()[name])
            if empty and not first:
                model.to_empty(device="cpu")
            set_model_state_dict(model, dict(full) if first else {}, options=options)
            for name, x in model.state_dict().items():
                for piece in _list_local_tensors(x.full_tensor()):
                    torch.testing.assert_close(piece, full[name])
            model(make_values(4, 3).float()).sum().backward()


@CASES.on_processes
def meta_tensors_on_the_first_rank_give_no_values() -> None:
    with torch.device("meta" if dist.get_rank() == 0 else "cpu"):
        model = _normalized()
    fully_shard(model, mesh=get_line_mesh())
    assert all(x.is_meta for x in (*model.parameters(), *model.buffers()))
    assert_raises(DTensorError, "still on the meta device", lambda: model(make_values(4, 3).float()))


@CASES.case
def buffers_start_with_the_values_of_the_first_rank() -> None:
    for distribute in (DISTRIBUTED["fully_shard"], DISTRIBUTED["replicate"]):
        model: Any = nn.BatchNorm1d(3)
        model.running_mean = make_per_rank(lambda rank: torch.full((3,), float(rank + 1)))
        model.register_buffer("mask", make_per_rank(lambda rank: torch.tensor([rank == 0, False])))
        distribute(model)
        for x, wanted in ((model.running_mean, torch.ones(3)), (model.mask, torch.tensor([True, False]))):
            for piece in _list_local_tensors(x.to_local()):
                torch.testing.assert_close(piece, wanted)


# --- buffers that are written with plain values -------------------------------------------------------------------------------
def _write_to_table(model: Any, table: torch.Tensor) -> None:
    model.running_mean[...] = table


def _write_rows_to_table(model: Any, table: torch.Tensor) -> None:
    model.running_mean[1:] = table[1:]
    model.running_mean[:1].copy_(table[:1])


def _write_through_data(model: Any, table: torch.Tensor) -> None:
    model.running_mean.data.copy_(table)


def _load(model: Any, table: torch.Tensor) -> None:
    model.load_state_dict(nn.BatchNorm1d(3).state_dict() | {"running_mean": table})


@CASES.case
def a_plain_value_written_to_a_buffer_is_set_on_all_ranks() -> None:
    for distribute in (DISTRIBUTED["fully_shard"], DISTRIBUTED["replicate"]):
        for write in (_write_to_table, _write_rows_to_table, _write_through_data, _load):
            for ran in (False, True):
                model: Any = distribute(nn.BatchNorm1d(3))
                if ran:
                    model(make_batch().float())
                write(model, torch.tensor([1.0, 2.0, 3.0]))
                for piece in _list_local_tensors(model.running_mean.full_tensor()):
                    torch.testing.assert_close(piece, torch.tensor([1.0, 2.0, 3.0]))
                model.eval()
                model(make_batch().float())


@CASES.case
def a_plain_value_that_differs_between_ranks_raises() -> None:
    model: Any = fully_shard(nn.BatchNorm1d(3), mesh=get_line_mesh())
    model.running_mean.copy_(torch.arange(3.0))
    different = make_per_rank(lambda rank: torch.arange(3.0) + rank)
    assert_raises(
        MixedTensorError,
        "differs between|would write a PerRank tensor",
        lambda: model.running_mean.__setitem__(slice(None), different),
    )
    for name in ("running_mean", "weight"):
        x = getattr(model, name).detach()
        assert_raises(
            MixedTensorError,
            "differs between|would write a PerRank tensor",
            functools.partial(x.copy_, different),
        )
    for piece in _list_local_tensors(model.running_mean.full_tensor()):
        torch.testing.assert_close(piece, torch.arange(3.0))


# --- the arguments of PyTorch's replicate --------------------------------------------------------------------------------------
@CASES.case
def replicate_accepts_device_mesh() -> None:
    model, alone = (
        replicate(make_network(), device_mesh=get_line_mesh(), bucket_cap_mb=25, gradient_as_bucket_view=True),
        make_network(),
    )
    assert_same_step(alone, model)
    assert_raises(
        ArgumentError,
        "one of mesh=, device_mesh= and process_group=",
        lambda: replicate(make_network(), get_line_mesh(), device_mesh=get_line_mesh()),
    )


# --- gathered parameters as forward sees them ----------------------------------------------------------------------------------
class Scaled(nn.Module):
    """Uses its scale only if it is a parameter, as modules do that accept a number or a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.scale = nn.Linear(3, 5), nn.Parameter(torch.arange(5.0))
        self.look: Callable[[Scaled], Any] = lambda module: None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.look(self)
        y = self.linear(x)
        return y * self.scale if isinstance(self.scale, nn.Parameter) else y


def _scaled() -> Any:
    torch.manual_seed(0)
    return Scaled().double()


@CASES.case
def gathered_parameters_are_instances_of_parameter() -> None:
    for name in ("fully_shard", "replicate"):
        model, alone = DISTRIBUTED[name](_scaled()), _scaled()
        assert_same_step(alone, model)
        with torch.no_grad():
            out = model(make_batch())
        torch.testing.assert_close(
            _list_local_tensors(out)[0], alone(_make_rank_batch(dist.get_rank() if dist.is_initialized() else 0))
        )
        whole = dt.distribute_tensor(make_values(8, 3), get_line_mesh(), [S0])
        for piece in _list_local_tensors(model(whole).full_tensor()):
            torch.testing.assert_close(piece, alone(make_values(8, 3)))


@CASES.case
def results_of_gathered_parameters_are_not_parameters() -> None:
    def look(module: Scaled) -> None:
        scale: Any = module.scale
        made = [scale.data, scale.detach(), scale.view(5, 1), scale + 1, scale.view_as(scale), *module.state_dict().values()]
        assert not any(isinstance(x, nn.Parameter) for x in made)
        assert all(isinstance(p, nn.Parameter) for p in module.parameters())
        module.alias = scale.view_as(scale)

    model = fully_shard(_scaled(), mesh=get_line_mesh())
    model.look = look
    model(make_batch()).sum().backward()
    assert [*model.state_dict()] == ["scale", "linear.weight", "linear.bias"]


@CASES.case
def registering_a_gathered_parameter_again_raises() -> None:
    def register(module: Scaled) -> None:
        module.alias = module.scale

    for look in (register, lambda module: nn.ParameterList([module.scale])):  # a list would cut the gradient off
        model: Any = fully_shard(_scaled(), mesh=get_line_mesh())
        model.look = look
        assert_raises(ValueError, "Cannot assign non-leaf Tensor to parameter", functools.partial(model, make_batch()))


@CASES.case
def registering_a_gathered_parameter_under_no_grad_raises() -> None:
    def as_parameter(module: Scaled) -> None:
        module.alias = module.scale

    def as_buffer(module: Scaled) -> None:
        module.register_buffer("alias", module.scale.detach()[1:])

    for look in (as_parameter, as_buffer):
        model: Any = fully_shard(_scaled(), mesh=get_line_mesh())
        model.look = look
        with torch.no_grad():
            assert_raises(
                UnitError,
                r"'alias' in its forward.*'scale' of FSDPScaled.*self.alias = self.scale.clone\(\)",
                functools.partial(model, make_batch()),
            )
            model.look = lambda module: None
            del model.alias
            model(make_batch())
        assert_same_step(_scaled(), model)


VIEWS: dict[str, Callable[[Any], Any]] = {
    "itself": lambda x: x,
    "a view": lambda x: x[1:].t(),
    "detached": lambda x: x.detach(),
    "data": lambda x: x.data[0],
}


@CASES.case
def gathered_parameters_stored_under_no_grad_keep_their_values() -> None:
    """Check that it keeps the values of that forward. ``replicate`` gathers nothing and returns the parameter itself."""
    for way, make in WAYS.items():
        for view in VIEWS.values():
            model, alone, kept = make(), make_network(), list[Any]()
            hook = model[0].register_forward_pre_hook(lambda module, _, view=view, kept=kept: kept.append(view(module.weight)))
            for _ in range(2):
                with torch.no_grad():
                    model(make_batch())
                    for each in (model, alone):
                        each[0].weight.add_(1)
            hook.remove()
            assert_same_step(alone, model)
            for step, x in enumerate(kept):
                wanted = view(make_network()[0].weight.detach()) + (2 if way == "replicate" else step)
                whole = x.full_tensor() if isinstance(x, DTensor) else x
                for piece in local_tensors_by_rank(whole).values():
                    torch.testing.assert_close(piece, wanted)


@CASES.case
def unsharded_parameters_stored_under_no_grad_keep_their_values() -> None:
    model = fully_shard(make_network(), mesh=get_line_mesh())
    with torch.no_grad():
        model.unshard()
        kept = model[0].weight
        model.reshard()
        for piece in local_tensors_by_rank(kept * 1).values():
            torch.testing.assert_close(piece, make_network()[0].weight.detach())
    assert_same_step(make_network(), model)


class CallsOtherUnit(nn.Module):
    """A module that calls another unit with its own gathered parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.inner = nn.Parameter(torch.ones(5, 3)), nn.Linear(3, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.func.functional_call(self.inner, {"weight": self.weight}, (x,))


@CASES.case
def functional_call_with_a_parameter_of_another_unit_raises() -> None:
    for distribute in (DISTRIBUTED["fully_shard"], DISTRIBUTED["replicate"]):
        model = CallsOtherUnit().double()
        distribute(model.inner)
        distribute(model)
        x = dt.distribute_tensor(make_values(8, 3), get_line_mesh(), [S0])
        assert_raises(DTensorError, "functional_call cannot replace it", functools.partial(model, x))
