"""How fully sharded modules communicate, and what may be set of it: in one process and on process groups."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from compare_with_one_device import dp, own, same_gradients, whole
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
from dtensor.parallel.data.unit import unit_of
from dtensor.redistribute.flat_buffer import FlatRows

X = torch.randn(24, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()


def wrapped(mesh: dt.DeviceMesh, **options: Any) -> Any:
    model = net()
    for layer in (model[0], model[2], model[4]):
        fully_shard(layer, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, **options)


def rows(mesh: dt.DeviceMesh) -> Tensor:
    """Of each rank."""
    return own(X.chunk(mesh.size()), mesh)


def gradients(model: nn.Module) -> list[Tensor]:
    return [whole(p.grad) for p in model.parameters()]


def alone(parts: int) -> list[Tensor]:
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


# --- a number of neighbours that keep parts between forward and backward -----------------------------------------------
def _neighbours(shape: tuple[int, ...], names: tuple[str, ...], dims: tuple[str, ...], size: int) -> list[float]:
    mesh = dt.init_device_mesh("cpu", shape, mesh_dim_names=names)[dims]
    model, plain = wrapped(mesh, reshard_after_forward=size), wrapped(mesh, reshard_after_forward=True)
    for _ in range(2):
        model.zero_grad()
        plain.zero_grad()
        for ours, theirs in zip(step(model, mesh), step(plain, mesh), strict=True):
            assert torch.equal(ours, theirs)
    assert_same(gradients(model), alone(mesh.size()))
    return sums(gradients(model))


SHAPES = [((4,), ("dp",), ("dp",), 2), ((2, 4), ("out", "in"), ("out", "in"), 2), ((4, 2), ("dp", "tp"), ("dp",), 2)]


@pytest.mark.parametrize(("shape", "names", "dims", "size"), [*SHAPES, ((6,), ("dp",), ("dp",), 3)])
def test_neighbours_gather_what_they_kept(shape: Any, names: Any, dims: Any, size: int) -> None:
    _neighbours(shape, names, dims, size)


@pytest.mark.gloo
def test_neighbours_on_process_groups() -> None:
    case = ((4,), ("dp",), ("dp",), 2)
    for there in run_gloo(_neighbours, 4, *case):
        assert there == pytest.approx(_neighbours(*case), rel=1e-12)


def test_a_part_is_kept_and_few_bytes_are_gathered() -> None:
    mesh = dp(4)
    model = wrapped(mesh, reshard_after_forward=2)
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
        model[0].weight.mul_(2)  # what was kept is of no use then
        assert not torch.equal(model(rows(mesh)).shards[0], before.shards[0])
    model.set_reshard_after_forward(True)
    model.zero_grad()
    step(model, mesh)
    assert group.unsharded.resharded_part is None


def test_numbers_that_mean_all_or_nothing_and_such_as_do_not_fit() -> None:
    mesh = dp(4)
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


def test_an_embedding_is_not_gathered_in_backward() -> None:
    mesh, counts, results = dp(), [], []
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


def test_a_backward_that_needs_what_is_not_gathered_says_so() -> None:
    mesh = dp()
    model = wrapped(mesh, reshard_after_forward=True)
    model[2].set_unshard_in_backward(False)
    loss = (model(rows(mesh)) ** 2).sum()
    with pytest.raises(DTensorError, match=r"a view of one, of shape \(5, 7\)|a view of one, of shape \(7, 5\)"):
        loss.backward()
    model[2].set_unshard_in_backward(True)
    model.reset_iter_state()
    model.zero_grad()
    assert_same(step(model, mesh), alone(2))


# --- hooks, sums, divisors ---------------------------------------------------------------------------------------------
def _hooked(shape: tuple[int, ...], sums_only: bool) -> list[float]:
    mesh = dt.init_device_mesh("cpu", shape, mesh_dim_names=("out", "in")[-len(shape) :])
    model, seen = wrapped(mesh), []

    def hook(flat: Tensor) -> None:
        seen.append(sum(x.sum().item() for x in (flat.shards if isinstance(flat, dt.PerRank) else [flat])))
        flat.mul_(2)

    for layer in model[::2]:
        layer.set_all_reduce_hook(hook)
        layer.set_force_sum_reduction_for_comms(sums_only)
    grads, ranks = step(model, mesh), mesh.size()
    expected = alone(ranks)
    assert_same(grads, [2 * x for x in expected])
    if not dist.is_initialized() and len(shape) == 1:
        first = sum(x.sum().item() for x in expected[4:])
        assert seen[0] == pytest.approx(first * (ranks if sums_only else 1))
    assert len(seen) == 3
    return sums(grads)


@pytest.mark.parametrize("sums_only", [False, True])
@pytest.mark.parametrize("shape", [(2,), (3,), (2, 2)])
def test_a_hook_sees_and_changes_reduced_gradients(shape: tuple[int, ...], sums_only: bool) -> None:
    _hooked(shape, sums_only)


@pytest.mark.gloo
def test_a_hook_on_process_groups() -> None:
    for shape in ((3,), (2, 2)):
        here = _hooked(shape, True)
        for there in run_gloo(_hooked, torch.Size(shape).numel(), shape, True):
            assert there == pytest.approx(here, rel=1e-12)


def test_sums_only_means_that_nothing_else_is_asked_of_collectives() -> None:
    mesh = dp(3)
    plain, summing = wrapped(mesh), wrapped(mesh)
    for layer in summing[::2]:
        layer.set_force_sum_reduction_for_comms(True)
    comm = unit_of(plain[0]).groups[0].comm
    asked: list[Any] = []
    bind_scatter = comm.bind_scatter

    def bound(dims: Any, lengths_of: Any, op: str, *rest: Any) -> Any:
        run = bind_scatter(dims, lengths_of, op, *rest)
        return lambda row: asked.append(op) or run(row)

    comm.bind_scatter = bound
    try:
        assert_same(step(summing, mesh), alone(3))
        assert_same(step(plain, mesh), alone(3))
    finally:
        del comm.bind_scatter
    assert asked == ["sum"] * 3 + ["avg"] * 3
    with pytest.warns(FutureWarning, match="use set_gradient_divide_factor"):
        summing[0].set_reduce_scatter_divide_factor(1.0)
    summing.zero_grad()
    expected = alone(3)
    assert_same(step(summing, mesh)[:2], [3 * x for x in expected[:2]])


@pytest.mark.parametrize("way", ["fully_shard", "replicate", "zero"])
def test_a_later_step_finds_no_regions_and_binds_no_collective(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = dp(3)
    model: Any = wrapped(mesh) if way == "fully_shard" else replicate(net(), mesh)
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
    train()  # then nothing is new
    for at, name in ((InProcess, "_transfer"), (InProcess, "_reduce_scatter"), (InProcess, "_all_reduce"), (FlatRows, "of")):
        monkeypatch.setattr(at, name, lambda *args, name=name: made.append(name))
    train()
    assert not made


# --- primitives of the user's own ----------------------------------------------------------------------------------------
class Memory:
    def __init__(self) -> None:
        self.sizes: list[int] = []
        self.calls = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.sizes.append(size[0])
        return torch.empty(*size, dtype=dtype, device=device)


class Gathering(Memory, AllGather):
    def __call__(self, output_tensor: Any, input_tensor: Any, group: Any, async_op: bool = False) -> dist.Work | None:
        self.calls, self.dtype = self.calls + 1, input_tensor.dtype
        if group is not None:
            pieces = list(output_tensor.chunk(dist.get_world_size(group)))
            return dist.all_gather(pieces, input_tensor, group=group, async_op=async_op)
        for out in output_tensor.shards:
            torch.cat(input_tensor.shards, out=out)
        return None


class Scattering(Memory, ReduceScatter):
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


def _by_others(size: int, sums_only: bool) -> list[float]:
    mesh = dp(size)
    model, gathering, scattering = wrapped(mesh, reshard_after_forward=True), Gathering(), Scattering()
    model[2].set_custom_all_gather(gathering)
    model[2].set_custom_reduce_scatter(scattering)
    model[2].set_force_sum_reduction_for_comms(sums_only)
    with CommDebugMode() as comm:
        grads = step(model, mesh)
    counts = dict(comm.get_comm_counts())
    assert counts["reduce_scatter"] == 3  # as without primitives of the user's
    assert not comm.get_direct_counts()
    assert_same(grads, alone(size))
    assert (gathering.calls, gathering.dtype, scattering.calls) == (2, torch.float64, 1)
    assert max(gathering.sizes) == size * min(gathering.sizes)
    with pytest.raises(DTensorError, match="allocates its own memory"):
        model[2].set_allocate_memory_from_process_group_for_comm(True)
    return sums(grads)


@pytest.mark.own_collectives
@pytest.mark.parametrize("sums_only", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_gathers_and_reductions_of_the_users_own(size: int, sums_only: bool) -> None:
    _by_others(size, sums_only)


@pytest.mark.own_collectives
@pytest.mark.gloo
def test_gathers_and_reductions_of_the_users_own_on_process_groups() -> None:
    for there in run_gloo(_by_others, 3, 3, True):
        assert there == pytest.approx(_by_others(3, True), rel=1e-12)


@pytest.mark.own_collectives
def test_parameters_of_several_dtypes_are_gathered_as_bytes() -> None:
    mesh, gathering = dp(), Gathering()
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3).double())
    fully_shard(model, mesh=mesh).set_custom_all_gather(gathering)
    with torch.no_grad():
        model.unshard()
    assert gathering.dtype is torch.uint8
    half = fully_shard(nn.Linear(3, 3), mesh=mesh, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    half.set_custom_all_gather(gathering)
    half(own_floats(mesh))
    assert gathering.dtype is torch.bfloat16


def own_floats(mesh: dt.DeviceMesh) -> Tensor:
    return dt.map_ranks(lambda at: torch.ones(2, 3), mesh=mesh)


def _options(size: int) -> list[float]:
    mesh = dp(size)
    model = wrapped(mesh)
    with pytest.warns(UserWarning, match="does not provide memory"):
        model[0].set_allocate_memory_from_process_group_for_comm(True)
    model[0].set_allocate_memory_from_process_group_for_comm(False)
    model.set_separate_reduce_scatter_group()
    model.set_reduce_scatter_max_input_buffers(2)
    model.set_post_optim_event(torch.Event("cpu"))
    share_comm_ctx([model, model[0]])
    grads = step(model, mesh)
    assert_same(grads, alone(size))
    assert unit_of(model).post_optim_event is None
    reductions = {id(g.settings.reduce_scatter_comm) for m in model[::2] for g in unit_of(m).groups}
    assert len(reductions) == 1
    model.set_separate_reduce_scatter_group(False)
    return sums(grads)


def test_what_has_no_meaning_here_changes_no_value() -> None:
    _options(3)
    model = wrapped(dp())
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
def test_what_has_no_meaning_on_gloo_changes_no_value() -> None:
    for there in run_gloo(_options, 3, 3):
        assert there == pytest.approx(_options(3), rel=1e-12)


# --- around the steps ------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_pass_that_raised_is_forgotten(place: str) -> None:
    mesh = dp()
    model = wrapped(mesh, reshard_after_forward=True)
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
    assert_same(step(model, mesh), alone(2))


def test_a_first_forward_names_the_parameters_without_values() -> None:
    mesh = dp()
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


def test_a_container_is_refused_as_torch_does() -> None:
    for container in (nn.ModuleList([nn.Linear(2, 2)]), nn.ModuleDict({"a": nn.Linear(2, 2)})):
        with pytest.raises(ValueError, match="without a forward of its own"):
            fully_shard(container, mesh=dp())


def test_a_part_of_a_sharded_sequence_is_no_unit_of_its_own() -> None:
    mesh = dp()
    model = wrapped(mesh)
    part = model[:2]
    assert type(part) is nn.Sequential
    assert isinstance(part[0], FSDPModule)
    assert part(rows(mesh)).shape == (12, 5)


def test_settings_are_copied_with_the_module() -> None:
    mesh = dp()
    model = wrapped(mesh)
    for layer in model[::2]:
        layer.set_gradient_divide_factor(1.0)
    assert_same(step(copy.deepcopy(model), mesh), [2 * x for x in alone(2)])


class Branches(nn.Module):
    """Gradients reach only those of the layers that ``used`` has."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(3, 3) for _ in range(4)).double()

    def forward(self, x: Tensor, used: tuple[int, ...]) -> Tensor:
        for k, layer in enumerate(self.layers):
            y = layer(x).tanh()
            x = x + (y if k in used else y.detach())
        return x


