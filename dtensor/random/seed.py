"""Seed and mode of random numbers, which do not depend on the mesh or the placements (see ``random/draw.py``)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..base.mode_stack import mode_context
from ..comm.cross_rank_check import gather_summaries
from ..comm.map_ranks import communicator_of
from ..errors import MeshError
from ..mesh.device_mesh import DeviceMesh, as_mesh
from .draw import MODE_NAMES, RANDOM_MODE


def manual_seed(seed: int, device_mesh: DeviceMesh | None = None, *, mode: str | None = None) -> None:
    """Seed the generators of this process, like ``torch.manual_seed``. Call it on every rank with the same seed.

    Args:
        device_mesh: on processes, compare the seeds of its ranks now (one small collective). Without it, the first random
            operator on a mesh broadcasts the state of the mesh's first rank. Stages of a pipeline may have different seeds:
            pass ``mesh["tp"]``.
        mode: random mode from now on, see :func:`random_mode`. It applies to the whole process, or until the end of a
            surrounding ``random_mode`` block. None leaves the mode unchanged.

    Raises:
        MeshError: on every rank of ``device_mesh``, if their seeds differ.

    >>> import torch, dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> dt.manual_seed(0, mesh)
    >>> x = dt.rand(3, device_mesh=mesh, placements=[dt.Shard(0)]).full_tensor()
    >>> _ = torch.manual_seed(0)
    >>> torch.equal(x, torch.rand(3))
    True
    """
    mesh = None if device_mesh is None else as_mesh(device_mesh)
    if mode is not None:
        RANDOM_MODE.set_mode(_check_mode(mode))
    torch.manual_seed(seed)
    if mesh is not None:
        _check_seeds_agree(seed, mesh)


def _check_seeds_agree(seed: int, mesh: DeviceMesh) -> None:
    """Raise if ranks of the mesh passed different seeds, else mark its generators as synchronized."""
    comm = communicator_of(mesh)
    if not comm.has_other_processes:
        return
    if not gather_summaries(mesh, repr(seed)).same:
        seeds = comm.all_gather_object(seed, tuple(range(mesh.ndim)))
        raise MeshError(
            f"manual_seed: ranks of {mesh!r} passed different seeds, {seeds}: pass the same seed on all "
            "ranks, or a mesh of ranks with the same seed"
        )
    mesh._root.seeded = set(mesh.group_id(range(mesh.ndim)))  # copies of a submesh may have different seeds


@mode_context
def random_mode(mode: str) -> Iterator[None]:
    """Set how random numbers are generated inside of a ``with`` block, which all ranks must enter together.

    Neither mode communicates.

    Args:
        mode: ``"exact"``: the values of one device with the same seed. Each rank generates the complete tensor and keeps its
            block. ``"counter"``: other values, which depend only on the seed, the number of the call and the global index. Each
            rank generates its block, in parallel. Operators that it does not support (given probabilities, ``randperm``) are
            generated exactly.

    >>> import dtensor as dt
    >>> meshes = [dt.init_device_mesh("cpu", shape) for shape in ((1,), (2, 2))]
    >>> with dt.random_mode("counter"):
    ...     dt.manual_seed(0)
    ...     one = dt.randn(5, 3, device_mesh=meshes[0]).full_tensor()
    ...     dt.manual_seed(0)
    ...     four = dt.randn(5, 3, device_mesh=meshes[1], placements=[dt.Shard(0), dt.Shard(1)]).full_tensor()
    >>> bool((one == four).all())
    True

    Raises:
        ValueError: ``mode`` is another word.
    """
    with RANDOM_MODE.blocks.entered(_check_mode(mode)):
        yield


def _check_mode(mode: str) -> str:
    """Return ``mode``; raise ValueError if it is no random mode."""
    if mode not in MODE_NAMES:
        raise ValueError(f"random mode {mode!r} is not one of {MODE_NAMES}")
    return mode
