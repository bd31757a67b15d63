"""Checkpoints: any layout loads into any other, in one process and on processes, and errors change nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import checkpoint_cases
import pytest
import torch
import torch.distributed.checkpoint as dcp
from case_lists import make_case_tests
from gloo_processes import run_gloo
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import dtensor as dt
from dtensor.checkpoint import load, merge_rank_files, save, save_safetensors
from dtensor.errors import CheckpointError
from dtensor.layout.layout import Layout
from dtensor.testing import strategies

test_case_in_one_process, test_all_cases_on_four_processes = make_case_tests(checkpoint_cases, folders=True)


@settings(max_examples=40)
@given(st.data())
def test_checkpoint_of_random_layout_loads_into_another_random_layout(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    x, value = data.draw(strategies.dtensors())
    asked: Layout = data.draw(strategies.layouts(shape=tuple(value.shape)))
    into = dt.zeros(*value.shape, dtype=value.dtype, device_mesh=asked.mesh, placements=asked.placements)
    folder = tmp_path_factory.mktemp("c")
    save_it = data.draw(st.sampled_from([save, save_safetensors]))
    save_it({"x": x}, folder)
    load({"x": into}, folder)
    found = into.full_tensor()
    for piece in found.shards if isinstance(found, dt.PerRank) else (found,):
        torch.testing.assert_close(piece, value, rtol=0, atol=0 if not (asked.is_partial or x.layout.is_partial) else 1e-12)


def _save_on(mesh_shape: tuple[int, ...], placements: list[dt.Placement], folder: str) -> None:
    mesh = dt.init_device_mesh("cpu", mesh_shape)
    save({"x": dt.distribute_tensor(checkpoint_cases.make_values(13, 6), mesh, placements), "n": mesh_shape}, folder)


def _save_and_load_submeshes(path: str) -> None:
    """Save and load tensors of each submesh with its process group; a group without all shards raises."""
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    for name in ("dp", "tp"):
        other = mesh.get_local_rank("tp" if name == "dp" else "dp")
        folder, group = f"{path}/{name}{other}", mesh[name].get_group()
        value = torch.arange(15.0).reshape(5, 3) + other
        for placement in (dt.Shard(0), dt.Replicate()):
            state = {"x": dt.distribute_tensor(value, mesh[name], [placement])}
            for write, file in (
                (dt.checkpoint.save, f"{folder}{placement}"),
                (dt.checkpoint.save_safetensors, f"{folder}{placement}-st"),
            ):
                write(state, file, process_group=group)
                found = {"x": dt.zeros(5, 3, device_mesh=mesh[name], placements=[dt.Shard(1)])}
                dt.checkpoint.load(found, file, process_group=group)
                assert torch.equal(found["x"].full_tensor(), value), (name, placement)
    whole = {"x": dt.distribute_tensor(torch.arange(15.0).reshape(5, 3), mesh, [dt.Shard(0), dt.Shard(1)])}
    with pytest.raises(dt.errors.CheckpointError, match="no rank of process_group= has its block"):
        dt.checkpoint.save(whole, f"{path}/half{mesh.get_local_rank('dp')}", process_group=mesh["tp"].get_group())


@pytest.mark.gloo
def test_submeshes_save_and_load_with_their_groups_and_missing_blocks_raise(tmp_path: Path) -> None:
    run_gloo(_save_and_load_submeshes, 4, str(tmp_path))


@pytest.mark.gloo
def test_checkpoint_of_two_processes_loads_on_eight_in_process_ranks(tmp_path: Path) -> None:
    run_gloo(_save_on, 2, (2,), [dt.Shard(0)], str(tmp_path))
    for shape, placements in (((8,), [dt.Shard(0)]), ((2, 4), [dt.Shard(1), dt.Shard(0)]), ((8,), [dt.Shard(1)])):
        x = dt.zeros(13, 6, device_mesh=dt.init_device_mesh("cpu", shape), placements=placements)
        state = {"x": x, "n": None}
        load(state, tmp_path)
        checkpoint_cases.assert_same_values(x, checkpoint_cases.make_values(13, 6))
        assert state["n"] == (2,)


View = Callable[[torch.Tensor], torch.Tensor]
# views of shape (4, 6), and whether torch's loader supports them
VIEWS: list[tuple[tuple[int, ...], dt.Placement, View, bool]] = [
    ((2, 2, 6), dt.Shard(1), lambda x: x.view(4, 6), True),
    ((4, 2, 3), dt.Shard(2), lambda x: x.view(4, 6), True),
    ((4, 2, 6), dt.Shard(2), lambda x: x.view(4, 12)[:, ::2], False),
    ((2, 2, 6), dt.Shard(0), lambda x: x.view(4, 6), True),
]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(("shape", "placement", "view", "torch_loads"), VIEWS)
def test_lazy_views_save_and_load_and_torch_loader_loads_them_or_raises(
    tmp_path: Path, shape: tuple[int, ...], placement: dt.Placement, view: View, torch_loads: bool
) -> None:
    value = checkpoint_cases.make_values(4, 6)
    plain = torch.zeros(shape, dtype=value.dtype)
    view(plain).copy_(value)
    base = dt.zeros(*shape, dtype=value.dtype, device_mesh=dt.init_device_mesh("cpu", (3,)), placements=[placement])
    save({"x": value}, tmp_path / "ours")
    load({"x": view(base)}, tmp_path / "ours")
    checkpoint_cases.assert_same_values(base, plain)
    save({"x": view(base)}, tmp_path / "again")
    back = torch.zeros_like(value)
    load({"x": back}, tmp_path / "again")
    torch.testing.assert_close(back, value)
    base.zero_()
    dcp.save({"x": value}, checkpoint_id=tmp_path / "torchs", no_dist=True)
    if torch_loads:
        dcp.load({"x": view(base)}, checkpoint_id=tmp_path / "torchs", no_dist=True)
        checkpoint_cases.assert_same_values(base, plain)
        return
    with pytest.raises(dcp.CheckpointException, match=r"dtensor\.checkpoint\.load"):
        dcp.load({"x": view(base)}, checkpoint_id=tmp_path / "torchs", no_dist=True)


# --- files that each rank writes for itself -----------------------------------------------------------------------------
def _write_rank_file(folder: str) -> None:
    mesh = dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5), nn.BatchNorm1d(5))
    dt.parallel.parallelize_module(model, mesh["tp"], {"0": dt.parallel.ColwiseParallel(), "2": dt.parallel.RowwiseParallel()})
    dt.parallel.fully_shard(model, mesh=mesh["dp"])
    x = dt.distribute_tensor(checkpoint_cases.make_values(7, 5), mesh, [dt.Shard(0), dt.Replicate()])
    partial = dt.DTensor.from_local(torch.ones(3), mesh, [dt.Partial(), dt.Replicate()])
    rank = torch.distributed.get_rank()
    torch.save({"model": model.state_dict(), "list": [x], "step": 7}, Path(folder) / f"rank_{rank}.pt")
    torch.save({"x": partial}, Path(folder) / f"partial_{rank}.pt")


@pytest.mark.gloo
def test_merge_rank_files_returns_full_tensors_and_missing_files_raise(tmp_path: Path) -> None:
    run_gloo(_write_rank_file, 4, str(tmp_path))
    torch.manual_seed(0)
    expected = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 5), nn.BatchNorm1d(5)).state_dict()
    files = [tmp_path / f"rank_{rank}.pt" for rank in (2, 0, 3, 1)]
    state = merge_rank_files(files)
    assert state["step"] == 7
    assert state["model"].keys() == expected.keys()
    for name, x in expected.items():
        assert type(state["model"][name]) is torch.Tensor
        assert torch.equal(state["model"][name], x), name
    assert torch.equal(state["list"][0], checkpoint_cases.make_values(7, 5))
    with pytest.raises(CheckpointError, match=r"at \(0, 0\) is in none of the files: add the file of one of the ranks \[0\]"):
        merge_rank_files([files[0], *files[2:]])
    with pytest.raises(CheckpointError, match="'x' is partial"):
        merge_rank_files([tmp_path / f"partial_{rank}.pt" for rank in range(4)])
    with pytest.raises(CheckpointError, match="distributed in some of the files only"):
        merge_rank_files([*files, tmp_path / "partial_0.pt"])
    with pytest.raises(dt.errors.DTensorError, match="merge_rank_files"):
        torch.load(files[0])
