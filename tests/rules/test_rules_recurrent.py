"""Rules of recurrent layers on sharded sequences: values, states and gradients of plain torch; only weight gradients are
reduced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from slow_case_marks import keep_chosen_fast
from torch import nn

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.testing import check

R = Replicate()
MESH_1D, MESH_2D = dt.init_device_mesh("cpu", (3,)), dt.init_device_mesh("cpu", (2, 2))
BATCHES: list[tuple[Any, list[Any]]] = [
    (MESH_1D, [Shard(0)]),  # uneven
    (MESH_1D, [Shard(0, sizes=(3, 0, 2))]),
    (MESH_1D, [Shard(1)]),
    (MESH_1D, [Partial()]),
    (MESH_2D, [Shard(0), R]),
    (MESH_2D, [Shard(0), Shard(1)]),
    (MESH_2D, [Shard(2), Shard(0)]),
]
WEIGHTS = [R, Shard(0), Shard(1)]


@pytest.mark.parametrize(("mesh", "batch"), BATCHES, ids=str)
@pytest.mark.parametrize("first", keep_chosen_fast([True, False], [True]))
@pytest.mark.parametrize("kind", keep_chosen_fast([nn.LSTM, nn.GRU, nn.RNN], [nn.LSTM]))
def test_recurrent_layers_outputs_and_states_equal_plain_torch(
    kind: type[nn.RNNBase], first: bool, mesh: Any, batch: list[Any]
) -> None:
    torch.manual_seed(0)
    layers = kind(4, 6, 2, batch_first=first, bidirectional=True)
    names, weights = zip(*((name, w.detach()) for name, w in layers.named_parameters()), strict=True)
    x, *states = torch.randn(5, 7, 4), *(torch.randn(4, 5 if first else 7, 6) for _ in range(1 + (kind is nn.LSTM)))

    def program(x: Any, *rest: Any) -> Any:
        given, held = rest[: len(names)], rest[len(names) :]
        out, last = torch.func.functional_call(
            layers, dict(zip(names, given, strict=True)), (x, held if len(held) > 1 else held[0])
        )
        return out, *(last if isinstance(last, tuple) else (last,))

    for k, weight in enumerate(WEIGHTS if mesh is MESH_1D else [R]):
        placed = [[weight if w.ndim > 1 else R, R][: mesh.ndim] for w in weights]
        state = [Shard(1), R][: mesh.ndim] if k else [R] * mesh.ndim
        check(program, x, *weights, *states, mesh=mesh, placements=[batch, *placed, *[state] * len(states)])


def test_lstm_of_sharded_sequences_does_not_communicate_in_forward() -> None:
    layers, x = nn.LSTM(4, 6, 2), torch.randn(7, 6, 4)
    model = dt.distribute_module(layers, MESH_1D)
    given = dt.distribute_tensor(x, MESH_1D, [Shard(1)]).requires_grad_()
    with dt.budget(collectives=0):
        out, (h, c) = model(given)
    assert {t.placements for t in (out, h, c)} == {(Shard(1),)}
    with dt.budget(collectives=8):
        out.sum().backward()
    assert given.grad.placements == (Shard(1),)


def test_captured_lstm_equals_eager() -> None:
    model = dt.distribute_module(nn.LSTM(4, 6, batch_first=True), MESH_1D)
    x = dt.distribute_tensor(torch.randn(5, 7, 4), MESH_1D, [Shard(0)])
    with torch.no_grad():
        expected = model(x)[0]
    step = dt.capture(torch.no_grad()(lambda x: model(x)[0]))
    for _ in range(3):
        torch.testing.assert_close(step(x).full_tensor(), expected.full_tensor())
    assert step.cache_info().replayed
