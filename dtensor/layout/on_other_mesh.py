"""On other mesh: express a layout on a mesh with more or fewer dims of the same root."""

from __future__ import annotations

from collections.abc import Sequence

from ..mesh.device_mesh import DeviceMesh
from ..mesh.submesh import select_dims
from ..placement import Placement, Replicate, Shard
from .layout import Layout


def layout_on_larger_mesh(mesh: DeviceMesh, inside: Layout) -> Layout:
    """Return ``inside`` on a larger mesh, replicated over the additional mesh dims."""
    placements: list[Placement] = [Replicate()] * mesh.ndim
    for placement, root_dims in zip(inside.placements, inside.mesh._dims, strict=True):
        placements[mesh._dims.index(root_dims)] = placement
    return Layout.of(mesh, placements, inside.shape, None, inside.dtype)


def shard_further(whole: Layout, dim: int, mesh_dims: Sequence[int]) -> list[Placement]:
    """Return the placements of ``whole`` with tensor dim ``dim`` also sharded over ``mesh_dims``, innermost."""
    split = whole.splits[dim]
    outer = () if split is None else split.mesh_dims
    placements = list(whole.placements)
    for level, i in enumerate(outer):
        old = placements[i]
        assert isinstance(old, Shard)
        placements[i] = Shard(dim, old.sizes, level)
    for level, i in enumerate(mesh_dims, start=len(outer)):
        placements[i] = Shard(dim, None, level if outer else None)
    return placements


def layout_on_smaller_mesh(layout: Layout, mesh: DeviceMesh) -> Layout:
    """Return a replicated layout on the mesh dims that ``mesh`` has too. Return it unchanged if there are none or all."""
    own_mesh = layout.mesh
    common = [i for i, dims in enumerate(own_mesh._dims) if dims in mesh._dims]
    if not common or len(common) == own_mesh.ndim:
        return layout
    return Layout.of(own_mesh._derive(*select_dims(own_mesh, common)), None, layout.shape, None, layout.dtype)
