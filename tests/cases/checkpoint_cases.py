"""Checkpoint cases for one process and for four: each gets a folder shared by all ranks."""

from __future__ import annotations

import copy
import random
import re
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from case_lists import CaseList
from torch import nn

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.checkpoint import load, read_tensors, read_tree, save, save_safetensors
from dtensor.errors import CheckpointError

R = Replicate()
CASES = CaseList()
case = CASES.case


def make_square_mesh() -> dt.DeviceMesh:
    return dt.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


def make_line_mesh() -> dt.DeviceMesh:
    return dt.init_device_mesh("cpu", (4,))


def make_values(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def distribute_values(x: torch.Tensor, mesh: dt.DeviceMesh, *placements: dt.Placement) -> dt.DTensor:
    return dt.distribute_tensor(x, mesh, placements)


def distribute_zeros_like(x: torch.Tensor, mesh: dt.DeviceMesh, *placements: dt.Placement) -> dt.DTensor:
    return dt.zeros(*x.shape, dtype=x.dtype, device_mesh=mesh, placements=placements)


def assert_same_values(x: Any, expected: torch.Tensor) -> None:
    found = x.full_tensor() if isinstance(x, dt.DTensor) else x
    for piece in found.shards if isinstance(found, dt.PerRank) else (found,):
        assert torch.equal(piece, expected), (piece, expected)


def run_on_first_rank(fn: Callable[[], Any]) -> None:
    """Call ``fn`` on the first rank only, and let all ranks wait for it."""
    if not dist.is_initialized():
        fn()
        return
    if dist.get_rank() == 0:
        fn()
    dist.barrier()


def list_layouts(x: torch.Tensor) -> list[tuple[dt.DeviceMesh, tuple[dt.Placement, ...]]]:
    """Return pairs of mesh and placements for a matrix of 7 rows and 5 columns, with each unusual kind of layout."""
    two, one = make_square_mesh(), make_line_mesh()
    return [
        (two, (Shard(0), Shard(1))),
        (two, (Shard(0, level=1), Shard(0, level=0))),
        (two, (Shard(0), Shard(0))),
        (two, (R, Shard(1, sizes=(1, 4)))),
        (two, (Shard(0), R)),
        (one, (Shard(0, sizes=(0, 4, 1, 2)),)),
        (one, (Shard(1),)),
        (one, (R,)),
        (two["tp"], (Shard(0),)),
        (two, (Partial(), Shard(1))),
    ]


# --- any layout to any other ------------------------------------------------------------------------------------------------
@case
def any_layout_loads_into_any_other(folder: Path) -> None:
    x = make_values(7, 5)
    layouts = list_layouts(x)
    save({str(i): distribute_values(x, mesh, *p) for i, (mesh, p) in enumerate(layouts)} | {"plain": x}, folder)
    for mesh, placements in layouts:
        state: dict[str, Any] = {str(i): distribute_zeros_like(x, mesh, *placements) for i in range(len(layouts))} | {
            "plain": torch.zeros(7, 5)
        }
        load(state, folder)
        for name, tensor in state.items():
            if not any(isinstance(p, Partial) for p in (layouts[int(name)][1] if name != "plain" else ())):
                assert_same_values(tensor, x)
    state = {str(i): torch.zeros(7, 5) for i in range(len(layouts))} | {
        "plain": distribute_zeros_like(x, make_line_mesh(), Shard(1))
    }
    load(state, folder)
    for name, tensor in state.items():
        assert_same_values(tensor, x) if name != "9" else torch.testing.assert_close(tensor, x)


@case
def every_dtype_shape_and_memory_order_is_saved_and_loaded(folder: Path) -> None:
    mesh = make_line_mesh()
    dtypes = [
        torch.bool,
        torch.uint8,
        torch.int64,
        torch.bfloat16,
        torch.float16,
        torch.float64,
        torch.complex64,
        torch.complex128,
    ]
    dtypes += [torch.float8_e4m3fn, torch.uint16]
    plain = {f"{dtype}": make_values(9, 3).mul(10).to(dtype) for dtype in dtypes}
    saved: dict[str, Any] = {name: distribute_values(x, mesh, Shard(0)) for name, x in plain.items()}
    saved["t"], saved["0d"], saved["empty"] = (
        distribute_values(make_values(6, 4).t(), mesh, Shard(0)),
        distribute_values(torch.tensor(2.5), mesh, R),
        torch.zeros(0, 3),
    )
    saved["few"] = distribute_values(make_values(2, 3), mesh, Shard(0))
    save(saved, folder)
    state: dict[str, Any] = {name: torch.zeros(9, 3, dtype=x.dtype) for name, x in plain.items()}
    state |= {
        "t": distribute_zeros_like(make_values(4, 6), mesh, Shard(1)),
        "0d": torch.tensor(0.0),
        "empty": torch.ones(0, 3),
        "few": torch.zeros(2, 3),
    }
    load(state, folder)
    for name, x in plain.items():
        assert torch.equal(state[name].view(torch.uint8), x.view(torch.uint8)), name
    assert_same_values(state["t"], make_values(6, 4).t())
    assert_same_values(state["0d"], torch.tensor(2.5))
    assert_same_values(state["few"], make_values(2, 3))


@case
def plain_values_and_nesting_are_saved_and_loaded(folder: Path) -> None:
    values = {
        "n": 1,
        "f": float("inf"),
        "t": (1, [2, (3,)]),
        "by": b"\x00x",
        5: {"a": None},
        "d": torch.bfloat16,
        "c": 1j,
        "s": {1, 2},
    }
    save({"v": values, "x": [torch.ones(2), {"y": torch.zeros(1)}]}, folder)
    state = {"v": copy.deepcopy(values) | {"n": 0, "t": 0}, "x": [torch.zeros(2), {"y": torch.ones(1)}]}
    inner = state["v"]
    load(state, folder)
    assert state["v"] == values
    assert state["v"] is inner
    assert_same_values(state["x"][0], torch.ones(2))
    assert read_tree(folder)["v"] == values
    assert read_tensors(folder)["x.1.y"].shape == (1,)


@case
def no_rank_reads_more_than_it_needs(folder: Path) -> None:
    x = make_values(64, 96)
    save({"w": distribute_values(x, make_square_mesh(), Shard(0), Shard(1)), "v": x}, folder)
    for mesh, placements in [
        (make_line_mesh(), (Shard(0),)),
        (make_line_mesh(), (Shard(1),)),
        (make_square_mesh(), (R, Shard(1))),
    ]:
        state = {"w": distribute_zeros_like(x, mesh, *placements), "v": distribute_zeros_like(x, mesh, *placements)}
        read = load(state, folder).bytes_read
        needed = 2 * (x.nbytes if not dist.is_initialized() else state["w"].to_local().nbytes)
        assert read == needed
        assert_same_values(state["w"], x)


@case
def other_dtypes_raise_unless_convert_is_true(folder: Path) -> None:
    x, mesh = make_values(7, 5), make_line_mesh()
    save({"a": distribute_values(x, mesh, Shard(0)), "p": x, "n": torch.arange(3), "c": x.to(torch.complex64)}, folder)
    for dtype in (torch.bfloat16, torch.float64):
        wide = torch.complex128 if dtype == torch.float64 else torch.complex64
        state: dict[str, Any] = {
            "a": distribute_zeros_like(x.to(dtype), make_square_mesh(), Shard(1), Shard(0)),
            "p": torch.zeros(7, 5, dtype=dtype),
        }
        state |= {"n": torch.zeros(3, dtype=torch.int64), "c": torch.zeros(7, 5, dtype=wide)}
        with pytest.raises(CheckpointError, match=f"'a' is {str(dtype)[6:]} here and float32 .*: give convert=True"):
            load(state, folder)
        assert_same_values(state["a"], torch.zeros(7, 5, dtype=dtype))
        load(state, folder, convert=True)
        assert_same_values(state["a"], x.to(dtype))
        assert_same_values(state["p"], x.to(dtype))
        assert_same_values(state["c"], x.to(torch.complex64).to(wide))
    with pytest.raises(CheckpointError, match="'n' is float32 here and int64 in the checkpoint: load it as such"):
        load({**state, "n": torch.zeros(3)}, folder, convert=True)


@case
def a_model_and_its_optimizer_load_under_other_names(folder: Path) -> None:
    wrapped = nn.ModuleDict({"module": make_network()})
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=0.1)
    train_steps(wrapped["module"], optimizer, None)
    save({"net": wrapped, "optimizer": optimizer, "step": 2}, folder)
    other = shard_parameters(make_network(), make_line_mesh(), Shard(0))
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    state = {"model": other, "optimizer": fresh, "step": 0}
    with pytest.raises(CheckpointError, match="not in the checkpoint"):
        load(state, folder)

    def new(key: str) -> str:
        return key.replace("net", "model", 1).replace("module.", "")

    load(state, folder, rename=new)
    assert state["step"] == 2
    assert fresh.param_groups[0]["lr"] == 0.1
    for p, q in zip(other.parameters(), wrapped.parameters(), strict=True):
        assert_same_values(p, q.detach())
        assert_same_values(fresh.state[p]["exp_avg"], optimizer.state[q]["exp_avg"])
    found = {"steps": 0}
    assert load(found, folder, strict=False, rename={"step": "steps"}).missing_keys == []
    assert found["steps"] == 2
    with pytest.raises(CheckpointError, match="two values of the checkpoint the name 'same"):
        load(state, folder, rename=lambda key: "same")


