"""State: make DTensors, and ask what is known of one: memory that it shares, version counters, functorch levels."""
