"""Communication of fully sharded modules, and its settings: in one process and on process groups."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare_with_one_device import assert_same_gradients, full_value, make_dp_mesh, make_per_rank_batch
from gloo_processes import run_gloo
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, bf16_compress_hook

import dtensor as dt
from dtensor.comm.in_process import InProcess
from dtensor.debug import CommDebugMode
from dtensor.errors import DTensorError, MeshError, UnsupportedOperationError
from dtensor.parallel import (
    AllGather,
    CPUOffloadPolicy,
    DataParallelMeshDims,
    FSDPModule,
    MixedPrecisionPolicy,
    ReduceScatter,
    ZeroRedundancyOptimizer,
    fully_shard,
    materialize,
    replicate,
    share_comm_ctx,
)
from dtensor.parallel.data.units.unit import unit_of
from dtensor.redistribute.flat_buffer import FlatBuffer

X = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()


def make_sharded(mesh: dt.DeviceMesh, **options: Any) -> Any:
    model = net()
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def rows(mesh: dt.DeviceMesh) -> Tensor:
    """Return the rows of each rank."""
    return make_per_rank_batch(X.chunk(mesh.size()), mesh)


def gradients(model: nn.Module) -> list[Tensor]:
    return [full_value(p.grad) for p in model.parameters()]


def plain_gradients(parts: int) -> list[Tensor]:
    model = net()
    (sum((model(x) ** 2).sum() for x in X.chunk(parts)) / parts).backward()
    return gradients(model)


def step(model: nn.Module, mesh: dt.DeviceMesh) -> list[Tensor]:
    (model(rows(mesh)) ** 2).sum().backward()
    return gradients(model)


def assert_same(ours: list[Tensor], theirs: list[Tensor]) -> None:
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b)


def sums(grads: list[Tensor]) -> list[float]:
    return [x.sum().item() for x in grads]


# --- reshard_after_forward=n: groups of ranks that keep one copy -------------------------------------------------------
def _train_with_reshard_group(shape: tuple[int, ...], names: tuple[str, ...], dims: tuple[str, ...], size: int) -> list[float]:
    mesh = dt.init_device_mesh("cpu", shape, mesh_dim_names=names)[dims]
    model, plain = make_sharded(mesh, reshard_after_forward=size), make_sharded(mesh, reshard_after_forward=True)
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        for ours, theirs in zip(step(model, mesh), step(plain, mesh), strict=True):
            assert torch.equal(ours, theirs)
    assert_same(gradients(model), plain_gradients(mesh.size()))
    return sums(gradients(model))


SHAPES = [((4,), ("dp",), ("dp",), 2), ((2, 4), ("out", "in"), ("out", "in"), 2), ((4, 2), ("dp", "tp"), ("dp",), 2)]


@pytest.mark.parametrize(("shape", "names", "dims", "size"), [*SHAPES, ((6,), ("dp",), ("dp",), 3)])
def test_reshard_after_forward_to_a_smaller_group_equals_full_reshard(shape: Any, names: Any, dims: Any, size: int) -> None:
    _train_with_reshard_group(shape, names, dims, size)


@pytest.mark.gloo
def test_reshard_to_a_smaller_group_equals_full_reshard_on_process_groups() -> None:
    case = ((4,), ("dp",), ("dp",), 2)
    for there in run_gloo(_train_with_reshard_group, 4, *case):
        assert there == pytest.approx(_train_with_reshard_group(*case), rel=1e-12)


def test_reshard_group_stores_a_shard_and_gathers_fewer_bytes_in_backward() -> None:
    mesh = make_dp_mesh(4)
    model = make_sharded(mesh, reshard_after_forward=2)
    loss = (model(rows(mesh)) ** 2).sum()
    group = unit_of(model[2]).groups[0]
    assert group.unsharded.buffer.shards[0].untyped_storage().nbytes() == 0
    assert [x.numel() for x in group.unsharded.resharded_part[1].shards] == [(5 * 7 + 7) * 8 // 2] * 4
    with CommDebugMode() as comm:
        loss.backward()
    assert comm.get_comm_counts()["all_gather"] == 3
    assert comm.get_comm_bytes()["all_gather"] == sum((i * o + o) * 8 // 2 for i, o in ((3, 5), (5, 7), (7, 2)))
    assert group.unsharded.resharded_part is None
    with torch.no_grad():
        before = model(rows(mesh))
        model[0].weight.mul_(2)  # invalidates the kept shards
        assert not torch.equal(model(rows(mesh)).shards[0], before.shards[0])
    model.set_reshard_after_forward(True)
    model.zero_grad()
    step(model, mesh)
    assert group.unsharded.resharded_part is None


def test_reshard_after_forward_takes_divisors_of_the_number_of_ranks() -> None:
    mesh = make_dp_mesh(4)
    assert unit_of(fully_shard(nn.Linear(2, 2), mesh=mesh, reshard_after_forward=1)).keep_after_forward is True
    whole = unit_of(fully_shard(nn.Linear(2, 2), mesh=mesh, reshard_after_forward=4))
    assert (whole.keep_after_forward, whole.groups[0].reshard_group) == (False, None)
    for number in (0, 3, 8):
        with pytest.raises(ValueError, match="must divide the 4 ranks"):
            fully_shard(nn.Linear(2, 2), mesh=mesh, reshard_after_forward=number)
    with pytest.raises(ValueError, match="takes True or False"):
        fully_shard(nn.Linear(2, 2), mesh=mesh).set_reshard_after_forward(2)


# --- units that backward does not gather ---------------------------------------------------------------------------------
class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.out = nn.Embedding(6, 4).double(), nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table(x).tanh())


def test_set_unshard_in_backward_false_skips_the_all_gather() -> None:
    mesh, counts, results = make_dp_mesh(), [], []
    for gathers in (True, False):
        torch.manual_seed(0)
        model = Tokens()
        for part in (model.table, model.out, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        model.table.set_unshard_in_backward(gathers)
        loss = model(dt.map_ranks(lambda at: torch.tensor([1, 4, 1 + at[0]]), mesh=mesh)).square().sum()
        with CommDebugMode() as comm:
            loss.backward()
        counts.append(comm.get_comm_counts()["all_gather"])
        results.append(gradients(model))
    assert counts == [2, 1]
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_backward_that_needs_a_unit_without_unshard_raises() -> None:
    mesh = make_dp_mesh()
    model = make_sharded(mesh, reshard_after_forward=True)
    model[2].set_unshard_in_backward(False)
    loss = (model(rows(mesh)) ** 2).sum()
    with pytest.raises(DTensorError, match=r"a view of one, of shape \(5, 7\)|a view of one, of shape \(7, 5\)"):
        loss.backward()
    model[2].set_unshard_in_backward(True)
    model.reset_iter_state()
    model.zero_grad()
    assert_same(step(model, mesh), plain_gradients(2))


# --- hooks, sums, divisors ---------------------------------------------------------------------------------------------
def _train_with_hook(shape: tuple[int, ...], sums_only: bool) -> list[float]:
    mesh = dt.init_device_mesh("cpu", shape, mesh_dim_names=("out", "in")[-len(shape) :])
    model, seen = make_sharded(mesh), []

    def hook(flat: Tensor) -> None:
        seen.append(sum(x.sum().item() for x in (flat.shards if isinstance(flat, dt.PerRank) else [flat])))
        flat.mul_(2)

    for layer in model[::2]:
        layer.set_all_reduce_hook(hook)
        layer.set_force_sum_reduction_for_comms(sums_only)
    grads, ranks = step(model, mesh), mesh.size()
    expected = plain_gradients(ranks)
    assert_same(grads, [2 * x for x in expected])
    if not dist.is_initialized() and len(shape) == 1:
        first = sum(x.sum().item() for x in expected[4:])
        assert seen[0] == pytest.approx(first * (ranks if sums_only else 1))
    assert len(seen) == 3
    return sums(grads)


@pytest.mark.parametrize("sums_only", [False, True])
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_all_reduce_hook_gets_and_changes_reduced_gradients(shape: tuple[int, ...], sums_only: bool) -> None:
    _train_with_hook(shape, sums_only)


@pytest.mark.gloo
def test_all_reduce_hook_changes_reduced_gradients_on_process_groups() -> None:
    for shape in ((3,), (2, 2)):
        here = _train_with_hook(shape, True)
        for there in run_gloo(_train_with_hook, torch.Size(shape).numel(), shape, True):
            assert there == pytest.approx(here, rel=1e-12)


def test_force_sum_reduction_issues_sums_in_place_of_averages() -> None:
    mesh = make_dp_mesh(3)
    plain, summing = make_sharded(mesh), make_sharded(mesh)
    for layer in summing[::2]:
        layer.set_force_sum_reduction_for_comms(True)
    comm = unit_of(plain[0]).groups[0].comm
    asked: list[Any] = []
    bind_scatter = comm.bind_row_reduce_scatter

    def bound(dims: Any, lengths_of: Any, op: str, *rest: Any) -> Any:
        run = bind_scatter(dims, lengths_of, op, *rest)
        return lambda row: asked.append(op) or run(row)

    comm.bind_row_reduce_scatter = bound
    try:
        assert_same(step(summing, mesh), plain_gradients(3))
        assert_same(step(plain, mesh), plain_gradients(3))
    finally:
        del comm.bind_row_reduce_scatter
    assert asked == ["sum"] * 3 + ["avg"] * 3
    with pytest.warns(FutureWarning, match="use set_gradient_divide_factor"):
        summing[0].set_reduce_scatter_divide_factor(1.0)
    summing.zero_grad()
    expected = plain_gradients(3)
    assert_same(step(summing, mesh)[:2], [3 * x for x in expected[:2]])


@pytest.mark.parametrize("way", ["fully_shard", "replicate", "zero"])
def test_second_training_step_creates_no_collectives_or_buffers(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = make_dp_mesh(3)
    model: Any = make_sharded(mesh) if way == "fully_shard" else replicate(net(), mesh)
    optimizer: Any = (
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
        if way == "zero"
        else torch.optim.SGD(model.parameters(), lr=0.1)
    )

    def train() -> None:
        model(rows(mesh)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    made: list[str] = []
    train()  # after this step all plans are cached
    for at, name in (
        (InProcess, "_make_transfer"),
        (InProcess, "_make_reduce_scatter"),
        (InProcess, "_make_all_reduce"),
        (FlatBuffer, "from_layouts"),
    ):
        monkeypatch.setattr(at, name, lambda *args, name=name: made.append(name))
    train()
    assert not made


# --- custom all-gather and reduce-scatter -------------------------------------------------------------------------------
class RecordsAllocations:
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.sizes.append(size[0])
        return torch.empty(*size, dtype=dtype, device=device)


class CustomAllGather(RecordsAllocations, AllGather):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> dist.Work | None:
        self.calls, self.dtype = self.calls + 1, input_tensor.dtype
        if group is not None:
            pieces = list(output_tensor.chunk(dist.get_world_size(group)))
            return dist.all_gather(pieces, input_tensor, group=group, async_op=async_op)
        for out in output_tensor.shards:
            torch.cat(input_tensor.shards, out=out)
        return None


class CustomReduceScatter(RecordsAllocations, ReduceScatter):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False) -> dist.Work | None:
        self.calls += 1
        if group is not None:
            whole = input_tensor.clone()
            dist.all_reduce(whole, op, group=group)
            output_tensor.copy_(whole.chunk(dist.get_world_size(group))[dist.get_rank(group)])
            return None
        total = sum(input_tensor.shards)
        for k, out in enumerate(output_tensor.shards):
            out.copy_(total.chunk(len(output_tensor.shards))[k] / (len(output_tensor.shards) if op == dist.ReduceOp.AVG else 1))
        return None


def _train_with_custom_collectives(size: int, sums_only: bool) -> list[float]:
    mesh = make_dp_mesh(size)
    model, gathering, scattering = make_sharded(mesh, reshard_after_forward=True), CustomAllGather(), CustomReduceScatter()
    model[2].set_custom_all_gather(gathering)
    model[2].set_custom_reduce_scatter(scattering)
    model[2].set_force_sum_reduction_for_comms(sums_only)
    with CommDebugMode() as comm:
        grads = step(model, mesh)
    counts = dict(comm.get_comm_counts())
    assert counts["reduce_scatter"] == 3  # as without custom collectives
    assert not comm.get_direct_counts()
    assert_same(grads, plain_gradients(size))
    assert (gathering.calls, gathering.dtype, scattering.calls) == (2, torch.float64, 1)
    assert max(gathering.sizes) == size * min(gathering.sizes)
    with pytest.raises(DTensorError, match="allocates its own memory"):
        model[2].set_allocate_memory_from_process_group_for_comm(True)
    return sums(grads)


@pytest.mark.own_collectives
@pytest.mark.parametrize("sums_only", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_custom_all_gather_and_reduce_scatter_are_called_by_their_unit(size: int, sums_only: bool) -> None:
    _train_with_custom_collectives(size, sums_only)


@pytest.mark.own_collectives
@pytest.mark.gloo
def test_custom_collectives_are_called_by_their_unit_on_process_groups() -> None:
    for there in run_gloo(_train_with_custom_collectives, 3, 3, True):
        assert there == pytest.approx(_train_with_custom_collectives(3, True), rel=1e-12)


@pytest.mark.own_collectives
def test_custom_all_gather_of_mixed_dtypes_gets_bytes() -> None:
    mesh, gathering = make_dp_mesh(), CustomAllGather()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
    fully_shard(model, mesh=mesh).set_custom_all_gather(gathering)
    with torch.no_grad():
        model.unshard()
    assert gathering.dtype is torch.uint8
    half = fully_shard(nn.Linear(3, 3), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    half.set_custom_all_gather(gathering)
    half(local_ones(mesh))
    assert gathering.dtype is torch.bfloat16


def local_ones(mesh: dt.DeviceMesh) -> Tensor:
    return dt.map_ranks(lambda at: torch.ones(2, 3), mesh=mesh)


def _train_with_settings(size: int) -> list[float]:
    mesh = make_dp_mesh(size)
    model = make_sharded(mesh)
    with pytest.warns(UserWarning, match="does not provide memory"):
        model[0].set_allocate_memory_from_process_group_for_comm(True)
    model[0].set_allocate_memory_from_process_group_for_comm(False)
    model.set_separate_reduce_scatter_group()
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_post_optim_event(torch.Event("cpu"))
    share_comm_ctx([model, model[0]])
    grads = step(model, mesh)
    assert_same(grads, plain_gradients(size))
    assert unit_of(model).post_optim_event is None
    reductions = {id(g.settings.reduce_scatter_comm) for m in model[::2] for g in unit_of(m).groups}
    assert len(reductions) == 1
    model.set_separate_reduce_scatter_group(False)
    return sums(grads)


def test_settings_without_effect_keep_gradients_and_invalid_ones_raise() -> None:
    _train_with_settings(3)
    model = make_sharded(make_dp_mesh())
    with pytest.raises(UnsupportedOperationError, match="symmetric memory"):
        model.set_symm_mem_for_comm()
    with pytest.raises(ValueError, match="is not a unit"):
        share_comm_ctx([nn.Linear(2, 2)])
    with pytest.raises(TypeError, match="a number of units"):
        model.set_reduce_scatter_max_input_buffers(True)
    with pytest.raises(ValueError, match="at least 1"):
        model.set_reduce_scatter_max_input_buffers(0)
    with pytest.raises(TypeError, match=r"a torch\.Event"):
        model.set_post_optim_event(3)


@pytest.mark.gloo
def test_settings_without_effect_keep_gradients_on_process_groups() -> None:
    for there in run_gloo(_train_with_settings, 3, 3):
        assert there == pytest.approx(_train_with_settings(3), rel=1e-12)


# --- errors, copies and unused parameters -------------------------------------------------------------------------------
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_step_after_failed_pass_and_reset_iter_state_equals_plain_model(place: str) -> None:
    mesh = make_dp_mesh()
    model = make_sharded(mesh, reshard_after_forward=True)
    model.set_requires_gradient_sync(False)
    step_held = (model(rows(mesh)) ** 2).sum()
    step_held.backward()
    model.set_requires_gradient_sync(True)
    failing = itertools.count()

    def fail(*_: Any) -> None:
        if next(failing) == 0:
            raise ZeroDivisionError

    def fail_later(module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(fail)

    where = model[2].register_forward_pre_hook(fail) if place == "forward" else model[2].register_forward_hook(fail_later)
    with pytest.raises(ZeroDivisionError):
        (model(rows(mesh)) ** 2).sum().backward()
    where.remove()
    with pytest.raises(RuntimeError, match="must be called on the outermost unit"):
        model[0].reset_iter_state()
    model.reset_iter_state()
    model.zero_grad()
    assert_same(step(model, mesh), plain_gradients(2))


def test_forward_with_meta_parameters_raises_with_their_names() -> None:
    mesh = make_dp_mesh()
    with torch.device("meta"):
        model = net()
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    with pytest.raises(
        RuntimeError, match=r"still on the meta device.*: 0\.weight, 0\.bias, 2\.weight, 2\.bias, 4\.weight, 4\.bias"
    ):
        model(rows(mesh))
    materialize(model, init=lambda m: [nn.init.ones_(p) for p in m._parameters.values() if p is not None])
    model.double()
    model(rows(mesh))


def test_fully_shard_of_module_containers_raises() -> None:
    for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
        with pytest.raises(ValueError, match="without a forward of its own"):
            fully_shard(container, mesh=make_dp_mesh())


def test_slice_of_fully_sharded_sequential_is_a_plain_sequential() -> None:
    mesh = make_dp_mesh()
    model = make_sharded(mesh)
    part = model[:2]
    assert type(part) is nn.Sequential
    assert isinstance(part[0], FSDPModule)
    assert part(rows(mesh)).shape == (12, 5)


def test_deepcopy_keeps_the_gradient_divide_factor() -> None:
    mesh = make_dp_mesh()
    model = make_sharded(mesh)
    for layer in model[::2]:
        layer.set_gradient_divide_factor(1.0)
    assert_same(step(copy.deepcopy(model), mesh), [2 * x for x in plain_gradients(2)])


class Branches(nn.Module):
    """Layers of which only those in ``used`` get gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4)).double()

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        for k, layer in enumerate(self.layers):
            y = layer(x).tanh()
            x = x + (y if k in used else y.detach())
        return x


