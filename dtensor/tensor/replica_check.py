"""Replica check (``check_ranks(..., replicas=K)``): compare copies of models and optimizers on all ranks, every K steps."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Any

import torch
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ..base.generators import default_generator, get_generator_state
from ..base.recorder_hooks import untracked
from ..comm.flat_rows import flatten_to_bytes
from ..comm.map_ranks import communicator_of
from ..mesh.device_mesh import DeviceMesh
from ..watchdog.collective_hooks import raise_replicas_differ
from ..watchdog.flight_recorder import fingerprint
from ..watchdog.levels import CheckLevel
from .dtensor import DTensor

ReplicaChecksums = dict[tuple[DeviceMesh, tuple[int, ...]], dict[str, int]]
"""(mesh, mesh dims along which there are copies) -> name -> checksum"""


class _StepHook:
    """The optimizer hook that runs while replicas are checked. Steps are counted for each optimizer."""

    handle: Any = None
    steps: Any = None


def _update_hook() -> None:
    """Install or remove the optimizer hook, as ``check_ranks(replicas=)`` says now."""
    if _StepHook.handle is not None:
        _StepHook.handle.remove()
        _StepHook.handle = None
    if CheckLevel.replicas:
        _StepHook.steps = torch.utils.weak.WeakIdKeyDictionary()
        _StepHook.handle = register_optimizer_step_post_hook(_on_step)


def _on_step(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Check the replicas of an optimizer if its step number is a multiple of K."""
    step = _StepHook.steps[optimizer] = _StepHook.steps.get(optimizer, 0) + 1
    if step % CheckLevel.replicas == 0:
        check_optimizer_replicas(optimizer, step)


@untracked
@torch.no_grad()
def check_optimizer_replicas(optimizer: Optimizer, step: int) -> None:
    """Check that ranks hold the same copies of an optimizer's parameters and state, and the same random state.

    Raises:
        DivergenceError: on all ranks that share them; it names what differs.

    Cost: one read of all tensors, and a gather of 8 bytes for each mesh and set of mesh dims with copies.
    """
    for (mesh, dims), sums in _replica_checksums(optimizer).items():
        comm = communicator_of(mesh)
        if not comm.has_other_processes or not comm.held:
            continue
        own_hash = fingerprint(struct.pack(f"{len(sums)}Q", *sums.values())) - 2**63
        hashes = [each for (each,) in comm.all_gather_numbers([own_hash], dims)]
        if len(set(hashes)) == 1:
            continue
        sums_by_rank = comm.all_gather_object(sums, dims)
        ranks = [mesh.ranks[member] for member in mesh.members_of(dims, comm.held[0])]
        raise_replicas_differ(
            step, repr(mesh.named(range(mesh.ndim))), _find_difference(dict(zip(ranks, sums_by_rank, strict=True)))
        )


def _find_difference(sums_by_rank: dict[int, dict[str, int]]) -> dict[int, tuple[int, str]]:
    """Return for each rank its checksum of the first tensor that differs between ranks, and a text that names the tensor."""
    first = next(iter(sums_by_rank.values()))
    different = [name for name in first if len({sums.get(name) for sums in sums_by_rank.values()}) > 1] or ["what there is"]
    more = f" (and {len(different) - 1} more)" if len(different) > 1 else ""
    checksums = {rank: sums.get(different[0], len(sums)) for rank, sums in sums_by_rank.items()}
    return {rank: (value, f"{different[0]}{more}, checksum {value:016x}") for rank, value in checksums.items()}


def _replica_checksums(optimizer: Optimizer) -> ReplicaChecksums:
    """Return the checksums of all replicated tensors and random states, by mesh and mesh dims of the copies."""
    checksums: ReplicaChecksums = {}
    for name, tensor, parameter in _named_tensors(optimizer):
        like = tensor if isinstance(tensor, DTensor) else parameter
        mesh = like.device_mesh
        large_dims = [dim for dim in range(mesh.ndim) if mesh.size(dim) > 1]
        dims = tuple(dim for dim in large_dims if tensor is not like or like.placements[dim].is_replicate())
        if dims:
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            checksums.setdefault((mesh, dims), {})[name] = local_checksum(local)
    for mesh, dims in list(checksums):
        if mesh._root.seeded.issuperset(mesh.group_id(dims)):  # a random operator has synchronized the seed
            state = get_generator_state(default_generator(torch.device(mesh.device_type)))
            checksums[mesh, dims]["the state of the default generator"] = fingerprint(state.numpy().tobytes())
    return checksums


def _named_tensors(optimizer: Optimizer) -> Iterator[tuple[str, Any, DTensor]]:
    """Yield the tensors of distributed parameters and of their state: name, tensor, and the parameter."""
    for group_index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [f"parameter {k} of group {group_index}" for k in range(len(group["params"]))]
        for name, parameter in zip(names, group["params"], strict=True):
            if isinstance(parameter, DTensor):
                yield name, parameter, parameter
                state = optimizer.state.get(parameter, {})
                yield from (
                    (f"{name}'s {key}", value, parameter) for key, value in state.items() if isinstance(value, torch.Tensor)
                )


def local_checksum(local: torch.Tensor) -> int:
    """Return a 64-bit checksum of a local tensor, the exclusive or of its words."""
    data = flatten_to_bytes(local)
    aligned = data.numel() // 8 * 8
    words = data[:aligned].view(torch.int64)
    result = int(torch.hash_tensor(words)) if aligned else 0
    return (result ^ int.from_bytes(bytes(data[aligned:].tolist()), "little") ^ data.numel()) & (2**64 - 1)


def install_replica_check() -> None:
    """Install the optimizer hook that checks replicas, and update it when ``check_ranks(replicas=)`` changes."""
    CheckLevel.changed.append(_update_hook)
    _update_hook()  # the environment may have set a level
