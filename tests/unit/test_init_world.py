"""How the ranks of one start find each other in a store in which earlier starts have written."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from dtensor.errors import MeshError
from dtensor.mesh.init_world import restart_store


def started(store: dist.Store, size: int) -> None:
    """Each rank writes its number, and reads the others': its own start's."""
    with ThreadPoolExecutor(size) as ranks:
        parts = list(ranks.map(lambda rank: restart_store(store, rank, size), range(size)))
    assert [part.check(["who"]) for part in parts] == [False] * size
    parts[0].set("who", str(size))
    assert [part.get("who") for part in parts] == [str(size).encode()] * size


def test_no_start_reads_what_an_earlier_one_wrote() -> None:
    store = dist.HashStore()
    for size in (3, 2, 1, 4):
        started(store, size)


def test_a_start_that_was_killed_on_its_way_does_not_matter() -> None:
    store = dist.HashStore()
    store.set("dtensor/start", "dtensor/start/dead")  # its first rank came, and met rank 2
    store.set("dtensor/start/dead/2", "nobody")
    started(store, 3)
    store.set("dtensor/start", "dtensor/start/older")  # all had met
    store.set("dtensor/start/older/met", b"some others")
    started(store, 3)


def test_a_rank_does_not_wait_for_ever() -> None:
    store = dist.HashStore()
    store.set("dtensor/start", "dtensor/start/dead")
    store.set_timeout(timedelta(milliseconds=50))
    with pytest.raises(MeshError, match="rank 1 has waited"):
        restart_store(store, 1, 2)
