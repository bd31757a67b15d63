"""dtensor: SPMD maths on distributed tensors."""
