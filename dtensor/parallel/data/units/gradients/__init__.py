"""Gradients: accumulate, check and reduce the gradients of FSDP units."""
