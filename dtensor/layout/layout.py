"""Layout: a mesh, one placement per mesh dim, and the global shape, strides and dtype.

[Note: Canonical layout]
The canonical form has a :class:`Split` for each tensor dim: the mesh dims that shard it, outermost first, and the sizes of all
blocks. So nesting order and uneven, empty and user-given shards are one thing, and every question about them is integer
arithmetic on one table. Layouts are immutable and interned: equal layouts are the same object, and a cache key hashes an
identity.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Mapping, Sequence
from functools import cached_property
from threading import RLock
from typing import Any

import torch

from ..base.caches import BoundedDict
from ..base.late_binding import html_repr
from ..base.memory_order import Stride, contiguous_stride, memory_order, stride_like
from ..base.symbolic_sizes import contains_symbols, hashable_sizes
from ..base.tensor_text import parse_tensor_text, tensor_text
from ..base.validation import check_dtype, check_sizes
from ..errors import LayoutError
from ..mesh.device_mesh import DeviceMesh
from ..mesh.geometry import uncached_property
from ..placement import Monoid, Partial, Placement, Replicate, Shard, check_placement, normalize_placements
from .placement_forms import LAYOUT_TEXT, hashable_form, placements_text, read_form, resolve_placements
from .splits import Split, canonical_placements, make_split


class Layout:
    """Placement of every element of a DTensor.

    Make one with :meth:`Layout.of`. It raises PlacementError if its arguments do not fit.

    Attributes:
        mesh, placements: as the user wrote them, in canonical spelling (``sizes`` equal to the default are dropped).
        shape, stride, dtype: of the global tensor.
        splits: per tensor dim a :class:`Split` or None. Mesh dims of size 1 do not appear, because they never cause work.
        partials: per mesh dim the reduce op of a ``Partial``, or None (also for mesh dims of size 1).
        dense: True if the global strides are row-major.
        is_complex: True for a complex dtype.
        wrapper_args: arguments of ``_make_wrapper_subclass`` for a CPU tensor of this layout, cached by dispatch.

    All questions are answered by integer arithmetic: no communication, and equal answers on every rank.

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
        "mesh",
        "partials",
        "placements",
        "shape",
        "splits",
        "stride",
        "wrapper_args",
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
    wrapper_args: tuple[Any, ...] | None

    # --- construction ----------------------------------------------------------------------------------------
    @staticmethod
    def of(
        mesh: DeviceMesh,
        placements: Any,
        shape: Sequence[int],
        stride: Sequence[int] | None = None,
        dtype: torch.dtype = torch.float32,
    ) -> Layout:
        """Return the layout of a tensor of global ``shape`` under ``placements`` (validated; in any form, see ``Placements``).

        Raises:
            PlacementError: wrong count, a dim out of range, sizes or levels that do not fit.

        >>> layout = Layout.of(DeviceMesh("cpu", 2), [Shard(0)], (5, 3))
        >>> layout.local_shape((0,)), layout.local_shape((1,)), layout.local_offset((1,))
        ((3, 3), (2, 3), (3, 0))
        """
        requested = hashable_form(placements)
        try:
            key = (mesh, requested, shape, stride, dtype)
            layout = _BY_REQUEST.get(key)
        except TypeError:  # unhashable: lists, or symbolic sizes
            shape = check_sizes(shape, "a global shape")
            placements = requested = resolve_placements(placements, mesh, len(shape))
            key = (mesh, requested, shape, None if stride is None else check_sizes(stride, "strides"), dtype)
            layout = _BY_REQUEST.get(key)
        if layout is None:
            shape, dtype = check_sizes(shape, "a global shape"), check_dtype(dtype)
            stride = contiguous_stride(shape) if stride is None else check_sizes(stride, "strides")
            normalized = resolve_placements(placements, mesh, len(shape))
            splits = tuple(make_split(mesh, normalized, d, size) for d, size in enumerate(shape))
            layout = Layout._interned(mesh, canonical_placements(mesh, normalized, splits, shape), splits, shape, stride, dtype)
            _BY_REQUEST.keep(key, layout)
        return layout

    @staticmethod
    def parse(text: str, mesh: DeviceMesh) -> Layout:
        """Return the layout on ``mesh`` that ``str`` prints as ``text``. Without strides it is row-major.

        Raises:
            LayoutError: ``text`` is not the text of a layout.
            PlacementError: its placements do not fit the mesh or the shape, or name a user's :class:`Monoid`.

        >>> mesh = DeviceMesh("cpu", [[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
        >>> Layout.parse("float32[5, 3] on (dp=S(0), tp=R)", mesh).placements
        (Shard(dim=0), Replicate())
        """
        if (match := LAYOUT_TEXT.fullmatch(text.strip())) is None:
            raise LayoutError(f"{text!r} is not a layout; write it as print(x.layout) does: 'float32[4, 6] on (dp=S(0), tp=R)'")
        dtype, shape = parse_tensor_text(match["tensor"])
        stride = None if match["stride"] is None else tuple(map(int, re.findall(r"\d+", match["stride"])))
        return Layout.of(mesh, match["placements"], shape, stride, dtype)

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
        """Return the layout with these splits and partials; mesh dims in neither are replicated, or placed as in ``idle``.

        ``idle`` has placements of mesh dims of size 1.
        """
        shape = hashable_sizes(shape)
        stride = contiguous_stride(shape) if stride is None else hashable_sizes(stride)
        placements: list[Placement] = [Replicate() if op is None else Partial(op) for op in partials]
        for d, split in enumerate(splits):
            for mesh_dim in () if split is None else split.mesh_dims:
                placements[mesh_dim] = Shard(d)
        for mesh_dim, placement in (idle or {}).items():
            placements[mesh_dim] = placement
        splits = tuple(split if split is None or split.mesh_dims else None for split in splits)
        return Layout._interned(mesh, canonical_placements(mesh, placements, splits, shape), splits, shape, stride, dtype)

    @staticmethod
    def replicated(mesh: DeviceMesh, shape: Sequence[int], stride: Sequence[int] | None, dtype: torch.dtype) -> Layout:
        """Return the layout with ``Replicate`` on every mesh dim."""
        return Layout.of(mesh, (Replicate(),) * mesh.ndim, shape, stride, dtype)

    @staticmethod
    def _interned(mesh: Any, placements: Any, splits: Any, shape: Any, stride: Any, dtype: Any) -> Layout:
        """Return the one layout with these attributes, and make it if there is none."""
        if contains_symbols(shape) or contains_symbols(stride):  # some symbols may be specialized to ints by now
            shape, stride = hashable_sizes(shape), hashable_sizes(stride)
        key = (mesh, placements, shape, stride, dtype)
        with _INTERN_LOCK:  # threads that make equal layouts get one object
            if (layout := _LAYOUTS.get(key)) is not None:
                return layout
            if not len(splits) == len(stride) == len(shape):  # an interned layout is used by all later requests
                raise LayoutError(f"{len(splits)} splits and strides {stride} do not fit the shape {tuple(shape)}")
            layout = object.__new__(Layout)
            layout.mesh, layout.placements = mesh, placements
            layout.splits = tuple(split and split.of_size(size) for split, size in zip(splits, shape, strict=True))
            layout.shape, layout.stride, layout.dtype = torch.Size(shape), stride, dtype
            layout.dense = tuple(stride) == contiguous_stride(tuple(shape))
            layout.is_complex, layout.wrapper_args = dtype.is_complex, None
            ops = (p.reduce_op if isinstance(p, Partial) and mesh.shape[i] > 1 else None for i, p in enumerate(placements))
            layout.partials = tuple(ops)
            _LAYOUTS[key] = layout
            return layout

    def replace(
        self,
        *,
        placements: Any = None,
        shape: Sequence[int] | None = None,
        stride: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Layout:
        """Return this layout with some parts changed. Strides become row-major if only the shape changes.

        Mesh dims that ``placements`` by name leave out keep their placements.
        """
        if shape is None and stride is None and dtype is None:
            return self if placements is None else self._with_placements(placements)
        if stride is None:
            stride = self.stride if shape is None else None
        new_placements = self.placements if placements is None else self._keep_unnamed(placements)
        shape, dtype = self.shape if shape is None else shape, self.dtype if dtype is None else dtype
        return Layout.of(self.mesh, new_placements, shape, stride, dtype)

    def reduced(self) -> Layout:
        """Return this layout with ``Replicate`` in place of each ``Partial``."""
        return self._with_placements(tuple(Replicate() if isinstance(p, Partial) else p for p in self.placements))

    def _with_placements(self, placements: Any) -> Layout:
        """Return the layout of the same tensor under other placements, from a small cache that each layout has."""
        key = hashable_form(placements)
        memo: BoundedDict[Any, Layout] | None = self.__dict__.get("_memo")
        if memo is None:
            memo = self.__dict__.setdefault("_memo", BoundedDict(_MEMO_SIZE))
        try:
            layout = memo.get(key)
        except TypeError:  # not placements
            placements = key = normalize_placements(self._keep_unnamed(placements), self.mesh.ndim, self.ndim)
            layout = memo.get(key)
        if layout is None:
            layout = memo.keep(key, Layout.of(self.mesh, self._keep_unnamed(placements), self.shape, self.stride, self.dtype))
        return layout

    def _keep_unnamed(self, placements: Any) -> Any:
        """Return ``placements`` completed by those of this layout along mesh dims that a form by name leaves out.

        Block sizes stay if the mesh dims that are no longer sharded were innermost. Otherwise they become those of
        ``torch.chunk``, because the remaining blocks would not be contiguous.
        """
        named = read_form(placements, self.mesh, self.ndim)
        if not isinstance(named, dict):
            return named
        named = {i: check_placement(placement, self.ndim) for i, placement in named.items()}
        changed = {i: placement for i, placement in named.items() if placement != self.placements[i]}
        splits = [None if split is None else split.without(changed, self.mesh) for split in self.splits]
        idle = {i: p for i, p in enumerate(self.placements) if self.mesh.shape[i] == 1 and i not in changed}
        partials = [None if i in changed else op for i, op in enumerate(self.partials)]
        rest = Layout.from_splits(self.mesh, splits, partials, self.shape, self.stride, self.dtype, idle)
        return tuple(changed.get(i, placement) for i, placement in enumerate(rest.placements))

    # --- integer arithmetic: which rank has which elements ----------------------------------------------------
    def local_shape(self, coordinate: Sequence[int] | None) -> tuple[int, ...]:
        """Return the shape of the local tensor at a mesh coordinate; for None, outside of the mesh, with an empty dim 0."""
        if coordinate is None:
            return tuple(0 if dim == 0 else size for dim, size in enumerate(self.shape))
        return tuple(
            size if split is None else split.sizes[self.mesh.index_over(split.mesh_dims, coordinate)]
            for size, split in zip(self.shape, self.splits, strict=True)
        )

    def shape_of(self, member: int) -> tuple[int, ...]:
        """Return the shape of a member's local tensor."""
        return self.local_shape(self.mesh.coordinates[member])

    def local_offset(self, coordinate: Sequence[int]) -> tuple[int, ...]:
        """Return the global index of the first element of the local tensor at a mesh coordinate."""
        return tuple(
            0 if split is None else starts[self.mesh.index_over(split.mesh_dims, coordinate)]
            for split, starts in zip(self.splits, self._block_starts, strict=True)
        )

    @cached_property
    def _block_starts(self) -> tuple[tuple[int, ...], ...]:
        """Return the starts of the blocks of each tensor dim, cached: a lookup by sizes would hash all sizes each time."""
        return tuple(() if split is None else split.offsets for split in self.splits)

    def local_stride(self, coordinate: Sequence[int] | None) -> Stride:
        """Return dense strides of the local tensor at a coordinate, with dims in the memory order of the global tensor."""
        return stride_like(self.local_shape(coordinate), self.stride)

    def new_local_like(self, x: torch.Tensor, member: int | None) -> torch.Tensor:
        """Allocate a member's local tensor on the device of ``x``, with dims in the memory order of the global tensor."""
        coordinate = self.mesh.coordinate_of(member)
        return x.new_empty_strided(self.local_shape(coordinate), self.local_stride(coordinate), dtype=self.dtype)

    @uncached_property
    def tensor_meta(self) -> Layout:
        """Return this layout, which has the global shape, stride and dtype (torch's name)."""
        return self

    @uncached_property
    def num_shards(self) -> int:
        """Return the number of blocks (torch's name)."""
        return math.prod(1 if split is None else len(split.sizes) for split in self.splits)

    @uncached_property
    def dim_map(self) -> list[int]:
        """Return for each tensor dim the outermost mesh dim that shards it, or -1 (torch's name)."""
        return [-1 if split is None else split.mesh_dims[0] for split in self.splits]

    @uncached_property
    def device_mesh(self) -> DeviceMesh:
        """Return ``mesh`` (torch's name)."""
        return self.mesh

    # --- properties --------------------------------------------------------------------------------------------
    @cached_property
    def has_symbols(self) -> bool:
        """Return True if a size or stride is a symbol of a traced program."""
        return contains_symbols((*self.shape, *self.stride))

    def with_known_sizes(self) -> Layout:
        """Return this layout with ints for symbols that can have only one value by now, which torch would treat as free."""
        shape, stride = hashable_sizes(self.shape), hashable_sizes(self.stride)
        if all(new is old for new, old in zip((*shape, *stride), (*self.shape, *self.stride), strict=True)):
            return self
        return Layout.of(self.mesh, self.placements, shape, stride, self.dtype)

    @cached_property
    def sizeless_key(self) -> tuple[DeviceMesh, tuple[Placement, ...], torch.dtype, Any]:
        """Return the layout without sizes: mesh, placements, dtype, and :func:`memory_order`."""
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
        """Return the bytes of the global tensor."""
        return self.numel * self.dtype.itemsize

    @cached_property
    def max_local_nbytes(self) -> int:
        """Return the bytes of the largest local tensor."""
        sizes = (size if split is None else max(split.sizes) for size, split in zip(self.shape, self.splits, strict=True))
        return math.prod(sizes) * self.dtype.itemsize

    @cached_property
    def is_partial(self) -> bool:
        """Return True if a mesh dim of size > 1 is partial."""
        return any(op is not None for op in self.partials)

    @cached_property
    def is_replicated(self) -> bool:
        """Return True if every rank has the complete value."""
        return not self.is_partial and all(split is None for split in self.splits)

    def to_replicated(self) -> Layout:
        """Return the layout of the same tensor, replicated on every rank."""
        return Layout.replicated(self.mesh, self.shape, self.stride, self.dtype)

    def placement_along(self, mesh_dim: int) -> int | Placement:
        """Return the placement along one mesh dim; for a shard, the tensor dim that is sharded."""
        placement = self.placements[mesh_dim]
        return placement.dim if isinstance(placement, Shard) else placement

    def has_same_blocks(self, other: Layout) -> bool:
        """Return True if every rank has the same block under both layouts. Strides, dtype and spelling may differ."""
        return (self.mesh, self.splits, self.partials, self.shape) == (other.mesh, other.splits, other.partials, other.shape)

    def __eq__(self, other: object) -> bool:
        """Return True for the same object, and for ``torch.strided``, with which code for plain tensors compares ``x.layout``."""
        return self is other or other is torch.strided

    __hash__ = object.__hash__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """Handle torch functions that get ``layout=x.layout``: pass ``torch.strided``."""
        args = [torch.strided if isinstance(each, Layout) else each for each in args]
        return func(*args, **{k: torch.strided if isinstance(each, Layout) else each for k, each in (kwargs or {}).items()})

    def __repr__(self) -> str:
        return f"{tensor_text(self.dtype, self.shape)} on ({placements_text(self.placements, self.mesh)})"

    def __str__(self) -> str:
        """Return text from which :meth:`parse` makes this layout: ``repr``, and strides that are not row-major."""
        return repr(self) if self.dense else f"{self!r}, stride={tuple(self.stride)}"

    _repr_html_ = html_repr

    def __reduce__(self) -> tuple[Any, ...]:
        return restore_layout, (self.mesh, self.placements, tuple(self.shape), self.stride, self.dtype)


def restore_layout(mesh: DeviceMesh, placements: Any, shape: Any, stride: Any, dtype: torch.dtype) -> Layout:
    """Rebuild a pickled layout. ``torch.load(weights_only=True)`` can allow this function, since it is module-level."""
    return Layout.of(mesh, placements, shape, stride, dtype)


_LAYOUTS: weakref.WeakValueDictionary[Any, Layout] = weakref.WeakValueDictionary()
_INTERN_LOCK = RLock()  # reentrant: garbage collection inside may run finalizers that make layouts
_BY_REQUEST: BoundedDict[Any, Layout] = BoundedDict(8192, "layout.requests")
_MEMO_SIZE = 64


def count_layouts() -> int:
    """Return the number of layouts that are alive."""
    return len(_LAYOUTS)
