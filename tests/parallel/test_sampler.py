"""``DistributedBatchSampler``: batches do not depend on the number of ranks, and a resumed run continues the schedule."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import pytest
import torch
from gloo_processes import run_gloo
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import dtensor as dt
from dtensor import Replicate, Shard
from dtensor.errors import LayoutError
from dtensor.parallel import DistributedBatchSampler


def mesh_of(*shape: int, names: tuple[str, ...] = ("dp", "tp")) -> dt.DeviceMesh:
    return dt.init_device_mesh("cpu", shape, mesh_dim_names=names[: len(shape)])


def join_batches_of_ranks(sampler: DistributedBatchSampler) -> list[list[int]]:
    """Return the remaining batches of an epoch, joined from the parts of all ranks along dp."""
    state, parts = sampler.state_dict(), {}

    def read(at: object) -> None:
        sampler.load_state_dict(state)
        parts[sampler.mesh.get_rank()] = list(sampler)

    dt.map_ranks(read, mesh=sampler.mesh)
    dims, coordinates = sampler.mesh_dims, sampler.mesh.coordinates
    firsts = [m for m, at in enumerate(coordinates) if all(at[d] == 0 for d in range(sampler.mesh.ndim) if d not in dims)]
    firsts.sort(key=lambda m: [coordinates[m][d] for d in dims])
    for member, at in enumerate(coordinates):  # other ranks read the samples of the first rank of their group
        first = next(m for m in firsts if all(coordinates[m][d] == at[d] for d in dims))
        assert parts[member] == parts[first]
    return [list(chain(*batch)) for batch in zip(*(parts[m] for m in firsts), strict=True)]


@pytest.mark.parametrize("seed", range(20))
def test_sampler_state_resumes_the_same_batches_on_another_number_of_ranks(seed: int) -> None:
    dice = random.Random(seed)
    length, size = dice.randint(1, 40), dice.randint(4, 13)
    options: dict[str, Any] = {"shuffle": dice.random() < 0.7, "seed": dice.randint(0, 3)}
    options["drop_last"] = length >= size and dice.random() < 0.5

    def sampler_on(ranks: int) -> DistributedBatchSampler:
        return DistributedBatchSampler(range(length), mesh_of(ranks), size, **options)

    whole = sampler_on(1)
    expected = [batch for _ in range(3) for batch in whole]
    assert [len(batch) for batch in expected] == [size] * (3 * len(whole))
    state, found = sampler_on(1).state_dict(), []
    while len(found) < len(expected):
        ranks = dice.choice([n for n in (1, 2, 3, 4) if -(-size // n) * (n - 1) < size])
        sampler = sampler_on(ranks)
        sampler.load_state_dict(state)
        found += [batch for _, batch in zip(range(dice.randint(1, 3)), sampler, strict=False)]
        state = sampler.state_dict()
        sought = sampler_on(ranks)
        sought.seek(len(found))
        assert sought.state_dict() == state
    assert found == expected[: len(found)]


@pytest.mark.parametrize("shape", [(3,), (2, 2), (4, 1)])
def test_samples_of_ranks_form_the_batches_of_one_process(shape: tuple[int, ...]) -> None:
    mesh = mesh_of(*shape)
    sampler = DistributedBatchSampler(range(23), mesh, 7)
    batches = join_batches_of_ranks(sampler)
    sampler.set_epoch(0)
    assert batches == list(DistributedBatchSampler(range(23), mesh, 7))
    assert sorted(list(chain(*batches))[:23]) == list(range(23))


def test_sample_order_equals_torch_distributed_sampler() -> None:
    theirs: Any = DistributedSampler(range(12), num_replicas=1, rank=0, seed=5)
    ours = DistributedBatchSampler(range(12), mesh_of(2), 4, seed=5)
    for epoch in range(3):
        theirs.set_epoch(epoch)
        ours.set_epoch(epoch)
        assert list(chain(*ours)) == list(theirs)


def test_sampler_over_two_mesh_dims_gives_each_rank_its_shard_of_the_batch() -> None:
    mesh = mesh_of(2, 2, 2, names=("copy", "cut", "tp"))
    rows = torch.arange(24).reshape(12, 2)
    for dims, placements in ((("copy", "cut"), (Shard(0), Shard(0), Replicate())), (("cut", "copy"), None)):
        sampler = DistributedBatchSampler(rows, mesh, 7, mesh_dims=dims, shuffle=False)
        assert join_batches_of_ranks(sampler) == [list(range(7)), [*range(7, 12), 0, 1]]
        sampler.set_epoch(0)
        whole = next(iter(sampler))
        x = sampler.distribute(rows[whole])
        assert placements is None or x.placements == placements
        for member, piece in enumerate(x.to_local().shards):
            mine = dt.map_ranks(lambda at: rows[whole][sampler._own_slice()], mesh=mesh).shards[member]  # noqa: B023 - run at once
            assert torch.equal(piece, mine)


def test_invalid_sampler_arguments_raise() -> None:
    with pytest.raises(LayoutError, match=r"leaves a rank without samples.*\[2, 2, 2, 0\]; use a multiple of 4"):
        DistributedBatchSampler(range(9), mesh_of(4), 6)
    with pytest.raises(LayoutError, match="3 samples are fewer than one batch of 4"):
        DistributedBatchSampler(range(3), mesh_of(4), 4, drop_last=True)
    with pytest.raises(LayoutError, match="0 samples"):
        DistributedBatchSampler(range(0), mesh_of(4), 4)
    state = DistributedBatchSampler(range(9), mesh_of(4), 4, seed=1).state_dict()
    with pytest.raises(LayoutError, match=r"another order.*seed=1 there, 0 here, length=9 there, 8 here"):
        DistributedBatchSampler(range(8), mesh_of(4), 4).load_state_dict(state)


def _read_on_processes(batch_size: int) -> list[torch.Tensor]:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    data = TensorDataset(torch.arange(10) * 2)
    sampler = DistributedBatchSampler(data, mesh, batch_size)
    sampler.seek(1)
    loader = DataLoader(data, batch_sampler=sampler)
    return [sampler.distribute(x).full_tensor() for (x,) in loader]


@pytest.mark.gloo
def test_sampler_on_process_groups_gives_the_batches_of_one_process() -> None:
    mesh = mesh_of(2, 2)
    sampler = DistributedBatchSampler(range(10), mesh, 3)
    sampler.seek(1)
    expected = [[2 * i for i in batch] for batch in sampler]
    for found in run_gloo(_read_on_processes, 4, 3):
        assert [batch.tolist() for batch in found] == expected


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # warning of torchdata
def test_stateful_dataloader_resumes_after_the_delivered_batches() -> None:
    torchdata = pytest.importorskip("torchdata.stateful_dataloader")
    data = TensorDataset(torch.arange(20))

    def loader() -> Any:
        sampler = DistributedBatchSampler(data, mesh_of(2), 4, seed=3)
        return torchdata.StatefulDataLoader(data, batch_sampler=sampler, num_workers=1)

    whole = [x.tolist() for (x,) in loader()]
    first = loader()
    found = [x.tolist() for _, (x,) in zip(range(2), first, strict=False)]
    state, second = first.state_dict(), loader()
    second.load_state_dict(state)
    assert found + [x.tolist() for (x,) in second] == whole
