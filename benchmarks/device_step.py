"""Device step: wall time, host time and peak memory of one rank's training step on an accelerator, for ``dtensor`` and PyTorch's
DTensor.

    python benchmarks/device_step.py [--device cuda] [--quick] [--only fsdp tp] [--width 2048 --layers 8]

The model, the plans and most cases are those of ``train_step.py`` (torch's DDP does not run on a fake group), under torch's fake
process group of 8 ranks: collectives take no time and move nothing, so losses are meaningless, and the time is that of one rank's
computation and copies on the device and of its host. Parameters are float32, the step runs under autocast to bfloat16. "MiB" is
the peak of allocated memory above the memory allocated before the side was built, each side measured alone.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.insert(0, str(Path(__file__).parent))
import train_step  # it is found by the path above
from train_step import Config, Step

RANKS = 8
CASES = {
    "tp": {"tp": 8},
    "fsdp": {"dp": 8},
    "fsdpxtp": {"dp": 4, "tp": 2},
    "hsdp": {"replica": 2, "part": 4},
    "dtensors": {"dp": 8},
}
BUILD = {"ours": train_step.make_dtensor_step, "peer": train_step.make_peer_step}


def build_step(side: str, case: str, config: Config, batch: torch.Tensor) -> Step:
    """Return one library's training step of a case, run under autocast to bfloat16."""
    torch.manual_seed(0)
    model = train_step.build_model(case, config).to(batch.device)
    step = BUILD[side](case, model, batch[:, :-1].contiguous(), batch[:, 1:].contiguous())

    def mixed() -> float:
        with torch.autocast(batch.device.type, torch.bfloat16):
            return step()

    return mixed


def synchronize_device(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def measure_peak_memory(side: str, case: str, config: Config, batch: torch.Tensor) -> float:
    """Return the peak MiB of the second step, when the optimizer's states exist; NaN without CUDA."""
    if batch.device.type != "cuda":
        return float("nan")
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    step = build_step(side, case, config, batch)
    step()
    torch.cuda.reset_peak_memory_stats()
    step()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure_case(case: str, config: Config, batch: torch.Tensor, rounds: int) -> dict[str, tuple[float, float, float]]:
    """Return for each library the median wall ms and host ms of a step, measured in turn, and its peak MiB."""
    device = batch.device.type
    peaks = {side: measure_peak_memory(side, case, config, batch) for side in BUILD}
    steps = {side: build_step(side, case, config, batch) for side in BUILD}
    wall: dict[str, list[float]] = {side: [] for side in steps}
    host: dict[str, list[float]] = {side: [] for side in steps}
    for k in range(rounds + 3):
        for side in [*steps][:: 1 if k % 2 else -1]:
            synchronize_device(device)
            began, thread = time.perf_counter(), time.thread_time()
            steps[side]()
            host[side].append(time.thread_time() - thread)
            synchronize_device(device)
            wall[side].append(time.perf_counter() - began)
    return {
        side: (statistics.median(wall[side][3:]) * 1e3, statistics.median(host[side][3:]) * 1e3, peaks[side]) for side in steps
    }


def main() -> None:
    """Print times and memory of each case on torch's fake process group of 8 ranks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--quick", action="store_true", help="a small model, few rounds")
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--context", type=int, default=1024)
    options = parser.parse_args()
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=RANKS)
    train_step.CASES.update({case: (RANKS, shape) for case, shape in CASES.items()})
    width, layers, context = (256, 2, 64) if options.quick else (options.width, options.layers, options.context)
    config = Config(vocabulary=16 * width, context=context, width=width, heads=width // 32, layers=layers)
    batch = torch.randint(config.vocabulary, (train_step.BATCH, context + 1), device=options.device)
    columns = "".join(f" {what:>9} {'peer':>9} {'ratio':>6}" for what in ("ms", "host ms", "MiB"))
    print(f"{'case':10}{columns}")
    for case in options.only:
        found = measure_case(case, config, batch, rounds=3 if options.quick else 15)
        pairs = zip(found["ours"], found["peer"], strict=True)
        cells = " ".join(f"{a:9.1f} {b:9.1f} {a / b:6.2f}" for a, b in pairs)
        print(f"{case:10} {cells}", flush=True)


if __name__ == "__main__":
    main()
