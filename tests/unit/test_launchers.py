"""A process that any launcher started as one of several ranks is one, as torch has it; and what torch's tools call its groups."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from gloo_processes import run_gloo

import dtensor as dt
from dtensor.mesh.init_world import has_processes

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
    assert not has_processes()  # a cluster may set some of them for purposes of its own
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert has_processes()


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


def _described() -> list[str]:
    named, nameless = (
        dt.init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "cp", "tp")),
        dt.DeviceMesh("cpu", [[0, 3], [1, 2]]),
    )
    groups = named.get_group("dp"), named["dp", "tp"].flatten().get_group(), named.get_group("cp"), nameless.get_group(1)
    return [group.group_desc for group in groups]


@pytest.mark.gloo
@pytest.mark.slow
def test_groups_are_described_by_their_dims() -> None:
    assert run_gloo(_described, 4) == [["mesh_dp", "mesh_dp", "mesh_cp", "mesh_dim_1"]] * 4
