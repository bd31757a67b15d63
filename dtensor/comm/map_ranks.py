"""Map ranks: the communicator of a mesh, and ``map_ranks``, which runs a function once per rank."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch

from ..mesh.device_mesh import DeviceMesh, as_mesh
from ..ranks.per_rank import patch_torch_for, patch_torch_for_per_rank
from ..ranks.rank_runs import RankRuns
from .communicator import Communicator
from .in_process import InProcess
from .processes.dry_run import DryRun
from .processes.process_group import ProcessGroups

# By ``mesh.kind``. A new backend is a class with six methods (see ``communicator.py``) and an entry here.
BACKENDS: dict[str, type[Communicator]] = {"process_group": ProcessGroups, "in_process": InProcess, "dry_run": DryRun}


def communicator_of(mesh: DeviceMesh) -> Communicator:
    """Return the communicator over the dims of ``mesh``, made once per mesh; meshes with one root share process groups."""
    communicator: Communicator | None = mesh.__dict__.get("_communicator")
    if communicator is None:
        communicator = mesh.__dict__["_communicator"] = BACKENDS[mesh.kind](mesh)
    return communicator


def expect_locals(mesh: DeviceMesh) -> None:
    """Patch torch for ``PerRank`` tensors if all ranks of ``mesh`` are in this process.

    Call it for modules that make local tensors themselves, before any local tensor is given to the program.
    """
    if communicator_of(mesh).holds_all:
        patch_torch_for_per_rank()


def map_ranks(fn: Callable[..., Any], *args: Any, mesh: Any = None, **kwargs: Any) -> Any:
    """Run ``fn(coordinate, *args, **kwargs)`` once per rank of ``mesh`` (default: the one entered by ``with mesh:``).

    With all ranks in this process each call gets its rank's tensor of every ``PerRank`` argument, and inside it
    ``mesh.get_rank()`` and ``mesh.get_coordinate()`` answer for that rank. With process groups ``fn`` runs once, for this
    process (not at all, giving None, outside the mesh). No communication.

    In one process the runs are as independent as in processes: a plain tensor has the gradient that every rank finds, and all
    runs start from the same state of the random generators (torch's, Python's and numpy's). Python objects are shared.

    Returns:
        Tensors as ``PerRank``, lists and tuples of tensors as such of ``PerRank``, None, or ``RankValues``.

    >>> from dtensor import DeviceMesh, map_ranks
    >>> x = map_ranks(lambda coordinate: torch.full((2,), float(coordinate[0])), mesh=DeviceMesh("cpu", 2))
    >>> x.shards
    (tensor([0., 0.]), tensor([1., 1.]))

    Raises:
        LayoutError: in one process, a tensor that the run of one rank wrote to is used by another rank's.
            Return the new value instead. What ``fn`` raises on a rank is raised as it is.
    """
    mesh = as_mesh(mesh)
    if mesh.current_member() is None:
        return None
    communicator, coordinates = communicator_of(mesh), mesh.coordinates
    expect_locals(mesh)
    runs = RankRuns(len(mesh.members), torch.device(mesh.device_type)) if len(communicator.held) > 1 else None

    def run_member(member: int, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if runs is None else runs.enter_run(member):
            return fn(coordinates[member], *args, **kwargs)

    results = communicator.map(run_member, *args, **kwargs)
    return patch_torch_for(results if runs is None else runs.copy_shared_results(results))
