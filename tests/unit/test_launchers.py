"""A process that any launcher started as one of several ranks is one, as torch has it; else all ranks are here."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from dtensor.mesh.world import distributed

ROOT = Path(__file__).parents[2]
WORLD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
PROGRAM = """
import torch, dtensor as dt
mesh = dt.init_device_mesh("cpu", (2,))
x = dt.distribute_tensor(torch.arange(4.), mesh, [dt.Shard(0)])
print(mesh.kind, x.to_local().shape[0], float(x.sum()))
"""


def test_four_variables_make_a_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in WORLD.items():
        monkeypatch.setenv(name, value)
    assert not distributed()  # a cluster may set some of them for purposes of its own
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert distributed()


@pytest.mark.gloo
@pytest.mark.slow
def test_ranks_without_torchrun() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    world = os.environ | WORLD | {"MASTER_PORT": port, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], env=world | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["process_group 2 6.0\n"] * 2
