"""Data parallelism: fully sharded and replicated modules, ZeRO-1, and the sampler of distributed batches."""
