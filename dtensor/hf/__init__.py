"""HF: models of Hugging Face, read from and written to checkpoints without a complete copy; their trainer; adapters."""

from __future__ import annotations

from .pretrained import from_pretrained, save_pretrained
from .training import adapted_plan, prepared

__all__ = ["adapted_plan", "from_pretrained", "prepared", "save_pretrained"]
