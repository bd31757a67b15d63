"""All ranks in one process: their local tensors as one value, and autograd over them."""
