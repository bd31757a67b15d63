"""Random numbers that do not depend on the mesh or the placements (``random/draw.py`` says how)."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from ..base.mode_stack import entering
from ..comm import communicator_of
from ..comm.cross_rank_check import told_by_all
from ..errors import MeshError
from ..mesh.device_mesh import DeviceMesh, as_mesh
from .draw import DRAWING, MODES


def manual_seed(seed: int, device_mesh: DeviceMesh | None = None, *, mode: str | None = None) -> None:
    """Seed the generators of this process (call it on every rank with the same seed), as ``torch.manual_seed`` does.

    Args:
        device_mesh: on processes, compare the seeds of its ranks now (one small collective). Without it the first draw on
            a mesh takes over the state of the mesh's first rank. A pipeline's stages may be seeded differently: ``mesh["tp"]``.
        mode: how to draw from now on, see :func:`random_mode`: in the whole process, as with the seed; inside of a block of
            ``random_mode`` until that ends. None leaves it as it is.

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
        DRAWING.from_now_on(_known(mode))
    torch.manual_seed(seed)
    if mesh is not None:
        _agree(seed, mesh)


def _agree(seed: int, mesh: DeviceMesh) -> None:
    comm = communicator_of(mesh)
    if not comm.talks:
        return
    if not told_by_all(mesh, repr(seed)).same:
        seeds = comm.all_gather_object(seed, tuple(range(mesh.ndim)))
        raise MeshError(
            f"manual_seed: ranks of {mesh!r} passed different seeds, {seeds}: pass the same seed on all "
            "ranks, or a mesh of ranks with the same seed"
        )
    mesh._root.seeded = set(mesh.group_id(range(mesh.ndim)))  # between the copies of a submesh seeds may differ


@entering
def random_mode(mode: str) -> Iterator[None]:
    """Inside, draw random numbers this way; all ranks must enter it alike. Neither mode communicates.

    Args:
        mode: ``"exact"``: the values that one device draws for the same seed. Each rank draws the whole tensor and keeps
            its block.
            ``"counter"``: values of their own, which depend on the seed, the number of the call and the global index only. Each
            rank draws its block, in parallel; what it does not cover (given probabilities, ``randperm``) is drawn exactly.

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
        ValueError: another mode.
    """
    with DRAWING.blocks.entered(_known(mode)):
        yield


def _known(mode: str) -> str:
    if mode not in MODES:
        raise ValueError(f"random mode {mode!r} is not one of {MODES}")
    return mode
