"""Plain operands: allowed where a rule declares them or torch creates them, else MixedTensorError."""

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


def distribute(x: torch.Tensor, dim: int | None = 0) -> torch.Tensor:
    mesh = dt.init_device_mesh("cpu", (2,))
    return dt.distribute_tensor(x, mesh, [dt.Replicate() if dim is None else dt.Shard(dim)])


class PlainAttribute:
    value = torch.ones(4, 5)


def linear_with_distributed_weight(x: torch.Tensor) -> torch.Tensor:
    layer = torch.nn.Linear(5, 3, bias=False)
    layer.weight = torch.nn.Parameter(distribute(torch.ones(3, 5)))
    return layer(x)


def embed_plain_indices(weight: torch.Tensor) -> torch.Tensor:
    indices = torch.tensor([0, 1])  # embedding() may assign its parameters, so only this frame shows the plain tensor
    return F.embedding(indices, weight)


PLAIN = torch.ones(4, 5)
PLAIN_OPERANDS: dict[str, Callable[[torch.Tensor], object]] = {
    "a global variable": lambda x: x + PLAIN,
    "an attribute": lambda x: x * PlainAttribute.value,
    "a temporary": lambda x: x + torch.ones(4, 5),
    "a temporary's method": lambda x: torch.ones(4, 5).add(x),
    "a keyword": lambda x: torch.add(x, other=torch.ones(4, 5)),
    "in a list": lambda x: torch.cat([x, torch.ones(4, 5)]),
    "a temporary of three dims": lambda x: torch.matmul(torch.ones(2, 3, 4), x),
    "in einsum": lambda x: torch.einsum("ij,jk", x, torch.ones(5, 2)),
    "in where": lambda x: torch.where(x > 0, x, torch.ones(4, 5)),
    "in a stack": lambda x: torch.stack([x, torch.ones(4, 5)]),
    "a plain weight": lambda x: F.linear(x, torch.ones(3, 5)),
    "a bias": lambda x: F.linear(x, distribute(torch.ones(3, 5), None), torch.ones(3)),
    "the left of an operator": lambda x: PLAIN - x,
    "in place": lambda x: x.add_(torch.ones(4, 5)),
    "an item": lambda x: x.__setitem__(0, x[0] + torch.ones(5)),
    "an argument of a Python function": lambda x: F.mse_loss(x, torch.ones(4, 5)),
    "a module's parameters": lambda x: torch.nn.LayerNorm(5)(x),
    "the input of a distributed module": lambda x: linear_with_distributed_weight(torch.ones(4, 5)),
    "indices of an embedding": embed_plain_indices,
}


@pytest.mark.parametrize("mixed", PLAIN_OPERANDS.values(), ids=PLAIN_OPERANDS)
def test_explain_raises_for_plain_operands_as_the_program_does(mixed: Callable[[torch.Tensor], object]) -> None:
    x = distribute(torch.ones(4, 5))
    with pytest.raises(MixedTensorError, match="mixes DTensors with a plain tensor"):
        dt.explain(mixed, x)


DECLARED_OPERANDS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "an index": lambda x: x[torch.tensor([0, 1])],
    "a list and a slice as indices": lambda x: x[:, [4, 0]],
    "index_select rows": lambda x: x.index_select(0, torch.tensor([3, 1])),
    "index_fill rows": lambda x: x.index_fill(0, torch.tensor([3, 1]), 7.0),
    "index_put rows": lambda x: x.index_put((torch.tensor([3, 1]),), torch.tensor(7.0)),
    "cross_entropy targets": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, 4])),
    "class weights": lambda x: F.cross_entropy(x, torch.tensor([0, 1, 2, 4]), torch.arange(5.0)),
    "targets of smoothed labels": lambda x: F.cross_entropy(x, torch.tensor([0, -100, 2, 4]), label_smoothing=0.1),
    "an operand of == and !=": lambda x: (x == torch.arange(20.0).reshape(4, 5).triu(1)) | (x != torch.ones(5)),
    "an operand of allclose and equal": lambda x: (
        x[:3] * (torch.allclose(x, torch.ones(4, 5)) + torch.equal(x, torch.ones(4, 5)))
    ),
}


