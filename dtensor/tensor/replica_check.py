"""``check_ranks(..., replicas=K)``: whether the copies of a model and its optimizer are the same on all ranks, every K steps."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..base.generators import default_generator, state_now
from ..base.recorder_hooks import aside
from ..comm import communicator_of
from ..comm.flat_rows import flat_bytes
from ..mesh.device_mesh import DeviceMesh
from ..watchdog.collective_hooks import parted
from ..watchdog.flight_recorder import fingerprint
from ..watchdog.levels import Level
from .dtensor import DTensor

Copies = dict[tuple[DeviceMesh, tuple[int, ...]], dict[str, int]]  # checksums by name, by mesh and the mesh dims of the copies


class _Hook:
    """Torch's, while replicas are compared; steps are counted for each optimizer."""

    handle: Any = None
    steps: Any = None


def _level_changed() -> None:
    if _Hook.handle is not None:
        _Hook.handle.remove()
        _Hook.handle = None
    if Level.replicas:
        _Hook.steps = torch.utils.weak.WeakIdKeyDictionary()
        _Hook.handle = register_optimizer_step_post_hook(_stepped)


def _stepped(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    step = _Hook.steps[optimizer] = _Hook.steps.get(optimizer, 0) + 1
    if step % Level.replicas == 0:
        compare(optimizer, step)


@aside
@torch.no_grad()
def compare(optimizer: Optimizer, step: int) -> None:
    """Check that ranks hold the same copies of an optimizer's parameters and state, and the same random state.

    Raises:
        DivergenceError: on all ranks that share them; it names what differs.

    Cost: reads all of it once; a gather of 8 bytes for each mesh and set of mesh dims with copies.
    """
    for (mesh, dims), sums in _copies(optimizer).items():
        comm = communicator_of(mesh)
        if not comm.talks or not comm.held:
            continue
        row = fingerprint(struct.pack(f"{len(sums)}Q", *sums.values())) - 2**63
        told = [each for (each,) in comm.all_gather_numbers([row], dims)]
        if len(set(told)) == 1:
            continue
        everybody = comm.all_gather_object(sums, dims)
        ranks = [mesh.ranks[member] for member in mesh.members_of(dims, comm.held[0])]
        parted(step, repr(mesh.named(range(mesh.ndim))), _differing(dict(zip(ranks, everybody, strict=True))))


def _differing(found: dict[int, dict[str, int]]) -> dict[int, tuple[int, str]]:
    """By rank its version of the first thing that differs, and what that is."""
    first = next(iter(found.values()))
    wrong = [name for name in first if len({sums.get(name) for sums in found.values()}) > 1] or ["what there is"]
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    own = {rank: sums.get(wrong[0], len(sums)) for rank, sums in found.items()}
    return {rank: (value, f"{wrong[0]}{more}, checksum {value:016x}") for rank, value in own.items()}


def _copies(optimizer: Optimizer) -> Copies:
    found: Copies = {}
    for name, tensor, parameter in _tensors(optimizer):
        like = tensor if isinstance(tensor, DTensor) else parameter
        mesh = like.device_mesh
        whole = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1]
        dims = tuple(dim for dim in whole if tensor is not like or like.placements[dim].is_replicate())
        if dims:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            found.setdefault((mesh, dims), {})[name] = checksum(local)
    for mesh, dims in list(found):
        if mesh._root.seeded.issuperset(mesh.group_id(dims)):  # a draw has made them the same
            state = state_now(default_generator(torch.device(mesh.device_type)))
            found[mesh, dims]["the state of the default generator"] = fingerprint(state.numpy().tobytes())
    return found


def _tensors(optimizer: Optimizer) -> Iterator[tuple[str, Any, DTensor]]:
    """Every tensor of distributed parameters and of their state, with a name."""
    for place, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"parameter {k} of group {place}" for k in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"], strict=True):
            if isinstance(parameter, DTensor):
                yield name, parameter, parameter
                state = optimizer.state.get(parameter, {})
                yield from (
                    (f"{name}'s {key}", value, parameter) for key, value in state.items() if isinstance(value, torch.Tensor)
                )


def checksum(local: torch.Tensor) -> int:
    """64 bits: the exclusive or of the tensor's words, which no order of adding up changes."""
    data = flat_bytes(local)
    whole = data.numel() // 8 * 8
    words = data[:whole].view(torch.int64)
    found = int(torch.hash_tensor(words)) if whole else 0
    return (found ^ int.from_bytes(bytes(data[whole:].tolist()), "little") ^ data.numel()) & (2**64 - 1)


def follow_check_level() -> None:
    """Check replicas as ``check_ranks(replicas=)`` says, from now on."""
    Level.changed.append(_level_changed)
    _level_changed()  # the environment may have set a level
