"""Samples of pooling, resampling, padding and unfolding."""

from __future__ import annotations

from typing import Any

import torch

from .of_schema import tensor
from .sample import Sample, Samples

aten = torch.ops.aten


def x(*shape: int, seed: int = 0) -> torch.Tensor:
    return tensor(shape, torch.float64, seed)


IMAGES = {1: x(5, 4, 7), 2: x(5, 4, 6, 7), 3: x(5, 4, 4, 5, 6)}


def like(op: Any, *args: Any, seed: int = 3) -> torch.Tensor:
    """A gradient for what ``op`` gives."""
    result = op(*args)
    return x(*(result[0] if isinstance(result, tuple) else result).shape, seed=seed)


def max_pool(n: int) -> dict[str, list[Any]]:
    name, two = f"max_pool{n}d_with_indices", [2] * n
    op = getattr(aten, name)
    indices = op(IMAGES[n], two)[1]
    back = (like(op, IMAGES[n], two), IMAGES[n], two, two, [0] * n, [1] * n, False, indices)
    return {
        name: [Sample((IMAGES[n], two)), Sample((IMAGES[n][0], two), note="no batch")],
        f"{name}_backward": [Sample(back, gradients=False)],
    }


def avg_pool(n: int) -> dict[str, list[Any]]:
    name, two, three = f"avg_pool{n}d", [2] * n, [3] * n
    op, adaptive, image = getattr(aten, name), getattr(aten, f"_adaptive_avg_pool{n}d"), IMAGES[n]
    top, indices = getattr(aten, f"adaptive_max_pool{n}d")(image, three)
    return {
        name: [Sample((image, two)), Sample((image, two, [1] * n, [1] * n), note="padded")],
        f"{name}_backward": [Sample((like(op, image, two), image, two, two, [0] * n, False, True, None), gradients=False)],
        f"_adaptive_avg_pool{n}d": [Sample((image, three))],
        f"_adaptive_avg_pool{n}d_backward": [Sample((like(adaptive, image, three), image), gradients=False)],
        f"adaptive_max_pool{n}d": [Sample((image, three))],
        f"adaptive_max_pool{n}d_backward": [Sample((like(lambda: top), image, indices), gradients=False)],
    }


def others(n: int) -> dict[str, list[Any]]:
    image, two = IMAGES[n], [2] * n
    out = getattr(aten, f"max_pool{n}d_with_indices")(image, two)
    size = [s // 2 * 2 for s in image.shape[2:]]
    draws = torch.rand(5, 4, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    fractional = getattr(aten, f"fractional_max_pool{n}d")
    indices = fractional(image, two, two, draws)[1]
    grid = x(5, *(3, 2, 4)[:n], n, seed=4) / 2
    sampled = getattr(aten, f"grid_sampler_{n}d")
    return {
        f"max_unpool{n}d": [Sample((out[0], out[1] % 4, size, *([[2] * n, [0] * n] if n == 3 else [])), gradients=False)],
        f"fractional_max_pool{n}d": [Sample((image, two, two, draws), gradients=False)],
        f"fractional_max_pool{n}d_backward": [Sample((x(5, 4, *two, seed=3), image, two, two, indices), gradients=False)],
        f"grid_sampler_{n}d": [Sample((image, grid, 0, 0, False))],
        f"grid_sampler_{n}d_backward": [
            Sample((like(sampled, image, grid, 0, 0, False), image, grid, 0, 0, False, [True, True]), gradients=False),
            Sample((like(sampled, image, grid, 0, 0, False), image, grid, 0, 0, False, [False, True]), gradients=False),
        ],
    }


def resampled(n: int, name: str, *extra: Any) -> dict[str, list[Any]]:
    image, size = IMAGES[n], [3, 5, 4][:n]
    op = getattr(aten, name)
    back = (like(op, image, size, *extra), size, list(image.shape), *extra)
    return {name: [Sample((image, size, *extra))], f"{name}_backward": [Sample(back, gradients=False)]}


def padded(n: int, kind: str) -> dict[str, list[Any]]:
    name, image, pad = f"{kind}_pad{n}d", IMAGES[n], [1, 2] * n
    back = (like(getattr(aten, name), image, pad), image, pad)
    return {
        name: [Sample((image, pad)), Sample((image[0], pad), note="no batch")],
        f"{name}_backward": [Sample(back, gradients=False)],
    }


WINDOW = ([2, 3], [1, 1], [0, 0], [1, 1])

SAMPLES: Samples = {
    **max_pool(2),
    **max_pool(3),
    **avg_pool(2),
    **avg_pool(3),
    **others(2),
    **others(3),
    **{
        k: v
        for n in (1, 2, 3)
        for mode in ("upsample_nearest", "_upsample_nearest_exact")
        for k, v in resampled(n, f"{mode}{n}d").items()
    },
    **resampled(1, "upsample_linear1d", False),
    **resampled(3, "upsample_trilinear3d", False),
    **{k: v for mode in ("bilinear", "bicubic") for k, v in resampled(2, f"upsample_{mode}2d", False).items()},
    **{k: v for mode in ("bilinear", "bicubic") for k, v in resampled(2, f"_upsample_{mode}2d_aa", False).items()},
    **{k: v for n in (1, 2, 3) for kind in ("reflection", "replication") for k, v in padded(n, kind).items()},
    "affine_grid_generator": [Sample((x(5, 2, 3), [5, 1, 3, 4], False), gradients=False)],
    "im2col": [Sample((IMAGES[2], *WINDOW)), Sample((IMAGES[2][0], *WINDOW), note="no batch")],
    "col2im": [Sample((x(5, 24, 25), [6, 7], *WINDOW)), Sample((x(24, 25), [6, 7], *WINDOW), note="no batch")],
}
