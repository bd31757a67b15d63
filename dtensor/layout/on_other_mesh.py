"""A layout on more dims of its mesh's root than it has, or on fewer."""

from __future__ import annotations

from collections.abc import Sequence

from ..mesh.device_mesh import DeviceMesh
from ..mesh.submesh import picked
from ..placement import Placement, Replicate, Shard
from .layout import Layout


def spelled_on(mesh: DeviceMesh, inside: Layout) -> Layout:
    """``inside`` spelled on a larger mesh, replicated over the further dims."""
    where: list[Placement] = [Replicate()] * mesh.ndim
    for placement, root_dims in zip(inside.placements, inside.mesh._dims, strict=True):
        where[mesh._dims.index(root_dims)] = placement
    return Layout.of(mesh, where, inside.shape, None, inside.dtype)


def cut_by(whole: Layout, dim: int, mesh_dims: Sequence[int]) -> list[Placement]:
    """The placements of ``whole`` with ``dim`` cut over further mesh dims too, innermost."""
    split = whole.splits[dim]
    outer = () if split is None else split.mesh_dims
    where = list(whole.placements)
    for level, i in enumerate(outer):
        old = where[i]
        assert isinstance(old, Shard)
        where[i] = Shard(dim, old.sizes, level)
    for level, i in enumerate(mesh_dims, start=len(outer)):
        where[i] = Shard(dim, None, level if outer else None)
    return where


def within(layout: Layout, mesh: DeviceMesh) -> Layout:
    """A replicated layout on those of its mesh dims that ``mesh`` has too, if it has some."""
    own = layout.mesh
    kept = [i for i, dims in enumerate(own._dims) if dims in mesh._dims]
    if not kept or len(kept) == own.ndim:
        return layout
    return Layout.of(own._derive(*picked(own, kept)), None, layout.shape, None, layout.dtype)
