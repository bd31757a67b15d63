"""Strides: results, redistributed tensors and local tensors have the memory order of one device."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.testing import scatter
from dtensor.testing.oracle import check
from dtensor.testing.placements import get_or_make_mesh


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def reverse_memory_order(x: torch.Tensor) -> torch.Tensor:
    """Return equal values with reversed memory order."""
    order = list(range(x.ndim))[::-1]
    return x.permute(order).contiguous().permute(order)


def to_channels_last(x: torch.Tensor) -> torch.Tensor:
    if x.ndim in (4, 5):
        return x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)
    return reverse_memory_order(x)


def reorder(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


UNPOOL_INDICES = torch.arange(12).reshape(1, 2, 2, 3) % 6 * 4
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "copysign": (torch.copysign, (reorder(draw(6, 1, 5)), reorder(draw(6, 5)))),
    "xlog1py": (torch.special.xlog1py, (reorder(draw(6, 1, 5)).abs(), reorder(draw(6, 5)).abs())),
    "div floor": (lambda x, y: torch.div(x, y, rounding_mode="floor"), (reorder(draw(6, 5)), torch.tensor(2.0))),
    "floor_divide": (torch.floor_divide, (reorder(draw(6, 5)), torch.tensor(2.0))),
    "pow of a number": (lambda x: 2.0**x, (reorder(draw(6, 5)),)),
    "index_fill of every other column": (
        lambda x, i: x[:, ::2].index_fill(0, i, 1.0),
        (reorder(draw(6, 5)), torch.tensor([1])),
    ),
    "logsigmoid": (F.logsigmoid, (reorder(draw(6, 5)),)),
    "huber": (F.huber_loss, (reorder(draw(6, 5)), draw(6, 5, seed=1))),
    "smooth l1": (F.smooth_l1_loss, (reorder(draw(6, 5)), draw(6, 5, seed=1))),
    "mse": (F.mse_loss, (reorder(draw(6, 5)), draw(6, 5, seed=1))),
    "logical_xor": (torch.logical_xor, (draw(6, 1, 5), reorder(draw(6, 5)))),
    "normal": (torch.normal, (reorder(draw(6, 5)), reorder(draw(6, 5)).abs())),
    "channel shuffle": (lambda x: F.channel_shuffle(x, 2), (to_channels_last(draw(2, 4, 3, 5)),)),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, 2), (to_channels_last(draw(2, 8, 3, 5)),)),
    "replication pad": (lambda x: F.pad(x, [1] * 6, "replicate"), (to_channels_last(draw(2, 3, 4, 5)),)),
    "reflection pad": (lambda x: F.pad(x, [1] * 4, "reflect"), (to_channels_last(draw(2, 3, 4, 5)),)),
    "view_copy": (lambda x: torch.view_copy(x, [30]), (reorder(draw(6, 5)),)),
    "xlogy": (torch.xlogy, (reorder(draw(6, 1, 5)).abs(), reorder(draw(6, 5)).abs())),
    "logaddexp": (torch.logaddexp, (draw(4, 1, 5), reorder(draw(6, 5)))),
    "heaviside": (torch.heaviside, (draw(4, 1, 5), reorder(draw(6, 5)))),
    "binary cross entropy": (
        lambda x, y: F.binary_cross_entropy(x, y, reduction="none"),
        (reorder(draw(6, 5)).sigmoid(), draw(6, 5).sigmoid()),
    ),
    "hardtanh gradient": (
        lambda g, x: torch.ops.aten.hardtanh_backward(g, x, -1, 1),
        (reorder(draw(6, 5)), draw(6, 5, seed=1)),
    ),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), (reorder(draw(4, 3, 2, 5)),)),
    "nll of images": (
        lambda x, y: F.nll_loss(x, y, reduction="none"),
        (draw(2, 3, 4, 5), reorder(torch.ones(2, 4, 5)).long()),
    ),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), (draw(3, 4, 5, 2).permute(3, 0, 1, 2),)),
    "one_hot": (lambda x: F.one_hot(x, 3), (reorder(torch.arange(30).reshape(6, 5) % 3),)),
    "max_unpool2d": (
        lambda x, i: F.max_unpool2d(x, i, 2),
        (to_channels_last(draw(1, 2, 2, 3)), to_channels_last(UNPOOL_INDICES)),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_result_strides_equal_those_of_one_device(name: str) -> None:
    fn, xs = CASES[name]
    mesh = dt.init_device_mesh("cpu", (2,))
    check(fn, *xs, mesh=mesh, placements=[[Replicate()]] * len(xs))
    for dim in range(xs[0].ndim):
        check(fn, *xs, mesh=mesh, placements=[[Shard(dim)] if x.ndim > dim else [Replicate()] for x in xs])


@pytest.mark.parametrize("parity", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["_fft_r2c", "_fft_c2c", "_fft_c2r"])
def test_fft_strides_equal_those_of_one_device_for_each_memory_order(kind: str, parity: int) -> None:
    """Memory orders and dims are combined on every second diagonal of their lists, for one parity."""
    op, mesh = getattr(torch.ops.aten, kind), dt.init_device_mesh("cpu", (2,))
    all_dims = [dims for n in (1, 2, 3) for dims in permutations(range(3), n)]
    for k, order in enumerate(permutations(range(3))):
        x = draw(*[(5, 4, 7)[d] for d in order]).permute([order.index(d) for d in range(3)])
        for dims in all_dims[(k + parity) % 2 :: 2]:
            signal = x if kind == "_fft_r2c" else x + 1j * x.flip(0)
            last = {"_fft_r2c": (True, False), "_fft_c2c": (True,), "_fft_c2r": (2 * x.shape[dims[-1]] - 2,)}[kind]
            for end in last:
                for placement in (Replicate(), Shard(1)):
                    check(op, signal, list(dims), 0, end, mesh=mesh, placements=[[placement]], gradients=False)


@pytest.mark.parametrize("right", ["rows", "columns"])
def test_scaled_mm_on_the_cpu_accepts_each_memory_order(right: str) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x, y = (draw(16, 32, seed=seed).to(torch.float8_e4m3fn) for seed in range(2))
    y = y.t() if right == "columns" else y.t().contiguous()
    for placement in ([Replicate()], [Shard(0)], [Shard(1)]):
        check(
            lambda x, y, s: torch._scaled_mm(x, y, s, s, out_dtype=torch.float32),
            *(reorder(x), y, torch.tensor(0.5)),
            mesh=mesh,
            placements=[placement, placement, [Replicate()]],
            gradients=False,
        )


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_out_arguments_resized_by_an_operator_have_new_strides() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x, y = reorder(draw(5, 6, 7)), reorder(draw(5, 1, 7, seed=1))
    for fn in (torch.remainder, torch.add, torch.floor_divide, torch.atan2):
        for size in ((5, 1, 1), (0,), (3, 4), (5, 6, 7)):
            check(
                lambda x, y, out: fn(x, y, out=out),  # noqa: B023 - called in this iteration
                *(x, y, torch.zeros(size, dtype=x.dtype)),
                mesh=mesh,
                placements=[[Shard(0)], [Shard(0)], [Shard(0)]],
                cloned=True,
                gradients=False,
            )


aten = torch.ops.aten
TARGET = torch.randint(0, 5, (4, 6, 3), generator=torch.Generator().manual_seed(0))


def distribute(x: torch.Tensor, ranks: int, placement: Any, order: Callable[[torch.Tensor], torch.Tensor]) -> dt.DTensor:
    mesh = get_or_make_mesh((ranks,))
    local: Any = scatter(x, mesh, [placement], seed=1)._local
    reordered = dt.per_rank([order(shard) for shard in local.shards])
    return dt.DTensor.from_local(reordered, mesh, [placement], shape=tuple(x.shape), stride=x.stride())


def attention(q: Any, k: Any, v: Any) -> Any:
    return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)[0]


def attention_gradient(q: Any, k: Any, v: Any) -> Any:
    out, sums = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(q, q, k, v, out, sums, 0.0, False)[1]


QKV = ((2, 3, 5, 4),) * 3
INPUT_CASES: dict[str, tuple[Callable[..., Any], tuple[tuple[int, ...], ...]]] = {
    "nll_loss2d_backward": (
        lambda x: aten.nll_loss2d_backward(
            _like(torch.ones(()), x), x, _like(TARGET, x), None, 1, -100, _like(torch.tensor(72.0).double(), x)
        ),
        ((4, 5, 6, 3),),
    ),
    "flash attention": (attention, QKV),
    "flash attention backward": (attention_gradient, QKV),
    "isin": (lambda x: torch.isin(x, x * 2), ((4, 5),)),
    "matrix_exp": (torch.linalg.matrix_exp, ((2, 3, 4, 4),)),
    "pdist": (F.pdist, ((5, 4),)),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), ((3, 4, 6, 4),)),
}


def _like(value: torch.Tensor, x: Any) -> Any:
    value = value.to(x.dtype) if value.is_floating_point() else value
    return dt.distribute_tensor(value, x.device_mesh, [Replicate()]) if isinstance(x, dt.DTensor) else value


@pytest.mark.parametrize("order", [reverse_memory_order, to_channels_last])
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("name", INPUT_CASES)
def test_operators_with_local_tensors_in_another_memory_order_equal_plain_torch(
    name: str, ranks: int, order: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    fn, shapes = INPUT_CASES[name]
    values = [torch.linspace(-1, 1 + k, torch.Size(shape).numel()).double().reshape(shape) for k, shape in enumerate(shapes)]
    expected = fn(*values)
    for placement in (Replicate(), Partial(), *map(Shard, range(len(shapes[0])))):
        for first_order in (order, torch.clone):  # one plan is used for local tensors of both orders
            operands = [distribute(x, ranks, placement, first_order if i % 2 == 0 else order) for i, x in enumerate(values)]
            torch.testing.assert_close(fn(*operands).full_tensor(), expected)
            assert all(x._local.shards[0].stride() == first_order(x._local.shards[0]).stride() for x in operands[:1])


@pytest.mark.parametrize("placement", [Replicate(), *map(Shard, range(4))])
def test_strides_that_plain_torch_refuses_raise(placement: Any) -> None:
    """The global strides are channels last, and the local tensors are contiguous."""
    x = torch.randn(4, 5, 6, 3).double().to(memory_format=torch.channels_last)
    for each in (x, distribute(x, 2, placement, torch.Tensor.contiguous)):
        with pytest.raises(RuntimeError, match="grad_input must be contiguous"):
            INPUT_CASES["nll_loss2d_backward"][0](each)


@pytest.mark.parametrize("ranks", [2, 3])
def test_cross_entropy_gradient_with_local_tensors_in_another_order_equals_torch(ranks: int) -> None:
    x = torch.linspace(-1, 1, 4 * 5 * 6 * 3).double().reshape(4, 5, 6, 3)
    own, plain = distribute(x, ranks, Shard(0), to_channels_last).requires_grad_(), x.clone().requires_grad_()
    F.cross_entropy(own, dt.distribute_tensor(TARGET, own.device_mesh, [Shard(0)]), ignore_index=2).backward()
    F.cross_entropy(plain, TARGET, ignore_index=2).backward()
    torch.testing.assert_close(own.grad.full_tensor(), plain.grad)


PLACEMENTS = [dt.Replicate(), dt.Shard(0), dt.Shard(1), dt.Shard(2), dt.Partial()]


@pytest.mark.parametrize(("source", "target"), [*itertools.permutations(PLACEMENTS[:4], 2), (PLACEMENTS[4], dt.Replicate())])
@pytest.mark.parametrize("async_op", [False, True])
def test_redistribution_keeps_the_memory_order_of_dims(source: dt.Placement, target: dt.Placement, async_op: bool) -> None:
    mesh = dt.init_device_mesh("cpu", (3,))
    x = torch.arange(5.0 * 6 * 7).reshape(5, 6, 7)
    sharded = dt.distribute_tensor(x.permute(2, 0, 1), mesh, [source])
    redistributed = sharded.redistribute(placements=[target], async_op=async_op)
    assert redistributed.stride() == (1, 42, 7)
    for shard in redistributed.to_local().shards:
        in_order = shard.permute(1, 2, 0)
        strides = [step for step, size in zip(in_order.stride(), in_order.shape, strict=True) if size > 1]
        assert strides == sorted(strides, reverse=True)
    assert torch.equal(redistributed.full_tensor(), x.permute(2, 0, 1))
    if target == dt.Replicate():
        assert torch.equal(redistributed.permute(1, 2, 0).view(30, 7).full_tensor(), x.view(30, 7))


@pytest.mark.parametrize("op", ["sum", "avg", "max", "product"])
@pytest.mark.parametrize("other", [dt.Replicate(), dt.Shard(0), dt.Shard(1), dt.Partial()], ids=str)
def test_addends_of_a_partial_have_the_memory_order_of_the_value(op: str, other: dt.Placement) -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2))
    for x in (torch.ones(4, 6).t(), torch.ones(4, 6, 2).permute(2, 0, 1), torch.ones(4, 6)):
        distributed = dt.distribute_tensor(x, mesh, [dt.Partial(op), other])
        redistributed = dt.distribute_tensor(x, mesh, [dt.Replicate(), other]).redistribute(placements=[dt.Partial(op), other])
        for partial in (distributed, redistributed):
            orders = [sorted(range(x.ndim), key=local.stride().__getitem__) for local in partial._local.shards]
            assert orders == [sorted(range(x.ndim), key=x.stride().__getitem__)] * 4


@pytest.mark.parametrize("read", ["to_local", "full_tensor"])
def test_gradients_of_expanded_tensors_that_differ_are_summed(read: str) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x = dt.distribute_tensor(torch.tensor([[1.0, 1.0]]), mesh, [Replicate()]).requires_grad_()
    weights = torch.tensor([[1.0, 10.0], [2.0, 20.0], [3.0, 30.0]])
    repeated = x.expand(3, -1).redistribute(placements=[Shard(1)])
    if read == "to_local":
        local = repeated.to_local() * dt.distribute_tensor(weights, mesh, [Shard(1)]).to_local()
        dt.DTensor.from_local(local, mesh, [Shard(1)]).sum().backward()
    else:
        (repeated.full_tensor() * weights).sum().backward()
    assert x.grad is not None
    assert x.grad.full_tensor().tolist() == [[6.0, 60.0]]
