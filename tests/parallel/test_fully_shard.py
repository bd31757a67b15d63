"""``fully_shard``: losses, gradients and updates of the plain model, and what it communicates and stores."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from compare_with_one_device import (
    assert_same_gradients,
    assert_same_parameters,
    full_value,
    make_dp_mesh,
    make_per_rank_batch,
    step_and_clear_gradients,
)
from gloo_processes import run_gloo
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import dtensor as dt
from dtensor import DTensor, Placement, Replicate, Shard
from dtensor.debug import CommDebugMode
from dtensor.errors import DTensorError, MeshError
from dtensor.parallel import (
    ColwiseParallel,
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    RowwiseParallel,
    fully_shard,
    parallelize_module,
    register_fsdp_forward_method,
    replicate,
)
from dtensor.parallel.data.settings.policy import HostOffload
from dtensor.parallel.data.units.unit import unit_of

pytestmark = pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")


class Net(nn.Module):
    """Model with layers of odd sizes, an embedding, a 0-d parameter and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 5)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 5)) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(5, 3, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in (*self.layers, self.layers[0]):
            x = x + layer(x)
        return self.head(x * self.scale)


def net() -> Net:
    torch.manual_seed(0)
    return Net().double()


def shard(model: nn.Module, mesh: Any, **options: Any) -> Any:
    for layer in model.layers:
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def batches(ranks: int, count: int = 1) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randint(7, (2, 3), generator=generator) for _ in range(ranks)] for _ in range(count)]


def loss_of(out: Tensor) -> Tensor:
    return (out**2).mean()


def plain_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    return torch.stack([loss_of(model(part)) for part in batch]).mean()


def train(mesh: dt.DeviceMesh, dims: tuple[str, ...], steps: int = 3, **options: Any) -> tuple[Any, Any]:
    """Compare some steps of Adam, and return the distributed and the plain model."""
    model, alone = net(), net()
    shard(model, mesh[dims] if mesh.ndim > 1 else mesh, **options)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, alone)]
    for batch in batches(mesh.size(), steps):
        loss = loss_of(model(make_per_rank_batch(batch, mesh)))
        loss.backward()
        plain_loss(alone, batch).backward()
        assert_same_gradients(model, alone)
        step_and_clear_gradients(*optimizers)
    assert_same_parameters(model, alone)
    return model, alone


# --- equal to one device -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("size", [1, 2, 3, 4])
@pytest.mark.parametrize("reshard", [None, True, False])
def test_adam_steps_of_fully_sharded_model_equal_plain_model(size: int, reshard: bool | None) -> None:
    train(make_dp_mesh(size), ("dp",), reshard_after_forward=reshard)


def test_hsdp_replicates_over_the_first_mesh_dim_and_equals_plain_model() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("ddp", "fsdp"))
    model, _ = train(mesh, ("ddp", "fsdp"))
    assert model.head.weight.placements == (Replicate(), Shard(0))
    assert model.scale.placements == (Replicate(), Replicate())


def _train_and_sum_parameters(shape: tuple[int, ...], names: tuple[str, ...]) -> list[float]:
    mesh = dt.init_device_mesh("cpu", shape, mesh_dim_names=names)
    model, _ = train(mesh, names)
    return [p.detach().full_tensor().sum().item() for p in model.parameters()]