@pytest.mark.parametrize("dim", [0, 1, None])
@pytest.mark.parametrize("call", DECLARED_OPERANDS.values(), ids=DECLARED_OPERANDS)
def test_plain_operands_that_a_rule_declares_are_accepted(call: Callable[[torch.Tensor], torch.Tensor], dim: int | None) -> None:
    x = torch.arange(20.0).reshape(4, 5)
    for _ in range(2):  # the second call uses the cached plan
        torch.testing.assert_close(call(distribute(x, dim)).full_tensor(), call(x))


@pytest.mark.parametrize("mixed", PLAIN_OPERANDS.values(), ids=PLAIN_OPERANDS)
def test_plain_operands_of_the_user_raise(mixed: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(MixedTensorError, match="mixes DTensors with a plain tensor"):
        mixed(distribute(torch.ones(4, 5)))


TORCH_CREATED: dict[str, tuple[Callable[..., torch.Tensor], torch.Tensor]] = {
    "list as an index": (lambda x: x[[0, 2]], torch.arange(20.0).reshape(4, 5)),
    "one_hot": (lambda x: F.one_hot(x, 4), torch.tensor([1, 2, 3])),
    "combinations": (lambda x: torch.combinations(x), torch.arange(4.0)),
    "vander": (lambda x: torch.vander(x), torch.arange(4.0)),
    "vander with 3 columns of integers": (lambda x: torch.vander(x, 3, increasing=True), torch.arange(5)),
    "matrix_power": (lambda x: torch.linalg.matrix_power(x, 0), torch.ones(3, 3)),
    "quantile": (lambda x: torch.quantile(x, 0.5), torch.arange(5.0)),
    "unravel_index": (lambda x: torch.stack(torch.unravel_index(x, (3, 4))), torch.tensor([3, 4, 11])),
    "fractional_max_pool2d": (lambda x: F.fractional_max_pool2d(x, 3, output_ratio=(0.5, 0.5)), torch.randn(1, 3, 9, 9)),
    "embedding_bag": (lambda x: F.embedding_bag(x.long(), x, mode="sum"), torch.ones(3, 2)),
    "causal attention": (lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True), torch.randn(2, 3, 4)),
    "istft": (lambda x: torch.istft(torch.complex(x, x), 10), torch.randn(6, 3)),
}


@pytest.mark.parametrize("dim", [0, None])
@pytest.mark.parametrize(("function", "x"), TORCH_CREATED.values(), ids=TORCH_CREATED)
@pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning", "ignore:.*window was not provided.*")
def test_plain_tensors_created_by_torch_functions_are_replicated(
    function: Callable[..., torch.Tensor], x: torch.Tensor, dim: int | None
) -> None:
    torch.manual_seed(0)
    expected = function(x)
    torch.manual_seed(0)
    torch.testing.assert_close(function(distribute(x, dim)).full_tensor(), expected)


@pytest.mark.parametrize("causal", [True, False])
def test_transformer_encoder_with_a_distributed_mask_equals_plain_torch(causal: bool) -> None:
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
    x, mask = torch.randn(2, 4, 8), torch.nn.Transformer.generate_square_subsequent_mask(4)
    mask = mask if causal else mask.t().contiguous()
    expected, mesh = encoder(x, mask=mask), dt.init_device_mesh("cpu", (2,))
    got = dt.distribute_module(encoder, mesh)(distribute(x), mask=distribute(mask, 1))
    torch.testing.assert_close(got.full_tensor(), expected)


