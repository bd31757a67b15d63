"""Meshes by the name that ``torch.distributed.device_mesh`` has for them."""

from .mesh.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
