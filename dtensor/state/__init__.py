"""State: what the library knows about one tensor beside its values: wrapper, attributes, version counters, functorch levels."""