@case
def rename_by_a_dict_of_dotted_names(folder: Path) -> None:
    model = make_network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    train_steps(model, optimizer, None)
    save({"model": model, "optimizer": optimizer, "more": {"list": [{"a": make_values(3)}], "n": 5}}, folder)
    other = shard_parameters(nn.Sequential(nn.ModuleDict({"inner": make_network()})), make_line_mesh(), Shard(0))
    fresh = torch.optim.Adam(other.parameters(), lr=0.5)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    state = {
        "net": other,
        "optimizer": fresh,
        "more": {"list": [{"b": distribute_zeros_like(make_values(3), make_line_mesh(), Shard(0))}]},
        "n": 0,
    }
    names = {f"model.{name}": f"net.0.inner.{name}" for name in model.state_dict()}
    assert load(state, folder, rename={**names, "more.list.0.a": "more.list.0.b", "more.n": "n"}).missing_keys == []
    for p, q in zip(other.parameters(), model.parameters(), strict=True):
        assert_same_values(p, q.detach())
        assert_same_values(fresh.state[p]["exp_avg"], optimizer.state[q]["exp_avg"])
    assert_same_values(state["more"]["list"][0]["b"], make_values(3))  # type: ignore[index]  # nested
    assert state["n"] == 5
    flat = {name: torch.zeros_like(x) for name, x in model.state_dict().items()}
    load(flat, folder, strict=False, rename={f"model.{name}": name for name in flat})
    for name, x in flat.items():
        assert_same_values(x, model.state_dict()[name])
    for wrong, said in (
        ({"net.0.weight": "model.0.weight"}, r"rename matches nothing: none of \['net.0.weight'\]"),
        ({"more.n": "more.list"}, "two values of the checkpoint the name 'more.list'"),
        ({"model.0.weight": "model.0.bias"}, "two values of the checkpoint the name 'model.0.bias'"),
    ):
        with pytest.raises(CheckpointError, match=said):
            load(state, folder, strict=False, rename=wrong)