def _train_with_different_units(steps: int) -> list[float]:
    mesh, all_used = make_dp_mesh(3), [(0, 1, 3), (3,), (0, 3)]
    model, plain = Branches(), Branches()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh).set_reduce_scatter_unused_params(True)
    rank = dist.get_rank()
    for _ in range(steps):
        (model(X.chunk(3)[rank], all_used[rank]) ** 2).sum().backward()
    for part, used in zip(X.chunk(3), all_used, strict=True):
        ((plain(part, used) ** 2).sum() * steps / 3).backward()
    assert_same_gradients(model, plain)
    return []


@pytest.mark.gloo
def test_ranks_that_use_different_units_equal_plain_model_on_process_groups() -> None:
    run_gloo(_train_with_different_units, 3, 2, timeout_s=60.0)


def test_reduce_scatter_unused_params_gives_gradients_of_plain_model() -> None:
    mesh = make_dp_mesh()
    model = make_sharded(mesh, reshard_after_forward=True)
    model.set_reduce_scatter_unused_params(True)
    for _ in range(2):
        with CommDebugMode() as comm:
            grads = step(model, mesh)
        assert comm.get_comm_counts()["reduce_scatter"] == 3
        assert_same(grads, plain_gradients(2))
        model.zero_grad()
    model.set_requires_gradient_sync(False)
    (model(rows(mesh)) ** 2).sum().backward()
    model.set_requires_gradient_sync(True)
    assert_same(step(model, mesh), [2 * x for x in plain_gradients(2)])


