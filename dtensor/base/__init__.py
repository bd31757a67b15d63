"""What needs no mesh and no tensor: validation, bounded caches, nested values, recording, modes."""
