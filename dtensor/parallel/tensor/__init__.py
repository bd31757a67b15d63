"""Tensor, sequence, expert and context parallelism: parallel styles and the plans that apply them."""
