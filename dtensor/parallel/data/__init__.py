"""Data parallelism: fully sharded, replicated, hybrid, ZeRO."""
