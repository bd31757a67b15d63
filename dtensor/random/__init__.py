"""Random numbers: one global draw, in blocks; the values that one device would give for the same seed."""

from .draw import DRAWING, block_of, draw, draw_counted, synchronize
from .seed import manual_seed, random_mode

__all__ = ["DRAWING", "block_of", "draw", "draw_counted", "manual_seed", "random_mode", "synchronize"]
