"""Torch debug modes: DebugMode, CommDebugMode and MemTracker of torch with DTensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from case_lists import S0, S1, R, distribute_values, make_values
from gloo_processes import run_gloo
from torch import nn
from torch.distributed._tools.mem_tracker import MemTracker
from torch.distributed.tensor.debug import CommDebugMode as TorchCommDebugMode
from torch.utils._debug_mode import DebugMode

import dtensor as dt
from dtensor.debug import CommDebugMode
from dtensor.parallel import ColwiseParallel, RowwiseParallel, fully_shard, parallelize_module, replicate

P = dt.Partial()


def record_lines(program: Callable[[], Any], **options: Any) -> list[str]:
    with DebugMode(**options) as mode:
        program()
    return [line.rstrip() for line in mode.debug_string().splitlines()]


def operator_lines(lines: list[str]) -> list[tuple[int, str]]:
    """Return the depth and text of the lines that name ``add``, ``relu`` or a range of this library."""
    entries = [(len(line) - len(line.lstrip()), line.strip()) for line in lines]
    return [(depth, text) for depth, text in entries if "dtensor::" in text or "add" in text or "relu" in text]


def test_debug_mode_records_operators_redistributions_and_local_operators() -> None:
    mesh = dt.init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    a, b = (dt.ones(4, 6, device_mesh=mesh, placements=[dim]) for dim in (S0, S1))
    lines = record_lines(lambda: (a + b).relu(), record_tensor_attributes=["placements"])
    assert not any("device=meta" in line for line in lines)  # sharding propagation records no operators
    assert [text.partition("(t: ")[0].partition(", 24 B/rank")[0] for _, text in operator_lines(lines)] == [
        "aten::add.Tensor",
        "[record function] dtensor::aten::add.Tensor",
        "[record function] dtensor::exchange over tp: (tp=S(1)) -> (tp=S(0))",
        "[record function] dtensor::all_to_all over tp, 2 ranks, 24 B",
        "aten::add.Tensor",
        "aten::add.Tensor",
        "aten::relu",
        "aten::relu",
        "aten::relu",
    ]
    depths = [depth for depth, _ in operator_lines(lines)]
    assert depths[0] == depths[1] < depths[2] < depths[3]
    assert "t: f32[4, 6]{placements=(Shard(dim=0),)}, t: f32[4, 6]{placements=(Shard(dim=1),)}" in lines[0]


def test_debug_mode_records_explicit_redistributions_and_backward() -> None:
    x = distribute_values(make_values(4, 6), S0).requires_grad_()
    entries = "\n".join(record_lines(lambda: x.redistribute(placements=[R]).sum().backward()))
    assert "[record function] dtensor::all_gather over mesh dim 0: (S(0)) -> (R)" in entries
    assert "aten::sum(" in entries
    assert "aten::expand(" in entries  # from the backward pass


def run_plain() -> None:
    x = torch.ones(3, 4, requires_grad=True)
    y = (x @ x.t()).relu().sum()
    y.backward()


class UnreportedDebugMode(DebugMode):
    """Subclass that DTensor does not report to."""


@pytest.mark.parametrize("options", [{}, {"record_stack_trace": True}, {"record_ids": True, "record_output": False}], ids=str)
def test_debug_mode_records_of_plain_programs_are_unchanged(options: Any) -> None:
    with DebugMode(**options) as mode, DebugMode.log_tensor_hashes():
        run_plain()
    with UnreportedDebugMode(**options) as other, DebugMode.log_tensor_hashes():
        run_plain()
    assert mode.debug_string(show_stack_trace=False) == other.debug_string(show_stack_trace=False)
    assert not DebugMode.check_hash_mismatches(mode.logs, other.logs)


def programs(mesh: dt.DeviceMesh) -> dict[str, Callable[[], Any]]:
    def ones(*shape: int, at: Any) -> dt.DTensor:
        return dt.ones(*shape, device_mesh=mesh, placements=[at])

    def train(model: nn.Module) -> Callable[[], Any]:
        return lambda: model(torch.ones(2, 8, requires_grad=True)).sum().backward()

    layers = {"0": ColwiseParallel(), "1": RowwiseParallel()}
    return {
        "gather": lambda: ones(8, 12, at=S0).redistribute(placements=[R]),
        "all to all": lambda: ones(8, 12, at=S0).redistribute(placements=[S1]),
        "reduce": lambda: ones(8, 12, at=P).redistribute(placements=[R]),
        "scatter": lambda: ones(8, 12, at=P).redistribute(placements=[S0]),
        "uneven": lambda: ones(7, 5, at=S0).full_tensor(),
        "operator": lambda: (ones(8, 12, at=S0) @ ones(12, 7, at=S1)).relu(),
        "kernel with collectives": lambda: ones(8, 12, at=S1).softmax(1),
        "gradients": lambda: (ones(8, 12, at=S0).requires_grad_() * ones(8, 12, at=S1)).sum().backward(),
        "fully sharded": train(fully_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh=mesh)),
        "replicated": train(replicate(nn.Linear(8, 8), mesh=mesh)),
        "tensor parallel": train(parallelize_module(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh, layers)),
        "direct all_reduce": lambda: torch.distributed.all_reduce(torch.ones(3)),
    }


def _count_on_processes() -> dict[str, tuple[int, int]]:
    mesh = dt.init_device_mesh("cpu", (2,))
    found = {}
    for name, program in programs(mesh).items():
        for _ in range(2):  # the first and second pass also compare replicas and plain operands between ranks
            program()
        with CommDebugMode() as own_counts, TorchCommDebugMode() as torch_counts:
            program()
        found[name] = own_counts.get_total_counts(), torch_counts.get_total_counts()
    return found


@pytest.mark.gloo
def test_comm_debug_modes_of_torch_and_dtensor_count_equally_many_collectives() -> None:
    for found in run_gloo(_count_on_processes, 2):
        for name, (own_counts, torch_counts) in found.items():
            assert own_counts == torch_counts > 0, name


class Block(nn.Module):
    """FSDP unit with submodules that are no units."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def track_memory(model: nn.Module, x: Any) -> list[dict[str, int]]:
    """Return the tracked bytes after forward, backward and optimizer step of a second iteration."""
    optimizer = torch.optim.Adam(model.parameters())
    tracker, found = MemTracker(), list[dict[str, int]]()

    def take_snapshot() -> None:
        (counts,) = tracker.get_tracker_snapshot().values()
        found.append({getattr(kind, "value", kind): count for kind, count in counts.items()})

    tracker.track_external(model, optimizer, x)
    with tracker:
        for _ in range(2):
            found.clear()
            loss = model(x).square().mean()
            take_snapshot()
            loss.backward()
            take_snapshot()
            optimizer.step()
            take_snapshot()
            optimizer.zero_grad()
            del loss
            tracker.reset_mod_stats()
    return found


