"""Everything that torch is told: what, why, and how it is undone."""
