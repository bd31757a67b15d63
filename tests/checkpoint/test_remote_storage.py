"""Checkpoints on remote storage: in memory, and on an S3-like server on this machine."""

from __future__ import annotations

import json
import tempfile
import uuid
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from gloo_processes import run_gloo
from torch import nn

import dtensor as dt
from dtensor.checkpoint import Manager, load, read_tensors, read_tree, save, save_safetensors
from dtensor.errors import CheckpointError

fsspec = pytest.importorskip("fsspec")


@pytest.fixture
def memory() -> Iterator[str]:
    yield f"memory://{uuid.uuid4().hex}"
    fsspec.filesystem("memory").store.clear()


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    """Yield the address of a bucket on a local server."""
    server = pytest.importorskip("moto.server")
    pytest.importorskip("s3fs")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            patch.setenv(name, "testing")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        running = server.ThreadedMotoServer(port=0)
        running.start()
        host, port = running.get_host_and_port()
        patch.setenv("AWS_ENDPOINT_URL_S3", f"http://{host}:{port}")
        fsspec.filesystem("s3").mkdir("checkpoints")
        yield "s3://checkpoints"
        running.stop()


def state_on(ranks: int, placements: list[dt.Placement], value: float = 0.0) -> dict[str, Any]:
    mesh = dt.init_device_mesh("cpu", (ranks,))
    x = torch.arange(35.0).reshape(5, 7) + 1 if value else torch.zeros(5, 7)
    return {"w": dt.distribute_tensor(x, mesh, placements), "step": int(value), "name": "run" if value else ""}


def checkpoint_loads_on_other_meshes(address: str) -> None:
    save(state_on(4, [dt.Shard(0)], 7), address)
    for ranks, placements in ((3, [dt.Shard(1)]), (2, [dt.Replicate()]), (1, [dt.Shard(0)])):
        state = state_on(ranks, placements)
        found = load(state, address)
        assert (state["step"], state["name"], found.missing_keys) == (7, "run", [])
        assert torch.equal(state["w"].full_tensor(), torch.arange(35.0).reshape(5, 7) + 1)
    assert read_tensors(address)["w"].shape == (5, 7)
    assert read_tree(address)["step"] == 7


