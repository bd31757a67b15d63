"""What a dry run predicts, processes issue: bytes are counted below the library, at the operators of torch's process groups."""

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
from dtensor.comm import backends
from dtensor.cost import profile as profiles
from dtensor.cost.device import DEVICES
from dtensor.cost.profile import BUILT_IN_PROFILE, Profile
from dtensor.debug import CommDebugMode
from dtensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

R, P = Replicate(), Partial()


class Received(TorchDispatchMode):
    """Bytes that this rank receives, an all-reduce counted as the bandwidth-optimal algorithm moves it."""

    def __init__(self) -> None:
        super().__init__()
        self.nbytes, self.unknown = 0, set[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, dt.DTensor) for kind in types):
            return NotImplemented  # what it becomes on this rank comes here again
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
def made(mesh: dt.DeviceMesh, shape: tuple[int, ...], *placements: Any) -> Any:
    return dt.ones(shape, device_mesh=mesh, placements=placements)


def matrices(mesh: dt.DeviceMesh) -> None:
    """Contracted dims cut, then the sum needed whole; and forward and backward of a cut MLP."""
    (made(mesh, (16, 32), Shard(1)) @ made(mesh, (32, 8), Shard(0))).tanh()
    x = made(mesh, (16, 32), R).requires_grad_()
    up, down = made(mesh, (64, 32), Shard(0)).requires_grad_(), made(mesh, (32, 64), Shard(1)).requires_grad_()
    F.linear(F.linear(x, up).tanh(), down).square().sum().backward()


def moves(mesh: dt.DeviceMesh) -> None:
    for src, dst in ((Shard(0), Shard(1)), (Shard(0), R), (R, Shard(1)), (P, R), (P, Shard(0))):
        made(mesh, (16, 32), src).redistribute(placements=[dst])


def styles(mesh: dt.DeviceMesh) -> None:
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)).to(mesh.device_type)
    plan = {"0": ColwiseParallel(input_layouts=Shard(0)), "2": RowwiseParallel(output_layouts=Shard(0))}
    parallelize_module(model, mesh, plan, src_data_rank=None)  # all ranks have the parameters
    x = made(mesh, (8, 16), Shard(0)).requires_grad_()
    model(x).square().sum().backward()


def kernels(mesh: dt.DeviceMesh) -> None:
    made(mesh, (8, 16), Shard(1)).requires_grad_().softmax(-1).log().sum().backward()


PROGRAMS = (matrices, moves, styles, kernels)


def received(size: int) -> list[tuple[int, int, list[str]]]:
    """Of each program: bytes that this rank received, those that its events say, and operators that are not counted here."""
    # up to 2 MiB gloo's all-reduces go in one round, which moves more: what is this small goes in two, as large ones do
    backends._TRAITS["gloo"] = replace(backends._TRAITS["gloo"], one_round_bytes=0)
    mesh = dt.init_device_mesh("cpu", (size,))
    found = []
    for program in PROGRAMS:
        program(mesh)  # what is agreed on once (generators, sizes) is no part of a step
        with CommDebugMode() as comm, Received() as counted:
            program(mesh)
        found.append((counted.nbytes, sum(event.bytes for event in comm.events), sorted(counted.unknown)))
    return found


GLOO = BUILT_IN_PROFILE.links["gloo"]
LIKE_GLOO = Profile({"gloo": GLOO, "nccl": GLOO}, {}, 8, {"meta": DEVICES["CPU"]})


def predicted(device: str, size: int) -> list[int]:
    """What all ranks in this process, or none at all, say of the programs."""
    mesh = dt.init_device_mesh(device, (size,))
    found = []
    for program in PROGRAMS:
        with CommDebugMode() as comm:
            program(mesh)
        found.append(sum(event.bytes for event in comm.events))
    return found


@pytest.mark.gloo
@pytest.mark.parametrize("size", [2, 4])
def test_a_dry_run_predicts_what_processes_receive(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a machine like this one: a dry run stands for GPUs, unless the profile says what it stands for."""
    monkeypatch.setattr(profiles, "_process_profile", lambda: LIKE_GLOO)
    expected = predicted("meta", size)
    assert all(expected)
    assert predicted("cpu", size) == expected
    for rank in run_gloo(received, size, size):
        assert [counted for counted, _, _ in rank] == expected
        assert [told for _, told, _ in rank] == expected
        assert not any(unknown for _, _, unknown in rank)