# --- modules and optimizers -------------------------------------------------------------------------------------------------
def make_network(device: str = "cpu") -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 10, device=device), nn.LayerNorm(10, device=device), nn.Linear(10, 3, device=device))


def shard_parameters(module: nn.Module, mesh: dt.DeviceMesh, *placements: dt.Placement) -> nn.Module:
    """Distribute a module with all parameters under ``placements``; vectors are sharded along dim 0 wherever matrices are
    sharded.
    """

    def partition(name: str, sub: nn.Module, mesh: dt.DeviceMesh) -> None:
        for key, p in list(sub._parameters.items()):
            where = [Shard(0) if isinstance(q, Shard) and p.ndim == 1 else q for q in placements]
            sub.register_parameter(key, nn.Parameter(dt.distribute_tensor(p.detach(), mesh, where)))

    return dt.distribute_module(module, mesh, partition)


def train_steps(module: nn.Module, optimizer: torch.optim.Optimizer, mesh: dt.DeviceMesh | None, steps: int = 2) -> None:
    for step in range(steps):
        x = make_values(8, 6, seed=step)
        out = module(x if mesh is None else dt.distribute_tensor(x, mesh, [R] * mesh.ndim))
        optimizer.zero_grad()
        out.square().mean().backward()
        optimizer.step()


