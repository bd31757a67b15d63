"""Global strides are those of the kernels on one device, whatever memory order the arguments have."""

from __future__ import annotations

from collections.abc import Callable
from itertools import permutations
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.testing.oracle import check


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def turned(x: torch.Tensor) -> torch.Tensor:
    return x.transpose(0, -1).contiguous().transpose(0, -1)


def channels_last(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous(memory_format=torch.channels_last if x.ndim == 4 else torch.channels_last_3d)


PLACE = torch.arange(12).reshape(1, 2, 2, 3) % 6 * 4
CASES: dict[str, tuple[Callable[..., Any], tuple[torch.Tensor, ...]]] = {
    "copysign": (torch.copysign, (turned(draw(6, 1, 5)), turned(draw(6, 5)))),
    "xlog1py": (torch.special.xlog1py, (turned(draw(6, 1, 5)).abs(), turned(draw(6, 5)).abs())),
    "div floor": (lambda x, y: torch.div(x, y, rounding_mode="floor"), (turned(draw(6, 5)), torch.tensor(2.0))),
    "floor_divide": (torch.floor_divide, (turned(draw(6, 5)), torch.tensor(2.0))),
    "pow of a number": (lambda x: 2.0**x, (turned(draw(6, 5)),)),
    "index_fill of every other column": (lambda x, i: x[:, ::2].index_fill(0, i, 1.0), (turned(draw(6, 5)), torch.tensor([1]))),
    "logsigmoid": (F.logsigmoid, (turned(draw(6, 5)),)),
    "huber": (F.huber_loss, (turned(draw(6, 5)), draw(6, 5, seed=1))),
    "smooth l1": (F.smooth_l1_loss, (turned(draw(6, 5)), draw(6, 5, seed=1))),
    "mse": (F.mse_loss, (turned(draw(6, 5)), draw(6, 5, seed=1))),
    "logical_xor": (torch.logical_xor, (draw(6, 1, 5), turned(draw(6, 5)))),
    "normal": (torch.normal, (turned(draw(6, 5)), turned(draw(6, 5)).abs())),
    "channel shuffle": (lambda x: F.channel_shuffle(x, 2), (channels_last(draw(2, 4, 3, 5)),)),
    "pixel shuffle": (lambda x: F.pixel_shuffle(x, 2), (channels_last(draw(2, 8, 3, 5)),)),
    "replication pad": (lambda x: F.pad(x, [1] * 6, "replicate"), (channels_last(draw(2, 3, 4, 5)),)),
    "reflection pad": (lambda x: F.pad(x, [1] * 4, "reflect"), (channels_last(draw(2, 3, 4, 5)),)),
    "view_copy": (lambda x: torch.view_copy(x, [30]), (turned(draw(6, 5)),)),
    "xlogy": (torch.xlogy, (turned(draw(6, 1, 5)).abs(), turned(draw(6, 5)).abs())),
    "logaddexp": (torch.logaddexp, (draw(4, 1, 5), turned(draw(6, 5)))),
    "heaviside": (torch.heaviside, (draw(4, 1, 5), turned(draw(6, 5)))),
    "binary cross entropy": (
        lambda x, y: F.binary_cross_entropy(x, y, reduction="none"),
        (turned(draw(6, 5)).sigmoid(), draw(6, 5).sigmoid()),
    ),
    "hardtanh gradient": (lambda g, x: torch.ops.aten.hardtanh_backward(g, x, -1, 1), (turned(draw(6, 5)), draw(6, 5, seed=1))),
    "batch norm": (lambda x: F.batch_norm(x, None, None, training=True), (turned(draw(4, 3, 2, 5)),)),
    "nll of images": (lambda x, y: F.nll_loss(x, y, reduction="none"), (draw(2, 3, 4, 5), turned(torch.ones(2, 4, 5)).long())),
    "max_pool3d": (lambda x: F.max_pool3d(x, 2), (draw(3, 4, 5, 2).permute(3, 0, 1, 2),)),
    "one_hot": (lambda x: F.one_hot(x, 3), (turned(torch.arange(30).reshape(6, 5) % 3),)),
    "max_unpool2d": (lambda x, i: F.max_unpool2d(x, i, 2), (channels_last(draw(1, 2, 2, 3)), channels_last(PLACE))),
}


@pytest.mark.parametrize("name", CASES)
def test_strides_are_those_of_one_device(name: str) -> None:
    fn, xs = CASES[name]
    mesh = dt.init_device_mesh("cpu", (2,))
    check(fn, *xs, mesh=mesh, placements=[[Replicate()]] * len(xs))
    for dim in range(xs[0].ndim):
        check(fn, *xs, mesh=mesh, placements=[[Shard(dim)] if x.ndim > dim else [Replicate()] for x in xs])


@pytest.mark.parametrize("kind", ["_fft_r2c", "_fft_c2c", "_fft_c2r"])
def test_transforms_are_batches_of_signals(kind: str) -> None:
    op, mesh = getattr(torch.ops.aten, kind), dt.init_device_mesh("cpu", (2,))
    for order in permutations(range(3)):
        x = draw(*[(5, 4, 7)[d] for d in order]).permute([order.index(d) for d in range(3)])
        for dims in (dims for n in (1, 2, 3) for dims in permutations(range(3), n)):
            of = x if kind == "_fft_r2c" else x + 1j * x.flip(0)
            last = {"_fft_r2c": (True, False), "_fft_c2c": (True,), "_fft_c2r": (2 * x.shape[dims[-1]] - 2,)}[kind]
            for end in last:
                for placement in (Replicate(), Shard(1)):
                    check(op, of, list(dims), 0, end, mesh=mesh, placements=[[placement]], gradients=False)


@pytest.mark.parametrize("right", ["rows", "columns"])
def test_scaled_products_take_any_order_on_the_cpu(right: str) -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x, y = (draw(16, 32, seed=seed).to(torch.float8_e4m3fn) for seed in range(2))
    y = y.t() if right == "columns" else y.t().contiguous()
    for where in ([Replicate()], [Shard(0)], [Shard(1)]):
        check(
            lambda x, y, s: torch._scaled_mm(x, y, s, s, out_dtype=torch.float32),
            *(turned(x), y, torch.tensor(0.5)),
            mesh=mesh,
            placements=[where, where, [Replicate()]],
            gradients=False,
        )


@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_results_written_into_another_size_lie_as_new_ones() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    x, y = turned(draw(5, 6, 7)), turned(draw(5, 1, 7, seed=1))
    for fn in (torch.remainder, torch.add, torch.floor_divide, torch.atan2):
        for size in ((5, 1, 1), (0,), (3, 4), (5, 6, 7)):
            check(
                lambda x, y, out: fn(x, y, out=out),  # noqa: B023  called at once
                *(x, y, torch.zeros(size, dtype=x.dtype)),
                mesh=mesh,
                placements=[[Shard(0)], [Shard(0)], [Shard(0)]],
                cloned=True,
                gradients=False,
            )
