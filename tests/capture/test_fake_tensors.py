"""DTensors of fake tensors: shapes and layouts without data, without an effect on later calls with real tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.nn import functional as F

import dtensor as dt
from dtensor import Shard
from dtensor.testing import check
from dtensor.testing.placements import get_or_make_mesh

LINE = get_or_make_mesh((4,))
X = (torch.arange(30.0).reshape(5, 6) - 7) / 4
ROWS = torch.tensor([0, 4, 2, 2, 1])

PROGRAMS = {
    "softmax": lambda x, i: x.softmax(0) @ x.t(),
    "embedding": lambda x, i: F.embedding(i, x),
    "index": lambda x, i: x[i],
    "index_add": lambda x, i: x.index_add(0, i, x),
    "gather": lambda x, i: x.gather(0, i[:, None]),
    "scatter": lambda x, i: x.scatter(1, i[:, None], x[:, :1]),
    "take": lambda x, i: x.take(i),
    "cross_entropy": lambda x, i: F.cross_entropy(x, i),
    "nll_loss": lambda x, i: F.nll_loss(x.log_softmax(1), i, ignore_index=2),
    "sort": lambda x, i: x.sort(0).values,
    "topk": lambda x, i: x.topk(2, 0).values,
    "cumsum": lambda x, i: x.cumsum(0),
    "layer_norm": lambda x, i: F.layer_norm(x, (6,)),
}


@pytest.mark.filterwarnings("ignore::dtensor.errors.GatherWarning")
@pytest.mark.parametrize("where", [Shard(0), Shard(1)], ids=str)
@pytest.mark.parametrize("name", PROGRAMS)
def test_operators_on_fake_tensors_infer_results_and_later_real_calls_are_right(name: str, where: Any) -> None:
    fn: Any = PROGRAMS[name]
    wanted = fn(X, ROWS)
    with FakeTensorMode():
        x = dt.distribute_tensor(torch.empty(5, 6), LINE, [where]).requires_grad_()
        out = fn(x, dt.distribute_tensor(torch.empty(5, dtype=torch.int64), LINE, [dt.Replicate()]))
        assert (out.shape, out.dtype) == (wanted.shape, wanted.dtype)
        assert all(type(piece) is FakeTensor for piece in out.detach()._local.shards)
        out.sum().backward()
        assert x.grad.placements == x.placements
    check(fn, X.double(), ROWS, mesh=LINE, placements=[[where], [dt.Replicate()]])


def test_embedding_and_nll_loss_of_real_tensors_raise_for_an_index_out_of_range() -> None:
    x = dt.distribute_tensor(X, LINE, [Shard(0)])
    with pytest.raises(IndexError, match="out of range"):
        F.embedding(dt.distribute_tensor(torch.tensor([7]), LINE, [dt.Replicate()]), x)
    with pytest.raises(IndexError, match="out of bounds"):
        F.nll_loss(x.redistribute(placements=[Shard(1)]), dt.distribute_tensor(ROWS + 9, LINE, [dt.Replicate()]))
