"""Sides: the three columns of ``dispatch.py``: plain torch, ``torch.distributed.tensor`` ("peer") and ``dtensor``.

A case is written once, against a side: it asks for tensors by their local shape and runs torch functions on them.
The process group is torch's fake one, so a collective takes no time and computes nothing.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.tensor as peer
import torch.distributed.tensor.parallel as peer_parallel
from torch import Tensor

import dtensor
import dtensor.parallel

WORLD = 8
GRID = (2, 4)  # the 2-D mesh
N = 8  # rows and columns of a local tensor
_all_gather = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)  # torch 2.13 renamed it


class Side(Protocol):
    """Interface of one column of the table: how it makes tensors and runs collectives."""

    ranks: int  # over which a sharded dim is spread
    grid: tuple[int, int]  # the same on the 2-D mesh

    def shard(self, dim: int, *local: int) -> Any: ...
    def replicate(self, *shape: int) -> Any: ...
    def partial(self, *shape: int) -> Any: ...
    def tiles(self, *local: int) -> Any:
        """Return a tensor on the 2-D mesh with tensor dims 0 and 1 sharded."""

    def rows(self, *local: int) -> Any:
        """Return a tensor on the 2-D mesh with tensor dim 0 sharded along the first mesh dim."""

    def columns(self, *local: int) -> Any:
        """Return a tensor on the 2-D mesh with tensor dim 1 sharded along the second mesh dim."""

    def ids(self, count: int, high: int) -> Any: ...
    def same_ids(self, count: int) -> Any:
        """Return indices replicated on all ranks."""

    def wrap(self, local: Tensor, **known: Any) -> Any: ...
    def unwrap(self, x: Any) -> Tensor: ...
    def distribute(self, full: Tensor) -> Any:
        """Return this rank's rows of a tensor that every rank has."""

    def to_replicate(self, x: Any) -> Any: ...
    def to_shard(self, x: Any) -> Any: ...
    def reduce(self, x: Any) -> Any: ...
    def parallelize(self, block: torch.nn.Module) -> torch.nn.Module:
        """Apply the tensor-parallel plan that users write to a block of ``dispatching.cases``."""


class Plain:
    """Plain torch: the hand-written work of one rank on local tensors."""

    ranks, grid = 1, (1, 1)

    def shard(self, dim: int, *local: int) -> Tensor:
        return torch.rand(local)

    def replicate(self, *shape: int) -> Tensor:
        return torch.rand(shape)

    partial = tiles = rows = columns = replicate

    def ids(self, count: int, high: int) -> Tensor:
        return torch.arange(count) % high

    def same_ids(self, count: int) -> Tensor:
        return torch.arange(count)

    def wrap(self, local: Tensor, **known: Any) -> Tensor:
        return local

    def unwrap(self, x: Tensor) -> Tensor:
        return x

    def distribute(self, full: Tensor) -> Tensor:
        out = full.new_empty(full.shape[0] // WORLD, *full.shape[1:])
        dist.scatter(out, list(full.chunk(WORLD)))
        return out

    def to_replicate(self, x: Tensor) -> Tensor:
        out = x.new_empty(WORLD * x.shape[0], *x.shape[1:])
        _all_gather(out, x)
        return out

    def to_shard(self, x: Tensor) -> Tensor:
        return x.narrow(0, 0, x.shape[0] // WORLD)

    def reduce(self, x: Tensor) -> Tensor:
        out = x.clone()
        dist.all_reduce(out.detach())  # in place, behind autograd's back: the gradient passes as it is
        return out

    def parallelize(self, block: torch.nn.Module) -> torch.nn.Module:
        for name, dim in {"query": 0, "key": 0, "value": 0, "up": 0, "out": 1, "down": 1}.items():
            linear = block.get_submodule(name)
            linear.weight = torch.nn.Parameter(linear.weight.detach().chunk(WORLD, dim)[0].clone())
        block.reduce = self.reduce
        return block


class Distributed:
    """One of the two DTensor libraries, which have the same public names."""

    ranks, grid = WORLD, GRID

    def __init__(self, library: ModuleType) -> None:
        self.library = library
        self.styles = peer_parallel if library is peer else dtensor.parallel
        make = dist.device_mesh.init_device_mesh if library is peer else library.init_device_mesh
        self.mesh = make("cpu", (WORLD,))
        self.mesh_2d = make("cpu", GRID, mesh_dim_names=("dp", "tp"))
        self.sharded, self.replicated = [library.Shard(0)], [library.Replicate()]

    def _from_local(self, local: Tensor, *placements: Any) -> Any:
        mesh = self.mesh if len(placements) == 1 else self.mesh_2d
        return self.library.DTensor.from_local(local, mesh, placements, run_check=False)

    def shard(self, dim: int, *local: int) -> Any:
        return self._from_local(torch.rand(local), self.library.Shard(dim))

    def replicate(self, *shape: int) -> Any:
        return self._from_local(torch.rand(shape), self.library.Replicate())

    def partial(self, *shape: int) -> Any:
        return self._from_local(torch.rand(shape), self.library.Partial())

    def tiles(self, *local: int) -> Any:
        return self._from_local(torch.rand(local), self.library.Shard(0), self.library.Shard(1))

    def rows(self, *local: int) -> Any:
        return self._from_local(torch.rand(local), self.library.Shard(0), self.library.Replicate())

    def columns(self, *local: int) -> Any:
        return self._from_local(torch.rand(local), self.library.Replicate(), self.library.Shard(1))

    def ids(self, count: int, high: int) -> Any:
        return self._from_local(torch.arange(count) % high, self.library.Shard(0))

    def same_ids(self, count: int) -> Any:
        return self._from_local(torch.arange(count), self.library.Replicate())

    def wrap(self, local: Tensor, **known: Any) -> Any:
        return self.library.DTensor.from_local(local, self.mesh, self.sharded, run_check=False, **known)

    def unwrap(self, x: Any) -> Tensor:
        return x.to_local()

    def distribute(self, full: Tensor) -> Any:
        return self.library.distribute_tensor(full, self.mesh, self.sharded)

    def to_replicate(self, x: Any) -> Any:
        return x.redistribute(self.mesh, self.replicated)

    def to_shard(self, x: Any) -> Any:
        return x.redistribute(self.mesh, self.sharded)

    reduce = to_replicate

    def parallelize(self, block: torch.nn.Module) -> torch.nn.Module:
        style = self.styles
        colwise, rowwise = style.ColwiseParallel(), style.RowwiseParallel()
        plan = {"query": colwise, "key": colwise, "value": colwise, "up": colwise, "out": rowwise, "down": rowwise}
        return style.parallelize_module(block, self.mesh, plan)


def make_all_sides() -> dict[str, Side]:
    """Return the sides by column name; needs the process group."""
    return {"plain": Plain(), "peer": Distributed(peer), "ours": Distributed(dtensor)}