def _unlike_ranks(steps: int) -> list[float]:
    mesh, all_used = dp(3), [(0, 1, 3), (3,), (0, 3)]
    model, plain = Branches(), Branches()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh).set_reduce_scatter_unused_params(True)
    rank = dist.get_rank()
    for _ in range(steps):
        (model(X.chunk(3)[rank], all_used[rank]) ** 2).sum().backward()
    for part, used in zip(X.chunk(3), all_used, strict=True):
        ((plain(part, used) ** 2).sum() * steps / 3).backward()
    same_gradients(model, plain)
    return []


@pytest.mark.gloo
def test_ranks_may_reach_different_units() -> None:
    run_gloo(_unlike_ranks, 3, 2, timeout_s=60.0)


def test_reductions_that_wait_for_the_end_are_the_same() -> None:
    mesh = dp()
    model = wrapped(mesh, reshard_after_forward=True)
    model.set_reduce_scatter_unused_params(True)
    for _ in range(2):
        with CommDebugMode() as comm:
            grads = step(model, mesh)
        assert comm.get_comm_counts()["reduce_scatter"] == 3
        assert_same(grads, alone(2))
        model.zero_grad()
    model.set_requires_gradient_sync(False)
    (model(rows(mesh)) ** 2).sum().backward()
    model.set_requires_gradient_sync(True)
    assert_same(step(model, mesh), [2 * x for x in alone(2)])


