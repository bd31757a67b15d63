"""The rows of document 000 (model sharding); cases for one process and for four, each with a folder shared by all ranks."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from case_lists import CaseList
from torch import nn

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.errors import DTensorError, MeshError, PlacementError, UnsupportedOperationError
from dtensor.sharding_spec.composite import composite, from_data, mesh, single_split, spec_of, whole

CASES = CaseList()
case = CASES.case


def make_values(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, 1.0 + torch.Size(shape).numel()).reshape(shape)


def local_tensors_by_rank(x: Any) -> dict[int, torch.Tensor]:
    """Return the local tensors of a DTensor by rank of its mesh, for the ranks of this process."""
    local = x.to_local()
    if isinstance(local, dt.PerRank):
        return dict(zip(x.device_mesh.ranks, local.shards, strict=True))
    return {dist.get_rank(): local} if dist.get_rank() in x.device_mesh.ranks else {}


def assert_same_values(x: Any, expected: torch.Tensor) -> None:
    found = x.full_tensor()
    if not dist.is_initialized() or dist.get_rank() in x.device_mesh.ranks:
        for piece in found.shards if isinstance(found, dt.PerRank) else (found,):
            torch.testing.assert_close(piece.detach(), expected)


@case
def single_splits_even_and_uneven(folder: Path) -> None:
    places = [f"rank:{k}/cpu" for k in range(4)]
    x = dt.sharded_tensor.shard_tensor(make_values(6, 2), single_split(0, places))
    for rank, piece in local_tensors_by_rank(x).items():
        assert torch.equal(piece, make_values(6, 2)[min(6, 2 * rank) : 2 * rank + 2])
    y = dt.sharded_tensor.shard_tensor(make_values(6, 2), single_split(-2, [1, 0, 2, 3], [3, 1, 0, 2]))
    starts = {1: (0, 3), 0: (3, 4), 2: (4, 4), 3: (4, 6)}
    for rank, piece in local_tensors_by_rank(y).items():
        assert torch.equal(piece, make_values(6, 2)[slice(*starts[rank])])
    shards = y.sharding_metadata().shards
    assert [(s.sizes, s.offsets, s.rank) for s in shards] == [
        ((3, 2), (0, 0), 1),
        ((1, 2), (3, 0), 0),
        ((0, 2), (4, 0), 2),
        ((2, 2), (4, 0), 3),
    ]
    assert_same_values(y * 2, make_values(6, 2) * 2)


@case
def a_grid_of_blocks_over_ranks_and_devices(folder: Path) -> None:
    spec = mesh([["rank:0", "rank:1"], ["rank:2", "rank:3"]])
    x = dt.sharded_tensor.shard_tensor(make_values(4, 8), spec)
    for rank, piece in local_tensors_by_rank(x).items():
        assert torch.equal(piece, make_values(4, 8)[rank // 2 * 2 :][:2, rank % 2 * 4 :][:, :4])
    if dist.is_initialized():
        return
    places = [[f"rank:{r}/cuda:{4 * r + c}" for c in range(4)] for r in range(2)]
    x = dt.sharded_tensor.shard_tensor(make_values(4, 8), mesh(places))
    for k, piece in local_tensors_by_rank(x).items():
        assert torch.equal(piece, make_values(4, 8)[k // 4 * 2 :][:2, k % 4 * 2 :][:, :2])
    assert x.sharding_metadata().shards[5].place == "rank:1/cuda:5"
    assert x.sharding_metadata().shards[5].offsets == (2, 2)


@case
def ranks_with_several_blocks(folder: Path) -> None:
    x = dt.sharded_tensor.shard_tensor(make_values(5, 4), mesh([[0, 0, 1], [0, 0, 1]], [None, [1, 1, 2]]))
    assert x.placements == (Shard(1),)
    assert len(x.sharding_metadata().shards) == 6
    assert_same_values(x.sin(), make_values(5, 4).sin())
    y = dt.sharded_tensor.shard_tensor(make_values(7, 2), single_split(0, [0, 1, 0, 1]))
    for rank, blocks in y.local_shards().items():
        if rank in (0, 1):
            assert [b.tolist() for b in blocks] == [b.tolist() for b in make_values(7, 2).chunk(4)[rank::2]]
    here = dist.get_rank() if dist.is_initialized() else 0
    assert [b.tolist() for b in y.local_shard()] == [b.tolist() for b in make_values(7, 2).chunk(4)[here::2] if here in (0, 1)]
    assert_same_values(torch.exp(y), make_values(7, 2).exp())
    assert_same_values(y * 2.0, make_values(7, 2) * 2)
    with pytest.raises(UnsupportedOperationError, match="reshard"):
        y.add_(1)
    for changing in (lambda: torch.ops.aten.add_.Tensor(y, 1), lambda: torch.exp(y, out=y), lambda: torch._foreach_neg_([y])):
        with pytest.raises(UnsupportedOperationError, match="reshard"):
            changing()
    assert_same_values(y.reshard(single_split(1, [2, 3])), make_values(7, 2))
    z = dt.sharded_tensor.zeros(7, 2, sharding_spec=mesh([[0], [1], [0]]))
    assert_same_values(z, torch.zeros(7, 2))


@case
def factories_and_resharding(folder: Path) -> None:
    spec, other = single_split(0, [0, 1, 2]), single_split(1, [1, 2, 3], [1, 0, 3])
    torch.manual_seed(5)
    expected = torch.randn(7, 4)
    torch.manual_seed(5)
    x = dt.sharded_tensor.randn(7, 4, sharding_spec=spec, requires_grad=True)
    assert x.requires_grad
    assert_same_values(x.detach(), expected)
    y = x.detach().reshard(other)
    assert y.device_mesh.ranks == (1, 2, 3)
    assert_same_values(y, expected)
    assert_same_values(y.reshard(whole("rank:0|rank:3")), expected)
    for made, plain in [("zeros", torch.zeros), ("ones", torch.ones)]:
        assert_same_values(getattr(dt.sharded_tensor, made)((3, 2), sharding_spec=spec), plain(3, 2))
    assert_same_values(dt.sharded_tensor.full((3, 2), 4.5, sharding_spec=spec), torch.full((3, 2), 4.5))
    assert dt.sharded_tensor.empty(3, 2, sharding_spec=spec, dtype=torch.int8).dtype == torch.int8


@case
def specs_and_layouts_are_equivalent(folder: Path) -> None:
    layouts = [((5, 6), [Shard(0), Shard(1)]), ((5, 6), [Shard(1), Replicate()]), ((5,), [Replicate(), Replicate()])]
    for shape, placements in layouts:
        x = dt.zeros(*shape, device_mesh=dt.init_device_mesh("cpu", (2, 2)), placements=placements)
        again = spec_of(x.layout).layout(shape)
        pieces = {
            r: (again.local_shape(c), again.local_offset(c))
            for r, c in zip(again.mesh.ranks, again.mesh.coordinates, strict=True)
        }
        for rank, c in zip(x.device_mesh.ranks, x.device_mesh.coordinates, strict=True):
            assert pieces[rank] == (x.layout.local_shape(c), x.layout.local_offset(c))
    for spec in [
        single_split(0, ["rank:0/cuda:0", 1], [1, 2]),
        mesh([[0, 1]], [[3], None]),
        whole("rank:0|rank:2"),
        composite(a="rank:1", b=composite(w=single_split(0, [0, 1]))),
    ]:
        assert from_data(json.loads(json.dumps(spec.to_data()))) == spec
    for wrong in [
        lambda: single_split(0, []),
        lambda: single_split("a", [0]),
        lambda: single_split(0, [0, 1], [1]),
        lambda: mesh([[0, 1], [2]]),
        lambda: composite(),
        lambda: from_data({"split": 1}),
    ]:
        with pytest.raises(PlacementError):
            wrong()
    for place in ("rank0", "rank:x", "rank:0/gpuu", -1, 1.5, "rank:0|rank:0"):
        with pytest.raises(MeshError):
            single_split(0, [place])
    with pytest.raises(PlacementError, match="has no dim 2"):
        single_split(2, [0]).layout((3, 4))
    with pytest.raises(PlacementError, match="do not split tensor dim 0 of size 4"):
        single_split(0, [0, 1], [1, 2]).layout((4,))


class Net(nn.Module):
    """The document's three layers, joined so that results of different devices meet."""

    def __init__(self) -> None:
        super().__init__()
        self.net1, self.net2, self.net3 = (nn.Linear(20, 20) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net3((self.net1(x) + self.net2(x)).relu())


class Pair(NamedTuple):
    one: torch.Tensor
    two: torch.Tensor


class Inner(nn.Module):
    """Its tensors are on one rank each, and so are its results."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(20, 3), nn.Linear(20, 3)
        self.scale = nn.Parameter(torch.ones(20))

    def forward(self, pair: Pair) -> Pair:
        return Pair(self.one(pair.one * self.scale), self.two(pair.two * self.scale))


class Named(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, pair: Pair) -> Pair:
        return self.inner(pair)


def compare_with_plain_model(spec: Any, make: Callable[[], nn.Module] = Net, meta: bool = False, **options: Any) -> nn.Module:
    """Assert that the model sharded by ``spec`` has the loss and the gradients of the plain model, and return it."""
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    with torch.device("meta" if meta else "cpu"):
        model = make()
    torch.manual_seed(0)
    dt.shard_model(model, spec, **options)
    x = make_values(3, 20) / 60
    torch.manual_seed(1)
    loss = model(x).square().mean()
    torch.manual_seed(1)
    expected = plain(x).square().mean()
    loss.backward()
    expected.backward()
    assert_same_values(loss, expected)
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert p.grad is not None, name
        assert q.grad is not None
        assert_same_values(p, q.detach())
        assert_same_values(p.grad, q.grad)
    return model


@case
def submodules_on_different_ranks_equal_one_device(folder: Path) -> None:
    model = compare_with_plain_model(composite(net1="rank:0", net2="rank:1", net3="rank:0"))
    assert model.net2.weight.device_mesh.ranks == (1,)
    two = composite(weight=single_split(0, [0, 1]))
    model = compare_with_plain_model(composite(net1=two, net2=two, net3=single_split(0, [2, 3])))
    assert model.net3.bias.placements == (Shard(0),)
    compare_with_plain_model(
        {"0": "rank:0", "2": single_split(1, [1, 2, 3])}, lambda: nn.Sequential(nn.Linear(20, 7), nn.ReLU(), nn.Linear(7, 2))
    )


@case
def a_model_on_meta_is_made_shard_by_shard(folder: Path) -> None:
    model = compare_with_plain_model(single_split(0, [0, 1, 2, 3]), meta=True)
    assert all(p.placements == (Shard(0),) for p in model.parameters())
    with torch.device("meta"):
        left = Net()
    dt.shard_model(left, single_split(0, [0, 1, 2, 3]), materialize=False)
    assert left.net1.weight.is_meta
    dt.checkpoint.save({"m": model}, folder)
    dt.checkpoint.load({"m": left}, folder)
    assert_same_values(left.net1.weight, model.net1.weight.detach().full_tensor())


class Dropping(Net):
    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net3(self.drop(self.net2(self.drop(self.net1(x)))))


@case
def dropout_of_submodules_on_different_ranks_equals_one_device(folder: Path) -> None:
    compare_with_plain_model(composite(net1="rank:3", net2=single_split(0, [0, 1]), net3="rank:2"), Dropping, meta=True)


class OwnTensorsModule(nn.Module):
    """A module with tensors and children, all set by its constructor; the buffer is registered again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(6, 20))
        self.inner = nn.Sequential(nn.Linear(20, 6), nn.LayerNorm(6))
        self.register_buffer("scale", torch.empty(6))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight)
        self.scale = torch.full_like(self.weight.detach()[:, 0], 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.inner(x) * self.scale) @ self.weight


