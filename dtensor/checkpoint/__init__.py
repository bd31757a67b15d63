"""Checkpoint: sharded checkpoints, saved by all ranks and loaded under any mesh and layout."""

from .async_save import PendingSave
from .loading import Loaded, load, read_tensors, read_tree
from .manager import Manager
from .rank_files import merge_rank_files
from .safetensors import save_safetensors
from .saving import save

__all__ = [
    "Loaded",
    "Manager",
    "PendingSave",
    "load",
    "merge_rank_files",
    "read_tensors",
    "read_tree",
    "save",
    "save_safetensors",
]
