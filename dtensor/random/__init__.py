"""Random numbers: one global draw, in blocks."""
