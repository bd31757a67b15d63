"""A mesh of torch's as one of this package's: its ranks, names and process groups.

Private, of torch: a slice tells the mesh that it was picked from, and a mesh what has been flattened of it, by name.
"""

from __future__ import annotations

from typing import Any

from torch.distributed.device_mesh import DeviceMesh as TorchDeviceMesh

from .submesh import dims_of_ranks


def of_torch(mesh: TorchDeviceMesh, kind: Any) -> Any:
    """The mesh of class ``kind`` for one of torch's; for a slice the slice of that mesh, so that slices go together."""
    return _sliced(mesh, kind) or _whole(mesh, kind)


def _sliced(mesh: TorchDeviceMesh, kind: Any) -> Any:
    """None: it is no slice, or not one by names of that mesh."""
    whole, names = getattr(mesh, "_get_root_mesh", lambda: mesh)(), mesh.mesh_dim_names
    if whole is mesh or names is None:
        return None
    made = _whole(whole, kind)
    if not all(name in made._root.named or name in made._root.flattened for name in names):
        return None
    found = made[names]
    return found if found.mesh.tolist() == mesh.mesh.tolist() else None


def _whole(mesh: TorchDeviceMesh, kind: Any) -> Any:
    made = kind.from_group(mesh.get_all_groups(), mesh.device_type, mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)
    for name, flat in getattr(mesh, "_flatten_mapping", {}).items():
        dims = dims_of_ranks(made, tuple(flat.mesh.tolist()))
        if dims is not None:
            made._root.flattened[name] = dims
            made._root.groups[dims] = flat.get_group()
    return made