def test_orthogonal_parametrization_of_a_distributed_weight_equals_plain_torch() -> None:
    plain = torch.nn.Linear(5, 5, bias=False)
    distributed = torch.nn.Linear(5, 5, bias=False)
    distributed.weight = torch.nn.Parameter(distribute(plain.weight.detach()))
    layers = [torch.nn.utils.parametrizations.orthogonal(layer) for layer in (plain, distributed)]
    torch.testing.assert_close(layers[1].weight.full_tensor(), layers[0].weight)


@pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")
def test_lstm_that_creates_its_initial_state_equals_plain_torch() -> None:
    lstm, x = torch.nn.LSTM(5, 6), torch.randn(3, 2, 5)
    expected = lstm(x)[0]
    mesh = dt.init_device_mesh("cpu", (2,))
    got = dt.distribute_module(lstm, mesh)(dt.distribute_tensor(x, mesh, [dt.Shard(1)]))[0]
    torch.testing.assert_close(got.full_tensor(), expected)


# --- plain operands on processes: compared when a call is planned ---------------------------------------------------
def _index_rows(rows: list[list[int]]) -> list[float]:
    x = distribute(torch.arange(4.0))
    found: list[float] = []
    for row in rows:
        found += x[torch.tensor(row)].full_tensor().tolist()
    return found


def _index_rows_of_each_rank() -> None:
    _index_rows([[0, 1 + torch.distributed.get_rank()]])


def _count_exchanges() -> int:
    x = distribute(torch.arange(4.0), None)
    _index_rows([[0, 1]])
    with CommDebugMode() as comm:
        x[torch.tensor([2, 3])]
        x[torch.tensor([2, 3])]
    return comm.get_total_counts()


@pytest.mark.gloo
def test_indexing_with_equal_plain_indices_on_all_processes_gives_the_rows() -> None:
    assert run_gloo(_index_rows, 2, [[0, 3], [2, 1], [0, 1, 1]]) == [[0.0, 3.0, 2.0, 1.0, 0.0, 1.0, 1.0]] * 2


@pytest.mark.gloo
def test_different_plain_indices_raise_on_all_processes() -> None:
    with pytest.raises(RankFailed, match=r"MixedTensorError: .* differs between ranks"):
        run_gloo(_index_rows_of_each_rank, 2)


@pytest.mark.gloo
def test_a_call_with_a_cached_plan_does_not_compare_plain_operands_on_processes() -> None:
    assert run_gloo(_count_exchanges, 2) == [0, 0]


def test_is_same_size_accepts_plain_tensors() -> None:
    x = dt.ones(4, 3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    assert x.is_same_size(torch.zeros(4, 3))
    assert not torch.zeros(2, 3).is_same_size(x)


def _compare_sizes() -> tuple[bool, bool]:
    x = dt.ones(4, 3, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[dt.Shard(0)])
    own = torch.full((4, 3), float(dist.get_rank()))
    return own.is_same_size(x), x.is_same_size(own[:3])


@pytest.mark.gloo
def test_is_same_size_accepts_plain_tensors_that_differ_between_processes() -> None:
    assert run_gloo(_compare_sizes, 2) == [(True, False)] * 2


def test_expanded_numbers_and_empty_tensors_are_accepted_plain_operands() -> None:
    x = distribute(torch.arange(6.0).reshape(2, 3))
    torch.testing.assert_close((x * torch.tensor(2.0).expand(2, 3)).full_tensor(), 2 * torch.arange(6.0).reshape(2, 3))
    assert torch.cat([x, torch.zeros(0, 3)]).shape == (2, 3)
    with pytest.raises(MixedTensorError):
        x * torch.tensor([[2.0], [3.0]]).expand(2, 3)


def test_result_strides_follow_the_strides_of_each_plain_operand() -> None:
    x, y = distribute(torch.tensor(3.0), None), torch.ones(4, 3).t()
    with dt.implicit_replication():
        assert [(x * other).stride() for other in (y.contiguous(), y)] == [(4, 1), (1, 3)]
