"""Tensors of which a place holds several blocks that are not adjacent, and the metadata of shards."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..base.tensor_tree import leaves, like
from ..comm import communicator_of
from ..errors import PlacementError, UnsupportedOperationError
from ..layout.layout import Layout
from ..mesh.device_mesh import DeviceMesh
from ..placement import Shard
from ..tensor.dtensor import DTensor, wrap
from .blocks import Cell
from .composite import as_spec, spec_of
from .rank_device import device_type_of, members_of
from .specs import Spec


@dataclass(frozen=True, slots=True)
class ShardMetadata:
    """One shard: its sizes, where it starts in the tensor, and where it is ("rank:1/cuda:0").

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
        """Another name of ``sizes``."""
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
    """All shards of a tensor, replicas included, and its global shape and dtype.

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


def metadata_of(spec: Spec, shape: Sequence[int], dtype: torch.dtype) -> ShardedTensorMetadata:
    """Every shard that a spec cuts from a tensor of ``shape``."""
    shards = [ShardMetadata(cell.shape, cell.offset, str(place)) for cell in spec.cells(shape) for place in cell.places]
    return ShardedTensorMetadata(tuple(shards), torch.Size(shape), dtype)


def whole_mesh(spec: Spec) -> DeviceMesh:
    """The 1-d mesh of a spec's places, on which a scattered tensor travels."""
    return DeviceMesh(device_type_of(spec.places), list(dict.fromkeys(members_of(spec.places).values())))


class ScatteredTensor:
    """A tensor whose places hold several blocks each, as ``single_split(0, [0, 1, 0, 1])`` says.

    Underneath is a 1-d DTensor that holds each rank's blocks one after the other. Torch's functions take it, by making the
    ordinary DTensor of its value first (on all its ranks: an all-gather) and giving an ordinary result; what would change it in
    place raises.

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
        self.packed, self.shape, self._spec = packed, shape, spec
        self.dtype, self.device, self.device_mesh = packed.dtype, packed.device, packed.device_mesh
        self.requires_grad = False

    @staticmethod
    def of(value: DTensor, spec: Spec) -> ScatteredTensor:
        """The blocks of ``value``, which every rank of the mesh holds whole; no communication."""
        mesh, dealt = value.device_mesh, _dealt(spec, value.shape)
        sizes = tuple(sum(math.prod(cell.shape) for cell in dealt[rank]) for rank in mesh.ranks)
        layout = Layout.of(mesh, [Shard(0, sizes)], (sum(sizes),), None, value.dtype)

        def pack(member: int, full: torch.Tensor) -> torch.Tensor:
            parts = [full[_slices(cell)].reshape(-1) for cell in dealt[mesh.ranks[member]]]
            return torch.cat(parts) if parts else full.new_empty(0)

        local = value.detach()._local  # type: ignore[attr-defined]  # a DTensor
        if mesh.current_member() is None:
            return ScatteredTensor(wrap(local.new_empty(0), layout), value.shape, spec)
        return ScatteredTensor(wrap(communicator_of(mesh).map(pack, local), layout), value.shape, spec)

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def sharding_spec(self) -> Spec:
        """The spec that it was made with."""
        return self._spec

    def size(self, dim: int | None = None) -> Any:
        """As of a tensor."""
        return self.shape if dim is None else self.shape[dim]

    def to_dtensor(self) -> DTensor:
        """The ordinary DTensor of the value, replicated over the ranks; one all-gather."""
        mesh, dealt = self.device_mesh, _dealt(self._spec, self.shape)
        whole: Any = self.packed.redistribute(placements=None)
        layout = Layout.replicated(mesh, self.shape, None, self.dtype)

        def unpack(member: int, flat: torch.Tensor) -> torch.Tensor:
            full, start = flat.new_empty(self.shape), 0
            for rank in mesh.ranks:
                for cell in dealt[rank]:
                    count = math.prod(cell.shape)
                    full[_slices(cell)] = flat[start : start + count].view(cell.shape)
                    start += count
            return full

        if mesh.current_member() is None:
            return wrap(whole._local.new_zeros(layout.local_shape(None)), layout)
        return wrap(communicator_of(mesh).map(unpack, whole._local), layout)

    def full_tensor(self) -> torch.Tensor:
        """The global value as a plain tensor on every rank."""
        return self.to_dtensor().full_tensor()

    def reshard(self, spec: Any) -> Any:
        """The same value under another spec."""
        return reshard(self, spec)

    def local_shard(self) -> list[torch.Tensor]:
        """This rank's blocks, in the order of the grid (with all ranks in this process, those of the current one)."""
        member = self.device_mesh.current_member()
        return [] if member is None else self.local_shards().get(self.device_mesh.ranks[member], [])

    def local_shards(self) -> dict[int, list[torch.Tensor]]:
        """Rank -> its blocks, for the ranks of this process."""
        mesh, dealt = self.device_mesh, _dealt(self._spec, self.shape)
        found = {}
        for member, flat in communicator_of(mesh).pieces(self.packed._local).items():
            rank = mesh.ranks[member]
            cells = dealt.get(rank, [])
            parts = flat.split([math.prod(cell.shape) for cell in cells]) if cells else ()
            found[rank] = [part.view(cell.shape) for part, cell in zip(parts, cells, strict=True)]
        return found

    def sharding_metadata(self) -> ShardedTensorMetadata:
        """Sizes, offsets and place of every block."""
        return metadata_of(self._spec, self.shape, self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name = getattr(func, "__name__", "").partition(".")[0]  # of an overload, too
        out = any(isinstance(item, ScatteredTensor) for item in leaves((kwargs or {}).get("out")))
        if out or (name.endswith("_") and not name.endswith("__")):
            raise UnsupportedOperationError(
                f"{name} would change a tensor of scattered blocks in place; reshard it first: x = x.reshard(spec)"
            )
        return func(*_plain(args), **{key: _plain(value) for key, value in (kwargs or {}).items()})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"'ScatteredTensor' object has no attribute {name!r}")
        if name.endswith("_"):
            return lambda *args, **kwargs: self.__torch_function__(getattr(torch.Tensor, name), (), (self, *args), kwargs)
        return getattr(self.to_dtensor(), name)

    def __repr__(self) -> str:
        return f"ScatteredTensor({list(self.shape)}, {self._spec!r})"


