"""Checkpoints that move between meshes: saved by all ranks, loaded under any mesh and layout."""

from .loading import Loaded, load, read_tensors, read_tree
from .safetensors import save_safetensors
from .saving import PendingSave, save

__all__ = ["Loaded", "PendingSave", "load", "read_tensors", "read_tree", "save", "save_safetensors"]
