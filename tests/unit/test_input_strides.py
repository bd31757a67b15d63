"""Operators that choose, refuse or read memory by strides: locals in another order than the global strides change nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.testing import scatter
from dtensor.testing.placements import get_or_make_mesh

aten = torch.ops.aten
TARGET = torch.randint(0, 5, (4, 6, 3), generator=torch.Generator().manual_seed(0))


def turned(x: torch.Tensor) -> torch.Tensor:
    """The same values, the last dim outermost in memory."""
    order = list(range(x.ndim))[::-1]
    return x.permute(order).contiguous().permute(order)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.to(memory_format=torch.channels_last) if x.ndim == 4 else turned(x)


def put(x: torch.Tensor, ranks: int, placement: Any, order: Callable[[torch.Tensor], torch.Tensor]) -> dt.DTensor:
    mesh = get_or_make_mesh((ranks,))
    pieces: Any = scatter(x, mesh, [placement], seed=1)._local
    held = dt.per_rank([order(piece) for piece in pieces.shards])
    return dt.DTensor.from_local(held, mesh, [placement], shape=tuple(x.shape), stride=x.stride())


def attention(q: Any, k: Any, v: Any) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]


def attention_gradient(q: Any, k: Any, v: Any) -> Any:
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(q, q, k, v, out, sums, 0.0, False)[1]


QKV = ((2, 3, 5, 4),) * 3
CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "nll_loss2d_backward": (
        lambda x: aten.nll_loss2d_backward(
            _like(torch.ones(()), x), x, _like(TARGET, x), None, 1, -100, _like(torch.tensor(72.0).double(), x)
        ),
        ((4, 5, 6, 3),),
    ),
    "flash attention": (attention, QKV),
    "its gradient": (attention_gradient, QKV),
    "isin": (lambda x: torch.isin(x, x * 2), ((4, 5),)),
    "matrix_exp": (torch.linalg.matrix_exp, ((2, 3, 4, 4),)),
    "pdist": (F.pdist, ((5, 4),)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), ((3, 4, 6, 4),)),
}


def _like(value: torch.Tensor, x: Any) -> Any:
    value = value.to(x.dtype) if value.is_floating_point() else value
    return dt.distribute_tensor(value, x.device_mesh, [Replicate()]) if isinstance(x, dt.DTensor) else value


@pytest.mark.parametrize("order", [turned, channels_last])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("what", CASES)
def test_locals_in_another_order(what: str, ranks: int, order: Callable[[torch.Tensor], torch.Tensor]) -> None:
    fn, shapes = CASES[what]
    values = [torch.linspace(-1, 1 + k, torch.Size(shape).numel()).double().reshape(shape) for k, shape in enumerate(shapes)]
    expected = fn(*values)
    for placement in (Replicate(), Partial(), *map(Shard, range(len(shapes[0])))):
        for laid_out in (order, torch.clone):  # a plan serves locals of either order
            operands = [put(x, ranks, placement, laid_out if i % 2 == 0 else order) for i, x in enumerate(values)]
            torch.testing.assert_close(fn(*operands).full_tensor(), expected)
            assert all(x._local.shards[0].stride() == laid_out(x._local.shards[0]).stride() for x in operands[:1])


@pytest.mark.parametrize("placement", [Replicate(), *map(Shard, range(4))])
def test_what_plain_torch_refuses_for_its_strides_is_refused(placement: Any) -> None:
    """A tensor whose global strides are channels last, however its blocks lie."""
    x = torch.randn(4, 5, 6, 3).double().to(memory_format=torch.channels_last)
    for each in (x, put(x, 2, placement, torch.Tensor.contiguous)):
        with pytest.raises(RuntimeError, match="grad_input must be contiguous"):
            CASES["nll_loss2d_backward"][0](each)


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_segmentation_loss_of_a_batch_with_blocks_in_another_order(ranks: int) -> None:
    x = torch.linspace(-1, 1, 4 * 5 * 6 * 3).double().reshape(4, 5, 6, 3)
    own, plain = put(x, ranks, Shard(0), channels_last).requires_grad_(), x.clone().requires_grad_()
    F.cross_entropy(own, dt.distribute_tensor(TARGET, own.device_mesh, [Shard(0)]), ignore_index=2).backward()
    F.cross_entropy(plain, TARGET, ignore_index=2).backward()
    torch.testing.assert_close(own.grad.full_tensor(), plain.grad)
