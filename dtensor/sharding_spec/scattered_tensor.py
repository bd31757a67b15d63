"""Scattered tensor: a tensor of which one place has several non-adjacent blocks; ``reshard`` and the metadata of shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base.tensor_tree import iter_tree_leaves, rebuild_sequence
from ..comm.map_ranks import communicator_of
from ..errors import PlacementError, UnsupportedOperationError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..placement import Shard
from ..tensor.dtensor import DTensor, wrap
from .block_grid import Cell
from .composite import as_spec, spec_of
from .rank_device import common_device_type, mesh_ranks_of
from .specs import Spec


@dataclass(frozen=True, slots=True)
class ShardMetadata:
    """Metadata of one shard: its sizes, its offsets in the tensor, and its place ("rank:1/cuda:0").

    A record: no communication.

    >>> import dtensor as dt
    >>> x = dt.sharded_tensor.zeros(3, 2, sharding_spec=dt.sharding_spec.single_split(0, ["rank:0/cpu", "rank:1/cpu"]))
    >>> x.sharding_metadata().shards[1]
    ShardMetadata(sizes=(1, 2), offsets=(2, 0), place='rank:1/cpu')
    """

    sizes: tuple[int, ...]
    offsets: tuple[int, ...]
    place: str

    @property
    def dims(self) -> tuple[int, ...]:
        """Return ``sizes``, under the name that torch's chunk metadata has for it."""
        return self.sizes

    @property
    def rank(self) -> int:
        return int(self.place.partition("/")[0].removeprefix("rank:"))

    @property
    def device(self) -> str:
        return self.place

    def __str__(self) -> str:
        return f"{self.place}: {list(self.sizes)} at {list(self.offsets)}"


@dataclass(frozen=True, slots=True)
class ShardedTensorMetadata:
    """Metadata of all shards of a tensor, replicas included, and its global shape and dtype.

    A record: no communication.

    >>> import dtensor as dt
    >>> x = dt.sharded_tensor.zeros(3, 2, sharding_spec=dt.sharding_spec.single_split(0, ["rank:0/cpu", "rank:1/cpu"]))
    >>> x.sharding_metadata().size, len(x.sharding_metadata().shards)
    (torch.Size([3, 2]), 2)
    """

    shards: tuple[ShardMetadata, ...]
    size: torch.Size
    dtype: torch.dtype

    def __str__(self) -> str:
        return "\n".join(map(str, self.shards))


def make_metadata(spec: Spec, shape: Sequence[int], dtype: torch.dtype) -> ShardedTensorMetadata:
    """Return sizes, offset and place of every shard that a spec gives a tensor of this shape and dtype."""
    shards = [ShardMetadata(cell.shape, cell.offset, str(place)) for cell in spec.cells(shape) for place in cell.places]
    return ShardedTensorMetadata(tuple(shards), torch.Size(shape), dtype)


def make_flat_mesh(spec: Spec) -> DeviceMesh:
    """Return the 1-d mesh over all places of a spec, on which a scattered tensor is stored and gathered."""
    return DeviceMesh(common_device_type(spec.places), list(dict.fromkeys(mesh_ranks_of(spec.places).values())))


