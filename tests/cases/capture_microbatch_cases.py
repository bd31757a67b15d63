"""Capture microbatch cases: gradient accumulation with one captured call per microbatch and one for the optimizer, over units of
4 ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from capture_cases import assert_bitwise_equal, randn
from capture_data_parallel_cases import fully_shard_layers, make_grid_mesh, make_line_mesh, make_network

from dtensor import Replicate, Shard
from dtensor.capture import capture
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module, replicate

SYNCS = ("set_requires_gradient_sync", "set_requires_all_reduce")
CASES: dict[str, Callable[[], Any]] = {
    "fully_shard": lambda: fully_shard_layers(make_network(), make_line_mesh()),
    "hybrid": lambda: fully_shard_layers(make_network(), make_grid_mesh("copies", "dp")),
    "replicate": lambda: replicate(make_network(), make_line_mesh(), bucket_cap_mb=1e-4),
    "tensor parallel": lambda: parallelize_module(
        make_network(), make_line_mesh(), {"0": ColwiseParallel(), "2": RowwiseParallel()}
    ),
}


def train_microbatches(build: Any, captures: Any, sync: str, counts: list[int]) -> tuple[Any, Any]:
    """Train for steps of several microbatches, with one call for each microbatch and one for the optimizer, captured or not."""
    torch.manual_seed(0)
    model = build()
    opt = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
    parted = hasattr(model, sync)
    mesh = make_line_mesh()

    def forward_backward(x: Any, weight: float) -> Any:
        loss = model(x.to_local() if parted else x).square().mean() * weight
        loss.backward()
        return loss.detach()

    def update() -> None:
        opt.step()
        opt.zero_grad()

    micro, after = captures(forward_backward), captures(update)
    found: list[Any] = []
    for count in counts:
        for k in range(count):
            if parted:
                getattr(model, sync)(k == count - 1)
            at = [Shard(0) if parted else Replicate()]
            found.append(micro(randn(12, 6, on=mesh, at=at), 1.0 / count))
            found.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
        after()
        found.append([p.detach().clone() for p in model.parameters()])
    return found, (micro, after)


def compare_microbatches(build: Callable[[], Any], sync: str) -> None:
    """Compare losses, gradients between microbatches and parameters bit for bit; each kind of microbatch is replayed."""
    counts = [3, 3, 3, 3, 3, 3]
    expected, _ = train_microbatches(build, lambda fn: fn, sync, counts)
    got, (micro, after) = train_microbatches(build, capture, sync, counts)
    assert_bitwise_equal(got, expected)
    assert micro.cache_info().replayed >= 6
    assert after.cache_info().replayed >= 2


def main() -> list[str]:
    for build in CASES.values():
        for sync in SYNCS:
            compare_microbatches(build, sync)
    return list(CASES)
