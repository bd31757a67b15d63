"""Device mesh classes, under the name of ``torch.distributed.device_mesh``."""

from .mesh.device_mesh import DeviceMesh, init_device_mesh

__all__ = ["DeviceMesh", "init_device_mesh"]
