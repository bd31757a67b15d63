"""Mesh: ranks arranged as arrays with named dims, and the process groups along their dims. No communication but making groups."""

from .device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
