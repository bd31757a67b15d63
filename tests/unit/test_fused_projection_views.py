"""Fused projections, whose columns ranks have as they lie: parts of a view that blocks do not show are parts of its base."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch_versions import needs_whole

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.testing.oracle import check

LINE, SQUARE = dt.init_device_mesh("cpu", (4,)), dt.init_device_mesh("cpu", (2, 2))
HEADS, K = 8, 4


def numbers(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


X, W = numbers(6, 20, 16), numbers(3 * HEADS * K, 16)


def unbound(y: Any) -> Any:
    return y.view(6, 20, 3, HEADS, K).permute(2, 0, 3, 1, 4).unbind(0)


def chunked(y: Any) -> Any:
    return [part.squeeze(2).transpose(1, 2) for part in y.view(6, 20, 3, -1, K).chunk(3, 2)]


def picked(y: Any) -> Any:
    turned = y.view(6, 20, 3, HEADS, K).transpose(1, 3)
    return [turned[:, :, k] for k in range(3)]


def sliced(y: Any) -> Any:
    return [y.view(6, 20, 3, HEADS, K)[:, :, k : k + 1].squeeze(2).transpose(1, 2) for k in range(3)]


def by_rows(y: Any) -> Any:
    return [part.view(6, 20, HEADS, K).transpose(1, 2) for part in y.view(120, 3, HEADS, K).transpose(0, 1).unbind(0)]


def attention(x: Any, w: Any, parts: Callable[[Any], Any]) -> Any:
    return F.scaled_dot_product_attention(*parts(F.linear(x, w)))


PARTS = [unbound, chunked, picked, sliced, by_rows]


@needs_whole
@pytest.mark.parametrize("parts", PARTS, ids=lambda fn: fn.__name__)
def test_heads_of_a_fused_projection_move_as_far_as_they_have_to(parts: Callable[[Any], Any]) -> None:
    """Forward four heads to the busiest rank; back the matrix and its gradient rather than activations."""
    x, w = X.clone().requires_grad_(), W.clone().requires_grad_()
    attention(x, w, parts).square().sum().backward()
    p = dt.distribute_tensor(X, LINE, [Replicate()]).requires_grad_()
    q = dt.distribute_tensor(W, LINE, [Shard(0)]).requires_grad_()
    with dt.debug.CommDebugMode() as comm:
        made = attention(p, q, parts)
        head, received = 6 * 20 * K * 8, sum(event.bytes for event in comm.events)
        made.square().sum().backward()
    assert received == 4 * head
    torch.testing.assert_close(made.full_tensor(), attention(X, W, parts))
    for found, expected in ((p.grad, x.grad), (q.grad, w.grad)):
        assert found is not None
        torch.testing.assert_close(found.full_tensor(), expected)
    assert sum(event.bytes for event in comm.events) <= received + 5 * W.nbytes // 4 + 2 * 3 * X.nbytes // 4


@pytest.mark.parametrize("parts", PARTS, ids=lambda fn: fn.__name__)
@pytest.mark.parametrize(
    "where", [[Replicate(), Shard(2)], [Shard(0), Shard(2)], [Shard(2), Shard(2)], [Shard(1), Shard(2)]], ids=str
)
def test_parts_are_those_of_one_device(parts: Callable[[Any], Any], where: Any) -> None:
    check(lambda y: [part * 2 for part in parts(y)], F.linear(X, W), mesh=SQUARE, placements=[where])


def test_parts_are_one_memory_with_what_they_are_parts_of() -> None:
    y, whole = dt.distribute_tensor(F.linear(X, W), LINE, [Shard(2)]), F.linear(X, W)
    for each in (y, whole):
        q, k, v = unbound(each)
        q.mul_(2)
        each.add_(1)
        k.copy_(v)
    torch.testing.assert_close(y.full_tensor(), whole)
    for found, expected in zip(unbound(y), unbound(whole), strict=True):
        torch.testing.assert_close(found.full_tensor(), expected)
