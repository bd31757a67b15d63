"""Sequences of several lengths: padded, packed, through recurrent layers, and padded again."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence, pad_sequence

import dtensor as dt
from dtensor import DTensor, Partial, Replicate, Shard
from dtensor.testing import check, scatter
from dtensor.testing.placements import get_or_make_mesh

LINE, SQUARE = get_or_make_mesh((4,)), get_or_make_mesh((2, 2))
X = torch.randn(3, 5, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
LENGTHS = torch.tensor([5, 4, 2])
WHERE = pytest.mark.parametrize("where", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)


@WHERE
@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"padding_value": -1.5}, {"padding_side": "left"}], ids=str)
def test_padded(where: Any, options: dict[str, Any]) -> None:
    for rest in ((), (3,), (3, 2)):
        sequences = [X.flatten()[: length * torch.Size(rest).numel()].reshape(length, *rest) for length in (2, 5)]
        own = Replicate() if where == Shard(1) and not rest else where
        check(lambda a, b: pad_sequence([a, b, a * 2], **options), *sequences, mesh=LINE, placements=[[own], [own]])


@WHERE
@pytest.mark.parametrize("batch_first", [True, False])
def test_packed_and_padded_again(where: Any, batch_first: bool) -> None:
    def there_and_back(x: Any) -> Any:
        packed = pack_padded_sequence(x, LENGTHS if batch_first else LENGTHS[[0, 0, 1, 1, 2]], batch_first=batch_first)
        assert not isinstance(packed.batch_sizes, DTensor)
        padded, lengths = pad_packed_sequence(packed, batch_first=batch_first, padding_value=7.0, total_length=6)
        return packed.data, padded, lengths.tolist()

    x = X if batch_first else torch.cat([X, X]).clone()[:6, :5]
    check(there_and_back, x, mesh=LINE, placements=[[where]])
    if batch_first:
        check(there_and_back, x, mesh=SQUARE, placements=[[where, Shard(0)]])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: Any) -> None:
    torch.manual_seed(0)
    layer = kind(2, 3, 2, batch_first=True, bidirectional=True).double()
    own = dt.distribute_module(copy.deepcopy(layer), LINE)
    for where in (Shard(0), Shard(1), Replicate()):
        x, p = scatter(X, LINE, [where]).requires_grad_(), X.clone().requires_grad_()
        for model, source in ((own, x), (layer, p)):
            out, _ = model(pack_padded_sequence(source, LENGTHS, batch_first=True))
            assert isinstance(out, PackedSequence)
            out.data.square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), p.grad)


def test_sequences_packed_at_once_and_lengths_that_do_not_fit() -> None:
    rows = [X[0], X[1, :3]]
    packed = pack_sequence([dt.distribute_tensor(row, LINE, [Shard(0)]) for row in rows])
    assert torch.equal(packed.data.full_tensor(), pack_sequence(rows).data)
    x = dt.distribute_tensor(X, LINE, [Shard(0)])
    for wrong in (torch.tensor([5, 4]), torch.tensor([5, 4, 0]), torch.tensor([2, 4, 5])):
        with pytest.raises((RuntimeError, ValueError)):
            pack_padded_sequence(X, wrong, batch_first=True)
        with pytest.raises((RuntimeError, ValueError)):
            pack_padded_sequence(x, wrong, batch_first=True)


class Other(torch.Tensor):
    """Somebody else's tensors."""

    @staticmethod
    def __new__(cls, x: torch.Tensor) -> Other:
        made: Other = torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)  # type: ignore[attr-defined]  # torch's own way
        made.plain = x
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*[x.plain if isinstance(x, Other) else x for x in args], **(kwargs or {}))


@pytest.mark.parametrize("inference", [False, True])
def test_other_peoples_tensors_are_packed_by_themselves(inference: bool) -> None:
    with torch.inference_mode(inference):
        found = torch.ops.aten._pack_padded_sequence(Other(X), LENGTHS, True)
    assert torch.equal(found[0], pack_padded_sequence(X, LENGTHS, batch_first=True).data)


def test_lengths_may_be_distributed_too() -> None:
    whole = dt.distribute_tensor(LENGTHS, LINE, [Replicate()])
    packed = pack_padded_sequence(dt.distribute_tensor(X, LINE, [Shard(0)]), whole, batch_first=True)
    sizes = dt.distribute_tensor(packed.batch_sizes, LINE, [Replicate()])
    padded, lengths = pad_packed_sequence(PackedSequence(packed.data, sizes), batch_first=True)
    want, _ = pad_packed_sequence(pack_padded_sequence(X, LENGTHS, batch_first=True), batch_first=True)
    assert torch.equal(padded.full_tensor(), want)
    assert torch.equal(lengths, LENGTHS)
    with pytest.raises(RuntimeError, match="empty"):
        pack_padded_sequence(dt.zeros(0, 0, device_mesh=LINE), whole[:0])
