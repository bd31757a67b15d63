"""State: what is known of one tensor in addition to its values: wrapper, attributes, version counters, functorch levels."""
