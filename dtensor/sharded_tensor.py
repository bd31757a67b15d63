"""Sharded tensors: the public name of :mod:`dtensor.sharding_spec.sharded_tensor`."""

from .sharding_spec.sharded_tensor import (
    ScatteredTensor,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardMetadata,
    empty,
    full,
    ones,
    rand,
    randn,
    reshard,
    shard_tensor,
    zeros,
)

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