@case
def training_resumes_under_another_layout(folder: Path) -> None:
    plain = make_network()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    train_steps(plain, reference, None, 4)
    model, mesh = shard_parameters(make_network(), make_square_mesh(), R, Shard(0)), make_square_mesh()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    train_steps(model, optimizer, mesh)
    save({"model": model, "optimizer": optimizer}, folder)
    other = shard_parameters(make_network("meta"), make_line_mesh(), Shard(1))
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    load({"model": other}, folder, strict=False)
    fresh = torch.optim.AdamW(other.parameters(), lr=0.5)
    load({"model": other, "optimizer": fresh}, folder)
    assert fresh.param_groups[0]["lr"] == 0.1
    p = next(iter(other.parameters()))
    assert fresh.state[p]["exp_avg"].placements == p.placements
    for step in (2, 3):
        x = make_values(8, 6, seed=step)
        fresh.zero_grad()
        other(dt.distribute_tensor(x, make_line_mesh(), [R])).square().mean().backward()
        fresh.step()
    whole = make_network()
    again = torch.optim.AdamW(whole.parameters(), lr=0.1)
    load({"model": whole, "optimizer": again}, folder)
    for step in (2, 3):
        again.zero_grad()
        whole(make_values(8, 6, seed=step)).square().mean().backward()
        again.step()
    plain = make_network()
    reference = torch.optim.AdamW(plain.parameters(), lr=0.1)
    train_steps(plain, reference, None, 4)
    for p, q, r in zip(other.parameters(), whole.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(q, r)
        found = p.full_tensor()
        torch.testing.assert_close(found.shards[0] if isinstance(found, dt.PerRank) else found, r)


@case
def an_optimizer_without_its_model_is_matched_by_position(folder: Path) -> None:
    model = make_network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    train_steps(model, optimizer, None)
    save({"o": optimizer, "flat": model.state_dict()}, folder)
    other = make_network()
    fresh = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
    load({"o": fresh, "flat": other.state_dict()}, folder)
    for a, b in zip(model.parameters(), other.parameters(), strict=True):
        assert_same_values(b, a)
        assert_same_values(fresh.state[b]["momentum_buffer"], optimizer.state[a]["momentum_buffer"])


@case
def a_scheduler_and_extra_state_are_restored(folder: Path) -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("b", torch.zeros(2))
            self.count = 0

        def get_extra_state(self) -> Any:
            return {"count": self.count}

        def set_extra_state(self, state: Any) -> None:
            self.count = state["count"]

    one, two = Counter(), Counter()
    one.count = 5
    optimizer = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
    schedules = [torch.optim.lr_scheduler.MultiStepLR(optimizer, [m, 30]) for m in (10, 20)]
    save({"m": one, "s": schedules[0]}, folder)
    load({"m": two, "s": schedules[1]}, folder)
    assert two.count == 5
    assert schedules[1].milestones == schedules[0].milestones


@case
def regrouped_parameters_are_matched_with_their_state_by_name(folder: Path) -> None:
    model = make_network()
    optimizer = torch.optim.Adam(model.parameters())
    train_steps(model, optimizer, None, 1)
    save({"model": model, "optimizer": optimizer}, folder)
    other = make_network()
    fresh = torch.optim.Adam([{"params": list(other.parameters())[::-1]}])
    with pytest.raises(CheckpointError, match="parameter groups"):
        load({"model": other, "optimizer": fresh}, folder)
    assert_same_values(next(iter(other.parameters())), next(iter(make_network().parameters())))


@case
def fully_sharded_states_load_into_plain_and_zero_optimizers(folder: Path) -> None:
    mesh, x = make_line_mesh(), make_values(8, 6)
    model = dt.parallel.fully_shard(make_network(), mesh=mesh)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    model(dt.distribute_tensor(x, mesh, [Shard(0)]).to_local()).square().mean().backward()
    optimizer.step()
    save({"model": model, "optimizer": optimizer}, folder)
    whole = make_network()
    again = torch.optim.Adam(whole.parameters(), lr=0.5)
    load({"model": whole, "optimizer": again}, folder)
    zero_model = shard_parameters(make_network(), mesh, R)
    zero = dt.parallel.ZeroRedundancyOptimizer(zero_model.parameters(), torch.optim.Adam, mesh=mesh, lr=0.5)
    load({"model": zero_model, "optimizer": zero}, folder)
    for p, q, part in zip(whole.parameters(), zero_model.parameters(), zero.inner.param_groups[0]["params"], strict=True):
        assert_same_values(q, p)
        state = zero.inner.state[part]["exp_avg"]
        assert state.placements == part.placements
        assert_same_values(state, again.state[p]["exp_avg"])


# --- torch's own functions --------------------------------------------------------------------------------------------------
@case
def checkpoints_are_compatible_with_torch_distributed_checkpoint(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    x, mesh = make_values(7, 5), make_line_mesh()
    saved = {
        "m": {
            "w": distribute_values(x, make_square_mesh(), Shard(0), Shard(1)),
            "none": distribute_values(make_values(0, 2), mesh, Shard(0)),
        },
        "p": x,
        "l": [1, "two"],
        "n": 3,
        "d": {"!": 2, "v": 5},  # the key by which ours tags what JSON has no word for
    }
    target = {
        "m": {"w": distribute_zeros_like(x, mesh, Shard(1)), "none": torch.zeros(0, 2)},
        "p": distribute_zeros_like(x, mesh, Shard(0)),
        "l": [],
        "n": 0,
    }
    target["d"] = {"!": 0, "v": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save(saved, folder / "ours")
        state = copy.deepcopy(target)
        dcp.load(state, checkpoint_id=folder / "ours")
        assert_same_values(state["m"]["w"], x)
        assert_same_values(state["p"], x)
        assert (state["l"], state["n"]) == ([1, "two"], 3)
        dcp.save(saved, checkpoint_id=folder / "torchs")
    state = copy.deepcopy(target)
    load(state, folder / "torchs")
    assert_same_values(state["m"]["w"], x)
    assert_same_values(state["p"], x)
    assert (state["l"], state["n"], state["d"]) == ([1, "two"], 3, {"!": 2, "v": 5})


@case
def tensors_in_tuples_load_without_a_manifest_or_raise(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    x = make_values(3, 2)
    names = {1, 2}
    pending = save({"t": (x, 3), "l": [(4, 5)], "s": names}, folder / "ours", async_op=True)
    names.add(9)
    pending.wait()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"t": (x, 3)}, checkpoint_id=folder / "torchs")
    run_on_first_rank((folder / "ours" / "manifest.json").unlink)
    state = {"t": (torch.zeros(3, 2), 0), "l": [()], "s": set()}
    load(state, folder / "ours")
    assert_same_values(state["t"][0], x)
    assert (state["l"], state["s"]) == ([(4, 5)], {1, 2})
    with pytest.raises(CheckpointError, match=r"'t' holds tensors .* save them in a list"):
        load({"t": (torch.zeros(3, 2), 0)}, folder / "torchs")


@case
def torch_distributed_checkpoint_loads_every_replica(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    x, scalar, two, one = make_values(7, 5), torch.tensor(2.5), make_square_mesh(), make_line_mesh()
    layouts = [(mesh, p) for mesh, p in list_layouts(x) if not any(isinstance(q, Partial) for q in p)]
    state: dict[str, Any] = {
        "list": [distribute_zeros_like(x, mesh, *p) for mesh, p in layouts],
        "scalar": distribute_zeros_like(scalar, two, R, R),
    }
    units = dt.parallel.fully_shard(make_network(), mesh=two)  # replicated over "dp", sharded over "tp"
    copies = dt.distribute_module(make_network(), one)
    saved = {"list": [x for _ in layouts], "scalar": scalar, "units": make_network(), "copies": make_network()}
    for module in (units, copies):
        for p in module.parameters():
            torch.nn.init.zeros_(p)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({k: v.state_dict() if isinstance(v, nn.Module) else v for k, v in saved.items()}, checkpoint_id=folder)
        dcp.load({**state, "units": units.state_dict(), "copies": copies.state_dict()}, checkpoint_id=folder)
    for tensor in state["list"]:
        assert_same_values(tensor, x)
    assert_same_values(state["scalar"], scalar)
    for module in (units, copies):
        for p, q in zip(module.parameters(), make_network().parameters(), strict=True):
            assert_same_values(p, q)


@case
def torch_distributed_checkpoint_load_invalidates_cached_redistributions(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp

    x, mesh = make_values(8, 6), make_line_mesh()
    target, left = distribute_zeros_like(x, mesh, Shard(0)), distribute_values(torch.eye(8), mesh, Shard(0))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"x": x}, checkpoint_id=folder)
        assert_same_values(left @ target, torch.zeros(8, 6))  # the replicated copy of `target` is cached
        dcp.load({"x": target}, checkpoint_id=folder)
    assert_same_values(left @ target, x)


@case
def torch_state_dict_stager_and_async_save_store_values_of_the_call(folder: Path) -> None:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint._state_dict_stager import StateDictStager

    x = make_values(7, 5)
    layouts = [(mesh, p) for mesh, p in list_layouts(x) if not any(isinstance(q, Partial) for q in p)]
    tensors = [distribute_values(x, mesh, *p) for mesh, p in layouts]
    tensors[0].note = "kept"  # type: ignore[attr-defined]
    state = {"list": tensors, "tied": tensors[0], "n": 3}
    stager = StateDictStager()
    for factor in (1, 2):  # the second time the stager uses its memory again
        staged = stager.stage(state)
        assert staged["tied"] is staged["list"][0]
        assert staged["tied"].note == "kept"
        assert staged["n"] == 3
        for tensor, origin in zip(staged["list"], tensors, strict=True):
            assert tensor.layout is origin.layout
            assert_same_values(tensor, x * factor)
            origin.mul_(2)
            assert_same_values(tensor, x * factor)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        response: Any = dcp.async_save(state, checkpoint_id=folder)
        response.result()
        loaded = {"list": [distribute_zeros_like(x, mesh, *p) for mesh, p in layouts], "tied": torch.zeros(7, 5), "n": 0}
        dcp.load(loaded, checkpoint_id=folder)
    assert loaded["n"] == 3
    for tensor in (*loaded["list"], loaded["tied"]):
        assert_same_values(tensor, x * 4)


# --- what goes wrong --------------------------------------------------------------------------------------------------------
@case
def load_with_mismatches_raises_and_changes_nothing(folder: Path) -> None:
    x, mesh = make_values(6, 4), make_line_mesh()
    save({"a": distribute_values(x, mesh, Shard(0)), "b": x, "n": 1}, folder)

    def asked(**changes: Any) -> dict[str, Any]:
        return {
            k: v
            for k, v in {"a": distribute_zeros_like(x, mesh, Shard(1)), "b": torch.zeros(6, 4), "n": 0, **changes}.items()
            if v is not None
        }

    wrong: list[tuple[dict[str, Any], str]] = [
        (asked(b=torch.zeros(4, 6)), r"'b' has shape \[4, 6\] here and \[6, 4\]"),
        (asked(b=torch.zeros(6, 4, dtype=torch.float64)), "'b' is float64 here and float32"),
        (asked(c=torch.zeros(1)), "not in the checkpoint: c"),
        (asked(b=None), "not asked for: b"),
        (asked(n=None), "not asked for: n"),
        (asked(b=3), "'b' is a int here and a tensor"),
        (asked(n=torch.zeros(1)), "'n' is a tensor here and a int"),
    ]
    for state, words in wrong:
        with pytest.raises(CheckpointError, match=words):
            load(state, folder)
        assert_same_values(state["a"], torch.zeros(6, 4))
    state = asked(b=None, c=torch.ones(1))
    assert load(state, folder, strict=False)[:2] == (["c"], ["b"])
    assert_same_values(state["a"], x)
    with pytest.raises(CheckpointError, match="does not exist"):
        load(asked(), folder / "nowhere")
    run_on_first_rank(lambda: (folder / "empty").mkdir())
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        load(asked(), folder / "empty")
    with pytest.raises(CheckpointError, match="'f' is a function"):
        save({"f": asked}, folder)
    with pytest.raises(CheckpointError, match="on meta"):
        save({"m": torch.zeros(2, device="meta")}, folder)
    load(asked(), folder)


@case
def targets_sharing_memory_load_all_values_or_none(folder: Path) -> None:
    x, y = make_values(6, 4), make_values(6, 4, seed=1)
    save(
        {
            "a": distribute_values(x, make_line_mesh(), Shard(0)),
            "b": distribute_values(x, make_line_mesh(), Shard(0)),
            "p": x,
            "q": x,
        },
        folder / "alike",
    )
    save(
        {
            "a": distribute_values(x, make_line_mesh(), Shard(0)),
            "b": distribute_values(y, make_line_mesh(), Shard(0)),
            "p": x,
            "q": y,
        },
        folder / "other",
    )

    def both(tied: str) -> dict[str, Any]:
        one, two, p = (
            distribute_zeros_like(x, make_line_mesh(), Shard(1)),
            distribute_zeros_like(x, make_line_mesh(), Shard(0)),
            torch.zeros(6, 4),
        )
        shared = {"a": one, "b": one if tied == "ab" else two, "p": p, "q": p if tied == "pq" else torch.zeros(6, 4)}
        return shared | {"q": p[:, :].view(6, 4)} if tied == "pq" else shared

    for tied in ("ab", "pq"):
        state = both(tied)
        load(state, folder / "alike")
        for found in state.values():
            assert_same_values(found, x)
        assert state["a"]._local is state["b"]._local if tied == "ab" else state["p"].data_ptr() == state["q"].data_ptr()
        state = both(tied)
        with pytest.raises(CheckpointError, match=f"'{tied[0]}' and '{tied[1]}' share memory here .* different values"):
            load(state, folder / "other")
        for found in state.values():
            assert_same_values(found, torch.zeros(6, 4))
    state = both("no")
    load(state, folder / "other")
    assert_same_values(state["b"], y)
    if dist.is_initialized():  # on one rank only: all of them say so
        state = both("pq" if dist.get_rank() == 2 else "no")
        with pytest.raises(CheckpointError, match="share memory here"):
            load(state, folder / "other")
        assert_same_values(state["a"], torch.zeros(6, 4))


@case
def targets_that_overlap_in_one_storage_load_or_raise(folder: Path) -> None:
    x = make_values(6, 4)
    save({"a": x[:4].clone(), "b": x[2:].clone(), "c": x[:, 1].clone()}, folder / "fits")
    save({"a": x[:4].clone(), "b": make_values(4, 4, seed=2), "c": x[:, 1].clone()}, folder / "contradicts")
    save({"a": x[:, 0].clone(), "b": x[:, 1].clone(), "c": x[:, 2:].clone()}, folder / "apart")
    z = torch.zeros(6, 4)
    load({"a": z[:4], "b": z[2:], "c": z[:, 1]}, folder / "fits")
    assert_same_values(z, x)
    z = torch.zeros(6, 4)
    with pytest.raises(CheckpointError, match="share memory here"):
        load({"a": z[:4], "b": z[2:], "c": z[:, 1]}, folder / "contradicts")
    assert_same_values(z, torch.zeros(6, 4))
    load({"a": z[:, 0], "b": z[:, 1], "c": z[:, 2:]}, folder / "apart")
    assert_same_values(z, x)
    c = torch.tensor([1 + 2j, 3j])
    save({"a": c, "b": c.conj()}, folder / "conjugates")
    z = torch.zeros(2, dtype=torch.complex64)
    load({"a": z, "b": z.conj()}, folder / "conjugates")
    assert_same_values(z, c)


@case
def tied_targets_on_meta_stay_tied_or_raise(folder: Path) -> None:
    x = make_values(6, 4)
    save(
        {
            "a": x,
            "b": x,
            "c": distribute_values(x, make_line_mesh(), Shard(0)),
            "d": distribute_values(x, make_line_mesh(), Shard(0)),
        },
        folder / "alike",
    )
    save(
        {
            "a": x,
            "b": x + 1,
            "c": distribute_values(x, make_line_mesh(), Shard(0)),
            "d": distribute_values(x, make_line_mesh(), Shard(0)),
        },
        folder / "other",
    )
    plain, cut = torch.empty(6, 4, device="meta"), distribute_values(torch.empty(6, 4, device="meta"), make_line_mesh(), Shard(1))
    state = {"a": plain, "b": plain, "c": cut, "d": cut}
    with pytest.raises(CheckpointError, match="'a' and 'b' share memory here"):
        load(dict(state), folder / "other")
    load(state, folder / "alike")
    assert state["a"] is state["b"]
    assert state["c"] is state["d"]
    assert_same_values(state["c"], x)
    model = nn.ModuleList([nn.Linear(4, 6, bias=False, device="meta") for _ in range(2)])
    model[1].weight = model[0].weight
    save({"0.weight": x, "1.weight": x + 1}, folder / "module")
    with pytest.raises(CheckpointError, match=r"'0\.weight' and '1\.weight' share memory here"):
        load(model, folder / "module")
    assert model[0].weight.is_meta


@case
def targets_that_cannot_be_filled_raise_before_any_change(folder: Path) -> None:
    x, mesh = make_values(6, 4), make_line_mesh()
    save({"a": distribute_values(x, mesh, Shard(0)), "b": x, "z": distribute_values(x, mesh, R)}, folder)
    unfit: list[tuple[dict[str, Any], str]] = [
        ({"b": torch.zeros(1, 4).expand(6, 4)}, "'b' has elements that share memory"),
        ({"b": torch.zeros(9).as_strided((6, 4), (1, 1))}, "'b' has elements that share memory"),
        ({"b": torch.zeros(6, 4).to_sparse()}, "'b' is no strided tensor"),
        ({"z": dt.zeros(1, 4, device_mesh=mesh, placements=[R]).expand(6, 4)}, "'z' has elements that share memory"),
        ({"z": dt.zeros(1, 4, device_mesh=mesh, placements=[Shard(1)]).expand(6, 4)}, "'z' has elements that share memory"),
    ]
    for changes, words in unfit:
        state = {
            "a": distribute_zeros_like(x, mesh, Shard(1)),
            "b": torch.zeros(6, 4),
            "z": distribute_zeros_like(x, mesh, R),
            **changes,
        }
        with pytest.raises(CheckpointError, match=words):
            load(state, folder)
        assert_same_values(state["a"], torch.zeros(6, 4))
        assert_same_values(state["b"].to_dense() if state["b"].is_sparse else state["b"], torch.zeros(6, 4))
    if not dist.is_initialized():
        piece = torch.zeros(6, 4)
        terms = dt.DTensor.from_local(dt.per_rank([piece] * 4), mesh, [Partial()])
        with pytest.raises(CheckpointError, match="'a' share memory here"):
            load({"a": terms}, folder, strict=False)


@case
def leaves_views_and_inference_tensors_are_filled_in_place(folder: Path) -> None:
    x, mesh = make_values(6, 4), make_line_mesh()
    saved = {"leaf": x, "result": x, "turned": x, "step": x, "0d": torch.tensor(2.5), "none": torch.zeros(0, 4)}
    save(
        {"plain": saved, "cut": {name: distribute_values(t, mesh, R if t.ndim == 0 else Shard(0)) for name, t in saved.items()}},
        folder,
    )
    for inference in (False, True):
        with torch.inference_mode(inference):
            plain: dict[str, torch.Tensor] = {
                "leaf": torch.zeros(6, 4, requires_grad=True),
                "result": torch.zeros(6, 4, requires_grad=True) * 1,
                "turned": torch.zeros(4, 6).t(),
                "step": torch.zeros(12, 4)[::2],
                "0d": torch.tensor(0.0),
                "none": torch.ones(0, 4),
            }
            cut: dict[str, Any] = {
                "leaf": distribute_zeros_like(x, mesh, Shard(1)).requires_grad_(not inference),
                "result": distribute_zeros_like(x, mesh, Shard(1)).requires_grad_(not inference) * 1,
                "turned": distribute_zeros_like(x.t(), mesh, Shard(0)).t(),
                "step": distribute_zeros_like(make_values(12, 4), mesh, R)[::2],
                "0d": distribute_zeros_like(torch.tensor(0.0), mesh, R),
                "none": distribute_zeros_like(torch.zeros(0, 4), mesh, Shard(0)),
            }
        before = {key: t._local for key, t in cut.items()}
        load({"plain": plain, "cut": cut}, folder)
        for name, t in saved.items():
            assert_same_values(plain[name].detach(), t)
            assert_same_values(cut[name].detach(), t)
            assert cut[name]._local is before[name]


class _RaisingState:
    """State that raises on one rank when it is read."""

    def __init__(self, kind: type[BaseException]) -> None:
        self.kind = kind

    def state_dict(self) -> dict[str, int]:
        if not dist.is_initialized() or dist.get_rank() == 1:
            raise self.kind("mine")
        return {"n": 1}

    def load_state_dict(self, state: dict[str, int]) -> None: ...


@case
def a_rank_that_raises_does_not_hang_the_others(folder: Path) -> None:
    terms = dt.DTensor.from_local(torch.ones(3), make_line_mesh(), [Partial()])
    for state in (
        {"x": terms, "bad": _RaisingState(ValueError)},
        {"bad": _RaisingState(ValueError), "x": distribute_values(make_values(4), make_line_mesh(), Shard(0))},
    ):
        with pytest.raises(CheckpointError, match="ValueError: mine"):
            save(state, folder)
        with pytest.raises(CheckpointError, match=r"ValueError: mine|are not tensors"):
            save_safetensors(state, folder)
        with pytest.raises(CheckpointError, match="ValueError: mine"):
            save(state, folder, async_op=True).wait()
    save({"bad": {"n": 1}}, folder)
    with pytest.raises(CheckpointError, match="ValueError: mine"):
        load({"bad": _RaisingState(ValueError)}, folder)
    if dist.is_initialized():
        whole = terms.redistribute(placements=[R])
        with pytest.raises(CheckpointError, match="state of rank 3 differs from that of rank 0: 'x' is "):
            save({"x": terms if dist.get_rank() != 3 else whole}, folder)
    with pytest.raises((CheckpointError, KeyboardInterrupt), match="mine"):
        load({"bad": _RaisingState(KeyboardInterrupt)}, folder)


def expect_error_on_processes(words: str) -> Any:
    """Expect an error with these words if there are several processes. In one process all ranks have one state, and no error is
    expected.
    """
    return pytest.raises(CheckpointError, match=re.escape(words)) if dist.is_initialized() else nullcontext()


@case
def states_that_differ_between_ranks_raise_with_the_key(folder: Path) -> None:
    odd, differs = dist.is_initialized() and dist.get_rank() == 2, "the state of rank 2 differs from that of rank 0: "
    parameters = {"w": distribute_values(make_values(4, 3), make_line_mesh(), Shard(0)), "b": torch.zeros(3)}
    usual = {"m": parameters, "n": 1, "l": [1, 2], "s": {1, 2}}
    others: dict[str, Any] = {
        "'n' is 2 there, 1 on rank 0": usual | {"n": 2},
        "'m.b' is plain float32[4] there, plain float32[3] on rank 0": usual | {"m": parameters | {"b": torch.zeros(4)}},
        "'m.w' is float32[4, 3] on (0=S(1)) there, float32[4, 3] on (0=S(0)) on rank 0": usual
        | {"m": parameters | {"w": distribute_values(make_values(4, 3), make_line_mesh(), Shard(1))}},
        "'epoch' is on rank 2 and not on rank 0": usual | {"epoch": 3},
        "'n' is on rank 0 and not on rank 2": {key: item for key, item in usual.items() if key != "n"},
        "'l.0' is 2 there, 1 on rank 0 ('l.1' too)": usual | {"l": [2, 1]},
        "its dicts, lists and tuples are nested otherwise": usual | {"l": (1, 2)},
        "'n' comes where 'm.w' does on rank 0": {"n": 1} | usual,
    }
    for words, other in others.items():
        with expect_error_on_processes(differs + words):
            save(other if odd else usual, folder)
        with expect_error_on_processes(differs + words):
            pending = save(other if odd else usual, folder, async_op=True)
            assert pending is not None
            pending.wait()
    with expect_error_on_processes(differs + "'b' is plain float32[2] there, plain float32[3] on rank 0"):
        save_safetensors({"b": torch.zeros(3 - odd)}, folder / "exported")
    save(usual, folder)
    with expect_error_on_processes(differs + "'m.w' is float32[4, 3] on (0=S(1)) there"):
        load({"m": {"w": distribute_zeros_like(make_values(4, 3), make_line_mesh(), Shard(int(odd)))}}, folder, strict=False)


@case
def damaged_truncated_and_missing_files_raise(folder: Path) -> None:
    x, mesh = make_values(16, 24), make_line_mesh()
    save(
        {"a": distribute_values(x, mesh, Shard(0)), "b": distribute_values(x.to(torch.int16), make_square_mesh(), Shard(1), R)},
        folder,
    )
    files = sorted([*folder.glob("*.distcp"), folder / "manifest.json"])
    blocks = [(b.file, b.at, b.at + 2 * 16) for e in read_tensors(folder).values() for b in e.blocks]
    dice = random.Random(1)
    for _ in range(12):
        name, low, high = dice.choice(blocks)
        at = dice.randrange(low, high)
        run_on_first_rank(lambda name=name, at=at: _flip_byte(folder / name, at))
        for layout in (Shard(0), Shard(1), R):
            state = {"a": distribute_zeros_like(x, mesh, layout), "b": distribute_zeros_like(x.to(torch.int16), mesh, layout)}
            with pytest.raises(CheckpointError, match="corrupted"):
                load(state, folder)
            assert_same_values(state["a"], torch.zeros(16, 24))
        run_on_first_rank(lambda name=name, at=at: _flip_byte(folder / name, at))
    load({"a": distribute_zeros_like(x, mesh, Shard(1)), "b": torch.zeros(16, 24, dtype=torch.int16)}, folder)
    for file in files:
        if "v." in file.name:
            continue
        content = file.read_bytes()
        for damaged in (content[: len(content) // 2], content + b"x", b""):
            run_on_first_rank(lambda file=file, damaged=damaged: file.write_bytes(damaged))
            with pytest.raises(CheckpointError, match=r"damaged|truncated"):
                load(
                    {"a": distribute_zeros_like(x, mesh, Shard(0)), "b": distribute_zeros_like(x.to(torch.int16), mesh, R)},
                    folder,
                )
        run_on_first_rank(lambda file=file, content=content: file.write_bytes(content))
    run_on_first_rank(files[0].unlink)
    with pytest.raises(CheckpointError, match="missing"):
        load({"a": distribute_zeros_like(x, mesh, Shard(0)), "b": distribute_zeros_like(x.to(torch.int16), mesh, R)}, folder)


def _flip_byte(path: Path, at: int) -> None:
    with open(path, "r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1]))


@case
def saving_again_replaces_files_and_removes_old_ones(folder: Path) -> None:
    mesh = make_line_mesh()
    for step in range(3):
        save({"a": distribute_values(make_values(9, 2, seed=step), mesh, Shard(0)), "step": step}, folder)
    names = {b.file for e in read_tensors(folder).values() for b in e.blocks}
    left = {path.name for path in folder.glob("*.distcp") if "v." not in path.name}
    assert left == names
    state = {"a": distribute_zeros_like(make_values(9, 2), mesh, R), "step": 0}
    load(state, folder)
    assert_same_values(state["a"], make_values(9, 2, seed=2))
    assert state["step"] == 2


@case
def an_asynchronous_save_stores_the_values_of_its_call(folder: Path) -> None:
    mesh, x = make_line_mesh(), make_values(9, 2)
    tensor, plain = distribute_values(x, mesh, Shard(0)), x.clone()
    pending = [save({"a": tensor, "p": plain}, folder / str(k), async_op=True) for k in range(2)]
    tensor.add_(1)
    plain.add_(1)
    state = {"a": distribute_zeros_like(x, mesh, R), "p": torch.zeros(9, 2)}
    load(state, folder / "1")
    assert all(p is not None and p.done() for p in pending)
    assert_same_values(state["a"], x)
    assert_same_values(state["p"], x)
    broken = save({"f": make_line_mesh}, folder / "bad", async_op=True)
    assert broken is not None
    with pytest.raises(CheckpointError, match="function"):
        broken.wait()
    ignored = save({"f": make_line_mesh}, folder / "bad", async_op=True)
    assert ignored is not None
    with pytest.warns(UserWarning, match="asynchronous save failed"):
        save({"a": tensor}, folder / "good")
