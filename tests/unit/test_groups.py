"""Process groups: on gloo the library uses its own groups, separate from those of the program."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gloo_processes import run_gloo

import dtensor as dt
from dtensor.mesh.process_groups import get_group, library_group

pytestmark = pytest.mark.gloo


def _compare_groups() -> list[bool]:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    mesh_from_groups = dt.DeviceMesh.from_group(
        [mesh.get_group("dp"), mesh.get_group("tp")], "cpu", mesh.mesh, mesh_dim_names=("dp", "tp")
    )
    library, program = get_group(mesh["tp"], (0,)).handle, mesh.get_group("tp")
    all_ranks = get_group(mesh, (0, 1)).handle
    return [
        library is not program,
        library is get_group(mesh, (1,)).handle is get_group(mesh_from_groups, (1,)).handle,
        dist.get_process_group_ranks(library) == dist.get_process_group_ranks(program),
        all_ranks
        is get_group(mesh.flatten("all"), (0,)).handle
        is library_group(dist.group.WORLD, "cpu")
        is library_group(all_ranks, "cpu"),
        mesh.get_group("tp") is program and mesh.flatten("all").get_group() is dist.group.WORLD,
        get_group(dt.DeviceMesh("cpu", [dist.get_rank()]), (0,)).size == 1,
    ]


def test_each_process_group_of_the_program_has_one_library_group() -> None:
    assert run_gloo(_compare_groups, 4) == [[True] * 6] * 4


def _run_during_program_collectives() -> list[float]:
    """Start collectives of the program on one rank, for each group of a mesh, and run DTensor operators meanwhile."""
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    x = dt.distribute_tensor(torch.arange(64.0).reshape(8, 8), mesh, [dt.Shard(0), dt.Shard(1)], src_data_rank=None)
    groups = [mesh.get_group("dp"), mesh.get_group("tp"), mesh.flatten("all").get_group()]
    works = [dist.all_reduce(torch.full((4, 4), 7.0), group=group, async_op=True) for group in groups if dist.get_rank() == 2]
    dp, tp = (x.sum(dim).redistribute(placements=[dt.Replicate()] * 2).to_local().sum().item() for dim in (0, 1))
    part, other = dt.DeviceMesh("cpu", [0, 1]), dt.DeviceMesh("cpu", [1, 2])  # rank 3 is on neither mesh
    y = dt.distribute_tensor(torch.arange(6.0), part, [dt.Shard(0)], src_data_rank=None).redistribute(other, [dt.Shard(0)])
    found = [dp, tp, float(x.full_tensor().sum()), y.to_local().sum().item() if dist.get_rank() in (1, 2) else -1.0]
    for group in groups if dist.get_rank() != 2 else ():
        dist.all_reduce(torch.zeros(4, 4), group=group) if 2 in dist.get_process_group_ranks(group) else None
    for work in works:
        work.wait()
    return found


def test_pending_program_collectives_do_not_mix_with_library_collectives() -> None:
    of_ranks = run_gloo(_run_during_program_collectives, 4)
    assert of_ranks == [[2016.0, 2016.0, 2016.0, part] for part in (-1.0, 3.0, 12.0, -1.0)]


def _run_in_two_process_groups(store: str) -> list[Any]:
    """Return sums in each of two worlds. One of them is compiled before the second world is made."""
    dist.destroy_process_group()
    step = torch.compile(lambda x: (x * 2).sum(0).redistribute(placements=[dt.Replicate()]), backend="aot_eager")
    found, before = [], None
    for world in range(2):
        rank, size = int(os.environ["RANK_OF_TEST"]), 2
        dist.init_process_group("gloo", init_method=f"file://{store}-{world}", rank=rank, world_size=size)
        mesh = dt.init_device_mesh("cpu", (2,))
        x = dt.distribute_tensor(torch.arange(6.0).reshape(2, 3), mesh, [dt.Shard(0)], src_data_rank=None)
        found += [step(x).to_local().tolist(), float(x.sum()), library_group(dist.group.WORLD, "cpu") is not before]
        before = library_group(dist.group.WORLD, "cpu")
        if not world:
            dist.destroy_process_group()
    return found


def _run_with_rank(store: str) -> list[Any]:
    os.environ["RANK_OF_TEST"] = str(dist.get_rank())
    return _run_in_two_process_groups(store)


def test_reinitialized_default_process_group_has_new_library_groups(tmp_path: Any) -> None:
    assert run_gloo(_run_with_rank, 2, str(tmp_path / "store")) == [[[6.0, 10.0, 14.0], 15.0, True] * 2] * 2


def _group_descriptions() -> list[str]:
    named, unnamed = (
        dt.init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "cp", "tp")),
        dt.DeviceMesh("cpu", [[0, 3], [1, 2]]),
    )
    groups = named.get_group("dp"), named["dp", "tp"].flatten().get_group(), named.get_group("cp"), unnamed.get_group(1)
    return [group.group_desc for group in groups]


@pytest.mark.slow
def test_process_groups_are_described_by_their_mesh_dims() -> None:
    assert run_gloo(_group_descriptions, 4) == [["mesh_dp", "mesh_dp", "mesh_cp", "mesh_dim_1"]] * 4
