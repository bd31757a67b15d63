"""Tensor and sequence parallelism: plans of styles."""
