"""Models in the Hugging Face file layout; cases for one process and for four, each with a folder shared by all ranks."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from case_lists import CaseList
from checkpoint_cases import (
    assert_same_values,
    distribute_values,
    distribute_zeros_like,
    list_layouts,
    make_line_mesh,
    make_network,
    make_square_mesh,
    make_values,
    run_on_first_rank,
    shard_parameters,
)
from torch import nn

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.checkpoint import load, read_tensors, save_safetensors
from dtensor.errors import CheckpointError

OFFICIAL = importlib.util.find_spec("safetensors") is not None
R = Replicate()
CASES = CaseList()
case = CASES.case


@case
def sharded_models_load_under_any_layout(folder: Path) -> None:
    x = make_values(7, 5)
    layouts = list_layouts(x)
    save_safetensors(
        {"x": {str(i): distribute_values(x, mesh, *p) for i, (mesh, p) in enumerate(layouts)}, "plain": x},
        folder,
        max_shard_size=300,
    )
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"]["x.0"] == "model-00001-of-00006.safetensors"
    assert index["metadata"]["total_size"] == 11 * x.nbytes
    for mesh, placements in layouts[:-1]:
        state: dict[str, Any] = {f"x.{i}": distribute_zeros_like(x, mesh, *placements) for i in range(9)}
        assert load(state, folder, strict=False).unexpected_keys == ["x.9", "plain"]
        for tensor in state.values():
            assert_same_values(tensor, x)
    state = {"x.9": torch.zeros(7, 5), "plain": torch.zeros(7, 5)}
    load(state, folder, strict=False)
    torch.testing.assert_close(state["x.9"], x)
    assert_same_values(state["plain"], x)


@case
def every_dtype_and_shape_is_saved_and_loaded(folder: Path) -> None:
    mesh, wide = make_line_mesh(), make_values(70, 300)
    plain = {
        "bf16": make_values(9, 3).bfloat16(),
        "f8": make_values(9, 3).to(torch.float8_e4m3fn),
        "bool": make_values(9, 3) > 0,
        "i64": make_values(9, 3).mul(9).long(),
        "0d": torch.tensor(2.5),
        "none": torch.zeros(0, 3),
        "wide": wide,
        "t": make_values(6, 4).t(),
    }
    layouts: dict[str, dt.Placement] = {"0d": R, "wide": Shard(1, sizes=(1, 290, 0, 9))}
    save_safetensors({name: distribute_values(x, mesh, layouts.get(name, Shard(0))) for name, x in plain.items()}, folder)
    assert {name: entry.shape for name, entry in read_tensors(folder).items()} == {n: tuple(x.shape) for n, x in plain.items()}
    state = {name: torch.zeros(x.shape, dtype=x.dtype) for name, x in plain.items()}
    load(state, folder / "model.safetensors")
    for name, x in plain.items():
        assert torch.equal(state[name].reshape(-1).view(torch.uint8), x.contiguous().reshape(-1).view(torch.uint8)), name
    if OFFICIAL:
        from safetensors.torch import load_file

        found = load_file(folder / "model.safetensors")
        for name, x in plain.items():
            assert found[name].dtype == x.dtype
            assert torch.equal(found[name].reshape(-1).view(torch.uint8), x.contiguous().reshape(-1).view(torch.uint8)), name


@case
def files_of_the_official_library_are_read_partially(folder: Path) -> None:
    if not OFFICIAL:
        pytest.skip("the safetensors package is not installed: pip install dtensor[safetensors]")
    from safetensors.torch import save_file

    x, v = make_values(64, 96), make_values(40)
    run_on_first_rank(lambda: save_file({"x": x, "v": v.bfloat16()}, folder / "model.safetensors"))
    for mesh, placements in (
        (make_line_mesh(), (Shard(0),)),
        (make_line_mesh(), (Shard(1),)),
        (make_square_mesh(), (R, Shard(1))),
    ):
        state = {
            "x": distribute_zeros_like(x, mesh, *placements),
            "v": distribute_zeros_like(v.bfloat16(), mesh, *(R for _ in placements)),
        }
        read = load(state, folder).bytes_read
        here = state["x"].to_local()
        assert read == (x.nbytes if isinstance(here, dt.PerRank) else here.nbytes) + v.nbytes // 2
        assert_same_values(state["x"], x)
        assert_same_values(state["v"], v.bfloat16())


class Tied(nn.Module):
    def __init__(self, device: str = "cpu") -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 6, device=device)
        self.head = nn.Linear(6, 11, bias=False, device=device)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embed(x))


@case
def modules_and_tied_parameters_are_saved_and_loaded(folder: Path) -> None:
    model = shard_parameters(make_network(), make_square_mesh(), R, Shard(0))
    save_safetensors(model, folder / "a")
    other = shard_parameters(make_network("meta"), make_line_mesh(), Shard(1))
    load(other, folder / "a")
    for p, q in zip(other.parameters(), make_network().parameters(), strict=True):
        assert_same_values(p.detach(), q.detach())
    torch.manual_seed(1)
    tied = Tied()
    spec = dt.sharding_spec.single_split(0, [0, 1, 2, 3])
    torch.manual_seed(1)
    save_safetensors(dt.shard_model(Tied(), spec), folder / "b")
    assert list(read_tensors(folder / "b")) == ["embed.weight"]
    blank_model = dt.shard_model(Tied("meta"), spec, materialize=False)
    load(blank_model, folder / "b")
    assert blank_model.head.weight is blank_model.embed.weight
    assert_same_values(blank_model.head.weight.detach(), tied.embed.weight.detach())


@case
def invalid_saves_and_loads_raise_and_change_nothing(folder: Path) -> None:
    x, mesh = make_values(6, 4), make_line_mesh()
    save_safetensors({"a": distribute_values(x, mesh, Shard(0))}, folder / "m")
    for state, place, words in [
        ({"a": x}, "m", "has a model already"),
        ({"a": x.to(torch.complex128)}, "new", "complex128, which safetensors files do not have"),
        ({"n": 3}, "new", r"\['n'\] are not tensors"),
    ]:
        with pytest.raises(CheckpointError, match=words):
            save_safetensors(state, folder / place)
    file = folder / "m" / "model.safetensors"
    content = file.read_bytes()
    run_on_first_rank(lambda: None)  # all have read it
    for damaged, words in [
        (content[:-5], "truncated"),
        (content[:4], "truncated"),
        (content[:8] + b"}" + content[9:], "damaged"),
        (content[:-30] + bytes([content[-30] ^ 4]) + content[-29:], "'a' is corrupted"),
        (content.replace(b'"dtensor.digests":"{', b'"dtensor.digests":"[', 1), "damaged"),
        (content.replace(b'"shape":[6,4]', b'"shape":[4,6]', 1), "does not match its checksum"),
    ]:
        run_on_first_rank(lambda damaged=damaged: file.write_bytes(damaged))
        target = distribute_zeros_like(x, mesh, Shard(1))
        with pytest.raises(CheckpointError, match=words):
            load({"a": target}, folder / "m")
        assert_same_values(target, torch.zeros(6, 4))
    run_on_first_rank(lambda: file.write_bytes(content))
    with pytest.raises(CheckpointError, match="float64 here and float32"):
        load({"a": distribute_zeros_like(x.double(), mesh, Shard(0))}, folder / "m")
    run_on_first_rank(lambda: (folder / "i").mkdir())
    for index in ('{"weight_map": {"a": "../m/model.safetensors"}}', '{"weight_map": {"b": "gone.safetensors"}}', "{}"):
        run_on_first_rank(lambda index=index: (folder / "i" / "model.safetensors.index.json").write_text(index))
        with pytest.raises(CheckpointError, match=r"outside of its folder|missing|damaged"):
            load({"a": distribute_zeros_like(x, mesh, Shard(0))}, folder / "i")
    save_safetensors({"p": distribute_values(x, make_square_mesh(), Partial(), Shard(1))}, folder / "p")
    state = {"p": torch.zeros(6, 4)}
    load(state, folder / "p")
    torch.testing.assert_close(state["p"], x)
