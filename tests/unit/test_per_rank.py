"""PerRank tensors: functions run for each rank; reads of one value need equal values on all ranks and raise otherwise."""

from __future__ import annotations

import copy
import io
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dtensor.comm import PerRank, RankValues, per_rank
from dtensor.errors import LayoutError, MeshError, PlacementError


def make_even() -> PerRank:
    return per_rank([torch.arange(6.0).reshape(2, 3), torch.arange(6.0, 12.0).reshape(2, 3)])


def make_uneven() -> PerRank:
    return per_rank([torch.ones(2, 3), torch.full((1, 3), 2.0), torch.zeros(0, 3)])


def lists(x: Any) -> list[Any]:
    assert isinstance(x, PerRank)
    return [shard.tolist() for shard in x.shards]


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "method": lambda x: x.sum(1),
    "operator": lambda x: 2 - x * 3,
    "torch function": lambda x: torch.softmax(x, -1),
    "functional": lambda x: F.linear(x, torch.ones(4, 3)),
    "overload": lambda x: torch.ops.aten.add.Tensor(x, 1),
    "packet": lambda x: torch.ops.aten.mul(x, x),
    "with a plain tensor first": lambda x: torch.ones(3) + x,
    "list argument": lambda x: torch.cat([x, x, torch.ones(1, 3)]),
    "overload with a list": lambda x: torch.ops.aten.cat.default([x, x], 1),
    "keyword": lambda x: torch.add(input=x, other=x),
    "index": lambda x: x[:, 1:],
    "boolean index": lambda x: x[x > 0.5],
    "property": lambda x: x.T,
    "dtype": lambda x: x.to(torch.float64),
    "factory": torch.zeros_like,
    "new": lambda x: x.new_ones(2),
    "detach and clone": lambda x: x.detach().clone(),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "layer": torch.nn.LayerNorm(3),
}


