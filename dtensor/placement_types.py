"""Placements by the name that ``torch.distributed.tensor.placement_types`` has for them."""

from .placement import Partial, Placement, Replicate, Shard

__all__ = ["Partial", "Placement", "Replicate", "Shard"]
