"""``run_gloo``, and the process cases in one process and on four."""

from __future__ import annotations

import os
import pickle
import time
from typing import Any

import process_cases
import pytest
import torch
import torch.distributed as dist
from case_lists import make_case_tests
from gloo_processes import RankFailed, run_gloo

import dtensor as dt

# --- the same cases here and there -------------------------------------------------------------------------------------
test_case_in_one_process, test_all_cases_on_four_processes = make_case_tests(process_cases, gather=True)


# --- the spawner returns what ranks return, and turns any failure of a rank into an error here ------------


def _sum_of_ranks(start: int) -> tuple[int, float]:
    x = torch.tensor([float(start + dist.get_rank())])
    dist.all_reduce(x)
    return dist.get_rank(), x.item()


def _fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError(f"rank {rank} has a reason")
    dist.barrier()


def _die_on(rank: int) -> None:
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def _leave_one_out() -> None:
    if dist.get_rank():
        dist.barrier()
    else:
        time.sleep(60)


@pytest.mark.gloo
def test_run_gloo_returns_results_in_rank_order() -> None:
    assert run_gloo(_sum_of_ranks, 3, 10) == [(0, 33.0), (1, 33.0), (2, 33.0)]


@pytest.mark.gloo
def test_run_gloo_raises_with_the_first_traceback() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 1 of 3.*ValueError: rank 1 has a reason"):
        run_gloo(_fail_on, 3, 1)


@pytest.mark.gloo
def test_run_gloo_raises_with_the_rank_and_exit_code_of_a_dead_process() -> None:
    with pytest.raises(RankFailed, match="rank 2 of 3 ---\nexit code 7"):
        run_gloo(_die_on, 3, 2)


@pytest.mark.gloo
def test_run_gloo_raises_with_the_stacks_after_a_timeout() -> None:
    with pytest.raises(RankFailed, match=r"(?s)rank 0 of 2.*in _leave_one_out"):
        run_gloo(_leave_one_out, 2, timeout_s=2.0)


def _pieces_of_others() -> list[list[Any]]:
    """Return, by placements and by the rank that pickled a DTensor, the first local size that is read or the error message."""
    mesh, value = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")), torch.arange(8.0)
    rows = []
    for placements in (
        [dt.Replicate(), dt.Shard(0)],
        [dt.Shard(0), dt.Shard(0)],
        [dt.Replicate()] * 2,
        [dt.Replicate(), dt.Partial()],
    ):
        x = dt.distribute_tensor(value, mesh, [dt.Replicate()] * 2).redistribute(placements=placements)
        sent = [b""] * 4
        dist.all_gather_object(sent, pickle.dumps(x))
        taken = []
        for data in sent:
            try:
                taken.append(pickle.loads(data).to_local().shape[0])
            except dt.errors.DTensorError as error:
                taken.append(str(error))
        rows.append(taken)
    return rows


@pytest.mark.gloo
def test_unpickled_tensor_of_a_rank_with_another_shard_raises_when_it_is_read() -> None:
    """Regression test: ``broadcast_object_list([x])`` and ``torch.load`` of another rank's file gave the first rank's rows on all
    ranks."""
    for rank, (halves, quarters, whole, terms) in enumerate(run_gloo(_pieces_of_others, 4)):
        assert whole == [8] * 4
        for other in range(4):
            assert halves[other] == 4 if other % 2 == rank % 2 else f"the local tensor of rank {other}" in halves[other]
            assert (
                quarters[other] == 2
                if other == rank
                else f"was unpickled on rank {rank}, which has another shard" in quarters[other]
            )
            assert terms[other] == 8 if other % 2 == rank % 2 else "send x.full_tensor()" in terms[other]
