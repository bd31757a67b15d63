"""Rules of convolution, pooling, resampling and padding: samples and channels can be sharded, positions are unsharded."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.testing import check

R, S0, S1, S2, SUM = Replicate(), Shard(0), Shard(1), Shard(2), Partial()
MESHES = {shape: dt.init_device_mesh("cpu", shape) for shape in ((2,), (3,), (2, 2))}


def x(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def conv(a: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.conv2d(a, w, b, stride=(2, 1), padding=1)


def depthwise(a: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.conv2d(a, w, b, groups=4)


def transposed(a: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    return F.conv_transpose2d(a, w, b, stride=2, output_padding=1)


CONV2D_SHAPES = [(5, 4, 6, 7), (6, 4, 3, 3), (6,)]
# name, function, shapes, placements on one mesh dim, placements of the result
LOCAL_CASES: list[tuple[str, Any, list[tuple[int, ...]], list[Any], Any]] = [
    ("samples", conv, CONV2D_SHAPES, [S0, R, R], S0),
    ("output channels", conv, CONV2D_SHAPES, [R, S0, S0], S1),
    ("input channels", conv, CONV2D_SHAPES, [S1, S1, R], SUM),
    ("groups", depthwise, [(5, 4, 6, 7), (4, 1, 3, 3), (4,)], [S1, S0, S0], S1),
    ("output channels, transposed", transposed, [(5, 4, 6, 7), (4, 6, 3, 3), (6,)], [R, S1, S0], S1),
    ("input channels, transposed", transposed, [(5, 4, 6, 7), (4, 6, 3, 3), (6,)], [S1, S0, R], SUM),
    ("pooled samples", lambda a: F.max_pool2d(a, 2), [(5, 4, 6, 7)], [S0], S0),
    ("pooled channels", lambda a: F.avg_pool2d(a, 2), [(5, 4, 6, 7)], [S1], S1),
    ("resized channels", lambda a: F.interpolate(a, scale_factor=1.5, mode="bilinear"), [(5, 4, 6, 7)], [S1], S1),
    ("padded channels", lambda a: F.pad(a, (1, 2, 1, 2), "reflect"), [(5, 4, 6, 7)], [S1], S1),
    ("columns of channels", lambda a: F.unfold(a, 3), [(5, 4, 6, 7)], [S1], S1),
]


@pytest.mark.parametrize(("name", "fn", "shapes", "placements", "result"), LOCAL_CASES, ids=[case[0] for case in LOCAL_CASES])
def test_convolutions_of_sharded_samples_and_channels_do_not_communicate(
    name: str, fn: Any, shapes: Any, placements: Any, result: Any
) -> None:
    tensors = [x(*shape, seed=i) for i, shape in enumerate(shapes)]
    with warnings.catch_warnings():
        warnings.filterwarnings("error", ".*has no sharding rule.*")
        outcome = check(fn, *tensors, mesh=MESHES[2,], placements=[[p] for p in placements])
    assert outcome.events == []
    assert outcome.layouts[0].placements == (result,)


COMPOSITES: list[tuple[str, Any, list[tuple[int, ...]]]] = [
    ("conv1d", F.conv1d, [(5, 4, 7), (6, 4, 3), (6,)]),
    ("conv2d", conv, CONV2D_SHAPES),
    ("same padding", lambda a, w, b: F.conv2d(a, w, b, padding="same"), CONV2D_SHAPES),
    ("dilated", lambda a, w, b: F.conv2d(a, w, b, dilation=2), CONV2D_SHAPES),
    ("conv3d", F.conv3d, [(2, 4, 3, 4, 5), (6, 4, 2, 2, 2), (6,)]),
    ("depthwise", depthwise, [(5, 4, 6, 7), (4, 1, 3, 3), (4,)]),
    ("transposed", transposed, [(5, 4, 6, 7), (4, 6, 3, 3), (6,)]),
    ("no batch", F.conv2d, [(4, 6, 7), (6, 4, 3, 3), (6,)]),
    ("max_pool1d", lambda a: F.max_pool1d(a, 2), [(5, 4, 7)]),
    ("adaptive pools", lambda a: F.adaptive_avg_pool2d(a, 3) + F.adaptive_max_pool2d(a, 3), [(5, 4, 6, 7)]),
    ("lp_pool", lambda a: F.lp_pool2d(a.abs() + 1, 2, 2), [(5, 4, 6, 7)]),
    ("unpool", lambda a: F.max_unpool2d(*F.max_pool2d(a, 2, return_indices=True), 2), [(5, 4, 6, 6)]),
    ("fold", lambda a: F.fold(a, (4, 5), (2, 2)), [(5, 8, 12)]),
    ("grid_sample", lambda a, g: F.grid_sample(a, g.tanh(), align_corners=False), [(5, 4, 6, 7), (5, 3, 4, 2)]),
    ("affine_grid", lambda t: F.affine_grid(t, [5, 1, 3, 4], align_corners=False), [(5, 2, 3)]),
    ("circular padding", lambda a: F.pad(a, (1, 2), "circular"), [(5, 4, 7)]),
]


@pytest.mark.parametrize(("name", "fn", "shapes"), COMPOSITES, ids=[case[0] for case in COMPOSITES])
def test_convolution_and_pooling_values_and_gradients_equal_plain_torch(name: str, fn: Any, shapes: Any) -> None:
    tensors = [x(*own, seed=i) for i, own in enumerate(shapes)]

    def placed(*wanted: Any) -> list[Any]:
        return [[p if not isinstance(p, Shard) or p.dim < t.ndim else R for p in wanted] for t in tensors]

    for one in (S0, S1, S2, SUM):
        check(fn, *tensors, mesh=MESHES[3,], placements=placed(one))
    check(fn, *tensors, mesh=MESHES[2, 2], placements=placed(S0, S1))
    check(fn, *tensors, mesh=MESHES[2, 2], placements=placed(S1, S1))


@pytest.mark.parametrize("channels_last", ["input", "weight"])
def test_conv2d_of_channels_last_operands_has_the_strides_of_plain_torch(channels_last: str) -> None:
    """Compare strides: a dropout mask drawn for the result depends on its memory order."""
    x, w = torch.randn(3, 16, 5, 6), torch.randn(8, 16, 3, 3)
    if channels_last == "input":
        x = x.to(memory_format=torch.channels_last)
    else:
        w = w.to(memory_format=torch.channels_last)
    mesh = dt.init_device_mesh("cpu", (2,))
    got = torch.nn.functional.conv2d(*(dt.distribute_tensor(t, mesh, [dt.Replicate()]) for t in (x, w)))
    assert got.stride() == torch.nn.functional.conv2d(x, w).stride()


@pytest.mark.parametrize("where", [S0, S1, Shard(3), Shard(3, sizes=(1, 3, 1))], ids=str)
@pytest.mark.parametrize("asked", [(), (0,), (1,)], ids=str)
def test_conv2d_gradients_that_are_not_requested_are_none(where: Any, asked: tuple[int, ...]) -> None:
    """Check float32 grouped convolutions: some kernels return the weight's gradient even if it is not requested."""

    def trained(*given: Any) -> list[Any]:
        a, w, b = [t.detach().requires_grad_(i in (*asked, 2)) for i, t in enumerate(given)]
        F.conv2d(a, w, b, groups=2).square().sum().backward()
        return [a.grad, w.grad, b.grad]

    given = [x(2, 4, 6, 5).float(), x(6, 2, 3, 2, seed=1).float(), x(6).float()]
    check(trained, *given, mesh=dt.init_device_mesh("cpu", (3,)), placements=[[where], [R], [R]], gradients=False)
