"""map_ranks in process: the runs of the ranks are independent as on processes, or an error is raised."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

import dtensor as dt
from dtensor.comm import PerRank
from dtensor.errors import LayoutError

MESH = dt.init_device_mesh("cpu", (3,))
BATCH = torch.arange(12.0, dtype=torch.float64).reshape(4, 3)


def make_batches() -> PerRank:
    return dt.per_rank([BATCH.clone() for _ in range(3)])


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


# --- gradients of plain tensors -------------------------------------------------------------------------------------
PLAIN_TENSOR_USES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "operator": lambda x, w: x @ w,
    "attribute": lambda x, w: x @ w.T,
    "view": lambda x, w: x @ w.view(3, 3),
    "functional": lambda x, w: F.linear(x, w),
    "list": lambda x, w: torch.cat([x, w]),
    "keyword": lambda x, w: torch.mm(x, mat2=w),
    "Function": lambda x, w: x @ Doubled.apply(w),
    "vmap": lambda x, w: torch.vmap(lambda row: row @ w)(x),
    "checkpoint": lambda x, w: checkpoint(torch.mm, x, w, use_reentrant=False),
}


@pytest.mark.parametrize("use", PLAIN_TENSOR_USES.values(), ids=PLAIN_TENSOR_USES.keys())
@pytest.mark.parametrize("leaf", [True, False])
def test_gradient_of_a_plain_tensor_in_map_ranks_is_that_of_one_rank_not_the_sum(
    use: Callable[[Tensor, Tensor], Tensor], leaf: bool
) -> None:
    def gradient(program: Callable[[Tensor], Any]) -> Tensor:
        w = torch.arange(9.0, dtype=torch.float64).reshape(3, 3).requires_grad_()
        program(w if leaf else w * 2).backward()
        assert w.grad is not None
        return w.grad

    expected = gradient(lambda w: use(BATCH, w).square().sum())
    found = gradient(lambda w: dt.map_ranks(lambda at, x: use(x, w).square().sum(), make_batches(), mesh=MESH))
    assert torch.equal(found, expected)


def test_gradients_of_a_module_in_a_closure_are_those_of_one_rank() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    dt.map_ranks(lambda at, x: model(x).square().sum(), make_batches(), mesh=MESH).backward()
    found = [p.grad for p in model.parameters()]
    model.zero_grad()
    model(BATCH).square().sum().backward()
    for mine, parameter in zip(found, model.parameters(), strict=True):
        assert mine is not None
        assert parameter.grad is not None
        assert torch.equal(mine, parameter.grad)


def test_sparse_gradient_of_a_plain_embedding_is_that_of_one_rank() -> None:
    table = nn.Embedding(5, 3, sparse=True)
    dt.map_ranks(lambda at: table(torch.tensor([1, 2, 1])).sum(), mesh=MESH).backward()
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense()[:, 0].tolist() == [0.0, 2.0, 1.0, 0.0, 0.0]


def test_gradients_of_a_plain_tensor_that_differ_between_ranks_raise() -> None:
    w = torch.ones(3, requires_grad=True)
    loss = dt.map_ranks(lambda at: (w * (at[0] + 1)).sum(), mesh=MESH)
    with pytest.raises(LayoutError, match=r"gradient .* differs between ranks"):
        loss.backward()


def test_autograd_grad_inside_map_ranks_returns_per_rank_gradients() -> None:
    w = torch.ones(3, requires_grad=True)
    (found,) = dt.map_ranks(lambda at: torch.autograd.grad((w * (at[0] + 1)).sum(), w), mesh=MESH)
    assert [shard.tolist() for shard in found.shards] == [[1.0] * 3, [2.0] * 3, [3.0] * 3]
    transformed = dt.map_ranks(lambda at: torch.func.grad(lambda w: (w * (at[0] + 1)).sum())(w), mesh=MESH)
    assert [shard.tolist() for shard in transformed.shards] == [[1.0] * 3, [2.0] * 3, [3.0] * 3]


def test_each_rank_trains_its_own_model_to_equal_parameters() -> None:
    def train(at: tuple[int, ...], model: nn.Module, x: Tensor) -> Tensor:
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(2):
            optimizer.zero_grad()
            model(x).square().sum().backward()
            optimizer.step()
        return next(model.parameters()).detach()

    models = dt.map_ranks(lambda at: nn.Linear(3, 2).double(), mesh=MESH)
    first, *others = dt.map_ranks(train, models, make_batches(), mesh=MESH).shards
    assert all(torch.equal(other, first) for other in others)
    assert len({model.weight.data_ptr() for model in models}) == 3


# --- writes ---------------------------------------------------------------------------------------------------------
class SharedState:
    """Tensors and modules that exist before ``map_ranks`` and that all ranks share."""

    def __init__(self) -> None:
        self.total, self.mean, self.variance = torch.zeros(3), torch.zeros(3), torch.ones(3)
        self.model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.1)
        self.distributed = dt.distribute_tensor(torch.zeros(6), MESH, [dt.Shard(0)])
        self.local = self.distributed.to_local()
        self.loss = (self.model[0].weight * dt.per_rank([torch.ones(3)] * 3)).sum()
        self.optimizer.zero_grad()

    def set_item(self, at: tuple[int, ...]) -> None:
        self.total[0] = at[0]

    def add_on_one_rank(self, at: tuple[int, ...]) -> Tensor:
        if at[0] == 0:
            self.total.add_(1)
        return self.total * 2

    def fill_lazily(self, at: tuple[int, ...]) -> None:
        if at[0] == 0:
            self.lazy = torch.zeros(3)
        self.lazy.add_(1)

    def train(self, at: tuple[int, ...]) -> None:
        self.model(torch.ones(2, 3)).sum().backward()
        self.optimizer.step()


WRITES: dict[str, Callable[[SharedState], Any]] = {
    "in place": lambda s: lambda at: s.total.add_(1),
    "item": lambda s: s.set_item,
    "in place on one rank": lambda s: s.add_on_one_rank,
    "out": lambda s: lambda at: torch.add(s.mean, 1, out=s.total),
    "data": lambda s: lambda at: s.model[0].weight.data.mul_(2),
    "view": lambda s: lambda at: s.total.view(3, 1).add_(1),
    "list": lambda s: lambda at: torch._foreach_add_([s.total, s.mean], 1),
    "inference mode": lambda s: torch.inference_mode()(lambda at: s.total.add_(1)),
    "made lazily": lambda s: s.fill_lazily,
    "running statistics": lambda s: lambda at: F.batch_norm(torch.ones(2, 3), s.mean, s.variance, training=True),
    "batch norm": lambda s: lambda at: s.model(torch.ones(2, 3)),
    "backward": lambda s: lambda at: s.model[0](torch.ones(2, 3)).sum().backward(),
    "backward with a graph": lambda s: lambda at: s.model[0](torch.ones(2, 3)).sum().backward(create_graph=True),
    "backward of an earlier graph": lambda s: lambda at: s.loss.shards[at[0]].backward(),
    "gradient": lambda s: lambda at: setattr(s.model[0].weight, "grad", torch.ones(3, 3)),
    "training": lambda s: s.train,
    "distributed": lambda s: lambda at: s.distributed.add_(1),
    "all ranks' local tensors": lambda s: lambda at: s.local.add_(1),
}


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_to_a_tensor_that_ranks_share_raises(write: Callable[[SharedState], Any]) -> None:
    with pytest.raises(
        LayoutError, match=r"map_ranks: the function writes to a tensor of shape .* on rank 0 and uses it on rank 1"
    ):
        dt.map_ranks(write(SharedState()), mesh=MESH)


def test_a_rank_writes_to_its_own_tensors() -> None:
    def run(at: tuple[int, ...], own: Tensor) -> Tensor:
        own.add_(at[0])
        made = torch.from_numpy(np.ones(3, dtype=np.float32)).div_(2)
        made[0] = at[0]
        return made + own

    local = dt.per_rank([torch.zeros(3) for _ in range(3)])
    found = dt.map_ranks(run, local, mesh=MESH)
    assert [shard.tolist() for shard in found.shards] == [[0.0, 0.5, 0.5], [2.0, 1.5, 1.5], [4.0, 2.5, 2.5]]
    assert [shard.tolist() for shard in local.shards] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]


def test_a_tensor_cached_by_the_first_rank_can_be_read_by_others() -> None:
    cached: list[Tensor] = []

    def run(at: tuple[int, ...]) -> Tensor:
        if not cached:
            cached.append(torch.zeros(3))
            cached[0][1] = 4.0
        return cached[0] + at[0]

    assert [shard[1].item() for shard in dt.map_ranks(run, mesh=MESH).shards] == [4.0, 5.0, 6.0]


def test_a_shared_tensor_returned_by_all_ranks_is_copied() -> None:
    shared = torch.zeros(4)
    local, (parts, same_view) = dt.map_ranks(lambda at: (shared, [shared[at[0] : at[0] + 1], shared[:2]]), mesh=MESH)
    for x in (local, same_view):
        x.add_(1)
        assert all(shard.eq(1).all() for shard in x.shards)
    assert not shared.any()
    assert parts.shards[1].data_ptr() == shared[1:].data_ptr()  # different views are not copied
    x = dt.DTensor.from_local(dt.map_ranks(lambda at: shared, mesh=MESH), MESH, [dt.Replicate()])
    assert x.add_(1).full_tensor().tolist() == [1.0] * 4


def test_gradient_of_a_plain_tensor_returned_by_all_ranks_is_that_of_one_rank() -> None:
    w = torch.ones(3, requires_grad=True)
    (dt.map_ranks(lambda at: w, mesh=MESH) * dt.per_rank([torch.ones(3)] * 3)).sum().backward()
    assert w.grad is not None
    assert w.grad.tolist() == [1.0] * 3


def test_batch_norm_in_eval_mode_can_be_shared() -> None:
    model = nn.BatchNorm1d(3).eval()
    found = dt.map_ranks(lambda at: model(torch.ones(2, 3)), mesh=MESH)
    assert torch.equal(found.shards[2], model(torch.ones(2, 3)))


def test_a_reentrant_checkpoint_inside_map_ranks_raises() -> None:
    model = nn.Linear(3, 2).double()
    with pytest.raises(LayoutError, match="use_reentrant=False"):
        dt.map_ranks(lambda at, x: checkpoint(model, x.requires_grad_(), use_reentrant=True), make_batches(), mesh=MESH)


@pytest.mark.parametrize("norm_class", [nn.BatchNorm1d, nn.InstanceNorm1d])
def test_running_statistics_of_equal_local_batches_are_written_once_and_of_different_ones_raise(norm_class: Any) -> None:
    """Ranks with equal local batches write one value; ranks with different batches raise."""
    x = torch.arange(12.0).reshape(2, 3, 2)
    expected, model = (norm_class(3, track_running_stats=True) for _ in range(2))
    result = expected(x)
    assert all(torch.equal(shard, result) for shard in model(dt.per_rank([x, x])).shards)
    assert torch.equal(model.running_mean, expected.running_mean)
    assert torch.equal(model.running_var, expected.running_var)
    with pytest.raises(LayoutError, match="the ranks write different values into one plain tensor"):
        model(dt.per_rank([x, x + 1]))


# --- random numbers -------------------------------------------------------------------------------------------------
GENERATOR = torch.Generator()
RANDOM_CALLS: dict[str, Callable[[], Any]] = {
    "torch": lambda: torch.rand(2).tolist(),
    "module": lambda: nn.Linear(2, 2).weight.tolist(),
    "generator": lambda: torch.rand(2, generator=GENERATOR).tolist(),
    "python": random.random,
    "numpy": np.random.rand,
}


@pytest.mark.parametrize("random_call", RANDOM_CALLS.values(), ids=RANDOM_CALLS.keys())
def test_each_rank_draws_the_random_numbers_of_a_separate_process(random_call: Callable[[], Any]) -> None:
    def seed() -> None:
        torch.manual_seed(1)
        GENERATOR.manual_seed(1)
        random.seed(1)
        np.random.seed(1)

    seed()
    inside, after = random_call(), random_call()
    seed()
    assert list(dt.map_ranks(lambda at: random_call(), mesh=MESH)) == [inside] * 3
    assert random_call() == after


def test_map_ranks_leaves_the_generator_in_the_state_of_the_first_rank() -> None:
    torch.manual_seed(2)
    expected = torch.rand(5)
    torch.manual_seed(2)
    dt.map_ranks(lambda at: torch.rand(4 + at[0]), mesh=MESH)
    assert torch.equal(torch.rand(1), expected[4:])


# --- compiled functions ---------------------------------------------------------------------------------------------
def test_a_function_compiled_as_one_graph_runs_inside_map_ranks() -> None:
    compiled = torch.compile(lambda x: x.sin() * 2, backend="eager", fullgraph=True)
    found = dt.map_ranks(lambda at, x: compiled(x + at[0]), make_batches(), mesh=MESH)
    for rank, shard in enumerate(found.shards):
        assert torch.equal(shard, (BATCH + rank).sin() * 2)


def test_gradient_of_compiled_function_in_map_ranks_is_right_and_fullgraph_raises() -> None:
    w = torch.ones(3, requires_grad=True)
    dt.map_ranks(lambda at: torch.compile(lambda: (w * 2).sum(), backend="eager")(), mesh=MESH).backward()
    assert w.grad is not None
    assert w.grad.tolist() == [2.0] * 3
    full_graph = torch.compile(lambda: (w * 2).sum(), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match=r"torch\.compile inside map_ranks, of tensors that require gradients"):
        dt.map_ranks(lambda at: full_graph(), mesh=MESH)


@pytest.mark.filterwarnings("ignore:flex_attention called without")
def test_flex_attention_of_local_heads_runs_in_map_ranks_and_raises_without_it() -> None:
    q, heads = torch.randn(1, 6, 16, 8), [dt.Shard(1)]
    x = dt.distribute_tensor(q, MESH, heads)

    def per_rank(*local: Any) -> Any:
        return dt.map_ranks(lambda at, *own: flex_attention(*own), *local, mesh=MESH)

    found = dt.local_map(per_rank, heads, (heads,) * 3, device_mesh=MESH)(x, x, x)
    torch.testing.assert_close(found.full_tensor(), flex_attention(q, q, q))
    with pytest.raises(Exception, match=r"tensors of each rank are not compiled into one graph. .*map_ranks"):
        dt.local_map(flex_attention, heads, (heads,) * 3, device_mesh=MESH)(x, x, x)


def test_map_ranks_uses_the_entered_mesh_and_is_differentiable() -> None:
    x = dt.per_rank([torch.ones(2, requires_grad=True), torch.ones(3, requires_grad=True)])
    with dt.DeviceMesh("cpu", 2):
        y = dt.map_ranks(lambda coordinate, x, scale: (x * scale * coordinate[0]).sum(), x, scale=5)
    y.backward()
    assert [shard.grad.tolist() for shard in x.shards] == [[0.0, 0.0], [5.0, 5.0, 5.0]]
