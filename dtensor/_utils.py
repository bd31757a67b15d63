"""Utils of ``torch.distributed.tensor._utils`` that programs import, under their names there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .errors import MeshError
from .layout.layout import Layout
from .mesh.device_mesh import as_mesh
from .placement import Placements

__all__ = ["compute_local_shape_and_global_offset"]


def compute_local_shape_and_global_offset(
    global_shape: Sequence[int], mesh: Any, placements: Placements, skip_offset: bool = False
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shape of this rank's block of a tensor, and the global index of its first element.

    With all ranks in one process call it inside of ``map_ranks``, where there is a current rank.

    Args:
        skip_offset: return ``()`` in place of the index.

    Raises:
        MeshError: all ranks are in this process, and none is the current one.
        PlacementError: ``placements`` do not fit the shape or the mesh.

    Cost: no communication. A rank outside of the mesh has an empty block at ``()``.

    >>> import dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2,))
    >>> dt.map_ranks(lambda at: compute_local_shape_and_global_offset((5, 3), mesh, [dt.Shard(0)]), mesh=mesh)
    RankValues(rank 0: ((3, 3), (0, 0)), rank 1: ((2, 3), (3, 0)))
    """
    layout = Layout.of(as_mesh(mesh), placements, global_shape)
    coordinate = layout.mesh.get_coordinate()
    if coordinate is not None and any(type(index) is not int for index in coordinate):
        raise MeshError(
            "compute_local_shape_and_global_offset is about the current rank, and all ranks of the mesh are in this process: "
            "call it inside of dtensor.map_ranks(lambda at: ..., mesh=mesh), or ask x.layout.local_shape(coordinate) and "
            "x.layout.local_offset(coordinate)"
        )
    offset = () if skip_offset or coordinate is None else layout.local_offset(coordinate)
    return layout.local_shape(coordinate), offset
