"""Plain tensors beside DTensors: what no rule declares is refused, what torch makes on its way is made distributed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gloo_processes import RankFailed, run_gloo

import dtensor as dt
from dtensor.debug import CommDebugMode
from dtensor.errors import MixedTensorError


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
    "a temporary of three dims": lambda x: torch.matmul(torch.ones(2, 3, 4), x),
    "in einsum": lambda x: torch.einsum("ij,jk", x, torch.ones(5, 2)),
    "in where": lambda x: torch.where(x > 0, x, torch.ones(4, 5)),
    "in a stack": lambda x: torch.stack([x, torch.ones(4, 5)]),
    "a plain weight": lambda x: F.linear(x, torch.ones(3, 5)),
    "a bias": lambda x: F.linear(x, distributed(torch.ones(3, 5), None), torch.ones(3)),
    "the left of an operator": lambda x: PLAIN - x,
    "in place": lambda x: x.add_(torch.ones(4, 5)),
    "an item": lambda x: x.__setitem__(0, x[0] + torch.ones(5)),
    "of a function in Python": lambda x: F.mse_loss(x, torch.ones(4, 5)),
    "a module's parameters": lambda x: torch.nn.LayerNorm(5)(x),
    "the input of a distributed module": lambda x: linear_with_distributed_weight(torch.ones(4, 5)),
    "indices of an embedding": embedded,
}


@pytest.mark.parametrize("mixed", MIXED.values(), ids=MIXED)
def test_explain_refuses_what_the_program_does(mixed: Callable[[torch.Tensor], object]) -> None:
    x = distributed(torch.ones(4, 5))
    with pytest.raises(MixedTensorError, match="mixes DTensors with a plain tensor"):
        dt.explain(mixed, x)


DECLARED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "an index": lambda x: x[torch.tensor([0, 1])],
    "a list as an index beside a slice": lambda x: x[:, [4, 0]],
    "rows": lambda x: x.index_select(0, torch.tensor([3, 1])),
    "rows written": lambda x: x.index_fill(0, torch.tensor([3, 1]), 7.0),
    "rows put": lambda x: x.index_put((torch.tensor([3, 1]),), torch.tensor(7.0)),
    "targets": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, 4])),
    "class weights": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, 4]), torch.arange(5.0)),
    "targets of smoothed labels": lambda x: F.cross_entropy(x, torch.tensor([0, -100, 2, 4]), label_smoothing=0.1),
    "what is compared with": lambda x: (x == torch.arange(20.0).reshape(4, 5).triu(1)) | (x != torch.ones(5)),
    "what is compared with at once": lambda x: x[:3] * (torch.allclose(x, torch.ones(4, 5)) + torch.equal(x, torch.ones(4, 5))),
}


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("call", DECLARED.values(), ids=DECLARED)
def test_what_a_rule_declares_may_be_plain(call: Callable[[torch.Tensor], torch.Tensor], dim: int | None) -> None:
    x = torch.arange(20.0).reshape(4, 5)
    for _ in range(2):  # planned, then found
        torch.testing.assert_close(call(distributed(x, dim)).full_tensor(), call(x))


@pytest.mark.parametrize("mixed", MIXED.values(), ids=MIXED)
def test_a_users_plain_tensor_is_refused(mixed: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(MixedTensorError, match="mixes DTensors with a plain tensor"):
        mixed(distributed(torch.ones(4, 5)))


MADE: dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor]] = {
    "list as an index": (lambda x: x[[0, 2]], torch.arange(20.0).reshape(4, 5)),
    "one_hot": (lambda x: F.one_hot(x, 4), torch.tensor([1, 2, 3])),
    "combinations": (lambda x: torch.combinations(x), torch.arange(4.0)),
    "powers": (lambda x: torch.vander(x), torch.arange(4.0)),
    "three powers of integers": (lambda x: torch.vander(x, 3, increasing=True), torch.arange(5)),
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


@pytest.mark.parametrize("causal", [True, False])
def test_a_layer_of_torchs_may_ask_whether_a_mask_is_causal(causal: bool) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    x, mask = torch.randn(2, 4, 8), torch.nn.Transformer.generate_square_subsequent_mask(4)
    mask = mask if causal else mask.t().contiguous()
    expected, mesh = encoder(x, mask=mask), dt.init_device_mesh("cpu", (2,))
    got = dt.distribute_module(encoder, mesh)(distributed(x), mask=distributed(mask, 1))
    torch.testing.assert_close(got.full_tensor(), expected)


def test_a_parametrization_of_torchs_may_ask_whether_a_matrix_is_orthogonal() -> None:
    plain = torch.nn.Linear(5, 5, bias=False)
    ours = torch.nn.Linear(5, 5, bias=False)
    ours.weight = torch.nn.Parameter(distributed(plain.weight.detach()))
    layers = [torch.nn.utils.parametrizations.orthogonal(layer) for layer in (plain, ours)]
    torch.testing.assert_close(layers[1].weight.full_tensor(), layers[0].weight)


@pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")
def test_a_module_may_make_its_first_state() -> None:
    lstm, x = torch.nn.LSTM(5, 6), torch.randn(3, 2, 5)
    expected = lstm(x)[0]
    mesh = dt.init_device_mesh("cpu", (2,))
    got = dt.distribute_module(lstm, mesh)(dt.distribute_tensor(x, mesh, [dt.Shard(1)]))[0]
    torch.testing.assert_close(got.full_tensor(), expected)


# --- on processes: compared when a call is planned --------------------------------------------------------------------------
def _picked(rows: list[list[int]]) -> list[float]:
    x = distributed(torch.arange(4.0))
    found: list[float] = []
    for row in rows:
        found += x[torch.tensor(row)].full_tensor().tolist()
    return found


def _picked_elsewhere() -> None:
    _picked([[0, 1 + torch.distributed.get_rank()]])


def _exchanges() -> int:
    x = distributed(torch.arange(4.0), None)
    _picked([[0, 1]])
    with CommDebugMode() as comm:
        x[torch.tensor([2, 3])]
        x[torch.tensor([2, 3])]
    return comm.get_total_counts()


@pytest.mark.gloo
def test_equal_values_are_used_on_all_ranks() -> None:
    assert run_gloo(_picked, 2, [[0, 3], [2, 1], [0, 1, 1]]) == [[0.0, 3.0, 2.0, 1.0, 0.0, 1.0, 1.0]] * 2


@pytest.mark.gloo
def test_different_values_are_an_error_on_all_ranks() -> None:
    with pytest.raises(RankFailed, match=r"MixedTensorError: .* differs between ranks"):
        run_gloo(_picked_elsewhere, 2)


@pytest.mark.gloo
def test_a_call_that_finds_its_plan_exchanges_nothing() -> None:
    assert run_gloo(_exchanges, 2) == [0, 0]


def test_shapes_are_compared_with_plain_tensors() -> None:
    x = dt.ones(4, 3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    assert x.is_same_size(torch.zeros(4, 3))
    assert not torch.zeros(2, 3).is_same_size(x)


def _same_size() -> tuple[bool, bool]:
    x = dt.ones(4, 3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    own = torch.full((4, 3), float(dist.get_rank()))
    return own.is_same_size(x), x.is_same_size(own[:3])


@pytest.mark.gloo
def test_of_what_is_asked_for_its_shape_the_values_may_differ_between_ranks() -> None:
    assert run_gloo(_same_size, 2) == [(True, False)] * 2


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
