"""Sharded tensors: the public name of :mod:`dtensor.sharding_spec.sharded_tensor`."""

from .sharding_spec.scattered_tensor import ScatteredTensor, ShardedTensorMetadata, ShardMetadata, reshard
from .sharding_spec.sharded_tensor import ShardedTensor, empty, full, ones, rand, randn, shard_tensor, zeros

__all__ = [
    "ScatteredTensor",
    "ShardMetadata",
    "ShardedTensor",
    "ShardedTensorMetadata",
    "empty",
    "full",
    "ones",
    "rand",
    "randn",
    "reshard",
    "shard_tensor",
    "zeros",
]