class ScatteredTensor:
    """Tensor with several blocks on each place, as ``single_split(0, [0, 1, 0, 1])`` describes it.

    It contains a 1-d DTensor with each rank's blocks one after the other. Torch's functions accept it: they first make the
    ordinary DTensor of its value (an all-gather on all its ranks) and return an ordinary result. In-place changes raise.

    >>> import dtensor as dt
    >>> x = dt.sharded_tensor.shard_tensor(torch.arange(4), dt.sharding_spec.single_split(0, [0, 1, 0, 1]))
    >>> x.local_shards()[0]
    [tensor([0]), tensor([2])]
    >>> (x + 1).full_tensor()
    tensor([1, 2, 3, 4])

    Raises:
        UnsupportedOperationError: it would be changed in place.
    """

    def __init__(self, packed: DTensor, shape: torch.Size, spec: Spec) -> None:
        """Wrap the 1-d DTensor ``packed``, in which each rank has the values of its blocks one after the other."""
        self.packed, self.shape, self._spec = packed, shape, spec
        self.dtype, self.device, self.device_mesh = packed.dtype, packed.device, packed.device_mesh
        self.requires_grad = False

    @staticmethod
    def of(value: DTensor, spec: Spec) -> ScatteredTensor:
        """Scatter ``value``, which is replicated on every rank of the mesh, to the blocks of ``spec``; no communication."""
        mesh, cells_of = value.device_mesh, _cells_by_rank(spec, value.shape)
        sizes = tuple(sum(math.prod(cell.shape) for cell in cells_of[rank]) for rank in mesh.ranks)
        layout = Layout.of(mesh, [Shard(0, sizes)], (sum(sizes),), None, value.dtype)

        def pack(member: int, full: torch.Tensor) -> torch.Tensor:
            parts = [full[_cell_slices(cell)].reshape(-1) for cell in cells_of[mesh.ranks[member]]]
            return torch.cat(parts) if parts else full.new_empty(0)

        local = value.detach()._local
        if mesh.current_member() is None:
            return ScatteredTensor(wrap(local.new_empty(0), layout), value.shape, spec)
        return ScatteredTensor(wrap(communicator_of(mesh).map(pack, local), layout), value.shape, spec)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def sharding_spec(self) -> Spec:
        """Return the spec of the tensor."""
        return self._spec

    def size(self, dim: int | None = None) -> Any:
        """Return the global shape, or the size of one dim."""
        return self.shape if dim is None else self.shape[dim]

    def to_dtensor(self) -> DTensor:
        """All-gather the blocks, and return the value as an ordinary DTensor, replicated over the ranks."""
        mesh, cells_of = self.device_mesh, _cells_by_rank(self._spec, self.shape)
        gathered: Any = self.packed.redistribute(placements=None)
        layout = Layout.replicated(mesh, self.shape, None, self.dtype)

        def unpack(member: int, flat: torch.Tensor) -> torch.Tensor:
            """Return the full tensor, with the blocks of each rank in ``flat`` copied to their positions."""
            full, start = flat.new_empty(self.shape), 0
            for rank in mesh.ranks:
                for cell in cells_of[rank]:
                    count = math.prod(cell.shape)
                    full[_cell_slices(cell)] = flat[start : start + count].view(cell.shape)
                    start += count
            return full

        if mesh.current_member() is None:
            return wrap(gathered._local.new_zeros(layout.local_shape(None)), layout)
        return wrap(communicator_of(mesh).map(unpack, gathered._local), layout)

    def full_tensor(self) -> torch.Tensor:
        """Return the global value as a plain tensor on every rank."""
        return self.to_dtensor().full_tensor()

    def reshard(self, spec: Any) -> Any:
        """Return the value as a tensor with another sharding spec; see ``DTensor.reshard``."""
        return reshard(self, spec)

    def local_shard(self) -> list[torch.Tensor]:
        """Return the blocks of this rank (the current rank, with all ranks in this process), in the order of the grid."""
        member = self.device_mesh.current_member()
        return [] if member is None else self.local_shards().get(self.device_mesh.ranks[member], [])

    def local_shards(self) -> dict[int, list[torch.Tensor]]:
        """Return the list of blocks of each rank of this process, by rank."""
        mesh, cells_of = self.device_mesh, _cells_by_rank(self._spec, self.shape)
        blocks_of = {}
        for member, flat in communicator_of(mesh).shards_by_member(self.packed._local).items():
            rank = mesh.ranks[member]
            cells = cells_of.get(rank, [])
            parts = flat.split([math.prod(cell.shape) for cell in cells]) if cells else ()
            blocks_of[rank] = [part.view(cell.shape) for part, cell in zip(parts, cells, strict=True)]
        return blocks_of

    def sharding_metadata(self) -> ShardedTensorMetadata:
        """Return sizes, offsets and place of every block of the tensor."""
        return make_metadata(self._spec, self.shape, self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Run a torch function on the ordinary DTensors of scattered tensors; raise if it would write to one."""
        name = getattr(func, "__name__", "").partition(".")[0]  # without the name of an overload
        out = any(isinstance(item, ScatteredTensor) for item in iter_tree_leaves((kwargs or {}).get("out")))
        if out or (name.endswith("_") and not name.endswith("__")):
            raise UnsupportedOperationError(
                f"{name} would change a tensor of scattered blocks in place; reshard it first: x = x.reshard(spec)"
            )
        return func(*_to_dtensors(args), **{key: _to_dtensors(value) for key, value in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        """Return a tensor method or attribute of the ordinary DTensor; an in-place method raises when it is called."""
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"'ScatteredTensor' object has no attribute {name!r}")
        if name.endswith("_"):
            return lambda *args, **kwargs: self.__torch_function__(getattr(torch.Tensor, name), (), (self, *args), kwargs)
        return getattr(self.to_dtensor(), name)

    def __repr__(self) -> str:
        return f"ScatteredTensor({list(self.shape)}, {self._spec!r})"


def _to_dtensors(value: Any) -> Any:
    """Return ``value`` with scattered tensors, also in lists, as ordinary DTensors; each one takes an all-gather."""
    if isinstance(value, ScatteredTensor):
        return value.to_dtensor()
    return rebuild_sequence(value, [_to_dtensors(item) for item in value]) if isinstance(value, (list, tuple)) else value


def _make_operator(name: str) -> Any:
    return lambda self, *args: getattr(self.to_dtensor(), name)(*_to_dtensors(args))


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "pow", "neg", "getitem"):
    setattr(ScatteredTensor, f"__{_name}__", _make_operator(f"__{_name}__"))


def _cells_by_rank(spec: Spec, shape: Sequence[int]) -> dict[int, list[Cell]]:
    """Return the cells of each mesh rank under a spec; a cell with replicas belongs to each of their ranks."""
    rank_of = mesh_ranks_of(spec.places)
    cells_of: dict[int, list[Cell]] = {rank: [] for rank in rank_of.values()}
    for cell in spec.cells(shape):
        for rank in dict.fromkeys(rank_of[place] for place in cell.places):
            cells_of[rank].append(cell)
    return cells_of


def _cell_slices(cell: Cell) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(cell.offset, cell.shape, strict=True))


def reshard(x: Any, sharding_spec: Any) -> Any:
    """Redistribute ``x`` to the layout of another sharding spec, or scatter it. See ``DTensor.reshard``.

    Costs the transfer of the blocks that change their place.

    >>> import dtensor as dt
    >>> x = dt.sharded_tensor.ones(4, 2, sharding_spec=dt.sharding_spec.single_split(0, [0, 1]))
    >>> reshard(x, dt.sharding_spec.single_split(1, [0, 1])).placements
    (Shard(dim=1),)

    Raises:
        PlacementError, MeshError: the spec does not fit the tensor, or is one for modules.
    """
    spec = parse_tensor_spec(sharding_spec)
    value: Any = x.to_dtensor() if isinstance(x, ScatteredTensor) else x
    layout = spec.layout(value.shape, value.dtype)
    if layout is None:
        return ScatteredTensor.of(value.redistribute(make_flat_mesh(spec)), spec)
    return attach_spec(value.redistribute(layout.mesh, layout.placements), spec)


def sharding_metadata(x: DTensor) -> ShardedTensorMetadata:
    """Return sizes, offsets and place of all shards of ``x``. See ``DTensor.sharding_metadata``."""
    spec = getattr(x, "_sharding_spec", None)
    return make_metadata(spec_of(x._layout) if spec is None else spec, x.shape, x.dtype)


def parse_tensor_spec(notation: Any) -> Spec:
    """Return the spec of one tensor that a spec, layout or place means; raise for a spec of modules."""
    spec = spec_of(notation) if isinstance(notation, Layout) else as_spec(notation)
    if not isinstance(spec, Spec):
        raise PlacementError(
            f"{spec!r} is for modules; for one tensor use single_split, mesh or a device placement "
            "(dtensor.shard_model takes modules)"
        )
    return spec


def attach_spec(x: DTensor, spec: Spec) -> DTensor:
    """Store on ``x``, which is returned, its spec, so that :func:`sharding_metadata` reports the devices in it."""
    x._sharding_spec = spec  # type: ignore[attr-defined]  # in the instance dictionary; results made from x do not have it
    return x
