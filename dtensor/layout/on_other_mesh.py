"""On other mesh: express a layout on a mesh with more or fewer dims of the same root."""

from __future__ import annotations

from collections.abc import Sequence

from ..mesh.device_mesh import DeviceMesh
from ..mesh.submesh import select_dims
from ..placement import Placement, Replicate, Shard
from .layout import Layout


def layout_on_larger_mesh(mesh: DeviceMesh, layout: Layout) -> Layout:
    """Return ``layout`` on a larger mesh, replicated over the additional mesh dims."""
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for placement, root_dims in zip(layout.placements, layout.mesh._dims, strict=True):
        placements[mesh._dims.index(root_dims)] = placement
    return Layout.of(mesh, placements, layout.shape, None, layout.dtype)


def shard_further(layout: Layout, dim: int, mesh_dims: Sequence[int]) -> list[Placement]:
    """Return the placements of ``layout`` with tensor dim ``dim`` also sharded over ``mesh_dims``, innermost."""
    split = layout.splits[dim]
    outer = () if split is None else split.mesh_dims
    placements = list(layout.placements)
    for level, i in enumerate(outer):
        old = placements[i]
        assert isinstance(old, Shard)
        placements[i] = Shard(dim, old.sizes, level)
    for level, i in enumerate(mesh_dims, start=len(outer)):
        placements[i] = Shard(dim, None, level if outer else None)
    return placements


def layout_on_smaller_mesh(layout: Layout, mesh: DeviceMesh) -> Layout:
    """Return ``layout``, which is replicated, on the mesh dims that ``mesh`` has too; unchanged if those are none or all."""
    own_mesh = layout.mesh
    common = [i for i, dims in enumerate(own_mesh._dims) if dims in mesh._dims]
    if not common or len(common) == own_mesh.ndim:
        return layout
    return Layout.of(own_mesh._derive(*select_dims(own_mesh, common)), None, layout.shape, None, layout.dtype)
