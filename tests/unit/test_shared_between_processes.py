"""DTensors between processes of one host, and what happens where they cannot be restored."""

from __future__ import annotations

import copy
import pickle
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
import torch.multiprocessing as mp

import dtensor as dt
from dtensor import DTensor, Partial, Replicate, Shard
from dtensor.comm import PerRank
from dtensor.errors import DTensorError
from dtensor.tensor.copies import restore_tensor
from dtensor.testing import scatter

X = torch.arange(30.0).reshape(5, 6)
VIEWS = [lambda x: x, lambda x: x[1:4], lambda x: x[2], lambda x: x.t(), lambda x: x.view(-1)]


def _double(given: Any, answers: Any) -> None:
    for _ in VIEWS:
        x = given.get(timeout=60)
        with torch.no_grad():
            x.mul_(2)
        answers.put((type(x).__name__, x.detach().full_tensor().tolist()))


def test_tensors_travel_through_queues_and_stay_the_same_memory() -> None:
    context = mp.get_context("fork")  # no interpreter to start
    given, answers = context.Queue(), context.Queue()
    process = context.Process(target=_double, args=(given, answers), daemon=True)
    process.start()
    mesh = dt.init_device_mesh("cpu", (2,))
    try:
        for view in VIEWS:
            x = view(scatter(X, mesh, [Shard(0)]))
            given.put(x)
            kind, value = answers.get(timeout=60)  # the sender lives until then, as torch asks
            assert kind == "DTensor"
            assert value == (view(X) * 2).tolist()
            assert x.is_shared() or not x._local_tensor.numel()
    finally:
        process.join(10)


@pytest.mark.parametrize("placement", [Replicate(), Shard(0), Shard(1), Partial()], ids=str)
def test_every_kind_of_view_is_copied_pickled_and_sent(placement: Any) -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2))
    for view in VIEWS:
        x = view(scatter(X, mesh, [placement, Shard(0)]))
        sent = pickle.loads(bytes(ForkingPickler.dumps(x)))
        for other in (sent, pickle.loads(pickle.dumps(x)), copy.copy(x), copy.deepcopy(x)):
            assert isinstance(other, DTensor)
            assert other.layout == x.layout
            assert torch.equal(other.full_tensor(), view(X))
        leaf = x.detach().requires_grad_()
        leaf.mark = "mine"
        assert copy.copy(leaf).requires_grad
        assert copy.copy(leaf).mark == "mine"


def test_a_piece_where_no_group_is_says_what_to_send_instead() -> None:
    layout = scatter(X, dt.init_device_mesh("cpu", (2,)), [Shard(0)]).layout
    with pytest.raises(DTensorError, match=r"one rank's local tensor.*full_tensor"):
        restore_tensor(X[:3], layout, False, False)
    assert restore_tensor(PerRank([X[:3], X[3:]]), layout, False, False).shape == (5, 6)
