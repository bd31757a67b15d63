"""Sharded tensors: DTensors that are made from sharding specs and report the place of each of their shards.

A sharded tensor *is* a DTensor, on the mesh and with the placements that its spec means. So every operation works on it, and
any DTensor has ``reshard``, ``local_shard`` and ``sharding_metadata``. Adjacent blocks of one place are one local tensor. If a
spec gives a place blocks that are not adjacent, no placements describe that. The value is then stored in a
:class:`ScatteredTensor`, which operations convert to a DTensor first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import PlacementError
from ..tensor import create
from ..tensor.distribute import distribute_tensor
from ..tensor.dtensor import DTensor
from .scattered_tensor import ScatteredTensor, attach_spec, make_flat_mesh, parse_tensor_spec, reshard

ShardedTensor = DTensor


def empty(*size: Any, sharding_spec: Any, **options: Any) -> Any:
    """Return an uninitialized tensor sharded by a spec; options as in ``torch.empty``. No communication.

    Raises ``PlacementError`` if the spec does not fit the shape.

    >>> import dtensor as dt
    >>> dt.sharded_tensor.empty(3, 2, sharding_spec=dt.sharding_spec.single_split(0, [0, 1])).placements
    (Shard(dim=0),)
    """
    return _make_tensor(create.empty, size, sharding_spec, options)


def zeros(*size: Any, sharding_spec: Any, **options: Any) -> Any:
    """Return a tensor of zeros sharded by a spec; options as in ``torch.zeros``. No communication.

    Raises ``PlacementError`` if the spec does not fit the shape.

    >>> import dtensor as dt
    >>> x = dt.sharded_tensor.zeros(3, 2, sharding_spec=dt.sharding_spec.single_split(0, [0, 1]))
    >>> x.shape, x.sum().item()
    (torch.Size([3, 2]), 0.0)
    """
    return _make_tensor(create.zeros, size, sharding_spec, options)


def ones(*size: Any, sharding_spec: Any, **options: Any) -> Any:
    """Return a tensor of ones sharded by a spec; options as in ``torch.ones``. No communication.

    >>> import dtensor as dt
    >>> spec = dt.sharding_spec.single_split(0, ["rank:0/cpu", "rank:1/cpu"], [1, 2])
    >>> x = dt.sharded_tensor.ones(3, 2, sharding_spec=spec)
    >>> x.local_shard().shards[1].shape, (x + 1).sum().item()
    (torch.Size([2, 2]), 12.0)
    >>> print(x.sharding_metadata())
    rank:0/cpu: [1, 2] at [0, 0]
    rank:1/cpu: [2, 2] at [1, 0]

    Raises ``PlacementError`` if the spec does not fit the shape.
    """
    return _make_tensor(create.ones, size, sharding_spec, options)


def full(size: Sequence[int], fill_value: Any, *, sharding_spec: Any, **options: Any) -> Any:
    """Return a tensor of ``fill_value`` sharded by a spec; options as in ``torch.full``. No communication.

    Raises ``PlacementError`` if the spec does not fit the shape.

    >>> import dtensor as dt
    >>> x = dt.sharded_tensor.full((3, 2), 2.0, sharding_spec=dt.sharding_spec.single_split(0, [0, 1]))
    >>> x.shape, x.sum().item()
    (torch.Size([3, 2]), 12.0)
    """
    return _make_tensor(lambda *shape, **rest: create.full(shape, fill_value, **rest), (size,), sharding_spec, options)


def rand(*size: Any, sharding_spec: Any, **options: Any) -> Any:
    """Return numbers on [0, 1) sharded by a spec: those of ``torch.rand`` on one device with the same seed, for every spec.

    No communication. Raises ``PlacementError`` if the spec does not fit the shape.

    >>> import torch, dtensor as dt
    >>> _ = torch.manual_seed(0)
    >>> x = dt.sharded_tensor.rand(3, 2, sharding_spec=dt.sharding_spec.single_split(0, [0, 1]))
    >>> _ = torch.manual_seed(0)
    >>> torch.equal(x.full_tensor(), torch.rand(3, 2))
    True
    """
    return _make_tensor(create.rand, size, sharding_spec, options)


def randn(*size: Any, sharding_spec: Any, **options: Any) -> Any:
    """Return normal numbers sharded by a spec: those of ``torch.randn`` on one device with the same seed, for every spec.

    No communication. Raises ``PlacementError`` if the spec does not fit the shape.

    >>> import torch, dtensor as dt
    >>> _ = torch.manual_seed(0)
    >>> x = dt.sharded_tensor.randn(3, 2, sharding_spec=dt.sharding_spec.single_split(0, [0, 1]))
    >>> _ = torch.manual_seed(0)
    >>> torch.equal(x.full_tensor(), torch.randn(3, 2))
    True
    """
    return _make_tensor(create.randn, size, sharding_spec, options)


def shard_tensor(tensor: torch.Tensor, sharding_spec: Any, src_rank: int | None = 0) -> Any:
    """Return ``tensor`` of rank ``src_rank``, distributed as a spec says; a parameter gives a leaf that requires grad.

    Args:
        tensor: the global tensor; a DTensor is resharded.
        src_rank: position among the spec's ranks of the rank with the value. It sends each other rank its shard. None: every
            rank shards its own copy, no communication.

    >>> import dtensor as dt
    >>> dt.sharded_tensor.shard_tensor(torch.arange(6).view(2, 3), dt.sharding_spec.single_split(1, [0, 1]))
    DTensor(int64[2, 3] on (0=S(1))
      rank 0: [[0, 1],
               [3, 4]]
      rank 1: [[2],
               [5]])

    Raises:
        PlacementError, MeshError: the spec does not fit the tensor, or is one for modules.
    """
    spec = parse_tensor_spec(sharding_spec)
    if isinstance(tensor, (DTensor, ScatteredTensor)):
        return reshard(tensor, spec)
    layout = spec.layout(tensor.shape, tensor.dtype)
    if layout is None:
        return ScatteredTensor.of(distribute_tensor(tensor, make_flat_mesh(spec), None, src_data_rank=src_rank), spec)
    if src_rank:
        coordinates = layout.mesh.coordinates
        indices = set(coordinates[src_rank]) if src_rank < len(coordinates) else set()
        if len(indices) != 1:
            raise PlacementError(f"src_rank={src_rank}: pass 0, or a rank with the same index along all dims of {layout.mesh!r}")
        (src_rank,) = indices
    return attach_spec(distribute_tensor(tensor, layout.mesh, layout.placements, src_data_rank=src_rank), spec)


def _make_tensor(factory: Callable[..., DTensor], size: Any, sharding_spec: Any, options: dict[str, Any]) -> Any:
    """Return the tensor that a factory such as ``zeros`` makes in the layout of the spec, or scattered if there is none."""
    spec = parse_tensor_spec(sharding_spec)
    shape = tuple(size[0]) if len(size) == 1 and isinstance(size[0], (tuple, list, torch.Size)) else tuple(size)
    options.pop("pin_memory", None)
    layout = spec.layout(shape)
    if layout is None:
        return ScatteredTensor.of(factory(*shape, device_mesh=make_flat_mesh(spec), **options), spec)
    return attach_spec(factory(*shape, device_mesh=layout.mesh, placements=layout.placements, **options), spec)
