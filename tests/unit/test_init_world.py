"""World initialization: environment variables of a rank, and the store in which the ranks of one start meet."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist

from dtensor.errors import MeshError
from dtensor.mesh.init_world import has_processes, restart_store


def start_ranks(store: dist.Store, size: int) -> None:
    """Start ``size`` ranks, and check that their store has no keys of earlier starts and is shared."""
    with ThreadPoolExecutor(size) as ranks:
        stores = list(ranks.map(lambda rank: restart_store(store, rank, size), range(size)))
    assert [prefix_store.check(["who"]) for prefix_store in stores] == [False] * size
    stores[0].set("who", str(size))
    assert [prefix_store.get("who") for prefix_store in stores] == [str(size).encode()] * size


def test_restart_store_hides_the_keys_of_earlier_starts() -> None:
    store = dist.HashStore()
    for size in (3, 2, 1, 4):
        start_ranks(store, size)


def test_restart_store_connects_ranks_after_an_earlier_start_was_killed() -> None:
    store = dist.HashStore()
    store.set("dtensor/start", "dtensor/start/dead")  # its first rank arrived and met rank 2
    store.set("dtensor/start/dead/2", "nobody")
    start_ranks(store, 3)
    store.set("dtensor/start", "dtensor/start/older")  # all ranks had met
    store.set("dtensor/start/older/met", b"some others")
    start_ranks(store, 3)


def test_restart_store_raises_after_the_timeout_of_the_store() -> None:
    store = dist.HashStore()
    store.set("dtensor/start", "dtensor/start/dead")
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(MeshError, match="rank 1 has waited"):
        restart_store(store, 1, 2)


ROOT = Path(__file__).parents[2]
WORLD = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
PROGRAM = """
import torch, dtensor as dt
mesh = dt.init_device_mesh("cpu", (2,))
x = dt.distribute_tensor(torch.arange(4.), mesh, [dt.Shard(0)])
print(mesh.kind, x.to_local().shape[0], float(x.sum()))
"""


def test_has_processes_needs_all_four_environment_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in WORLD.items():
        monkeypatch.setenv(name, value)
    assert not has_processes()  # clusters may set some of these variables for other purposes
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert has_processes()


@pytest.mark.gloo
@pytest.mark.slow
def test_ranks_started_without_torchrun_form_a_process_group() -> None:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    world = os.environ | WORLD | {"MASTER_PORT": port, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([sys.executable, "-c", PROGRAM], env=world | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]
    assert [rank.communicate(timeout=120)[0] for rank in ranks] == ["process_group 2 6.0\n"] * 2