class Nested(nn.Module):
    """A module with tensors and children within another; attention, whose initialiser has a private name."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = OwnTensorsModule(), nn.Sequential(OwnTensorsModule(), nn.Linear(20, 20))
        self.attention = nn.MultiheadAttention(20, 2)
        self.bias = nn.Parameter(torch.empty(20))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.two(self.one(x))
        return self.attention(x, x, x, need_weights=False)[0] + self.bias


@case
def models_made_from_meta_have_the_values_of_one_device(folder: Path) -> None:
    spec = single_split(0, [0, 1, 2, 3])
    for model in (
        compare_with_plain_model(spec, Nested, meta=True),
        compare_with_plain_model(composite(one="rank:2", two=spec, attention=spec), Nested, meta=True),
    ):
        assert isinstance(model.one.scale, dt.DTensor)
        assert_same_values(model.one.scale, torch.full((6,), 0.5))


@case
def parameters_without_an_initializer_raise_before_any_change(folder: Path) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(4, 4))

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
            self.head.weight = self.embed.weight

    spec = single_split(0, [0, 1])
    words = {
        lambda: nn.Sequential(
            nn.Linear(4, 4), Bare()
        ): r"nothing initializes 1\.weight: Bare without reset_parameters.* init_fn=f",
        Tied: "embed.weight and head.weight are one shared parameter",
    }
    for make, word in words.items():
        with torch.device("meta"):
            model = make()
        with pytest.raises(DTensorError, match=word):
            dt.shard_model(model, spec)
        assert all(p.is_meta and not isinstance(p, dt.DTensor) for p in model.parameters())
    asked: list[str] = []

    def ones(sub: nn.Module) -> None:
        asked.append(type(sub).__name__)
        for p in sub.parameters(recurse=False):
            nn.init.ones_(p)

    dt.shard_model(model, spec, init_fn=ones)
    assert asked == ["Embedding", "Linear"]
    assert model.head.weight is model.embed.weight
    assert_same_values(model.head.weight.detach(), torch.ones(4, 4))


@case
def sharding_plans_by_placements_and_name_patterns(folder: Path) -> None:
    grid = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    compare_with_plain_model({"net*.weight": [Replicate(), Shard(0)], "net1.bias": [Shard(0), Replicate()]}, mesh=grid)
    compare_with_plain_model(composite({"*.weight": single_split(0, [0, 1, 2, 3])}, net1=mesh([[0, 1], [2, 3]])))
    with pytest.raises(PlacementError, match=r"\['net4'\] match no parameter of Net"):
        dt.shard_model(Net(), composite(net4="rank:0"))


@case
def a_state_dict_is_collected_on_one_rank(folder: Path) -> None:
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    model = dt.shard_model(Net(), composite(net1=single_split(0, [0, 1, 2, 3]), net2="rank:2", net3=single_split(1, [1, 3])))
    found = dt.collect_state_dict(model.state_dict())
    if dist.is_initialized() and dist.get_rank():
        assert found == {}
        return
    for name, x in plain.state_dict().items():
        assert type(found[name]) is torch.Tensor
        assert torch.equal(found[name], x)


@case
def named_tuples_pass_through_modules(folder: Path) -> None:
    model = dt.shard_model(Named(), composite({"inner.one": "rank:0", "inner.two": "rank:1"}))
    pair = model(Pair(make_values(3, 20), make_values(3, 20)))
    assert type(pair) is Pair
    assert all(len(x.device_mesh.ranks) == 2 for x in pair)
    state = dt.collect_state_dict({"pair": pair})
    assert state == {} or [type(x) for x in (state["pair"], *state["pair"])] == [Pair, torch.Tensor, torch.Tensor]


@case
def a_state_saved_under_one_spec_loads_under_another(folder: Path) -> None:
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    model = dt.shard_model(Net(), composite(net1=single_split(0, [0, 1, 2, 3]), net2="rank:2", net3=single_split(1, [1, 3])))
    dt.checkpoint.save(model.state_dict(), folder)
    other = dt.shard_model(Net(), composite(net1="rank:1", net2=mesh([[3, 2], [1, 0]]), net3=single_split(0, [2, 0], [13, 7])))
    state = other.state_dict()
    dt.checkpoint.load(state, folder)
    one_device = Net()
    dt.checkpoint.load(one_device, folder)
    for (name, p), q in zip(plain.state_dict().items(), one_device.parameters(), strict=True):
        assert_same_values(state[name], p)
        assert torch.equal(q, p)


@case
def state_dicts_are_uniform_under_tensor_and_data_parallelism(folder: Path) -> None:
    torch.manual_seed(0)
    plain = Net()
    torch.manual_seed(0)
    grid = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"net1": dt.parallel.ColwiseParallel(), "net3": dt.parallel.RowwiseParallel()}
    model = dt.parallel.fully_shard(dt.parallel.parallelize_module(Net(), grid["tp"], plan), mesh=grid["dp"])
    state = model.state_dict()
    assert {name: x.shape for name, x in state.items()} == {name: x.shape for name, x in plain.state_dict().items()}
    dt.checkpoint.save(state, folder)
    sharded = dt.parallel.fully_shard(Net(), mesh=dt.init_device_mesh("cpu", (4,)))
    found = sharded.state_dict()
    dt.checkpoint.load(found, folder)
    for name, x in plain.state_dict().items():
        assert_same_values(found[name], x)
