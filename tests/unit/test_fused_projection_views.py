"""Views of fused projections: q, k and v of a column-sharded projection are lazy views of its output."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch_version_marks import needs_undecomposed_linear

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.testing.oracle import check

LINE, SQUARE = dt.init_device_mesh("cpu", (4,)), dt.init_device_mesh("cpu", (2, 2))
HEADS, K = 8, 4


def make_random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


X, W = make_random(6, 20, 16), make_random(3 * HEADS * K, 16)


def split_by_unbind(y: Any) -> Any:
    return y.view(6, 20, 3, HEADS, K).permute(2, 0, 3, 1, 4).unbind(0)


def split_by_chunk(y: Any) -> Any:
    return [part.squeeze(2).transpose(1, 2) for part in y.view(6, 20, 3, -1, K).chunk(3, 2)]


def split_by_index(y: Any) -> Any:
    transposed = y.view(6, 20, 3, HEADS, K).transpose(1, 3)
    return [transposed[:, :, k] for k in range(3)]


def split_by_slice(y: Any) -> Any:
    return [y.view(6, 20, 3, HEADS, K)[:, :, k : k + 1].squeeze(2).transpose(1, 2) for k in range(3)]


def split_flattened(y: Any) -> Any:
    return [part.view(6, 20, HEADS, K).transpose(1, 2) for part in y.view(120, 3, HEADS, K).transpose(0, 1).unbind(0)]


def attention(x: Any, w: Any, split: Callable[[Any], Any]) -> Any:
    return F.scaled_dot_product_attention(*split(F.linear(x, w)))


SPLITS = [split_by_unbind, split_by_chunk, split_by_index, split_by_slice, split_flattened]


@needs_undecomposed_linear
@pytest.mark.parametrize("split", SPLITS, ids=lambda fn: fn.__name__)
def test_attention_of_a_fused_projection_receives_only_the_needed_heads(split: Callable[[Any], Any]) -> None:
    """Forward sends four heads to a rank. Backward sends the weight and its gradient, and reduces the gradient of the input."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    attention(x, w, split).square().sum().backward()
    p = dt.distribute_tensor(X, LINE, [Replicate()]).requires_grad_()
    q = dt.distribute_tensor(W, LINE, [Shard(0)]).requires_grad_()
    with dt.debug.CommDebugMode() as comm:
        result = attention(p, q, split)
        head, received = 6 * 20 * K * 8, sum(event.bytes for event in comm.events)
        result.square().sum().backward()
    assert received == 4 * head
    torch.testing.assert_close(result.full_tensor(), attention(X, W, split))
    for found, expected in ((p.grad, x.grad), (q.grad, w.grad)):
        assert found is not None
        torch.testing.assert_close(found.full_tensor(), expected)
    assert sum(event.bytes for event in comm.events) <= received + 5 * W.nbytes // 4 + 2 * 3 * X.nbytes // 4


@pytest.mark.parametrize("split", SPLITS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize(
    "placements", [[Replicate(), Shard(2)], [Shard(0), Shard(2)], [Shard(2), Shard(2)], [Shard(1), Shard(2)]], ids=str
)
def test_parts_of_a_fused_projection_equal_those_of_one_device(split: Callable[[Any], Any], placements: Any) -> None:
    check(lambda y: [part * 2 for part in split(y)], F.linear(X, W), mesh=SQUARE, placements=[placements])


def test_writes_to_parts_of_a_fused_projection_reach_the_base() -> None:
    y, plain = dt.distribute_tensor(F.linear(X, W), LINE, [Shard(2)]), F.linear(X, W)
    for each in (y, plain):
        q, k, v = split_by_unbind(each)
        q.mul_(2)
        each.add_(1)
        k.copy_(v)
    torch.testing.assert_close(y.full_tensor(), plain)
    for found, expected in zip(split_by_unbind(y), split_by_unbind(plain), strict=True):
        torch.testing.assert_close(found.full_tensor(), expected)