def manager_resumes_from_last_step(address: str) -> None:
    torch.manual_seed(0)
    mesh = dt.init_device_mesh("cpu", (2,))
    model = dt.parallel.fully_shard(nn.Linear(6, 3), mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": model, "optimizer": optimizer}
    with Manager(address, every=2, keep=2, best="min") as manager:
        assert manager.resume(state) == 0
        for step in range(1, 9):
            model(torch.ones(2, 6)).sum().backward()
            optimizer.step()
            manager.save(step, state, metric=abs(step - 4))
    weight = model.weight.full_tensor().clone()
    with torch.no_grad():
        model.weight.zero_()
    with Manager(address, every=2, keep=2, best="min") as manager:
        assert (manager.steps(), manager.best_step()) == ([4, 6, 8], 4)
        assert manager.resume(state) == 8
        assert torch.equal(model.weight.full_tensor(), weight)
        manager.save(10, state)
        manager.wait()
        assert manager.steps() == [4, 8, 10]


def damaged_or_missing_files_raise(address: str) -> None:
    fs, folder = fsspec.core.url_to_fs(address)
    with pytest.raises(CheckpointError, match="does not exist"):
        load(state_on(2, [dt.Shard(0)]), address)
    save(state_on(2, [dt.Shard(0)], 7), address)
    save(state_on(2, [dt.Shard(0)], 7), address)  # replaces the first one and removes its files
    # a file of blocks and a file of plain values
    assert len([path for path in fs.ls(folder, detail=False) if path.endswith(".distcp")]) == 2
    manifest = f"{folder}/manifest.json"
    block = json.loads(json.loads(fs.cat_file(manifest))["body"])["tensors"]["w"]["blocks"][0]
    data, at = f"{folder}/{block['file']}", block["at"]
    content = fs.cat_file(data)
    fs.pipe_file(data, content[:-1])
    with pytest.raises(CheckpointError, match="the checkpoint is truncated"):
        load(state_on(3, [dt.Shard(1)]), address)
    fs.pipe_file(data, content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    with pytest.raises(CheckpointError, match="does not match its checksum"):
        load(state_on(3, [dt.Shard(1)]), address)
    fs.rm_file(data)
    with pytest.raises(CheckpointError, match="is missing"):
        load(state_on(3, [dt.Shard(1)]), address)
    fs.rm_file(manifest)
    with pytest.raises(CheckpointError, match="is missing"):  # the remaining files have torch's format
        load(state_on(3, [dt.Shard(1)]), address)


def safetensors_and_torch_formats_load(address: str) -> None:
    fs, folder = fsspec.core.url_to_fs(address)
    w = torch.arange(35.0).reshape(5, 7) + 1
    with tempfile.TemporaryDirectory() as here:
        save_safetensors({"w": w, "b": w[0]}, f"{here}/hub", max_shard_size=100)
        with warnings.catch_warnings(action="ignore"):  # warning that there is no process group
            dcp.save({"w": w, "b": w[0], "step": 7}, checkpoint_id=f"{here}/dcp")
        for file in (file for kind in ("hub", "dcp") for file in Path(here, kind).iterdir()):
            fs.makedirs(f"{folder}/{file.parent.name}", exist_ok=True)
            fs.put_file(str(file), f"{folder}/{file.parent.name}/{file.name}")
    for kind, rest in (("hub", {}), ("dcp", {"step": 0})):
        state = {**state_on(3, [dt.Shard(1)]), "b": torch.zeros(7)} | rest
        wanted = {key: state[key] for key in ("w", "b", *rest)}
        assert load(wanted, f"{address}/{kind}").missing_keys == []
        assert torch.equal(wanted["w"].full_tensor(), w)
        assert torch.equal(wanted["b"], w[0])
        assert wanted.get("step", 7) == 7
    fs.rm_file(f"{folder}/hub/model-00001-of-00002.safetensors")
    with pytest.raises(CheckpointError, match="is missing"):
        load({"w": w, "b": w[0]}, f"{address}/hub")


CASES = (
    checkpoint_loads_on_other_meshes,
    manager_resumes_from_last_step,
    damaged_or_missing_files_raise,
    safetensors_and_torch_formats_load,
)


@pytest.mark.parametrize("case", CASES)
def test_checkpoints_on_fsspec_memory_storage_load_and_damaged_ones_raise(case: Callable[[str], None], memory: str) -> None:
    case(memory)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # warnings of the server and its client
@pytest.mark.parametrize("case", CASES)
def test_checkpoints_on_an_s3_server_load_and_damaged_ones_raise(case: Callable[[str], None], s3: str) -> None:
    case(f"{s3}/{case.__name__}")


def _save_and_resume(address: str) -> tuple[list[int], float]:
    mesh = dt.init_device_mesh("cpu", (2,))
    state = {"w": dt.distribute_tensor(torch.arange(35.0).reshape(5, 7), mesh, [dt.Shard(0)])}
    with Manager(address) as manager:
        manager.save(1, state)
        manager.save(2, state)
        manager.wait()
        state["w"].zero_()
        assert manager.resume(state) == 2
        return manager.steps(), state["w"].sum().item()


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_each_rank_writes_its_own_s3_objects_and_resume_loads_them(s3: str) -> None:
    assert run_gloo(_save_and_resume, 2, f"{s3}/processes") == [([2], 595.0)] * 2
    fs = fsspec.filesystem("s3")
    fs.invalidate_cache()
    names = {path.rpartition("/")[2] for path in fs.ls("checkpoints/processes/step-000000002", detail=False)}
    assert {name[:4] for name in names if name.endswith(".distcp")} == {"__0_", "__1_"}


def test_unreachable_or_unsupported_addresses_raise_and_file_addresses_load(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be reached"):
        save({"step": 1}, "nosuch://x")
    with pytest.raises(CheckpointError, match="not to memory://x"):
        save_safetensors({"w": torch.ones(3)}, "memory://x")
    save({"step": 1}, f"file://{tmp_path}/here")
    assert read_tree(tmp_path / "here")["step"] == 1
