"""Recording: one run of the captured function, and the replay program that it gives."""
