"""Kernels: the algorithms behind rules of ``rules/aten``: scans, halo exchange, sharded indexing, random draws."""
