"""Modules: modules whose parameters are distributed tensors: distributing, materializing and replacing them."""