def _plain(value: Any) -> Any:
    """The ordinary DTensors of such tensors, also in lists and tuples."""
    if isinstance(value, ScatteredTensor):
        return value.to_dtensor()
    return like(value, [_plain(item) for item in value]) if isinstance(value, (list, tuple)) else value


def _operator(name: str) -> Any:
    return lambda self, *args: getattr(self.to_dtensor(), name)(*_plain(args))


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "matmul", "rmatmul", "pow", "neg", "getitem"):
    setattr(ScatteredTensor, f"__{_name}__", _operator(f"__{_name}__"))


def _dealt(spec: Spec, shape: Sequence[int]) -> dict[int, list[Cell]]:
    """Mesh rank -> its blocks; a block with replicas is dealt to each, and read from the last."""
    member = members_of(spec.places)
    dealt: dict[int, list[Cell]] = {rank: [] for rank in member.values()}
    for cell in spec.cells(shape):
        for rank in dict.fromkeys(member[place] for place in cell.places):
            dealt[rank].append(cell)
    return dealt


def _slices(cell: Cell) -> tuple[slice, ...]:
    return tuple(slice(a, a + n) for a, n in zip(cell.offset, cell.shape, strict=True))


def reshard(x: Any, sharding_spec: Any) -> Any:
    """See ``DTensor.reshard``.

    Costs the blocks that change their place; raises where the spec does not fit.

    >>> import dtensor as dt
    >>> x = dt.sharded_tensor.ones(4, 2, sharding_spec=dt.sharding_spec.single_split(0, [0, 1]))
    >>> reshard(x, dt.sharding_spec.single_split(1, [0, 1])).placements
    (Shard(dim=1),)

    Raises:
        PlacementError, MeshError: the spec does not fit the tensor, or is one for modules.
    """
    spec = one_spec(sharding_spec)
    value: Any = x.to_dtensor() if isinstance(x, ScatteredTensor) else x
    layout = spec.layout(value.shape, value.dtype)
    if layout is None:
        return ScatteredTensor.of(value.redistribute(whole_mesh(spec)), spec)
    return noted(value.redistribute(layout.mesh, layout.placements), spec)


def sharding_metadata(x: DTensor) -> ShardedTensorMetadata:
    """See ``DTensor.sharding_metadata``."""
    spec = getattr(x, "_sharding_spec", None)
    return metadata_of(spec_of(x._layout) if spec is None else spec, x.shape, x.dtype)


def one_spec(said: Any) -> Spec:
    """The spec of one tensor that a user said in any spelling."""
    spec = spec_of(said) if isinstance(said, Layout) else as_spec(said)
    if not isinstance(spec, Spec):
        raise PlacementError(
            f"{spec!r} is for modules; for one tensor use single_split, mesh or a device placement "
            "(dtensor.shard_model takes modules)"
        )
    return spec


def noted(x: DTensor, spec: Spec) -> DTensor:
    """``x``, which remembers its spec: the names of devices, and blocks that lie side by side in one piece."""
    x._sharding_spec = spec  # type: ignore[attr-defined]  # in the instance's dictionary; what is made from x does not have it
    return x
