"""Overrides: operators that this library computes above autograd, before torch decomposes them. :mod:`.table` lists them."""
