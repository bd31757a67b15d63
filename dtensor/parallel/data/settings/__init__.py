"""Settings of data parallelism: precision and offload policies, the mesh axes of a unit, and custom collectives."""
