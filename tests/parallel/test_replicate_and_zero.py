"""``replicate`` and ``ZeroRedundancyOptimizer``: steps of the plain model, buckets, buffers and unused parameters."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from compare_with_one_device import (
    assert_same_gradients,
    assert_same_parameters,
    assert_same_parameters_and_gradients,
    full_value,
    make_dp_mesh,
    make_per_rank_batch,
    step_and_clear_gradients,
)
from gloo_processes import run_gloo
from torch import Tensor, nn

import dtensor as dt
from dtensor import DTensor, Replicate, Shard
from dtensor.comm import Pending
from dtensor.debug import CommDebugMode
from dtensor.errors import MeshError
from dtensor.parallel import (
    ColwiseParallel,
    MixedPrecisionPolicy,
    RowwiseParallel,
    ZeroRedundancyOptimizer,
    parallelize_module,
    replicate,
)
from dtensor.parallel.data.units.unit import unit_of

pytestmark = pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()


def data(ranks: int, steps: int = 1) -> Tensor:
    return torch.randn(steps, ranks, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def alone_loss(model: nn.Module, batch: Tensor) -> Tensor:
    return torch.stack([(model(part) ** 2).mean() for part in batch]).mean()


def test_replicate_of_a_module_list_makes_one_unit() -> None:
    model, mesh = net(), make_dp_mesh()
    alone = copy.deepcopy(model)
    given = replicate([model[2], model[0], model[2]], mesh)
    assert given == [model[2], model[0], model[2]]
    assert unit_of(model[0]) is unit_of(model[2]) is not None
    replicate(model, mesh)
    for batch in data(2, 2):
        (model(make_per_rank_batch(batch, mesh)) ** 2).mean().backward()
        alone_loss(alone, batch).backward()
        assert_same_parameters_and_gradients(model, alone)


def train_both(size: int, zero: bool, **options: Any) -> list[float]:
    mesh, model, alone = make_dp_mesh(size), net(), net()
    replicate(model, mesh, **options)
    made = (
        ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.05)
        if zero
        else torch.optim.AdamW(model.parameters(), lr=0.05)
    )
    plain = torch.optim.AdamW(alone.parameters(), lr=0.05)
    for batch in data(size, 3):
        (model(make_per_rank_batch(batch, mesh)) ** 2).mean().backward()
        alone_loss(alone, batch).backward()
        for optimizer in (made, plain):
            optimizer.step()
        assert_same_parameters_and_gradients(model, alone)
        for optimizer in (made, plain):
            optimizer.zero_grad()
    return [full_value(p).sum().item() for p in model.parameters()]


def _record_all_reduce_rounds(parts: int, width: int) -> list[str]:
    """Return the order in which two-round all-reduces of several buckets advance and end in one backward."""
    mesh, seen = make_dp_mesh(3), []
    model, alone = (nn.Sequential(*[nn.Linear(width, width, bias=False) for _ in range(parts)]).double() for _ in range(2))
    alone.load_state_dict(model.state_dict())
    first = [torch.full((2, width), 0.01 * (rank + 1), dtype=torch.float64) for rank in range(3)]
    replicate(model, mesh, bucket_cap_mb=0.5)
    for p, q in zip(alone.parameters(), model.parameters(), strict=True):
        p.data.copy_(full_value(q))
    advance, wait = Pending.advance, Pending.wait

    def told(name: str, fn: Any) -> Any:
        def run(pending: Any) -> Any:
            found = fn(pending)
            if found is True or name == "ended":
                seen.append(name)
            return found

        return run

    Pending.advance, Pending.wait = told("second round", advance), told("ended", wait)
    try:
        (model(first[mesh.get_local_rank()]) ** 2).mean().backward()
    finally:
        Pending.advance, Pending.wait = advance, wait
    torch.stack([(alone(x) ** 2).mean() for x in first]).mean().backward()
    assert_same_gradients(model, alone)
    return seen


@pytest.mark.gloo
def test_second_round_of_bucket_all_reduce_overlaps_with_backward() -> None:
    for seen in [
        *run_gloo(_record_all_reduce_rounds, 3, 3, 320),
        *run_gloo(_record_all_reduce_rounds, 3, 3, 384),
    ]:  # by all-to-all and by point-to-point messages
        assert seen == ["second round", "second round", "ended", "second round", "ended", "ended"]


@pytest.mark.parametrize("zero", [False, True], ids=["AdamW", "ZeRO"])
@pytest.mark.parametrize("size", [1, 2, 3])
def test_replicate_and_zero_steps_equal_plain_model(size: int, zero: bool) -> None:
    train_both(size, zero)


@pytest.mark.gloo
def test_replicate_and_zero_steps_equal_plain_model_on_process_groups() -> None:
    for zero in (False, True):
        here = train_both(3, zero)
        for there in run_gloo(train_both, 3, 3, zero):
            assert there == pytest.approx(here, rel=1e-10)


def test_replicated_model_on_distributed_batch_gives_global_gradients() -> None:
    mesh, model, alone = make_dp_mesh(), net(), net()
    replicate(model, mesh)
    x = data(1)[0, 0][:3]  # ranks have 2 and 1 rows
    loss = (model(dt.distribute_tensor(x, mesh, [Shard(0)])) ** 2).mean()
    loss.backward()
    (alone(x) ** 2).mean().backward()
    assert_same_parameters_and_gradients(model, alone)


def test_gradient_buckets_are_reduced_during_backward() -> None:
    mesh = make_dp_mesh()
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(6)))  # 256 KiB each
    replicate(model, mesh, bucket_cap_mb=0.5)
    x = torch.ones(1, 256, requires_grad=True)
    sent: list[int] = []
    with CommDebugMode() as comm:
        out = model(dt.per_rank([x, x]))
        x.register_hook(lambda _: sent.append(comm.get_total_counts()))
        out.sum().backward()
    assert comm.get_comm_counts() == {"all_reduce": 3}
    assert sent[0] >= 2


def _gradient_pointers(x: Any) -> list[int]:
    local = x.grad._local
    return [shard.data_ptr() for shard in getattr(local, "shards", [local])]


def _compare_bucket_views(ranks: int, **options: Any) -> None:
    """Compare steps with and without ``gradient_as_bucket_view`` bit for bit."""
    mesh = make_dp_mesh(ranks)
    models = [replicate(net(), mesh, bucket_cap_mb=1e-4, gradient_as_bucket_view=views, **options) for views in (True, False)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5) for model in models]
    places = None
    for batch in data(ranks, 3):
        for model in models:
            (model(make_per_rank_batch(batch, mesh)) ** 2).mean().backward()
        for ours, theirs in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(full_value(ours.grad), full_value(theirs.grad))
        now = [_gradient_pointers(p) for p in models[0].parameters()]
        places = places or now
        assert now == places
        step_and_clear_gradients(*optimizers)


@pytest.mark.parametrize("options", [{}, {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}], ids=str)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_gradient_as_bucket_view_gives_equal_gradients(ranks: int, options: dict[str, Any]) -> None:
    _compare_bucket_views(ranks, **options)


@pytest.mark.gloo
def test_gradient_as_bucket_view_gives_equal_gradients_on_process_groups() -> None:
    run_gloo(_compare_bucket_views, 2, 2)
    run_gloo(_compare_bucket_views, 3, 3)


def test_gradient_as_bucket_view_accumulates_in_place() -> None:
    mesh, model, alone = make_dp_mesh(), net(), net()
    replicate(model, mesh, gradient_as_bucket_view=True)
    for step, batch in enumerate(data(2, 4)):
        (model(make_per_rank_batch(batch, mesh)) ** 2).mean().backward()
        alone_loss(alone, batch).backward()
        assert_same_parameters_and_gradients(model, alone)
        if step == 1:
            places = [_gradient_pointers(p) for p in model.parameters()]
            for each in (model, alone):
                each.zero_grad(set_to_none=False)
    assert [_gradient_pointers(p) for p in model.parameters()] == places
    first = next(model.parameters())
    first.grad = None  # only for one parameter; gradients of the others accumulate
    next(alone.parameters()).grad = None
    (model(make_per_rank_batch(batch, mesh)) ** 2).mean().backward()
    alone_loss(alone, batch).backward()
    assert_same_parameters_and_gradients(model, alone)


def test_gradient_as_bucket_view_halves_gradient_memory() -> None:
    mesh = make_dp_mesh()
    held = {}
    for views in (True, False):
        model = replicate(nn.Sequential(*(nn.Linear(16, 16) for _ in range(3))), mesh, gradient_as_bucket_view=views)
        model(dt.per_rank([torch.ones(1, 16)] * 2)).sum().backward()
        group = unit_of(model).groups[0]
        found = [x for each in group.unsharded.grad_buckets.values() for bucket in each.values() for x in bucket]
        found += [shard for p in model.parameters() for shard in p.grad._local.shards]
        stores = {x.untyped_storage()._cdata: x.untyped_storage().nbytes() for x in found}
        held[views] = sum(stores.values())
    assert held[True] * 2 == held[False]


def test_gradients_accumulate_under_no_sync() -> None:
    mesh, model, alone = make_dp_mesh(), net(), net()
    replicate(model, mesh)
    first, second, third = data(2, 3)
    with model.no_sync():
        for batch in (first, second):
            (model(make_per_rank_batch(batch, mesh)) ** 2).mean().backward()
    assert all(p.grad is None for p in model.parameters())
    (model(make_per_rank_batch(third, mesh)) ** 2).mean().backward()
    for batch in (first, second, third):
        alone_loss(alone, batch).backward()
    assert_same_parameters_and_gradients(model, alone)


def test_gradients_of_two_forward_passes_and_another_step_accumulate() -> None:
    mesh, model, alone = make_dp_mesh(), net(), net()
    replicate(model, mesh, bucket_cap_mb=0.0001)
    first, second = data(2, 2)
    a, b = ((model(make_per_rank_batch(batch, mesh)) ** 2).mean() for batch in (first, second))
    (a + b).backward()
    (model(make_per_rank_batch(second, mesh)) ** 2).mean().backward()
    for batch in (first, second, second):
        alone_loss(alone, batch).backward()
    assert_same_parameters_and_gradients(model, alone)


class Choice(nn.Module):
    """Model in which rank 0 uses ``a``, the other ranks ``b``, and no rank ``c``."""

    def __init__(self, mesh: dt.DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh
        self.a, self.b, self.c, self.last = (nn.Linear(3, 3, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        x = dt.map_ranks(lambda at, x, a, b: x @ (b if at[0] else a).T, x, self.a.weight, self.b.weight, mesh=self.mesh)
        return self.last(x)


def _train_choice(mesh: Any = None) -> list[Any]:
    mesh = mesh or make_dp_mesh(3)
    torch.manual_seed(0)
    model = Choice(mesh).double()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    replicate(model, mesh, bucket_cap_mb=0.00001)  # a bucket for each parameter
    model(dt.map_ranks(lambda at: torch.ones(1, 3, dtype=torch.float64), mesh=mesh)).sum().backward()
    last = weights["last.weight"].sum(0)
    torch.testing.assert_close(full_value(model.a.weight.grad), last[:, None].expand(3, 3) / 3)
    torch.testing.assert_close(full_value(model.b.weight.grad), last[:, None].expand(3, 3) * 2 / 3)
    assert model.c.weight.grad is None
    return [full_value(model.last.weight.grad).tolist()]


def test_parameters_used_by_some_ranks_are_averaged_and_unused_have_no_grad() -> None:
    _train_choice()


@pytest.mark.gloo
def test_parameters_used_by_some_ranks_are_averaged_on_process_groups() -> None:
    assert run_gloo(_train_choice, 3) == [_train_choice()] * 3


def test_buffers_are_broadcast_from_the_first_rank() -> None:
    mesh = make_dp_mesh()
    model = nn.BatchNorm1d(3).double()
    first = copy.deepcopy(model)
    replicate(model, mesh)
    (batch,) = data(2)
    for _ in range(2):
        model(make_per_rank_batch(batch, mesh))
        first(batch[0])
    for name, buffer in model.named_buffers():
        assert isinstance(buffer, DTensor)
        for shard in buffer.to_local().shards:
            torch.testing.assert_close(shard, dict(first.named_buffers())[name])
    model.eval()
    torch.testing.assert_close(model(make_per_rank_batch(batch, mesh)).shards[1], first.eval()(batch[1]))


def test_replicate_with_mixed_precision_has_bfloat16_output_and_float32_grad() -> None:
    model = replicate(
        nn.Linear(3, 2), make_dp_mesh(), mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    )
    out = model(dt.per_rank([torch.ones(1, 3)] * 2))
    out.sum().backward()
    assert out.dtype == torch.bfloat16
    assert model.weight.grad.dtype == model.weight.dtype == torch.float32


def test_replicate_of_tensor_parallel_module_equals_plain_model() -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    alone = copy.deepcopy(model)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    replicate(model, mesh["dp"])
    assert model[0].weight.placements == (Replicate(), Shard(0))
    (batch,) = data(2)
    (model(make_per_rank_batch(batch, mesh["dp"])) ** 2).mean().backward()
    alone_loss(alone, batch).backward()
    assert_same_parameters_and_gradients(model, alone)


# --- ZeRO ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adafactor, torch.optim.RMSprop])
def test_zero_updates_equal_plain_optimizer(make: Any) -> None:
    mesh, model, alone = make_dp_mesh(3), net(), net()
    options = {"momentum": 0.9} if make is torch.optim.SGD else {}
    sharded = ZeroRedundancyOptimizer(model.parameters(), make, mesh=mesh, lr=0.1, **options)
    plain = make(alone.parameters(), lr=0.1, **options)
    for batch in data(1, 3):
        for m, optimizer in ((model, sharded), (alone, plain)):
            optimizer.zero_grad()
            alone_loss(m, batch).backward()
            optimizer.step()
    assert_same_parameters(model, alone)


def test_zero_step_issues_one_all_gather_and_stores_a_shard_of_the_state() -> None:
    mesh = make_dp_mesh(2)
    model = replicate(nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 4)), mesh)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
    model(dt.per_rank([torch.ones(1, 4)] * 2)).sum().backward()
    with CommDebugMode() as comm:
        optimizer.step()
    assert comm.get_comm_counts() == {"all_gather": 1}
    held = sum(s["exp_avg"].to_local().shards[0].numel() for s in optimizer.inner.state.values())
    assert held * 2 == sum(p.numel() for p in model.parameters())


def test_schedulers_and_param_groups_apply_to_the_inner_optimizer() -> None:
    mesh, model, alone = make_dp_mesh(), net(), net()
    groups = [[{"params": list(m[0].parameters()), "lr": 0.3}, {"params": list(m[2].parameters())}] for m in (model, alone)]
    sharded = ZeroRedundancyOptimizer(groups[0], torch.optim.SGD, mesh=mesh, lr=0.1)
    plain = torch.optim.SGD(groups[1], lr=0.1)
    sharded.add_param_group({"params": list(model[4].parameters()), "lr": 0.2})
    plain.add_param_group({"params": list(alone[4].parameters()), "lr": 0.2})
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (sharded, plain)]
    for batch in data(1, 3):
        for m, optimizer, scheduler in ((model, sharded, schedulers[0]), (alone, plain, schedulers[1])):
            optimizer.zero_grad()
            alone_loss(m, batch).backward()
            optimizer.step()
            scheduler.step()
    assert_same_parameters(model, alone)


def test_zero_state_dict_loads_on_another_mesh() -> None:
    model, alone = net(), net()
    first = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, mesh=make_dp_mesh(2), lr=0.1)
    plain = torch.optim.Adam(alone.parameters(), lr=0.1)
    one, two = data(1, 2)
    for m, optimizer in ((model, first), (alone, plain)):
        alone_loss(m, one).backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(first.consolidated_state_dict()["state"], plain.state_dict()["state"])
    second = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, mesh=make_dp_mesh(3), lr=9.0)
    second.load_state_dict(first.consolidated_state_dict())
    third = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, mesh=make_dp_mesh(2), lr=9.0)
    third.load_state_dict(first.state_dict())
    assert second.param_groups[0]["lr"] == third.param_groups[0]["lr"] == 0.1
    for m, optimizer in ((model, second), (alone, plain)):
        alone_loss(m, two).backward()
        optimizer.step()
    assert_same_parameters(model, alone)


def test_zero_optimizer_without_mesh_raises() -> None:
    with pytest.raises(MeshError, match="needs mesh="):
        ZeroRedundancyOptimizer(net().parameters(), torch.optim.SGD, lr=0.1)
