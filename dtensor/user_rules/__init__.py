"""User rules: sharding rules that a program registers with ``register_sharding``."""
