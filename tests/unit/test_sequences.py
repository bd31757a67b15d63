"""Sequences of several lengths: padding, packing and recurrent layers."""

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
EACH_PLACEMENT = pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate(), Partial()], ids=str)


@EACH_PLACEMENT
@pytest.mark.parametrize("options", [{}, {"batch_first": True}, {"padding_value": -1.5}, {"padding_side": "left"}], ids=str)
def test_pad_sequence_equals_plain_torch(placement: Any, options: dict[str, Any]) -> None:
    for rest in ((), (3,), (3, 2)):
        sequences = [X.flatten()[: length * torch.Size(rest).numel()].reshape(length, *rest) for length in (2, 5)]
        first_placement = Replicate() if placement == Shard(1) and not rest else placement
        check(
            lambda a, b: pad_sequence([a, b, a * 2], **options),
            *sequences,
            mesh=LINE,
            placements=[[first_placement], [first_placement]],
        )


@EACH_PLACEMENT
@pytest.mark.parametrize("batch_first", [True, False])
def test_pack_and_pad_again_equals_plain_torch(placement: Any, batch_first: bool) -> None:
    def pack_and_pad(x: Any) -> Any:
        packed = pack_padded_sequence(x, LENGTHS if batch_first else LENGTHS[[0, 0, 1, 1, 2]], batch_first=batch_first)
        assert not isinstance(packed.batch_sizes, DTensor)
        padded, lengths = pad_packed_sequence(packed, batch_first=batch_first, padding_value=7.0, total_length=6)
        return packed.data, padded, lengths.tolist()

    x = X if batch_first else torch.cat([X, X]).clone()[:6, :5]
    check(pack_and_pad, x, mesh=LINE, placements=[[placement]])
    if batch_first:
        check(pack_and_pad, x, mesh=SQUARE, placements=[[placement, Shard(0)]])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers_on_packed_sequences_have_the_gradients_of_plain_torch(kind: Any) -> None:
    torch.manual_seed(0)
    layer = kind(2, 3, 2, batch_first=True, bidirectional=True).double()
    distributed_layer = dt.distribute_module(copy.deepcopy(layer), LINE)
    for placement in (Shard(0), Shard(1), Replicate()):
        x, p = scatter(X, LINE, [placement]).requires_grad_(), X.clone().requires_grad_()
        for model, source in ((distributed_layer, x), (layer, p)):
            out, _ = model(pack_padded_sequence(source, LENGTHS, batch_first=True))
            assert isinstance(out, PackedSequence)
            out.data.square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), p.grad)


def test_pack_sequence_equals_plain_torch_and_invalid_lengths_raise() -> None:
    rows = [X[0], X[1, :3]]
    packed = pack_sequence([dt.distribute_tensor(row, LINE, [Shard(0)]) for row in rows])
    assert torch.equal(packed.data.full_tensor(), pack_sequence(rows).data)
    x = dt.distribute_tensor(X, LINE, [Shard(0)])
    for wrong in (torch.tensor([5, 4]), torch.tensor([5, 4, 0]), torch.tensor([2, 4, 5])):
        with pytest.raises((RuntimeError, ValueError)):
            pack_padded_sequence(X, wrong, batch_first=True)
        with pytest.raises((RuntimeError, ValueError)):
            pack_padded_sequence(x, wrong, batch_first=True)


class OtherSubclass(torch.Tensor):
    """Tensor subclass of another library."""

    @staticmethod
    def __new__(cls, x: torch.Tensor) -> OtherSubclass:
        made: OtherSubclass = torch.Tensor._make_wrapper_subclass(cls, x.shape, dtype=x.dtype)  # type: ignore[attr-defined]  # untyped in torch
        made.plain = x
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*[x.plain if isinstance(x, OtherSubclass) else x for x in args], **(kwargs or {}))


@pytest.mark.parametrize("inference", [False, True])
def test_packing_of_another_tensor_subclass_is_unchanged(inference: bool) -> None:
    with torch.inference_mode(inference):
        found = torch.ops.aten._pack_padded_sequence(OtherSubclass(X), LENGTHS, True)
    assert torch.equal(found[0], pack_padded_sequence(X, LENGTHS, batch_first=True).data)


def test_pack_and_pad_accept_distributed_lengths() -> None:
    distributed_lengths = dt.distribute_tensor(LENGTHS, LINE, [Replicate()])
    packed = pack_padded_sequence(dt.distribute_tensor(X, LINE, [Shard(0)]), distributed_lengths, batch_first=True)
    sizes = dt.distribute_tensor(packed.batch_sizes, LINE, [Replicate()])
    padded, lengths = pad_packed_sequence(PackedSequence(packed.data, sizes), batch_first=True)
    expected, _ = pad_packed_sequence(pack_padded_sequence(X, LENGTHS, batch_first=True), batch_first=True)
    assert torch.equal(padded.full_tensor(), expected)
    assert torch.equal(lengths, LENGTHS)
    with pytest.raises(RuntimeError, match="empty"):
        pack_padded_sequence(dt.zeros(0, 0, device_mesh=LINE), distributed_lengths[:0])
