"""Ranks as threads of one process: torch's MultiThreadedTestCase, and thread safety of planning and generators."""

# ruff: noqa: PT009 -- assertEqual compares tensors
from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import in_kernel_invocation_manager
from torch.testing._internal.common_distributed import MultiThreadedTestCase

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.base import generators
from dtensor.propagation import shape_inference


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")  # the teardown of torch 2.11 raises
class Threads(MultiThreadedTestCase):
    @property
    def world_size(self) -> int:
        return 4

    def setUp(self) -> None:
        super().setUp()
        self._spawn_threads()

    def test_redistribution_gradients_and_submeshes_on_threads_equal_plain_torch(self) -> None:
        mesh = dt.init_device_mesh("cpu", (4,))
        value = torch.arange(45.0).view(9, 5)
        x = dt.distribute_tensor(value, mesh, [Shard(0)])
        self.assertEqual(x.to_local(), value.chunk(4)[self.rank] if self.rank < 3 else value[:0])
        self.assertEqual(x.redistribute(placements=[Shard(1)]).full_tensor(), value)
        self.assertEqual(x.sum().item(), value.sum().item())

        square = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        weight = value.clone().requires_grad_()
        y = dt.distribute_tensor(weight, square, [Shard(0), Shard(1)])
        (y @ y.t()).square().mean().backward()
        (weight @ weight.t()).square().mean().backward()
        self.assertEqual(y.grad.placements, (Shard(0), Shard(1)))
        self.assertEqual(y.grad.full_tensor(), weight.grad)
        partial = dt.DTensor.from_local(torch.full((3,), float(self.rank)), square["tp"], [Partial()])
        self.assertEqual(
            partial.redistribute(placements=[Replicate()]).to_local(), torch.full((3,), 1.0 if self.rank < 2 else 5.0)
        )


def test_planning_during_a_fake_kernel_of_another_thread_gives_right_results() -> None:
    """Fake tensor modes store the running kernel, so each thread needs its own mode."""
    x = dt.distribute_tensor(torch.arange(21.0).view(7, 3), dt.init_device_mesh("cpu", (2,)), [Shard(0)])
    out = torch.zeros_like(x)
    with shape_inference._FAKE_MODES.fake as mode, in_kernel_invocation_manager(mode), ThreadPoolExecutor(1) as other:
        made: Any = other.submit(torch.fft.rfft, x)
        written: Any = other.submit(torch.mul, x, 2.0, out=out)
    assert torch.equal(made.result().full_tensor(), torch.fft.rfft(x.full_tensor()))
    assert torch.equal(written.result().full_tensor(), x.full_tensor() * 2)


GENERATOR_PROGRAM = """
import gc, importlib.util, sys, threading, time, torch
spec = importlib.util.spec_from_file_location("generators", sys.argv[1])
generators = importlib.util.module_from_spec(spec)
spec.loader.exec_module(generators)

class Slow:
    def __init__(self):
        self.me = self
    def __del__(self):
        time.sleep(0.0005)  # lets another thread run

def ask():
    for _ in range(200):
        Slow()
        generators.state_now(torch.default_generator)

gc.set_threshold(5)
threads = [threading.Thread(target=ask) for _ in range(3)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("asked")
"""


def test_threads_read_generator_state_in_garbage_collection_without_deadlock() -> None:
    """Runs in a subprocess, because ``generator.get_state()`` deadlocks the interpreter here."""
    command = [sys.executable, "-c", GENERATOR_PROGRAM, generators.__file__]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.stdout == "asked\n", done.stderr
