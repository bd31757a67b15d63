"""Sharding propagation: turn an operator call and the layouts of its tensors into a plan. Pure: nothing runs."""
