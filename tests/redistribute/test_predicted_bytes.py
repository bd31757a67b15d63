"""Predicted bytes of dry runs equal those that processes receive, counted at the operators of torch's process groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from gloo_processes import run_gloo
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import dtensor as dt
from dtensor import Partial, Replicate, Shard
from dtensor.comm.processes import torch_backends
from dtensor.cost import profile as profiles
from dtensor.cost.device import DEVICES
from dtensor.cost.profile import BUILT_IN_PROFILE, Profile
from dtensor.debug import CommDebugMode
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

R, P = Replicate(), Partial()


class CountReceivedBytes(TorchDispatchMode):
    """Mode that counts the bytes that this rank receives; an all-reduce counts as the bandwidth-optimal algorithm."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, self.unknown = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, dt.DTensor) for kind in types):
            return NotImplemented  # its local operators are dispatched here again
        if func.namespace == "c10d":
            count = COUNTED.get(func._opname)
            if count is None:
                self.unknown.add(func._opname)
            else:
                self.nbytes += count(*args)
        return func(*args, **(kwargs or {}))


def _bytes(tensors: Any) -> int:
    return tensors.nbytes if isinstance(tensors, torch.Tensor) else sum(_bytes(x) for x in tensors)


def _group(handle: Any) -> dist.ProcessGroup:
    return dist.ProcessGroup.unbox(handle)


def _exchanged(into: Any, row: Any, handle: Any, arriving: Any, *rest: Any) -> int:
    group = _group(handle)
    own = arriving[group.rank()] * into.element_size() if arriving else into.nbytes // group.size()
    return int(into.nbytes - own)


COUNTED: dict[str, Callable[..., int]] = {
    "allreduce_": lambda tensors, handle, *_: 2 * (_group(handle).size() - 1) * _bytes(tensors) // _group(handle).size(),
    "_allgather_base_": lambda into, row, *_: into.nbytes - row.nbytes,
    "_reduce_scatter_base_": lambda into, row, *_: row.nbytes - into.nbytes,
    "alltoall_base_": _exchanged,
    "recv_": lambda tensors, *_: _bytes(tensors),
    "send": lambda *_: 0,
    "barrier": lambda *_: 0,
}


# --- programs on any mesh ------------------------------------------------------------------------------------------------
def make_ones(mesh: dt.DeviceMesh, shape: tuple[int, ...], *placements: Any) -> Any:
    return dt.ones(shape, device_mesh=mesh, placements=placements)


def matrices(mesh: dt.DeviceMesh) -> None:
    """Run a product of sharded contracted dims whose result is replicated, and forward and backward of a sharded MLP."""
    (make_ones(mesh, (16, 32), Shard(1)) @ make_ones(mesh, (32, 8), Shard(0))).tanh()
    x = make_ones(mesh, (16, 32), R).requires_grad_()
    up, down = make_ones(mesh, (64, 32), Shard(0)).requires_grad_(), make_ones(mesh, (32, 64), Shard(1)).requires_grad_()
    F.linear(F.linear(x, up).tanh(), down).square().sum().backward()


def redistributions(mesh: dt.DeviceMesh) -> None:
    for src, dst in ((Shard(0), Shard(1)), (Shard(0), R), (R, Shard(1)), (P, R), (P, Shard(0))):
        make_ones(mesh, (16, 32), src).redistribute(placements=[dst])


def styles(mesh: dt.DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)).to(mesh.device_type)
    plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
    parallelize_module(model, mesh, plan, src_data_rank=None)  # all ranks have equal parameters
    x = make_ones(mesh, (8, 16), Shard(0)).requires_grad_()
    model(x).square().sum().backward()


def kernels(mesh: dt.DeviceMesh) -> None:
    make_ones(mesh, (8, 16), Shard(1)).requires_grad_().softmax(-1).log().sum().backward()


PROGRAMS = (matrices, redistributions, styles, kernels)


def count_received_bytes(size: int) -> list[tuple[int, int, list[str]]]:
    """Return for each program the received bytes, the bytes of its events, and the operators that are not counted."""
    # small all-reduces on gloo use one round, which sends more: use two rounds, as for large ones
    torch_backends._TRAITS["gloo"] = replace(torch_backends._TRAITS["gloo"], one_round_bytes=0)
    mesh = dt.init_device_mesh("cpu", (size,))
    found = []
    for program in PROGRAMS:
        program(mesh)  # the first run also synchronizes generators and sizes
        with CommDebugMode() as comm, CountReceivedBytes() as counted:
            program(mesh)
        found.append((counted.nbytes, sum(event.bytes for event in comm.events), sorted(counted.unknown)))
    return found


GLOO = BUILT_IN_PROFILE.links["gloo"]
GLOO_PROFILE = Profile({"gloo": GLOO, "nccl": GLOO}, {}, 8, {"meta": DEVICES["CPU"]})


def predict_bytes(device: str, size: int) -> list[int]:
    """Return the bytes of each program on an in-process mesh or in a dry run."""
    mesh = dt.init_device_mesh(device, (size,))
    found = []
    for program in PROGRAMS:
        with CommDebugMode() as comm:
            program(mesh)
        found.append(sum(event.bytes for event in comm.events))
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("size", [2, 4])
def test_dry_run_predicts_the_bytes_that_processes_receive(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare with a dry run whose profile is that of gloo; by default a dry run uses GPU profiles."""
    monkeypatch.setattr(profiles, "_process_profile", lambda: GLOO_PROFILE)
    expected = predict_bytes("meta", size)
    assert all(expected)
    assert predict_bytes("cpu", size) == expected
    for rank in run_gloo(count_received_bytes, size, size):
        assert [counted for counted, _, _ in rank] == expected
        assert [reported for _, reported, _ in rank] == expected
        assert not any(unknown for _, _, unknown in rank)
