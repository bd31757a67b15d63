"""Plain tensors beside DTensors: a user's are refused, what torch makes on the way counts as replicated."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from gloo import RankFailed, run_gloo

import dtensor as dt
from dtensor.errors import ImplicitCommunicationError, MixedTensorError


def distributed(x: torch.Tensor, dim: int | None = 0) -> torch.Tensor:
    mesh = dt.init_device_mesh("cpu", (2,))
    return dt.distribute_tensor(x, mesh, [dt.Replicate() if dim is None else dt.Shard(dim)])


class Holder:
    value = torch.ones(4, 5)


def linear_with_distributed_weight(x: torch.Tensor) -> torch.Tensor:
    layer = torch.nn.Linear(5, 3, bias=False)
    layer.weight = torch.nn.Parameter(distributed(torch.ones(3, 5)))
    return layer(x)


def embedded(weight: torch.Tensor) -> torch.Tensor:
    indices = torch.tensor([0, 1])  # embedding() may assign its own parameter, so only this frame says whose it is
    return F.embedding(indices, weight)


PLAIN = torch.ones(4, 5)
MIXED: dict[str, Callable[[torch.Tensor], object]] = {
    "a global variable": lambda x: x + PLAIN,
    "an attribute": lambda x: x * Holder.value,
    "a temporary": lambda x: x + torch.ones(4, 5),
    "a temporary's method": lambda x: torch.ones(4, 5).add(x),
    "a keyword": lambda x: torch.add(x, other=torch.ones(4, 5)),
    "in a list": lambda x: torch.cat([x, torch.ones(4, 5)]),
    "an index": lambda x: x[torch.tensor([0, 1])],
    "the left of an operator": lambda x: PLAIN - x,
    "in place": lambda x: x.add_(torch.ones(4, 5)),
    "an item": lambda x: x.__setitem__(0, torch.ones(5)),
    "of a function in Python": lambda x: F.mse_loss(x, torch.ones(4, 5)),
    "of a loss module": lambda x: torch.nn.CrossEntropyLoss()(x, torch.tensor([0, 1, 2, 3])),
    "a module's parameters": lambda x: torch.nn.LayerNorm(5)(x),
    "the input of a distributed module": lambda x: linear_with_distributed_weight(torch.ones(4, 5)),
    "indices of an embedding": embedded,
}


@pytest.mark.parametrize("mixed", MIXED.values(), ids=MIXED)
def test_a_users_plain_tensor_is_refused(mixed: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(MixedTensorError, match="mixes DTensors with a plain tensor"):
        mixed(distributed(torch.ones(4, 5)))


MADE: dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor]] = {
    "list as an index": (lambda x: x[[0, 2]], torch.arange(20.0).reshape(4, 5)),
    "one_hot": (lambda x: F.one_hot(x, 4), torch.tensor([1, 2, 3])),
    "combinations": (lambda x: torch.combinations(x), torch.arange(4.0)),
    "matrix_power": (lambda x: torch.linalg.matrix_power(x, 0), torch.ones(3, 3)),
    "quantile": (lambda x: torch.quantile(x, 0.5), torch.arange(5.0)),
    "unravel_index": (lambda x: torch.stack(torch.unravel_index(x, (3, 4))), torch.tensor([3, 4, 11])),
    "fractional_max_pool2d": (lambda x: F.fractional_max_pool2d(x, 3, output_ratio=(0.5, 0.5)), torch.randn(1, 3, 9, 9)),
    "embedding_bag": (lambda x: F.embedding_bag(x.long(), x, mode="sum"), torch.ones(3, 2)),
    "causal attention": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), torch.randn(2, 3, 4)),
    "istft": (lambda x: torch.istft(torch.complex(x, x), 10), torch.randn(6, 3)),
}


@pytest.mark.parametrize("dim", [0, None])
@pytest.mark.parametrize(("made", "x"), MADE.values(), ids=MADE)
@pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning", "ignore:.*window was not provided.*")
def test_what_torch_makes_counts_as_replicated(made: Callable[..., torch.Tensor], x: torch.Tensor, dim: int | None) -> None:
    torch.manual_seed(0)
    expected = made(x)
    torch.manual_seed(0)
    torch.testing.assert_close(made(distributed(x, dim)).full_tensor(), expected)


@pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")
def test_a_module_may_make_its_first_state() -> None:
    lstm, x = torch.nn.LSTM(5, 6), torch.randn(3, 2, 5)
    expected = lstm(x)[0]
    mesh = dt.init_device_mesh("cpu", (2,))
    got = dt.distribute_module(lstm, mesh)(dt.distribute_tensor(x, mesh, [dt.Shard(1)]))[0]
    torch.testing.assert_close(got.full_tensor(), expected)


# --- copies that torch makes of a user's tensor cannot be told apart, so processes compare them -----------------------------
def _multiplied(differ: bool) -> list[float]:
    x = distributed(torch.ones(4, 5))
    value = 1.0 + (torch.distributed.get_rank() if differ else 0)
    return torch.matmul(torch.full((2, 3, 4), value), x).full_tensor().reshape(-1).tolist()


def _multiplied_explicitly() -> None:
    with dt.explicit():
        _multiplied(differ=False)


@pytest.mark.gloo
def test_equal_values_are_used_on_all_ranks() -> None:
    assert run_gloo(_multiplied, 2, False) == [[4.0] * 30] * 2


@pytest.mark.gloo
def test_different_values_are_an_error_on_all_ranks() -> None:
    with pytest.raises(RankFailed, match=r"MixedTensorError: .* differs between ranks"):
        run_gloo(_multiplied, 2, True)


@pytest.mark.gloo
def test_the_comparison_is_communication() -> None:
    with pytest.raises(RankFailed, match=ImplicitCommunicationError.__name__):
        run_gloo(_multiplied_explicitly, 2)


def test_shapes_are_compared_with_plain_tensors() -> None:
    x = dt.ones(4, 3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    assert x.is_same_size(torch.zeros(4, 3))
    assert not torch.zeros(2, 3).is_same_size(x)


def test_one_number_expanded_is_a_number_and_no_numbers_are_alike() -> None:
    x = distributed(torch.arange(6.0).reshape(2, 3))
    torch.testing.assert_close((x * torch.tensor(2.0).expand(2, 3)).full_tensor(), 2 * torch.arange(6.0).reshape(2, 3))
    assert torch.cat([x, torch.zeros(0, 3)]).shape == (2, 3)
    with pytest.raises(MixedTensorError):
        x * torch.tensor([[2.0], [3.0]]).expand(2, 3)


def test_strides_are_those_of_this_plain_tensor_not_of_one_seen_before() -> None:
    x, y = distributed(torch.tensor(3.0), None), torch.ones(4, 3).t()
    with dt.implicit_replication():
        assert [(x * other).stride() for other in (y.contiguous(), y)] == [(4, 1), (1, 3)]
