"""Kernels that several modules of ``rules/aten`` share: scans, halo exchange, sharded indexing, random draws."""