class TwoHalves(nn.Module):
    """Model of two halves, where the second can start from a detached leaf, so that backward runs in two passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = net(), nn.Linear(2, 3).double()

    def forward(self, x: Tensor, parts: bool) -> tuple[Tensor, Tensor, Tensor]:
        middle = self.first(x)
        given = middle.detach().requires_grad_() if parts else middle
        return self.second(given), given, middle


def _backward_of_halves(model: nn.Module, x: Tensor, way: str) -> None:
    loss, given, middle = model(x, way == "at a leaf")
    if way == "at a leaf":
        (loss**2).sum().backward()
        middle.backward(given.grad)
    elif way == "two losses":
        (loss**2).sum().backward(retain_graph=True)
        (middle**3).sum().backward()
    else:
        ((loss**2).sum() + (middle**3).sum()).backward()


@pytest.mark.parametrize("way", ["at a leaf", "two losses", "one backward"])
@pytest.mark.parametrize("kind", ["plain", "defers", "accumulates", "replicates"])
def test_backward_in_two_passes_equals_plain_torch(kind: str, way: str) -> None:
    _compare_halves(kind, way)


@pytest.mark.gloo
def test_backward_in_two_passes_equals_plain_torch_on_process_groups() -> None:
    run_gloo(_compare_all_halves, 2)


def _compare_all_halves() -> None:
    for kind in ("plain", "defers", "accumulates", "replicates"):
        for way in ("at a leaf", "two losses"):
            _compare_halves(kind, way)


def _compare_halves(kind: str, way: str) -> None:
    mesh = make_dp_mesh()
    torch.manual_seed(3)
    model, rounds = TwoHalves(), 2
    plain = copy.deepcopy(model)
    if kind == "replicates":
        replicate(model, mesh, bucket_cap_mb=1e-4)
    else:
        for part in (model.first[0], model.first[2], model.second):
            fully_shard(part, mesh=mesh, reshard_after_forward=True)
        fully_shard(model, mesh=mesh)
    if kind == "defers":
        model.set_reduce_scatter_unused_params(True)
    for turn in range(rounds):
        if kind in ("accumulates", "replicates"):
            model.set_requires_gradient_sync(turn == rounds - 1)
        _backward_of_halves(model, rows(mesh), way)
        for x in X.chunk(2):
            _backward_of_halves(plain, x, way)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad / 2)


# --- replicated modules --------------------------------------------------------------------------------------------------
def _train_with_comm_hooks(size: int) -> list[float]:
    mesh, results = make_dp_mesh(size), []
    hooks: list[Any] = [allreduce_hook, bf16_compress_hook] if dist.is_initialized() else [_average_in_process]
    for hook in hooks:
        model = replicate(net(), mesh, bucket_cap_mb=0.0001)
        seen: list[tuple[Any, ...]] = []

        def noting(state: Any, bucket: Any, hook: Any = hook, seen: list[Any] = seen) -> Any:
            shapes = [tuple(x.shape) for x in bucket.gradients()]
            seen.append((bucket.index(), bucket.is_last(), shapes, len(bucket.parameters())))
            return hook(state, bucket)

        model.register_comm_hook(None, noting)
        grads = step(model, mesh)
        for ours, theirs in zip(grads, plain_gradients(size), strict=True):
            torch.testing.assert_close(ours, theirs, **({"rtol": 3e-2, "atol": 3e-2} if hook is bf16_compress_hook else {}))
        assert [index for index, *_ in seen] == list(range(len(seen)))
        assert [last for _, last, *_ in seen] == [False] * (len(seen) - 1) + [True]
        assert [shape for _, _, shapes, _ in seen for shape in shapes] == [(2,), (2, 7), (7,), (7, 5), (5,), (5, 3)]
        results.append(grads)
    return sums(results[0])


def _average_in_process(state: None, bucket: Any) -> torch.futures.Future[Any]:
    mean = sum(bucket.buffer().shards) / len(bucket.buffer().shards)
    done: torch.futures.Future[Any] = torch.futures.Future()
    done.set_result(dt.per_rank([mean.clone() for _ in bucket.buffer().shards]))
    return done


def test_comm_hook_of_replicate_is_called_with_each_gradient_bucket() -> None:
    _train_with_comm_hooks(3)
    mesh = make_dp_mesh()
    model = replicate(net(), mesh)
    model.register_comm_hook(None, _average_in_process)
    loss = model(dt.distribute_tensor(X, mesh, [dt.Shard(0)])).sum()
    with pytest.raises(DTensorError, match="are summed"):
        loss.backward()
    with pytest.raises(TypeError, match="a function of a state and a bucket"):
        model.register_comm_hook(None, 3)


@pytest.mark.gloo
def test_comm_hooks_of_torch_average_gradients_on_process_groups() -> None:
    for there in run_gloo(_train_with_comm_hooks, 2, 2):
        assert there == pytest.approx(_train_with_comm_hooks(2), rel=1e-12)


def test_gradient_settings_of_replicated_modules_take_effect() -> None:
    mesh = make_dp_mesh()
    model = replicate(net(), mesh, find_unused_parameters=True, static_graph=True)
    assert isinstance(model, FSDPModule)
    model.set_force_sum_reduction_for_comms(True)
    model.set_all_reduce_hook(lambda flat: flat.mul_(3))
    assert_same(step(model, mesh), [3 * x for x in plain_gradients(2)])
    model.zero_grad()
    model.set_requires_all_reduce(False)
    (model(rows(mesh)) ** 2).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    model.set_requires_all_reduce(True)
    assert_same(step(model, mesh), [6 * x for x in plain_gradients(2)])
    for refused in (model.set_custom_all_gather, model.set_custom_reduce_scatter):
        with pytest.raises(UnsupportedOperationError, match="replicated module"):
            refused(CustomAllGather())


def test_replicate_with_dp_mesh_dims_replicates_over_the_named_dim() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
    model = replicate(net(), mesh, dp_mesh_dims=DataParallelMeshDims(replicate="dp"), offload_policy=CPUOffloadPolicy())
    assert model[0].weight.device_mesh == mesh["dp"]
    assert_same(step(model, mesh["dp"]), plain_gradients(2))
    with pytest.raises(MeshError, match="needs replicate= and no shard="):
        replicate(net(), mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def test_replicate_without_broadcast_buffers_keeps_per_rank_buffers() -> None:
    mesh = make_dp_mesh()
    model = replicate(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double(), mesh, broadcast_buffers=False)
    model(rows(mesh)).sum().backward()
    here = model[1].running_mean
    assert isinstance(here, dt.PerRank)
    assert not torch.equal(*here.shards)
