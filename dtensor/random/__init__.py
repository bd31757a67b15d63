"""Random numbers: every operator generates one global tensor, of which each rank has its block. Values are those of one device
with the same seed.
"""

from .draw import RANDOM_MODE, clone_block, draw, draw_counted, synchronize
from .seed import manual_seed, random_mode

__all__ = ["RANDOM_MODE", "clone_block", "draw", "draw_counted", "manual_seed", "random_mode", "synchronize"]
