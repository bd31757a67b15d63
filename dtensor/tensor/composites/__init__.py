"""Operators of torch that are served above autograd, in words of others."""