class Halves(nn.Module):
    """Two halves, of which the second is given a leaf of its own: backward runs through them in two passes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = net(), nn.Linear(2, 3).double()

    def forward(self, x: Tensor, parts: bool) -> tuple[Tensor, Tensor, Tensor]:
        middle = self.first(x)
        given = middle.detach().requires_grad_() if parts else middle
        return self.second(given), given, middle


def _halves(model: nn.Module, x: Tensor, way: str) -> None:
    loss, given, middle = model(x, way == "at a leaf")
    if way == "at a leaf":
        (loss**2).sum().backward()
        middle.backward(given.grad)
    elif way == "two losses":
        (loss**2).sum().backward(retain_graph=True)
        (middle**3).sum().backward()
    else:
        ((loss**2).sum() + (middle**3).sum()).backward()


@pytest.mark.parametrize("way", ["at a leaf", "two losses", "whole"])
@pytest.mark.parametrize("kind", ["plain", "defers", "accumulates", "replicates"])
def test_backward_in_two_passes_gives_what_plain_torch_does(kind: str, way: str) -> None:
    _same_halves(kind, way)


@pytest.mark.gloo
def test_backward_in_two_passes_on_process_groups() -> None:
    run_gloo(_all_halves, 2)


def _all_halves() -> None:
    for kind in ("plain", "defers", "accumulates", "replicates"):
        for way in ("at a leaf", "two losses"):
            _same_halves(kind, way)


def _same_halves(kind: str, way: str) -> None:
    mesh = dp()
    torch.manual_seed(3)
    model, rounds = Halves(), 2
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
        _halves(model, rows(mesh), way)
        for x in X.chunk(2):
            _halves(plain, x, way)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad.full_tensor(), q.grad / 2)


# --- replicated modules --------------------------------------------------------------------------------------------------
def _on_hooks(size: int) -> list[float]:
    mesh, results = dp(size), []
    hooks: list[Any] = [allreduce_hook, bf16_compress_hook] if dist.is_initialized() else [_mean_here]
    for hook in hooks:
        model = replicate(net(), mesh, bucket_cap_mb=0.0001)
        seen: list[tuple[Any, ...]] = []

        def noting(state: Any, bucket: Any, hook: Any = hook, seen: list[Any] = seen) -> Any:
            shapes = [tuple(x.shape) for x in bucket.gradients()]
            seen.append((bucket.index(), bucket.is_last(), shapes, len(bucket.parameters())))
            return hook(state, bucket)

        model.register_comm_hook(None, noting)
        grads = step(model, mesh)
        for ours, theirs in zip(grads, alone(size), strict=True):
            torch.testing.assert_close(ours, theirs, **({"rtol": 3e-2, "atol": 3e-2} if hook is bf16_compress_hook else {}))
        assert [index for index, *_ in seen] == list(range(len(seen)))
        assert [last for _, last, *_ in seen] == [False] * (len(seen) - 1) + [True]
        assert [shape for _, _, shapes, _ in seen for shape in shapes] == [(2,), (2, 7), (7,), (7, 5), (5,), (5, 3)]
        results.append(grads)
    return sums(results[0])


def _mean_here(state: None, bucket: Any) -> torch.futures.Future[Any]:
    mean = sum(bucket.buffer().shards) / len(bucket.buffer().shards)
    done: torch.futures.Future[Any] = torch.futures.Future()
    done.set_result(dt.per_rank([mean.clone() for _ in bucket.buffer().shards]))
    return done


def test_a_communication_hook_reduces_buckets() -> None:
    _on_hooks(3)
    mesh = dp()
    model = replicate(net(), mesh)
    model.register_comm_hook(None, _mean_here)
    loss = model(dt.distribute_tensor(X, mesh, [dt.Shard(0)])).sum()
    with pytest.raises(DTensorError, match="are summed"):
        loss.backward()
    with pytest.raises(TypeError, match="a function of a state and a bucket"):
        model.register_comm_hook(None, 3)


@pytest.mark.gloo
def test_torchs_communication_hooks_on_process_groups() -> None:
    for there in run_gloo(_on_hooks, 2, 2):
        assert there == pytest.approx(_on_hooks(2), rel=1e-12)


def test_replicated_modules_have_the_settings_of_gradients() -> None:
    mesh = dp()
    model = replicate(net(), mesh, find_unused_parameters=True, static_graph=True)
    assert isinstance(model, FSDPModule)
    model.set_force_sum_reduction_for_comms(True)
    model.set_all_reduce_hook(lambda flat: flat.mul_(3))
    assert_same(step(model, mesh), [3 * x for x in alone(2)])
    model.zero_grad()
    model.set_requires_all_reduce(False)
    (model(rows(mesh)) ** 2).sum().backward()
    assert all(p.grad is None for p in model.parameters())
    model.set_requires_all_reduce(True)
    assert_same(step(model, mesh), [6 * x for x in alone(2)])
    for refused in (model.set_custom_all_gather, model.set_custom_reduce_scatter):
        with pytest.raises(UnsupportedOperationError, match="replicated module"):
            refused(Gathering())


def test_replicated_over_named_dims_of_a_mesh() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))
    model = replicate(net(), mesh, dp_mesh_dims=DataParallelMeshDims(replicate="dp"), offload_policy=CPUOffloadPolicy())
    assert model[0].weight.device_mesh == mesh["dp"]
    assert_same(step(model, mesh["dp"]), alone(2))
    with pytest.raises(MeshError, match="needs replicate= and no shard="):
        replicate(net(), mesh, dp_mesh_dims=DataParallelMeshDims(shard="dp"))


def test_buffers_may_stay_each_ranks_own() -> None:
    mesh = dp()
    model = replicate(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double(), mesh, broadcast_buffers=False)
    model(rows(mesh)).sum().backward()
    here = model[1].running_mean
    assert isinstance(here, dt.PerRank)
    assert not torch.equal(*here.shards)
