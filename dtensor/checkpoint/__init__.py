"""Checkpoints that move between meshes: saved by all ranks, loaded under any mesh and layout."""

from .safetensors import save_safetensors
from .loading import Loaded, load, read_tensors, read_tree
from .saving import PendingSave, save

__all__ = ["Loaded", "PendingSave", "load", "read_tensors", "read_tree", "save", "save_safetensors"]
