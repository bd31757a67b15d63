"""Base: helpers that need no mesh and no DTensor: torch internals, caches, tracing, graph operators, nested values, modes."""
