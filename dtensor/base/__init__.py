"""Base: helpers that need no mesh and no DTensor: validation, bounded caches, nested values, recording, modes."""
