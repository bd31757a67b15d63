"""``Layout``: a mesh, one placement per mesh dim, and the global shape, strides and dtype.

The canonical form is, for each tensor dim, a :class:`Split`: the mesh dims that split it, outermost first, and the
sizes of all the blocks they cut, so that nesting order, uneven, empty and user-given shards are one thing and every
question about them is integer maths on one table. Layouts are immutable and interned: equal layouts are the same
object, and a cache key hashes an identity.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from threading import RLock
from typing import Any

import torch

from ..base.caches import Bounded
from ..base.late_binding import pictured
from ..base.memory_order import Stride, contiguous_stride, memory_order, stride_like
from ..base.symbolic_sizes import has_symbols, sizes
from ..base.validation import element_type, sizes_of
from ..errors import LayoutError
from ..mesh.device_mesh import DeviceMesh
from ..mesh.geometry import asked
from ..placement import Monoid, Partial, Placement, Replicate, Shard, normalize
from .splits import Split, canonical, split_of


class Layout:
    """Where every element of a distributed tensor is; make one with :meth:`Layout.of`.

    Attributes:
        mesh, placements: as the user wrote them, in canonical spelling (a user's ``sizes`` equal to the default vanish).
        shape, stride, dtype: of the global tensor.
        splits: per tensor dim a :class:`Split` or None. Mesh dims of size 1 do not appear: they never cause work.
        partials: per mesh dim the reduce op of a ``Partial``, or None (also for mesh dims of size 1).
        dense: the global strides are those of a row-major tensor.
        is_complex: what the dtype says.
        made_with: the arguments that make a tensor of this layout on the CPU, kept by dispatch.

    Integer maths alone: no communication, the same on every rank. Raises as :meth:`Layout.of` does.

    >>> layout = Layout.of(DeviceMesh("cpu", 2), [Shard(0)], (5, 3))
    >>> layout, layout.local_shape((1,)), layout.nbytes
    (float32[5, 3] on (0=S(0)), (2, 3), 60)
    """

    __slots__ = (
        "__dict__",
        "__weakref__",
        "dense",
        "dtype",
        "is_complex",
        "made_with",
        "mesh",
        "partials",
        "placements",
        "shape",
        "splits",
        "stride",
    )

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: Stride
    dtype: torch.dtype
    splits: tuple[Split | None, ...]
    partials: tuple[str | Monoid | None, ...]
    dense: bool
    is_complex: bool
    made_with: tuple[Any, ...] | None

    # --- making ----------------------------------------------------------------------------------------------
    @staticmethod
    def of(
        mesh: DeviceMesh,
        placements: Any,
        shape: Sequence[int],
        stride: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Layout:
        """The layout of a tensor of global ``shape`` under ``placements`` (validated; one per mesh dim).

        Raises:
            PlacementError: wrong count, a dim out of range, sizes or levels that do not fit.

        >>> layout = Layout.of(DeviceMesh("cpu", 2), [Shard(0)], (5, 3))
        >>> layout.local_shape((0,)), layout.local_shape((1,)), layout.local_offset((1,))
        ((3, 3), (2, 3), (3, 0))
        """
        asked = tuple(placements) if isinstance(placements, (list, tuple)) else placements
        try:
            key = (mesh, asked, shape, stride, dtype)
            found = _BY_REQUEST.get(key)
        except TypeError:  # lists, or sizes that are symbols
            shape = sizes_of(shape, "a global shape")
            asked = normalize(placements, mesh.ndim, len(shape))
            key = (mesh, asked, shape, None if stride is None else sizes_of(stride, "strides"), dtype)
            found = _BY_REQUEST.get(key)
        if found is None:
            shape, dtype = sizes_of(shape, "a global shape"), element_type(dtype)
            stride = contiguous_stride(shape) if stride is None else sizes_of(stride, "strides")
            wanted = normalize(asked, mesh.ndim, len(shape))
            splits = tuple(split_of(mesh, wanted, d, size) for d, size in enumerate(shape))
            found = Layout._interned(mesh, canonical(mesh, wanted, splits, shape), splits, shape, stride, dtype)
            _BY_REQUEST.keep(key, found)
        return found

    @staticmethod
    def from_splits(
        mesh: DeviceMesh,
        splits: Sequence[Split | None],
        partials: Sequence[str | Monoid | None],
        shape: Sequence[int],
        stride: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
        idle: Mapping[int, Placement] | None = None,
    ) -> Layout:
        """The layout with this canonical form; mesh dims named nowhere replicate, those of size 1 are spelled as in ``idle``."""
        shape = sizes(shape)
        stride = contiguous_stride(shape) if stride is None else sizes(stride)
        placements: list[Placement] = [Replicate() if op is None else Partial(op) for op in partials]
        for d, split in enumerate(splits):
            for mesh_dim in () if split is None else split.mesh_dims:
                placements[mesh_dim] = Shard(d)
        for mesh_dim, placement in (idle or {}).items():
            placements[mesh_dim] = placement
        splits = tuple(split if split is None or split.mesh_dims else None for split in splits)
        return Layout._interned(mesh, canonical(mesh, placements, splits, shape), splits, shape, stride, dtype)

    @staticmethod
    def replicated(mesh: DeviceMesh, shape: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype) -> Layout:
        """The layout with ``Replicate`` on every mesh dim."""
        return Layout.of(mesh, (Replicate(),) * mesh.ndim, shape, stride, dtype)

    @staticmethod
    def _interned(mesh: Any, placements: Any, splits: Any, shape: Any, stride: Any, dtype: Any) -> Layout:
        if has_symbols(shape) or has_symbols(stride):  # some may be numbers by now
            shape, stride = sizes(shape), sizes(stride)
        key = (mesh, placements, shape, stride, dtype)
        with _MAKING:  # two threads that want the same one get the same one
            if (found := _LAYOUTS.get(key)) is not None:
                return found
            if not len(splits) == len(stride) == len(shape):  # it would be everybody's layout from now on
                raise LayoutError(f"{len(splits)} splits and strides {stride} do not fit the shape {tuple(shape)}")
            found = object.__new__(Layout)
            found.mesh, found.placements = mesh, placements
            found.splits = tuple(split and split.of_size(size) for split, size in zip(splits, shape, strict=True))
            found.shape, found.stride, found.dtype = torch.Size(shape), stride, dtype
            found.dense = tuple(stride) == contiguous_stride(tuple(shape))
            found.is_complex, found.made_with = dtype.is_complex, None
            ops = (p.reduce_op if isinstance(p, Partial) and mesh.shape[i] > 1 else None for i, p in enumerate(placements))
            found.partials = tuple(ops)
            _LAYOUTS[key] = found
            return found

    def replace(
        self,
        *,
        placements: Any = None,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Layout:
        """This layout with some parts changed (strides become row-major when only the shape changes)."""
        if shape is None and stride is None and dtype is None:
            return self if placements is None else self._placed(placements)
        if stride is None:
            stride = self.stride if shape is None else None
        wanted = self.placements if placements is None else placements
        shape, dtype = self.shape if shape is None else shape, self.dtype if dtype is None else dtype
        return Layout.of(self.mesh, wanted, shape, stride, dtype)

    def reduced(self) -> Layout:
        """This layout with all terms added up: partial mesh dims replicate."""
        return self._placed(tuple(Replicate() if isinstance(p, Partial) else p for p in self.placements))

    def _placed(self, placements: Any) -> Layout:
        """The same tensor under other placements: what is asked most is remembered here."""
        key = tuple(placements) if isinstance(placements, (list, tuple)) else placements
        memo: Bounded[Any, Layout] | None = self.__dict__.get("_memo")
        if memo is None:
            memo = self.__dict__.setdefault("_memo", Bounded(_NEIGHBOURS))
        try:
            found = memo.get(key)
        except TypeError:  # no placements at all, or in something that is no list
            key = normalize(placements, self.mesh.ndim, self.ndim)
            found = memo.get(key)
        if found is None:
            found = memo.keep(key, Layout.of(self.mesh, placements, self.shape, self.stride, self.dtype))
        return found

    # --- pure integer maths: the single source of truth for who holds what ------------------------------------
    def local_shape(self, coordinate: Sequence[int] | None) -> tuple[int, ...]:
        """Shape of the block at a mesh coordinate. None, a rank outside the mesh: an empty block of dim 0 (a number: ``()``)."""
        if coordinate is None:
            return tuple(0 if dim == 0 else size for dim, size in enumerate(self.shape))
        return tuple(
            size if split is None else split.sizes[self.mesh.index_over(split.mesh_dims, coordinate)]
            for size, split in zip(self.shape, self.splits, strict=True)
        )

    def shape_of(self, member: int) -> tuple[int, ...]:
        """Shape of a member's block."""
        return self.local_shape(self.mesh.coordinates[member])

    def local_offset(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Global index of the first element of the block at a mesh coordinate."""
        return tuple(
            0 if split is None else starts[self.mesh.index_over(split.mesh_dims, coordinate)]
            for split, starts in zip(self.splits, self._starts, strict=True)
        )

    @cached_property
    def _starts(self) -> tuple[tuple[int, ...], ...]:
        """Where the blocks of each tensor dim start: looking them up by their sizes would read all sizes each time."""
        return tuple(() if split is None else split.offsets for split in self.splits)

    def local_stride(self, coordinate: Sequence[int] | None) -> Stride:
        """Dense strides of the block, its dims ordered in memory as in the global tensor."""
        return stride_like(self.local_shape(coordinate), self.stride)

    def block_beside(self, x: torch.Tensor, member: int | None) -> torch.Tensor:
        """Memory where ``x`` is for a member's block, its dims ordered as in the global tensor."""
        coordinate = self.mesh.coordinate_of(member)
        return x.new_empty_strided(self.local_shape(coordinate), self.local_stride(coordinate), dtype=self.dtype)

    @asked
    def tensor_meta(self) -> Layout:
        """What has the global shape, stride and dtype: itself (torch's name)."""
        return self

    @asked
    def num_shards(self) -> int:
        """Number of blocks (torch's name)."""
        return math.prod(1 if split is None else len(split.sizes) for split in self.splits)

    @asked
    def dim_map(self) -> list[int]:
        """By tensor dim the mesh dim that cuts it, the outermost of several, or -1 (torch's name)."""
        return [-1 if split is None else split.mesh_dims[0] for split in self.splits]

    @asked
    def device_mesh(self) -> DeviceMesh:
        """``mesh`` by torch's name."""
        return self.mesh

    # --- questions ---------------------------------------------------------------------------------------------
    @cached_property
    def sized(self) -> bool:
        """Whether some size is a symbol of a program that is traced."""
        return has_symbols((*self.shape, *self.stride))

    def known(self) -> Layout:
        """This layout, with numbers for symbols that can be nothing else by now: torch must not take them for open."""
        shape, stride = sizes(self.shape), sizes(self.stride)
        if all(now is was for now, was in zip((*shape, *stride), (*self.shape, *self.stride), strict=True)):
            return self
        return Layout.of(self.mesh, self.placements, shape, stride, self.dtype)

    @cached_property
    def manner(self) -> tuple[DeviceMesh, tuple[Placement, ...], torch.dtype, Any]:
        """How a tensor of any size lies: mesh, placements, dtype, and the order of dims in memory (see :func:`memory_order`)."""
        order = () if self.dense else memory_order(tuple(self.shape), self.stride)
        return self.mesh, self.placements, self.dtype, order

    @cached_property
    def ndim(self) -> int:
        return len(self.shape)

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the global tensor."""
        return self.numel * self.dtype.itemsize

    @cached_property
    def max_local_nbytes(self) -> int:
        """Bytes of the largest block."""
        sizes = (size if split is None else max(split.sizes) for size, split in zip(self.shape, self.splits, strict=True))
        return math.prod(sizes) * self.dtype.itemsize

    @cached_property
    def is_partial(self) -> bool:
        """Whether some mesh dim (of size > 1) holds unreduced terms."""
        return any(op is not None for op in self.partials)

    @cached_property
    def is_replicated(self) -> bool:
        """Whether every rank holds the whole value."""
        return not self.is_partial and all(split is None for split in self.splits)

    def whole(self) -> Layout:
        """The same tensor, whole on every rank."""
        return Layout.replicated(self.mesh, self.shape, self.stride, self.dtype)

    def along(self, mesh_dim: int) -> int | Placement:
        """How it lies along one mesh dim: the tensor dim that is cut, or the placement."""
        placement = self.placements[mesh_dim]
        return placement.dim if isinstance(placement, Shard) else placement

    def same_data(self, other: Layout) -> bool:
        """Whether every rank holds the same block under both (they may differ in strides, dtype or spelling)."""
        return (self.mesh, self.splits, self.partials, self.shape) == (other.mesh, other.splits, other.partials, other.shape)

    def __eq__(self, other: object) -> bool:
        """Identity; also equal to ``torch.strided``, which code written for plain tensors compares ``x.layout`` with."""
        return self is other or other is torch.strided

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Torch asks this of an argument that is not what it expects: of ``layout=x.layout``, meant as ``torch.strided``."""
        args = [torch.strided if isinstance(each, Layout) else each for each in args]
        return func(*args, **{k: torch.strided if isinstance(each, Layout) else each for k, each in (kwargs or {}).items()})

    def __repr__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        names = self.mesh.named(range(self.mesh.ndim))
        where = ", ".join(f"{name}={placement}" for name, placement in zip(names, self.placements, strict=True))
        return f"{dtype}[{', '.join(map(str, self.shape))}] on ({where})"

    _repr_html_ = pictured

    def __reduce__(self) -> tuple[Any, ...]:
        return restore_layout, (self.mesh, self.placements, tuple(self.shape), self.stride, self.dtype)


def restore_layout(mesh: DeviceMesh, placements: Any, shape: Any, stride: Any, dtype: torch.dtype) -> Layout:
    """The layout that was pickled: a module-level name, which ``torch.load(weights_only=True)`` can be told to trust."""
    return Layout.of(mesh, placements, shape, stride, dtype)


_LAYOUTS: weakref.WeakValueDictionary[Any, Layout] = weakref.WeakValueDictionary()  # those in use, and requested lately
_MAKING = RLock()  # of all tables: the collector may run finalizers here, which make layouts
_BY_REQUEST: Bounded[Any, Layout] = Bounded(8192, "layout.requests")
_NEIGHBOURS = 64


def interned() -> int:
    """How many layouts are alive."""
    return len(_LAYOUTS)
