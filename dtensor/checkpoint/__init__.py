"""Checkpoints that move between meshes: saved by all ranks, loaded under any mesh and layout."""

from .background import PendingSave
from .loading import Loaded, load, read_tensors, read_tree
from .safetensors import save_safetensors
from .saving import save
from .series import Manager

__all__ = ["Loaded", "Manager", "PendingSave", "load", "read_tensors", "read_tree", "save", "save_safetensors"]