@pytest.mark.parametrize("make", [make_even, make_uneven])
@pytest.mark.parametrize("fn", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_torch_functions_of_per_rank_tensors_run_for_each_rank(fn: Callable[[Any], Any], make: Callable[[], PerRank]) -> None:
    x = make()
    got = fn(x)
    assert isinstance(got, PerRank)
    for mapped, shard in zip(got.shards, x.shards, strict=True):
        expected = fn(shard)
        assert type(mapped) is Tensor
        assert torch.equal(mapped, expected)
        assert mapped.dtype == expected.dtype


@pytest.mark.parametrize("fn", [f for name, f in FUNCTIONS.items() if name not in ("property", "layer")])
def test_operators_of_per_rank_tensors_run_for_each_rank_without_torch_function(fn: Callable[[Any], Any]) -> None:
    x = make_even()
    with torch._C.DisableTorchFunctionSubclass():
        got = fn(x)
    assert isinstance(got, PerRank)
    assert all(torch.equal(mapped, fn(shard)) for mapped, shard in zip(got.shards, x.shards, strict=True))


def test_shape_of_uneven_per_rank_tensors_raises_without_torch_function() -> None:
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(LayoutError, match="differs between ranks"):
        make_uneven().shape  # noqa: B018


def test_functions_that_return_sequences_give_sequences_of_per_rank_tensors() -> None:
    values, indices = torch.max(make_uneven()[:, :2], 1)
    assert lists(values) == [[1.0, 1.0], [2.0], []]
    assert lists(indices) == [[0, 0], [0], []]
    largest = torch.max(make_even(), 1)
    assert type(largest) is torch.return_types.max
    assert lists(largest.values) == [[2.0, 5.0], [8.0, 11.0]]
    chunks = make_even().split(2, dim=1)
    assert type(chunks) is tuple
    assert [chunk.shape for chunk in chunks] == [(2, 2), (2, 1)]
    assert [lists(row) for row in make_even()] == [[[0.0, 1.0, 2.0], [6.0, 7.0, 8.0]], [[3.0, 4.0, 5.0], [9.0, 10.0, 11.0]]]


def test_unbind_and_iteration_of_uneven_per_rank_tensors_raise() -> None:
    with pytest.raises(LayoutError, match="map_ranks"):
        make_uneven().unbind(0)
    with pytest.raises(LayoutError, match="map_ranks"):
        next(iter(make_uneven()))


def test_attributes_that_are_equal_on_all_ranks_are_plain_values() -> None:
    x = make_even()
    assert x.shape == x.size() == torch.Size([2, 3])
    assert (x.ndim, x.dim(), x.numel(), len(x), x.size(1), x.stride()) == (2, 2, 6, 2, 3, (3, 1))
    assert (x.dtype, x.device, x.requires_grad, x.is_leaf, x.is_cuda) == (torch.float32, torch.device("cpu"), False, True, False)
    assert x.is_contiguous()
    assert isinstance(x, Tensor)
    assert make_uneven().dtype == torch.float32
    assert make_uneven().size(1) == 3
    assert per_rank([torch.tensor(1.0)] * 2).shape == ()


def test_sizes_of_uneven_per_rank_tensors_are_rank_numbers() -> None:
    x = per_rank([torch.arange(10.0).reshape(2, 5), torch.arange(21.0).reshape(3, 7)])
    rows, columns = x.shape
    assert (rows.values, columns.values) == ((2, 3), (5, 7))
    assert [x.numel().values, torch.numel(x).values, x.size(0).values, x.size(-1).values] == [(10, 21), (10, 21), (2, 3), (5, 7)]
    assert x.stride()[0].values == (5, 7)
    assert x.stride()[1] == 1
    assert make_uneven().size()[1] == 3
    for shard, view in zip(x.shards, x.view(rows * columns).shards, strict=True):
        assert torch.equal(view, shard.view(-1))
    for shard, mean in zip(x.shards, (x.sum() / x.numel()).shards, strict=True):
        assert torch.equal(mean, shard.mean())
    assert lists(x.new_zeros((columns, 2)).sum(1)) == [[0.0] * 5, [0.0] * 7]
    assert lists(torch.arange(rows)) == [[0, 1], [0, 1, 2]]


@pytest.mark.parametrize("read", [len, lambda x: range(x.shape[0]), lambda x: torch.ones(3)[: x.size(0)]])
def test_len_range_and_slices_of_uneven_per_rank_sizes_raise(read: Callable[[Any], Any]) -> None:
    with pytest.raises(LayoutError, match=r"rank 0: (.|\n)*map_ranks"):
        read(make_uneven())


def test_shape_raises_if_ranks_have_different_numbers_of_dims() -> None:
    with pytest.raises(LayoutError, match=r"`shape` of a PerRank tensor differs between ranks \(rank 0: "):
        per_rank([torch.ones(2), torch.ones(2, 2)]).shape  # noqa: B018


READS: list[Callable[[Any], Any]] = [
    Tensor.item,
    bool,
    float,
    int,
    Tensor.tolist,
    lambda x: bytes(x.numpy()),
    lambda x: f"{x.item():.1f}",
]


@pytest.mark.parametrize("read", READS)
def test_host_reads_need_equal_values_on_all_ranks(read: Callable[[Any], Any]) -> None:
    assert read(per_rank([torch.tensor(2.0), torch.tensor(2.0)])) == read(torch.tensor(2.0))
    with pytest.raises(LayoutError, match="differs between ranks"):
        read(per_rank([torch.tensor(0.0), torch.tensor(2.0)]))


def test_host_reads_accept_equal_nans_and_raise_for_zero_and_minus_zero() -> None:
    assert np.isnan(per_rank([torch.tensor(float("nan"))] * 2).item())
    with pytest.raises(LayoutError):
        per_rank([torch.tensor(0.0), torch.tensor(-0.0)]).item()
    with pytest.raises(LayoutError):
        per_rank([torch.tensor([0.0]), torch.tensor([-0.0])]).numpy()


def test_arrays_of_per_rank_tensors_are_read_only() -> None:
    array = np.asarray(per_rank([torch.ones(2), torch.ones(2)]))
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 5.0


def test_torch_equal_needs_equal_results_on_all_ranks() -> None:
    x = make_even()
    assert torch.equal(x, x.clone())
    with pytest.raises(LayoutError, match="differs between ranks"):
        torch.equal(x, per_rank([x.shards[0], x.shards[0]]))


def test_in_place_operators_write_each_rank_and_return_the_same_object() -> None:
    x = make_uneven()
    same = x
    shards = x.shards
    x += 1
    assert x is same
    assert x.mul_(2) is same
    assert x.shards is shards
    assert lists(x) == [[[4.0] * 3] * 2, [[6.0] * 3], []]
    x[:, 0] = per_rank([torch.tensor(7.0), torch.tensor(8.0), torch.tensor(9.0)])
    assert lists(x[:, 0]) == [[7.0, 7.0], [8.0], []]
    x[...] = 0
    out = make_even()
    assert torch.add(out, 1, out=out) is out
    assert x.requires_grad_() is x
    with torch._C.DisableTorchFunctionSubclass():
        assert out.add_(1) is out


def test_a_plain_tensor_plus_a_per_rank_tensor_is_per_rank() -> None:
    plain = torch.zeros(2, 3)
    got = plain + make_even()
    assert isinstance(got, PerRank)


def test_untyped_storage_of_a_per_rank_tensor_is_rank_values() -> None:
    storages = make_even().untyped_storage()
    assert isinstance(storages, RankValues)
    assert len({storage.data_ptr() for storage in storages}) == 2
    assert make_even().grad_fn is None
    assert "rank 1:" in repr(storages)


def test_rank_values_forward_attributes_and_methods_to_each_value() -> None:
    storages = make_even().untyped_storage()
    assert storages.nbytes() == storages[0].nbytes() > 0
    assert storages.device == torch.device("cpu")
    with pytest.raises(LayoutError, match="differs between ranks"):
        storages.data_ptr()
    with pytest.raises(AttributeError, match="no_such"):
        storages.no_such  # noqa: B018
    assert not hasattr(storages, "_fields")
    assert RankValues(("a", "b")).replace("a", "b") == "b"
    storages.resize_(0)
    assert [storage.nbytes() for storage in storages] == [0, 0]


def test_bool_of_rank_values_raises_if_ranks_differ() -> None:
    assert RankValues((1, 2))
    assert not RankValues((0, None))
    with pytest.raises(LayoutError, match="differs between ranks"):
        bool(RankValues((True, False)))


def test_backward_gives_each_rank_its_own_gradient() -> None:
    x = make_uneven().requires_grad_()
    assert x.grad is None
    (x * x).sum().backward()
    assert lists(x.grad) == [[[2.0] * 3] * 2, [[4.0] * 3], []]
    x.grad = None
    assert x.grad is None
    x.sum(1).backward(per_rank([torch.ones(2), torch.full((1,), 5.0), torch.ones(0)]))
    assert lists(x.grad) == [[[1.0] * 3] * 2, [[5.0] * 3], []]
    x.grad = torch.zeros_like(x)
    assert lists(x.grad) == lists(torch.zeros_like(x))


def test_gradient_of_a_tensor_shared_by_ranks_is_that_of_one_rank_not_the_sum() -> None:
    shared = torch.tensor(2.0, requires_grad=True)
    x = per_rank([torch.tensor(3.0), torch.tensor(3.0)]).requires_grad_()
    y = x * (shared * shared)  # one autograd node, shared by the graphs of both ranks
    torch.autograd.backward([y])
    assert shared.grad.item() == 4.0 * 3  # the gradient of each rank, as on processes, and not their sum
    assert lists(x.grad) == [4.0, 4.0]


def test_gradient_of_a_plain_tensor_is_that_of_one_rank_and_raises_if_ranks_differ() -> None:
    weight = torch.nn.Parameter(torch.ones(3))
    x = per_rank([torch.arange(6.0).reshape(2, 3)] * 2)
    torch.nn.functional.layer_norm(torch.stack([x, x * weight]), (3,), weight).pow(2).sum().backward()
    alone = torch.nn.Parameter(torch.ones(3))
    one = x.shards[0]
    torch.nn.functional.layer_norm(torch.stack([one, one * alone]), (3,), alone).pow(2).sum().backward()
    torch.testing.assert_close(weight.grad, alone.grad)
    differing = (per_rank([torch.ones(3), torch.zeros(3)]) * weight).sum()
    with pytest.raises(LayoutError, match="differs between ranks"):
        differing.backward()
    (x * weight).sum().shards[0].backward()  # one rank alone


def test_autograd_grad_returns_per_rank_gradients_of_per_rank_inputs() -> None:
    shared = torch.tensor(2.0, requires_grad=True)
    x = per_rank([torch.tensor(3.0), torch.tensor(3.0)]).requires_grad_()
    unused = torch.ones(1, requires_grad=True)
    dx, dshared, nothing = torch.autograd.grad((x * shared * shared).sum(), [x, shared, unused], allow_unused=True)
    assert lists(dx) == [4.0, 4.0]
    assert dshared.item() == 4.0 * 3
    assert nothing is None
    (scaled,) = torch.autograd.grad([x * x], [x], [per_rank([torch.tensor(1.0), torch.tensor(10.0)])])
    assert lists(scaled) == [6.0, 60.0]


def test_optimizers_update_the_parameter_of_each_rank_as_plain_torch() -> None:
    parameter = torch.nn.Parameter(make_even())
    assert isinstance(parameter, torch.nn.Parameter)
    assert isinstance(parameter, PerRank)
    for make_optimizer in (lambda p: torch.optim.SGD(p, 0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, 0.5)):
        plain = [torch.nn.Parameter(shard.detach().clone()) for shard in parameter.shards]
        optimizers = [make_optimizer([x]) for x in (parameter, *plain)]
        for x, optimizer in zip((parameter, *plain), optimizers, strict=True):
            optimizer.zero_grad()
            (x * x).sum().backward()
            optimizer.step()
        assert all(torch.equal(shard, x) for shard, x in zip(parameter.shards, plain, strict=True))


def test_repr_and_format_show_the_value_of_each_rank() -> None:
    text = repr(make_uneven())
    assert text.splitlines()[1] == "  rank 0: tensor([[1., 1., 1.],"
    assert "  rank 1: tensor([[2., 2., 2.]])" in text
    assert "  rank 2: tensor([], size=(0, 3))" in text
    assert f"{per_rank([torch.tensor(1.0), torch.tensor(2.5)]):.1f}" == "[rank 0: 1.0, rank 1: 2.5]"
    assert f"{per_rank([torch.tensor(1.0), torch.tensor(1.0)]):.1f}" == "1.0"


def test_copy_deepcopy_pickle_and_save_keep_values_of_each_rank() -> None:
    x = make_uneven().requires_grad_()
    stream = io.BytesIO()
    torch.save(x, stream)
    stream.seek(0)
    for made in (copy.deepcopy(x), pickle.loads(pickle.dumps(x)), torch.load(stream, weights_only=False)):
        assert lists(made) == lists(x)
        assert made.requires_grad
        with torch.no_grad():
            made.add_(1)
    assert lists(x) == lists(make_uneven())
    assert isinstance(copy.deepcopy(torch.nn.Parameter(x)), torch.nn.Parameter)
    assert lists(copy.copy(x)) == lists(x)


def test_per_rank_refuses_invalid_lists_and_different_numbers_of_ranks() -> None:
    with pytest.raises(MeshError, match="2 ranks and one of 3 ranks cannot be combined"):
        make_uneven() + make_even()
    for wrong in ([], [1.0], [make_even()]):
        with pytest.raises(PlacementError, match="one plain tensor per rank"):
            per_rank(wrong)


def test_item_of_different_values_raises_without_torch_function() -> None:
    with torch._C.DisableTorchFunctionSubclass(), pytest.raises(LayoutError):
        make_even().sum().item()


# --- writes of per-rank values to plain tensors ---------------------------------------------------------------------
@pytest.mark.parametrize(
    "write",
    [
        lambda plain, own: plain.add_(own),
        lambda plain, own: torch.add(plain, own, out=plain),
        lambda plain, own: torch._foreach_add_([plain], [own]),
        lambda plain, own: plain.index_add_(0, torch.tensor([0, 1]), own),
        lambda plain, own: plain.__setitem__(slice(0, 2), own + 1),
    ],
)
def test_an_in_place_write_of_per_rank_values_runs_once_on_a_plain_tensor(write: Any) -> None:
    """On processes each rank writes its own copy. In process, one write for each rank would add all of them."""
    plain = torch.ones(2)
    alias = plain.view(2)
    write(plain, per_rank([torch.tensor([1.0, math.nan]), torch.tensor([1.0, math.nan])]))
    assert alias[0] == 2
    assert alias[1].isnan()


def test_in_place_add_of_per_rank_values_to_a_plain_tensor_is_differentiable() -> None:
    own = per_rank([torch.ones(2, requires_grad=True), torch.ones(2, requires_grad=True)])
    total = torch.zeros(2)
    total += own * 3
    assert type(total) is torch.Tensor
    total.sum().backward()
    assert [shard.grad.tolist() for shard in own.shards] == [[3.0, 3.0]] * 2


def test_an_in_place_write_of_different_values_to_a_plain_tensor_raises() -> None:
    plain = torch.zeros(2)
    with pytest.raises(LayoutError, match="per_rank"):
        plain += per_rank([torch.zeros(2), torch.ones(2)])
    assert plain.tolist() == [0, 0]