def track_fsdp_memory(mesh: Any, x: Any, shard: Callable[..., Any] = fully_shard) -> list[dict[str, int]]:
    torch.manual_seed(0)
    model = nn.Sequential(Block(), Block(), nn.Linear(16, 16))
    for layer in (*model[:2], model):
        shard(layer, mesh=mesh)
    return track_memory(model, x)


def _track_both_fsdp() -> tuple[list[dict[str, int]], list[dict[str, int]]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard as fully_shard_of_torch

    x = torch.ones(8, 16)
    own_counts = track_fsdp_memory(dt.init_device_mesh("cpu", (2,)), x)
    return own_counts, track_fsdp_memory(init_device_mesh("cpu", (2,)), x, fully_shard_of_torch)


@pytest.mark.gloo
def test_mem_tracker_counts_equal_bytes_for_fully_shard_of_both_libraries() -> None:
    for own_counts, torch_counts in run_gloo(_track_both_fsdp, 2):
        flags = 4 * sum(1 for _ in Block().parameters()) * 2 + 4 * 2  # one float for each parameter, reduced with its gradient
        for kind in ("Parameter", "Activation", "Optstate", "Other"):
            assert [counts[kind] for counts in own_counts] == [counts[kind] for counts in torch_counts]
        assert [counts["Gradient"] for counts in torch_counts] == [0, torch_counts[1]["Parameter"], torch_counts[1]["Parameter"]]
        assert [counts["Gradient"] for counts in own_counts] == [0, *[counts["Gradient"] + flags for counts in torch_counts[1:]]]


def test_mem_tracker_counts_the_local_tensors_of_all_ranks_in_process() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    forward, backward, step = track_fsdp_memory(mesh, dt.per_rank([torch.ones(8, 16)] * 2))
    sizes = [sum(p.numel() * 4 for p in layer.parameters()) for layer in (Block(), Block(), nn.Linear(16, 16))]
    assert backward["Parameter"] == step["Parameter"] == sum(sizes)  # two shards of each parameter
    assert forward["Parameter"] == sum(sizes) + 2 * sizes[2]  # the outermost unit stays gathered, once per rank
    assert backward["Gradient"] - sum(sizes) == 2 * 4 * 10  # a flag for each parameter and rank
    assert step["Optstate"] == 2 * sum(sizes) + 4 * 10  # one step count per parameter


def test_mem_tracker_counts_the_local_tensors_of_tensor_parallelism() -> None:
    mesh = dt.init_device_mesh("cpu", (2,))
    model = parallelize_module(Block(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    _, backward, step = track_memory(model, torch.ones(8, 16))
    nbytes = sum(x.numel() * 4 for p in model.parameters() for x in p.to_local().shards)  # type: ignore[operator]
    assert backward["Parameter"] == backward["Gradient"] == nbytes
    assert step["Optstate"] >= 2 * nbytes
