"""Random modes: time in which one rank generates its block of a tensor in both modes, and of a plain draw of the full tensor.

``python benchmarks/random_modes.py [ranks ...]``: one process, one thread; a rank's share of an in-process mesh.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import torch

from dtensor.layout.layout import Layout
from dtensor.mesh.device_mesh import DeviceMesh
from dtensor.placement import Shard
from dtensor.random.distributions import SAMPLERS, sample_block
from dtensor.random.draw import clone_block

SHAPE = (2048, 2048)


def time_milliseconds(fn: Callable[[], object], repeat: int = 5) -> float:
    """Return the milliseconds of one run, the minimum of ``repeat`` runs."""
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        fn()
        best = min(best, time.perf_counter() - start)
    return best * 1e3


def measure_modes(plain: Callable[[tuple[int, int]], torch.Tensor], name: str, ranks: int) -> tuple[float, float, float]:
    """Return the milliseconds of a plain draw of the full tensor, and of the first rank's block in exact and in counter mode."""
    layout = Layout.of(DeviceMesh("cpu", ranks), [Shard(0)], SHAPE)
    at, size, like = layout.local_offset((0,)), layout.local_shape((0,)), (torch.float32, torch.device("cpu"))
    return (
        time_milliseconds(lambda: plain(SHAPE)),
        time_milliseconds(lambda: clone_block(plain(SHAPE), layout, 0)),
        time_milliseconds(lambda: sample_block(SAMPLERS[name], {"p": 0.5}, 1, SHAPE, at, size, like)),
    )


def draw_bernoulli(shape: tuple[int, int]) -> torch.Tensor:
    """Return random zeros and ones as dropout draws them."""
    return torch.empty(shape).bernoulli_(0.5)


def main() -> None:
    """Print the milliseconds of each distribution and number of ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("ranks", nargs="*", type=int, default=[1, 4, 16, 64], help="numbers of ranks of the mesh")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"{SHAPE[0]} x {SHAPE[1]} float32, Shard(0), ms per rank")
    print(f"{'':10}{'ranks':>7}{'plain':>9}{'exact':>9}{'counter':>9}")
    for name, plain in (("uniform", torch.rand), ("normal", torch.randn), ("bernoulli", draw_bernoulli)):
        for ranks in options.ranks:
            whole, exact, counted = measure_modes(plain, name, ranks)
            print(f"{name:10}{ranks:7}{whole:9.1f}{exact:9.1f}{counted:9.1f}")


if __name__ == "__main__":
    main()