@pytest.mark.gloo
@pytest.mark.parametrize(("shape", "names"), [((3,), ("dp",)), ((2, 2), ("ddp", "fsdp"))])
def test_fully_sharded_training_equals_plain_model_on_process_groups(shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    here = _train_and_sum_parameters(shape, names)
    for there in run_gloo(_train_and_sum_parameters, torch.Size(shape).numel(), shape, names):
        assert there == pytest.approx(here, rel=1e-10)


def test_fully_sharded_model_on_distributed_batch_gives_the_global_loss() -> None:
    model, alone, mesh = shard(net(), make_dp_mesh()), net(), make_dp_mesh()
    tokens = torch.randint(7, (5, 3))  # ranks have 3 and 2 rows; the mean is over all rows
    loss = loss_of(model(dt.distribute_tensor(tokens, mesh, [Shard(0)])))
    loss.backward()
    expected = loss_of(alone(tokens))
    expected.backward()
    torch.testing.assert_close(loss.full_tensor(), expected)
    assert_same_gradients(model, alone)


class ComputesOnLocalTensors(nn.Module):
    """Module that computes on local tensors, as programs with custom kernels do."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.weight, self.how = nn.Parameter(torch.randn(7, 4).double()), how

    def forward(self, tokens: Tensor) -> Tensor:
        if not isinstance(tokens, DTensor):
            return self.weight[tokens]
        if self.how == "local_map":
            return dt.local_map(lambda x, w: w[x], out_placements=(tokens.placements,))(tokens, self.weight)
        whole = self.weight.to_local() if self.how == "to_local" else self.weight.full_tensor()
        return DTensor.from_local(whole[tokens.to_local()], tokens.device_mesh, tokens.placements)


def _check_local_tensors_of_parameters(how: str) -> None:
    torch.manual_seed(0)
    alone = nn.Sequential(ComputesOnLocalTensors(how), nn.Linear(4, 2).double())
    tokens = torch.randint(7, (5, 3))
    loss_of(alone(tokens)).backward()
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    cut_over: list[tuple[Placement, ...]] = [(Shard(0), Replicate()), (Shard(0), Shard(1)), (Replicate(), Replicate())]
    for unit in (fully_shard, replicate):
        for batch in cut_over:
            model = copy.deepcopy(alone)
            model.zero_grad()
            for module in (model[0], model):
                unit(module, mesh=mesh)
            loss_of(model(dt.distribute_tensor(tokens, mesh, batch))).backward()
            assert_same_gradients(model, alone)


@pytest.mark.parametrize("how", ["to_local", "local_map"])
def test_gradients_through_to_local_and_local_map_of_parameters_equal_plain(how: str) -> None:
    _check_local_tensors_of_parameters(how)


@pytest.mark.gloo
# full_tensor needs processes: in one process it gives one plain tensor for all ranks
@pytest.mark.parametrize("how", ["to_local", "local_map", "full_tensor"])
def test_gradients_through_local_reads_equal_plain_model_on_process_groups(how: str) -> None:
    run_gloo(_check_local_tensors_of_parameters, 4, how)


class ReadsWeightDirectly(nn.Module):
    """Module that reads the weight of a submodule without calling it, as fused losses do."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.LayerNorm(4).double(), nn.Linear(4, 6, bias=False).double()

    def forward(self, x: Tensor) -> Tensor:
        weight = self.head.weight
        return self.norm(x) @ (weight.full_tensor() if isinstance(weight, DTensor) else weight).mT


def _check_weight_read_directly() -> None:
    torch.manual_seed(0)
    alone, x = ReadsWeightDirectly(), torch.randn(2, 3, 4).double()
    loss_of(alone(x)).backward()
    mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    rank = torch.distributed.get_rank()
    for units, reshard in ((["norm", "head"], False), (["norm", "head"], True), (["head"], True)):
        model = copy.deepcopy(alone)
        model.zero_grad()
        fully_shard([model.get_submodule(name) for name in units], mesh=mesh, reshard_after_forward=reshard)
        fully_shard(model, mesh=mesh)
        loss_of(model(x[rank : rank + 1])).backward()
        for theirs, ours in zip(alone.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.gloo
def test_weight_read_outside_its_module_gets_averaged_gradients() -> None:
    run_gloo(_check_weight_read_directly, 2)


def _check_writes_through_data() -> None:
    mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    x = torch.randn(3, 4).double()
    for unit in (functools.partial(fully_shard, reshard_after_forward=False), fully_shard, replicate):
        model, alone = nn.Linear(4, 2).double(), nn.Linear(4, 2).double()
        alone.load_state_dict(model.state_dict())
        unit(model, mesh=mesh)
        for step in range(4):  # without a backward that frees the gathered parameters
            torch.testing.assert_close(full_value(model(x)), alone(x))
            for p in (model.weight, alone.weight):
                if step % 2:
                    p.data += 1
                else:
                    p.data.add_(torch.ones(2, 4).double() if p is alone.weight else torch.ones_like(p), alpha=-2)
        torch.testing.assert_close(full_value(model(x)), alone(x))


def test_forward_uses_writes_through_data_of_parameters() -> None:
    _check_writes_through_data()


@pytest.mark.gloo
def test_forward_uses_writes_through_data_of_parameters_on_process_groups() -> None:
    run_gloo(_check_writes_through_data, 2)


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.norm = nn.LayerNorm(4)
        self.down = nn.Linear(6, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.down(torch.tanh(self.up(x))))


def _train_tensor_parallel(dim: int) -> dict[str, Any]:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(Mlp(), Mlp()).double()
    alone = copy.deepcopy(model)
    for block in model:
        parallelize_module(block, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(block, mesh=mesh["dp"], shard_placement_fn=lambda p: Shard(dim) if p.ndim == 2 else None)
    fully_shard(model, mesh=mesh["dp"])
    x = torch.randn(2, 3, 4, dtype=torch.float64)
    optimizers = [torch.optim.Adam(m.parameters(), lr=0.1) for m in (model, alone)]
    for _ in range(2):
        loss_of(model(dt.map_ranks(lambda at: x[at[0]].clone(), mesh=mesh))).backward()
        torch.stack([loss_of(alone(part)) for part in x]).mean().backward()
        assert_same_gradients(model, alone)
        step_and_clear_gradients(*optimizers)
    assert_same_parameters(model, alone)
    return {name: p.placements for name, p in model[0].named_parameters()}


def test_fully_shard_of_tensor_parallel_module_equals_plain_model() -> None:
    assert _train_tensor_parallel(0) == {
        "up.weight": (Shard(0, level=1), Shard(0, level=0)),
        "up.bias": (Shard(0, level=1), Shard(0, level=0)),
        # replicated inside tensor parallelism, on the mesh of the other parameters outside
        "norm.weight": (Shard(0), Replicate()),
        "norm.bias": (Shard(0), Replicate()),
        "down.weight": (Shard(0), Shard(1)),
        "down.bias": (Shard(0), Replicate()),
    }
    assert _train_tensor_parallel(1)["down.weight"] == (Shard(1, level=1), Shard(1, level=0))


@pytest.mark.gloo
def test_fully_shard_of_tensor_parallel_module_on_process_groups() -> None:
    assert run_gloo(_train_tensor_parallel, 4, 0) == [_train_tensor_parallel(0)] * 4


# --- communication ------------------------------------------------------------------------------------------------------
def test_unit_issues_one_all_gather_per_pass_and_one_reduce_scatter() -> None:
    mesh = make_dp_mesh()
    model = shard(net(), mesh)
    for _ in range(2):
        with CommDebugMode() as comm:
            loss_of(model(make_per_rank_batch(batches(2)[0], mesh))).backward()
        # four units; the first layer runs twice, so it is gathered twice in forward; the outermost unit stays unsharded
        assert comm.get_comm_counts() == {"all_gather": 5 + 3, "reduce_scatter": 4}


def test_unit_without_reshard_after_forward_is_gathered_once() -> None:
    mesh = make_dp_mesh()
    model = shard(net(), mesh, reshard_after_forward=False)
    with CommDebugMode() as comm:
        loss_of(model(make_per_rank_batch(batches(2)[0], mesh))).backward()
    assert comm.get_comm_counts() == {"all_gather": 4, "reduce_scatter": 4}


def test_two_units_issue_three_all_gathers_and_two_reduce_scatters() -> None:
    mesh = make_dp_mesh()
    torch.manual_seed(0)
    # the outermost unit has only the parameters of the last layer
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    for _ in range(2):
        with CommDebugMode() as comm:
            model(dt.per_rank([torch.ones(2, 4), torch.ones(2, 4)])).sum().backward()
        assert comm.get_comm_counts() == {"all_gather": 2 + 1, "reduce_scatter": 2}


def test_second_forward_prefetches_the_next_unit() -> None:
    mesh = make_dp_mesh()
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    counts: list[int] = []
    with CommDebugMode() as comm:
        for layer in model:
            layer.register_forward_hook(lambda *_: counts.append(comm.get_total_counts()))
        for _ in range(2):
            model(dt.per_rank([torch.ones(2, 4), torch.ones(2, 4)])).sum().backward()
            counts.append(-1)
    assert counts[:3] == [1, 2, 3]  # the first pass learns the order
    start = counts[4] - 2
    assert counts[4:7] == [start + 2, start + 3, start + 3]


def test_only_local_shards_are_stored_after_backward() -> None:
    mesh = make_dp_mesh()
    model = shard(net(), mesh)
    loss_of(model(make_per_rank_batch(batches(2)[0], mesh))).backward()
    for module in (model, *model.layers):
        (group,) = unit_of(module).groups
        assert not group.unsharded.is_filled
        assert all(buffer.untyped_storage().nbytes() == 0 for buffer in group.unsharded.buffer.shards)
    assert model.embedding.weight.to_local().shards[0].shape == (4, 5)


def test_only_the_running_unit_is_unsharded_in_forward() -> None:
    mesh = make_dp_mesh()
    model = shard(net(), mesh)
    gathered: list[list[bool]] = []
    for layer in model.layers:
        layer[1].register_forward_hook(
            lambda *_: gathered.append([unit_of(m).groups[0].unsharded.is_filled for m in model.layers])
        )
    model(make_per_rank_batch(batches(2)[0], mesh))
    assert gathered[:3] == [[True, False, False], [False, True, False], [False, False, True]]


# --- accumulation, freezing, sharing ---------------------------------------------------------------------------------------
@pytest.mark.parametrize("sync", [True, False])
def test_gradients_accumulate_over_two_passes_with_and_without_sync(sync: bool) -> None:
    mesh, model, alone = make_dp_mesh(), shard(net(), make_dp_mesh()), net()
    first, second = batches(2, 2)
    model.set_requires_gradient_sync(sync)
    with CommDebugMode() as comm:
        loss_of(model(make_per_rank_batch(first, mesh))).backward()
    assert comm.get_comm_counts()["reduce_scatter"] == (4 if sync else 0)
    assert sync or all(p.grad is None for p in model.parameters())
    model.set_requires_gradient_sync(True)
    loss_of(model(make_per_rank_batch(second, mesh))).backward()
    for batch in (first, second):
        plain_loss(alone, batch).backward()
    assert_same_gradients(model, alone)


def test_one_backward_of_two_forward_passes_equals_plain_model() -> None:
    mesh, model, alone = make_dp_mesh(), shard(net(), make_dp_mesh()), net()
    first, second = batches(2, 2)
    (loss_of(model(make_per_rank_batch(first, mesh))) + loss_of(model(make_per_rank_batch(second, mesh)))).backward()
    (plain_loss(alone, first) + plain_loss(alone, second)).backward()
    assert_same_gradients(model, alone)


def test_frozen_parameters_have_no_gradient() -> None:
    mesh, model, alone = make_dp_mesh(), net(), net()
    for m in (model, alone):
        m.layers[1].requires_grad_(False)
        m.embedding.weight.requires_grad_(False)
    shard(model, mesh)
    loss_of(model(make_per_rank_batch(batches(2)[0], mesh))).backward()
    plain_loss(alone, batches(2)[0]).backward()
    assert_same_gradients(model, alone)
    assert not unit_of(model.layers[1]).groups[0].unsharded.is_filled


def test_parameters_that_no_rank_uses_have_no_gradient() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.unused = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.used(x)

    mesh = make_dp_mesh()
    model = fully_shard(Branches(), mesh=mesh)
    model(dt.per_rank([torch.ones(1, 3)] * 2)).sum().backward()
    assert model.unused.weight.grad is None
    assert model.used.weight.grad is not None


def _train_with_parameter_of_one_rank(mesh: dt.DeviceMesh) -> Tensor:
    class Choice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(3, 2, bias=False), nn.Linear(3, 2, bias=False)

    model = fully_shard(Choice(), mesh=mesh)
    unit = unit_of(model)
    unit.before_forward(model, (), {})
    x = torch.ones(1, 3)
    outs = dt.map_ranks(lambda at, a, b: x @ (a if at[0] else b).T, model.a.weight, model.b.weight, mesh=mesh)
    unit.after_forward(model, outs)
    outs.sum().backward()
    return torch.stack([full_value(model.a.weight.grad), full_value(model.b.weight.grad)])


def test_gradient_of_parameter_used_by_one_rank_is_divided_by_all_ranks() -> None:
    assert _train_with_parameter_of_one_rank(make_dp_mesh()).tolist() == torch.full((2, 2, 3), 0.5).tolist()


def test_tied_weights_in_one_unit_or_two_units_equal_plain_model() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.body, self.head = nn.Embedding(5, 4), nn.Linear(4, 4), nn.Linear(4, 5, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.body(self.embedding(tokens)))

    mesh, batch = make_dp_mesh(), [torch.tensor([[1, 2]]), torch.tensor([[4, 0]])]
    for inner in ((), ("embedding",), ("embedding", "body")):
        torch.manual_seed(0)
        model = Tied()
        alone = copy.deepcopy(model)
        for name in inner:
            fully_shard(getattr(model, name), mesh=mesh)
        fully_shard(model, mesh=mesh)
        assert model.head.weight is model.embedding.weight
        loss_of(model(make_per_rank_batch(batch, mesh))).backward()
        plain_loss(alone, batch).backward()
        assert_same_gradients(model, alone)


def test_ignored_parameters_stay_plain() -> None:
    model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False))
    kept = model[0].weight
    fully_shard(model, mesh=make_dp_mesh(), ignored_params={kept})
    assert model[0].weight is kept
    assert isinstance(model[1].weight, DTensor)


# --- precision, offload ------------------------------------------------------------------------------------------------
def test_mixed_precision_policy_sets_the_dtypes_of_each_stage() -> None:
    mesh = make_dp_mesh()
    seen: list[torch.dtype] = []

    class Watched(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            seen.extend((x.dtype, self.weight.dtype))
            return super().forward(x)

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model = fully_shard(Watched(4, 3), mesh=mesh, mp_policy=policy)
    with CommDebugMode() as comm:
        out = model(dt.per_rank([torch.ones(2, 4), torch.ones(2, 4)]))
        out.sum().backward()
    assert seen == [torch.bfloat16, torch.bfloat16]
    assert out.dtype == model.weight.dtype == model.weight.grad.dtype == torch.float32
    assert comm.get_comm_bytes() == {"all_gather": 32, "reduce_scatter": 4 * (8 + 2 + 2)}  # rank 0 has 2 of 3 rows; 2 flags
    torch.testing.assert_close(full_value(model.weight.grad), torch.full((3, 4), 2.0))


def _replicated(module: nn.Module, mesh: Any, **options: Any) -> Any:
    return replicate(module, mesh["inside"] if mesh.ndim == 2 else mesh, **options)


def _fully_sharded(module: nn.Module, mesh: Any, **options: Any) -> Any:
    return fully_shard(module, mesh=mesh, **options)


def _accumulate_in_float32(make: Callable[..., Any], shape: tuple[int, ...], held_by: str) -> None:
    """Accumulate gradients of 64 passes: in bfloat16 the sum would lose one percent, in float32 almost nothing."""
    mesh = dt.init_device_mesh("cpu", shape, mesh_dim_names=("copies", "inside")[-len(shape) :])
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    generator = torch.Generator().manual_seed(3)
    alone = nn.Linear(7, 5, bias=False)
    model = make(copy.deepcopy(alone), mesh, mp_policy=policy)
    alone = alone.bfloat16()
    expected = torch.zeros(5, 7)
    for last in [False] * 63 + [True]:
        getattr(model, held_by)(last)
        x = torch.randn(3, 7, generator=generator)
        loss_of(model(make_per_rank_batch([x] * mesh.size(), mesh))).backward()
        expected += torch.autograd.grad(loss_of(alone(x.bfloat16())), alone.weight)[0]
    torch.testing.assert_close(full_value(model.weight.grad), expected, rtol=1e-5, atol=1e-6)


ACCUMULATION_CASES = [
    (_fully_sharded, (2,), "set_requires_gradient_sync"),
    (_fully_sharded, (2, 2), "set_requires_gradient_sync"),
]
ACCUMULATION_CASES += [(_fully_sharded, (2, 2), "set_requires_all_reduce"), (_replicated, (2,), "set_requires_gradient_sync")]


@pytest.mark.parametrize(("make", "shape", "held_by"), ACCUMULATION_CASES)
def test_accumulated_gradients_have_the_reduce_dtype(make: Any, shape: tuple[int, ...], held_by: str) -> None:
    _accumulate_in_float32(make, shape, held_by)


@pytest.mark.gloo
def test_accumulated_gradients_have_the_reduce_dtype_on_process_groups() -> None:
    run_gloo(_accumulate_in_float32, 2, _fully_sharded, (2,), "set_requires_gradient_sync")


def test_deferred_gradients_are_added_in_the_reduce_dtype() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(nn.Linear(3, 1, bias=False), mesh=make_dp_mesh(), mp_policy=policy)
    model.set_reduce_scatter_unused_params(True)
    parts = [torch.full((1, 3), 256.0), torch.ones(1, 3)]  # bfloat16 has no 257
    sum(model(make_per_rank_batch([x] * 2, make_dp_mesh())).sum() for x in parts).backward()
    assert full_value(model.weight.grad).tolist() == [[257.0] * 3]


@pytest.mark.parametrize("make", [fully_shard, replicate])
def test_gradients_of_complex_parameters_keep_their_dtype_in_mixed_precision(make: Any) -> None:
    class Turned(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return (super().forward(x).double() * self.turn).imag

    model = Turned(3, 3)
    model.turn = nn.Parameter(torch.tensor([1 + 2j, 3j, 1], dtype=torch.complex128))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = make(model, mesh=make_dp_mesh(), mp_policy=policy)
    x = torch.ones(2, 3)
    model(dt.per_rank([x, 3 * x])).sum().backward()
    expected = 1j * torch.stack(
        [nn.functional.linear(y, full_value(model.weight), full_value(model.bias)).sum(0) for y in (x, 3 * x)]
    )
    torch.testing.assert_close(full_value(model.turn.grad), expected.mean(0).to(torch.complex128), rtol=0.02, atol=0.02)
    assert model.weight.grad.dtype is torch.float32


def test_unit_with_float32_and_float64_parameters_uses_one_all_gather() -> None:
    mesh = make_dp_mesh()
    model = nn.Sequential(nn.Linear(3, 3, dtype=torch.float64), nn.Linear(3, 2, dtype=torch.float32))
    alone = copy.deepcopy(model)
    model[1].register_forward_pre_hook(lambda _, args: (args[0].float(),))
    alone[1].register_forward_pre_hook(lambda _, args: (args[0].float(),))
    fully_shard(model, mesh=mesh)
    x = torch.randn(2, 1, 3, dtype=torch.float64)
    with CommDebugMode() as comm:
        loss_of(model(make_per_rank_batch(list(x), mesh))).backward()
    assert comm.get_comm_counts() == {"all_gather": 1, "reduce_scatter": 2}
    plain_loss(alone, list(x)).backward()
    assert_same_gradients(model, alone)


def test_cpu_offload_on_the_host_changes_no_values() -> None:
    train(make_dp_mesh(), ("dp",), offload_policy=CPUOffloadPolicy())


@pytest.mark.parametrize("make", [shard, _replicated])
def test_offloaded_gradient_copies_overlap_and_end_before_their_first_use(make: Any, monkeypatch: Any) -> None:
    """Check offloaded gradients with a fake copy that completes only when it is waited for."""
    done: list[tuple[str, int]] = []

    def fetched(host: HostOffload, x: Tensor) -> tuple[Tensor, Callable[[], Any]]:
        late, number = torch.full_like(x, float("nan")), sum(what == "sent" for what, _ in done)
        done.append(("sent", number))
        return late, lambda: (late.copy_(x), done.append(("waited", number)))

    monkeypatch.setattr(HostOffload, "copy_to_host", fetched)
    mesh, model, alone = make_dp_mesh(), net(), net()
    make(model, mesh, offload_policy=CPUOffloadPolicy())
    if make is shard:
        model.scale.register_post_accumulate_grad_hook(lambda p: done.append(("gradient", int(p.grad.isnan().any()))))
    for batch in batches(2, 2):
        loss_of(model(make_per_rank_batch(batch, mesh))).backward()
        plain_loss(alone, batch).backward()
    assert_same_gradients(model, alone)
    if make is shard:
        sent = done.index(("sent", 2))
        assert ("waited", 0) not in done[:sent]  # the copies of two parameters are started together
        assert ("waited", 0) in done[: done.index(("sent", 5))]
        assert ("gradient", 0) in done


# --- checkpointing, methods, hooks, copies --------------------------------------------------------------------------------
@pytest.mark.parametrize("outside", [True, False], ids=["units recomputed", "parts of units recomputed"])
def test_checkpointing_around_or_inside_units_equals_plain_model(outside: bool) -> None:
    if outside:
        _train_checkpointed(False)
        return
    mesh, model, alone = make_dp_mesh(), net(), net()
    for layer in model.layers:
        layer.forward = lambda x, layer=layer: layer[2](checkpoint(lambda y: torch.tanh(layer[0](y)), x, use_reentrant=False))
    shard(model, mesh)
    loss_of(model(make_per_rank_batch(batches(2)[0], mesh))).backward()
    plain_loss(alone, batches(2)[0]).backward()
    assert_same_gradients(model, alone)


def _forward_layers(model: Net, tokens: Tensor) -> Tensor:
    x = model.embedding(tokens)
    for layer in model.layers:
        x = x + layer(x)
    return x


def _train_checkpointed(reentrant: bool) -> None:
    mesh, model, alone = make_dp_mesh(), net(), net()
    shard(model, mesh)

    def forward(tokens: Tensor) -> Tensor:
        x = model.embedding(tokens)
        for layer in model.layers:
            x = x + checkpoint(layer, x, use_reentrant=reentrant)
        return model.head(x * model.scale)

    model.forward = forward
    alone.forward = lambda tokens: alone.head(_forward_layers(alone, tokens) * alone.scale)
    for batch in batches(2, 2):
        loss_of(model(make_per_rank_batch(batch, mesh))).backward()
        plain_loss(alone, batch).backward()
        assert_same_gradients(model, alone)


@pytest.mark.parametrize("reentrant", [True, False])
def test_reentrant_and_other_checkpoints_of_units_equal_plain_model(reentrant: bool) -> None:
    _train_checkpointed(reentrant)


@pytest.mark.gloo
@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointed_units_equal_plain_model_on_process_groups(reentrant: bool) -> None:
    run_gloo(_train_checkpointed, 2, reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("output_dtype", [torch.float32, torch.float64])
def test_recomputed_output_of_a_unit_has_output_dtype_of_the_policy(reentrant: bool, output_dtype: torch.dtype) -> None:
    """Check that recomputed activations have the dtypes of the first forward."""
    mesh, body, head = make_dp_mesh(), nn.Linear(4, 4), nn.Linear(4, 3)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, output_dtype)
    plain = [copy.deepcopy(module) for module in (body, head)]
    for module in (body, head):
        fully_shard(module, mesh=mesh, mp_policy=policy)
    seen: list[torch.dtype] = []

    def forward(inner: nn.Module, last: nn.Module, x: Tensor) -> Tensor:
        def run(y: Tensor) -> Tensor:
            z = inner(y)
            seen.append(z.dtype)
            return torch.tanh(z) * z

        return last(checkpoint(run, x, use_reentrant=reentrant))

    batch = [torch.randn(2, 4, requires_grad=True) for _ in range(2)]
    loss_of(forward(body, head, make_per_rank_batch(batch, mesh))).backward()
    assert set(seen) == {output_dtype}
    assert len(seen) == 2
    torch.stack([loss_of(forward(*plain, part)) for part in batch]).mean().backward()
    for ours, theirs in zip((body, head), plain, strict=True):
        torch.testing.assert_close(full_value(ours.weight.grad), theirs.weight.grad, rtol=0.05, atol=0.02)


class CheckpointedPart(nn.Module):
    """Two layers, in which a checkpointed function uses both layers' weights."""

    def __init__(self, reentrant: bool = False) -> None:
        super().__init__()
        self.first, self.second, self.reentrant = nn.Linear(4, 4), nn.Linear(4, 4), reentrant

    def forward(self, x: Tensor) -> Tensor:
        inner = checkpoint(lambda y: self.second(torch.tanh(self.first(y))), x, use_reentrant=self.reentrant)
        return self.first(torch.tanh(self.second(torch.tanh(inner))))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")  # torch warns for the pass without gradients
@pytest.mark.parametrize("make", [_fully_sharded, _replicated])
@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("order", [(0, 1), (1, 0), (0, None), (0,)], ids=str)
def test_checkpointing_inside_units_with_interleaved_passes_equals_plain_model(
    make: Any, reentrant: bool, order: tuple[int | None, ...]
) -> None:
    """Check two forward passes before their backwards, or a pass without gradients (None) before backward."""
    torch.manual_seed(0)
    mesh, alone = make_dp_mesh(), nn.Sequential(nn.Linear(4, 4), CheckpointedPart(reentrant), nn.Linear(4, 3)).double()
    model = copy.deepcopy(alone)
    if make is _fully_sharded:
        fully_shard(model[1], mesh=mesh)
    make(model, mesh)
    data = torch.randn(2, 2, 2, 4, dtype=torch.float64)
    passes = [k for k in order if k is not None]
    for m, given in ((model, lambda k: make_per_rank_batch(list(data[k]), mesh)), (alone, lambda k: data[k].flatten(0, 1))):
        losses = {k: loss_of(m(given(k))) for k in sorted(passes)}
        if None in order:
            with torch.no_grad():
                m(given(1))
        for k in passes:
            losses[k].backward()
    assert_same_gradients(model, alone)


@pytest.mark.parametrize("make", [_fully_sharded, _replicated])
def test_nested_reentrant_checkpoints_equal_plain_model(make: Any) -> None:
    """Check nested reentrant checkpoints in a unit, also as the outermost unit, whose input has no gradient."""

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.start, self.inner = nn.Linear(4, 4), CheckpointedPart(reentrant=True)

        def forward(self, x: Tensor) -> Tensor:
            return self.start(checkpoint(self.inner, self.start(x), use_reentrant=True))

    torch.manual_seed(0)
    mesh, alone = make_dp_mesh(), Outer().double()
    model = copy.deepcopy(alone)
    if make is _fully_sharded:
        fully_shard(model.inner, mesh=mesh)
    make(model, mesh)
    for data in torch.randn(2, 2, 3, 4, dtype=torch.float64):
        loss_of(model(make_per_rank_batch(list(data), mesh))).backward()
        loss_of(alone(data.flatten(0, 1))).backward()
        assert_same_gradients(model, alone)


def _check_nested_checkpoints() -> None:
    test_nested_reentrant_checkpoints_equal_plain_model(_fully_sharded)
    test_checkpointing_inside_units_with_interleaved_passes_equals_plain_model(_fully_sharded, True, (1, 0))


@pytest.mark.gloo
def test_nested_reentrant_checkpoints_equal_plain_model_on_process_groups() -> None:
    run_gloo(_check_nested_checkpoints, 2)


class TwoInputBlock(nn.Module):
    """Module with two inputs, of which the second is shared with other modules."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, *, encoded: Tensor) -> Tensor:
        return torch.tanh(self.own(x) + self.other(encoded))


def test_units_that_share_an_input_are_resharded_one_by_one_in_backward() -> None:
    mesh, seen = make_dp_mesh(), []
    start, blocks = nn.Linear(4, 4), [TwoInputBlock() for _ in range(4)]
    for module in (start, *blocks):
        fully_shard(module, mesh=mesh, reshard_after_forward=True)
    x = encoded = start(make_per_rank_batch([torch.ones(2, 4)] * 2, mesh))
    for block in blocks:
        x = block(x * 1, encoded=encoded)
        x.register_hook(lambda _: seen.append(sum(unit_of(b).groups[0].unsharded.is_filled for b in blocks)))
    loss_of(x).backward()
    assert max(seen) <= 2
    assert not any(unit_of(b).groups[0].unsharded.is_filled for b in blocks)


def test_deepcopy_after_forward_trains_independently() -> None:
    mesh, model, alone = make_dp_mesh(), net(), net()
    shard(model, mesh)
    batch = batches(2)[0]
    with torch.no_grad():
        model(make_per_rank_batch(batch, mesh))
    kept = model(make_per_rank_batch(batch, mesh))  # its backward has not run yet
    copied = copy.deepcopy(model)
    loss_of(copied(make_per_rank_batch(batch, mesh))).backward()
    plain_loss(alone, batch).backward()
    assert_same_gradients(copied, alone)
    assert all(p.grad is None for p in model.parameters())
    loss_of(kept).backward()
    assert_same_gradients(model, alone)


def test_unshard_gathers_parameters_and_reshard_restores_the_shards() -> None:
    mesh = make_dp_mesh()
    model = fully_shard(nn.Linear(3, 4), mesh=mesh)
    sharded, expected = model.weight, full_value(model.weight)
    handle = model.unshard(async_op=True)
    assert model.weight is sharded
    handle.wait()
    assert torch.equal(model.weight.shards[1], expected)
    model.reshard()
    assert model.weight is sharded
    with CommDebugMode() as comm:
        model.unshard()
        model(torch.ones(1, 3))
    assert comm.get_comm_counts() == {"all_gather": 1}


def test_register_fsdp_forward_method_unshards_for_another_method() -> None:
    class Encoder(nn.Linear):
        def encode(self, x: Tensor) -> Tensor:
            return x @ self.weight.T

    model = fully_shard(Encoder(3, 4), mesh=make_dp_mesh())
    expected = full_value(model.weight).sum(1)
    register_fsdp_forward_method(model, "encode")
    assert torch.equal(model.encode(torch.ones(1, 3)).shards[0][0], expected)
    other = copy.deepcopy(model)  # the method of the copy uses the copy's parameters
    with torch.no_grad():
        other.weight.mul_(2)
    assert torch.equal(other.encode(torch.ones(1, 3)).shards[0][0], 2 * expected)


def test_parameter_hooks_get_and_change_the_reduced_gradient() -> None:
    model = fully_shard(nn.Linear(3, 2, bias=False), mesh=make_dp_mesh())
    seen: list[Any] = []
    model.weight.register_hook(lambda grad: grad * 2)
    model.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad))
    model(dt.per_rank([torch.ones(1, 3), torch.zeros(1, 3)])).sum().backward()
    (grad,) = seen
    assert full_value(grad).tolist() == [[1.0] * 3] * 2


def test_full_backward_hook_of_unit_gets_the_output_gradient() -> None:
    mesh, model = make_dp_mesh(), fully_shard(nn.Linear(3, 2, bias=False), mesh=make_dp_mesh())
    seen: list[Any] = []
    model.register_full_backward_hook(lambda _, grad_input, grad_output: seen.append(grad_output))
    x = dt.distribute_tensor(torch.ones(2, 3), mesh, [Shard(0)]).requires_grad_()
    model(x).sum().backward()
    assert full_value(seen[0][0]).tolist() == [[1.0] * 2] * 2


def test_averaged_deepcopy_of_model_trains_independently() -> None:
    mesh = make_dp_mesh()
    model = shard(net(), mesh)
    loss_of(model(make_per_rank_batch(batches(2)[0], mesh))).backward()
    average = copy.deepcopy(model)
    assert isinstance(average, FSDPModule)
    with torch.no_grad():
        for a, p in zip(average.parameters(), model.parameters(), strict=True):
            a.lerp_(p * 2, 0.5)
    before = loss_of(model(make_per_rank_batch(batches(2)[0], mesh)))
    after = loss_of(average(make_per_rank_batch(batches(2)[0], mesh)))
    assert before.detach().shards[0].item() != after.detach().shards[0].item()
    after.backward()
    assert average.head.weight.grad is not model.head.weight.grad


def test_state_dict_has_sharded_parameters_and_loads_into_another_model() -> None:
    mesh = make_dp_mesh()
    model, other = shard(net(), mesh), shard(Net().double(), mesh)
    state = model.state_dict()
    assert all(isinstance(value, DTensor) for value in state.values())
    other(make_per_rank_batch(batches(2)[0], mesh))
    other.load_state_dict(state)
    torch.testing.assert_close(
        other(make_per_rank_batch(batches(2)[0], mesh)).shards[0], model(make_per_rank_batch(batches(2)[0], mesh)).shards[0]
    )


def test_forward_without_gradients_frees_unsharded_parameters() -> None:
    mesh = make_dp_mesh()
    model = shard(net(), mesh)
    with torch.no_grad():
        first = model(make_per_rank_batch(batches(2)[0], mesh))
    assert not any(unit_of(m).groups[0].unsharded.is_filled for m in (model, *model.layers))
    assert torch.equal(first.shards[0], net()(batches(2)[0][0]))


def test_parameter_write_between_forward_and_backward_raises() -> None:
    mesh = make_dp_mesh()
    model = shard(net(), mesh)
    loss = loss_of(model(make_per_rank_batch(batches(2)[0], mesh)))
    with torch.no_grad():
        model.layers[2][0].weight.mul_(2)
    with pytest.raises(DTensorError, match="written to in between"):
        loss.backward()


def test_meta_parameters_are_initialized_shard_by_shard() -> None:
    mesh = make_dp_mesh()
    with torch.device("meta"):
        model = shard(Net(), mesh)
    assert all(p.is_meta and isinstance(p, DTensor) for p in model.parameters())
    model.to_empty(device="cpu")
    torch.manual_seed(3)
    for layer in model.layers:
        for i in (0, 2):
            layer[i].reset_parameters()
    torch.manual_seed(3)
    for layer in model.layers:
        for i in (0, 2):
            expected = nn.Linear(layer[i].in_features, layer[i].out_features)
            torch.testing.assert_close(full_value(layer[i].weight), expected.weight.detach())
            torch.testing.assert_close(full_value(layer[i].bias), expected.bias.detach())
    with torch.no_grad():
        for p in (model.embedding.weight, model.scale, model.head.weight):
            p.fill_(0.5)
    model(make_per_rank_batch(batches(2)[0], mesh)).sum().backward()
    assert model.head.weight.grad is not None


# --- errors -------------------------------------------------------------------------------------------------------------
def test_invalid_fully_shard_calls_raise() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("a", "b", "c"))
    with pytest.raises(MeshError, match=r"takes a mesh of one dim .sharded., or of two"):
        fully_shard(nn.Linear(2, 2), mesh=mesh)
    other = dt.DeviceMesh("cpu", [4, 5], mesh_dim_names=("tp",))
    with pytest.raises(MeshError, match="slice both from one"):
        fully_shard(parallelize_module(nn.Linear(2, 2), other, ColwiseParallel()), mesh=make_dp_mesh())
    with pytest.raises(MeshError, match="already"):
        fully_shard(parallelize_module(nn.Linear(2, 2), make_dp_mesh(), ColwiseParallel()), mesh=make_dp_mesh())
    with pytest.raises(ValueError, match="reshard_after_forward"):
        fully_shard(nn.Linear(2, 2), mesh=make_dp_mesh(), reshard_after_forward="all")


def _local_elements(make: Callable[[], nn.Module]) -> int:
    return sum(p.to_local().shards[0].numel() for p in make().parameters())


def test_rank_stores_its_share_of_the_parameters() -> None:
    full = sum(p.numel() for p in net().parameters())
    assert (
        _local_elements(lambda: shard(net(), make_dp_mesh(4))) <= full / 4 + 5 * 12
    )  # uneven dims add at most one row for each parameter


@pytest.mark.parametrize(
    "make", [lambda m, mesh: [fully_shard(x, mesh=mesh) for x in (*m, m)], lambda m, mesh: replicate(m, mesh)]
)
@pytest.mark.parametrize("used", [False, True], ids=["before the first pass", "after one"])
def test_double_after_fully_shard_or_replicate_gives_float64_gradients(make: Callable[[Any, Any], Any], used: bool) -> None:
    mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 5))
    alone = copy.deepcopy(model).double()
    make(model, mesh)
    batch = torch.randn(4, 3, dtype=torch.float64)
    if used:
        model(dt.per_rank(batch.float().chunk(2))).sum().backward()
        model.zero_grad()
    model.double()
    model(dt.per_rank(batch.chunk(2))).square().mean().backward()
    alone(batch).square().mean().backward()
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert ours.dtype == ours.grad.dtype == torch.float64
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


def test_forward_uses_each_kind_of_parameter_change() -> None:
    mesh = make_dp_mesh(2)
    layer = fully_shard(nn.Linear(4, 4, bias=False).double(), mesh=mesh)
    batch = dt.per_rank([torch.eye(4, dtype=torch.float64)] * 2)

    def seen() -> Tensor:
        return torch.cat(layer(batch).shards)

    def new(value: float) -> Any:
        return dt.distribute_tensor(torch.full((4, 4), value, dtype=torch.float64), mesh, [Shard(0)])

    weight: Any = layer.weight
    with torch.no_grad():
        weight.fill_(1.0)  # written to
        assert seen().eq(1).all()
        weight._local.add_(1.0)  # written through its local tensors
        assert seen().eq(2).all()
        weight.data = new(3.0)  # other memory
        assert seen().eq(3).all()
        weight._local = new(4.0)._local  # other local tensors
        assert seen().eq(4).all()
        layer.load_state_dict({"weight": new(5.0)}, assign=True)  # another parameter
        assert seen().eq(5).all()
        layer.weight.mul_(2.0)
        assert seen().eq(10).all()
