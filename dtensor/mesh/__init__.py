"""Geometry: ranks arranged in meshes, and the groups of their dims. No communication."""

from .device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
