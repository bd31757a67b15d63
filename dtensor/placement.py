"""Placement: how a tensor is distributed over ONE mesh dim.

A tuple with one placement per mesh dim says where every element is. Placements are plain values without a mesh or
communication. ``Layout`` gives them their meaning on a mesh and a shape. ``Placements`` is the type of all forms in which
functions accept them; :mod:`.layout.placement_forms` reads these forms.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from .base.late_binding import resolve_late
from .base.tracing import unwrap_graph_constant
from .base.validation import as_index
from .errors import PlacementError

if TYPE_CHECKING:
    from torch import Tensor

REDUCE_OPS = ("sum", "avg", "max", "min", "product")
_OWN_PREFIX = __name__.partition(".")[0] + "."


class Placement:
    """Base class of ``Shard``, ``Replicate`` and ``Partial``.

    A value: no communication until something is redistributed.

    >>> Shard(1).is_shard(), Shard(1).is_shard(0), Replicate().is_partial()
    (True, False, False)
    """

    __slots__ = ()

    def is_shard(self, dim: int | None = None) -> bool:
        """Return True if this is a ``Shard`` (of tensor dim ``dim``, if given)."""
        return False

    def is_replicate(self) -> bool:
        """Return True if this is ``Replicate``."""
        return False

    def is_partial(self, reduce_op: str | None = None) -> bool:
        """Return True if this is a ``Partial`` (with reduction ``reduce_op``, if given)."""
        return False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Raise PlacementError for a subclass of another package with methods: the library would not call them."""
        super().__init_subclass__(**kwargs)
        own = [name for name, value in vars(cls).items() if callable(value) and name not in ("__repr__", "__str__")]
        if own and not cls.__module__.startswith(_OWN_PREFIX):
            raise PlacementError(
                f"{cls.__name__}: subclasses of placements are not supported, because overridden methods "
                f"({', '.join(own)}) would not be called. For a reduction use Partial(Monoid(name, combine, "
                "identity, finalize)), for uneven shards Shard(dim, sizes=...)"
            )

    def __deepcopy__(self, memo: dict[int, Any]) -> Placement:
        return self  # immutable, and comparisons of the same object are fast


@dataclass(frozen=True, slots=True, weakref_slot=True, repr=False)
class Shard(Placement):
    """Split tensor dim ``dim`` over the mesh dim, in rank order.

    Args:
        dim: the tensor dim; negative counts from the end.
        sizes: elements of ``dim`` that each rank of the mesh dim has. ``None`` splits like ``torch.chunk``: every rank gets
            ``ceil(n / ranks)`` until nothing is left, so last shards may be smaller or empty. If several mesh dims split one
            tensor dim, the innermost may list the sizes of all blocks, major first.
        level: nesting depth among the mesh dims that split the same tensor dim, 0 outermost. ``None`` nests in mesh-dim order.
            A weight that tensor parallelism splits first and FSDP second, on a mesh ``("dp", "tp")``, is ``(Shard(0, level=1),
            Shard(0, level=0))``.

    >>> Shard(1), Shard(0, sizes=(3, 2))
    (Shard(dim=1), Shard(dim=0, sizes=(3, 2)))

    Redistribution from ``Replicate`` costs no communication, from another ``Shard`` an all-to-all, from ``Partial`` a
    reduce-scatter.
    """

    dim: int
    sizes: tuple[int, ...] | None = None
    level: int | None = None

    def __post_init__(self) -> None:
        """Convert ``dim``, ``sizes`` and ``level`` to ints; raise PlacementError if they are none."""
        if type(self.dim) is not int:
            object.__setattr__(self, "dim", _check_int(self.dim, "Shard(dim)", "Shard(0)"))
        if self.level is not None and (type(self.level) is not int or self.level < 0):
            object.__setattr__(self, "level", _check_int(self.level, "Shard(level=)", "Shard(0, level=0)"))
            if self.level < 0:
                raise PlacementError(f"Shard levels count from 0, the outermost, got {self.level}")
        if self.sizes is not None:
            try:
                sizes = tuple(map(operator.index, self.sizes))
            except TypeError:
                raise PlacementError(f"Shard sizes are ints, one per rank, got {self.sizes!r}") from None
            if any(size < 0 for size in sizes):
                raise PlacementError(f"Shard sizes must be non-negative, got {sizes}")
            object.__setattr__(self, "sizes", sizes)

    def is_shard(self, dim: int | None = None) -> bool:
        """Return True if this shards (tensor dim ``dim``, if given) a block of the mesh dims before its own.

        Programs that process placements in order assume that. False for a shard inside of that of a later mesh dim
        (``level=1``).
        """
        return not self.level and (dim is None or dim == self.dim)

    @property
    def split_factor(self) -> int:
        """Raise AttributeError: PyTorch's ``_StridedShard`` has it, and a placement here knows no mesh."""
        raise AttributeError(
            f"{self!r} has no split_factor: it is the product of the sizes of the mesh dims with a lower level, which split "
            "the dim first. Blocks are at x.layout.local_offset(coordinate), with shape x.layout.local_shape(coordinate)"
        )

    @staticmethod
    def local_shard_size_and_offset(curr_local_size: int, num_chunks: int, rank: int) -> tuple[int, int]:
        """Return (size, start) of the block that rank ``rank`` of ``num_chunks`` gets of ``curr_local_size`` elements.

        No communication. This is the rule of a :class:`Shard` without ``sizes``; an empty block starts at the end. The blocks of
        a DTensor, with all its mesh dims and sizes, are ``x.layout.local_shape(coordinate)`` and ``local_offset``.

        >>> [Shard.local_shard_size_and_offset(5, 4, rank) for rank in range(4)]
        [(2, 0), (2, 2), (1, 4), (0, 5)]
        """
        start = min(curr_local_size, rank * -(-curr_local_size // num_chunks))
        return min(curr_local_size, (rank + 1) * -(-curr_local_size // num_chunks)) - start, start

    def __eq__(self, other: object) -> bool:  # faster than the generated one: placements are parts of cache keys
        return self is other or (
            type(other) is Shard and self.dim == other.dim and self.sizes == other.sizes and self.level == other.level
        )

    def __hash__(self) -> int:
        return self.dim if self.sizes is None else hash((self.dim, self.sizes))

    def __repr__(self) -> str:
        extra = "" if self.sizes is None else f", sizes={self.sizes}"
        extra += "" if self.level is None else f", level={self.level}"
        return f"Shard(dim={self.dim}{extra})"

    def __str__(self) -> str:
        extra = "" if self.sizes is None else ":" + "+".join(map(str, self.sizes))
        extra += "" if self.level is None else f"@{self.level}"
        return f"S({self.dim}{extra})"


@dataclass(frozen=True, slots=True, weakref_slot=True, repr=False)
class Replicate(Placement):
    """Every rank of the mesh dim has the complete tensor.

    Local and global shape are equal. Redistribution costs an all-gather from ``Shard`` and an all-reduce from ``Partial``.

    >>> import dtensor as dt
    >>> x = dt.ones(4, device_mesh=dt.init_device_mesh("cpu", (2,)), placements=[Replicate()])
    >>> [tuple(local.shape) for local in x.to_local().shards]
    [(4,), (4,)]
    """

    def is_replicate(self) -> bool:
        return True

    def __eq__(self, other: object) -> bool:
        return type(other) is Replicate

    def __hash__(self) -> int:
        return -7

    def __repr__(self) -> str:
        return "Replicate()"

    def __str__(self) -> str:
        return "R"


@dataclass(frozen=True, slots=True, weakref_slot=True)
class Monoid:
    """User-defined associative reduction, for ``Partial(Monoid(...))``.

    Args:
        name: shown in prints; two monoids are equal if all their parts are.
        combine: ``combine(a, b)`` of two local values, associative; ranks are combined in order.
        identity: ``identity(like)`` returns the neutral element, of the shape and dtype of ``like``.
        finalize: applied once to the reduced value, shape kept.
        elementwise: True if each element of the reduction depends only on that element of the addends. Views, ``cat`` and
            ``stack`` of addends are then addends.
        combine_all: returns the value of addends that are stacked along a new dim 0, if that costs less than pair by pair.

    The reduction costs a gather of the addends.

    >>> import torch, dtensor as dt
    >>> largest = Monoid("largest", torch.maximum, lambda like: torch.full_like(like, -torch.inf))
    >>> terms = dt.per_rank([torch.tensor([1.0, 5.0]), torch.tensor([3.0, 2.0])])
    >>> dt.DTensor.from_local(terms, dt.init_device_mesh("cpu", (2,)), [Partial(largest)], shape=(2,)).full_tensor()
    tensor([3., 5.])
    """

    name: str
    combine: Callable[[Tensor, Tensor], Tensor]
    identity: Callable[[Tensor], Tensor]
    finalize: Callable[[Tensor], Tensor] | None = None
    elementwise: bool = False
    combine_all: Callable[[Tensor], Tensor] | None = None

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True, weakref_slot=True, repr=False)
class Partial(Placement):
    """Every rank of the mesh dim has an addend; the value is their reduction.

    Args:
        reduce_op: ``"sum"``, ``"avg"``, ``"max"``, ``"min"``, ``"product"`` or a :class:`Monoid`.

    Attributes:
        ALL_REDUCE_OPS: the names of all reductions.
        LINEAR_REDUCE_OPS: the names of those with ``f(a + b) = f(a) + f(b)``.

    Each local shape is the global one. The reduction costs an all-reduce, or a reduce-scatter if the target is ``Shard``.

    Raises:
        PlacementError: another ``reduce_op``.

    >>> import torch, dtensor as dt
    >>> terms = dt.per_rank([torch.tensor([1.0, 5.0]), torch.tensor([3.0, 2.0])])
    >>> dt.DTensor.from_local(terms, dt.init_device_mesh("cpu", (2,)), [Partial()], shape=(2,)).full_tensor()
    tensor([4., 7.])
    """

    ALL_REDUCE_OPS: ClassVar[tuple[str, ...]] = REDUCE_OPS
    LINEAR_REDUCE_OPS: ClassVar[tuple[str, ...]] = ("sum", "avg")
    reduce_op: str | Monoid = "sum"

    def __post_init__(self) -> None:
        """Raise PlacementError for an unknown reduction."""
        op = self.reduce_op
        if not isinstance(op, Monoid) and op not in REDUCE_OPS:
            raise PlacementError(f"Partial takes one of {REDUCE_OPS} or a Monoid, got {op!r}")

    def is_partial(self, reduce_op: str | None = None) -> bool:
        return reduce_op is None or reduce_op == self.reduce_op

    def __repr__(self) -> str:
        return f"Partial({self.reduce_op})"

    def __str__(self) -> str:
        return f"P({self.reduce_op})"


# --- one placement as text: __str__ and __repr__ of the classes above print it --------------------------------------------
_SHARD_TEXT = re.compile(
    r"S(?:hard)?\((?:dim=)?(?P<dim>-?\d+)(?P<sizes>:(?:\d+(?:\+\d+)*)?|,sizes=\((?:\d+,?)*\))?(?:(?:@|,level=)(?P<level>\d+))?\)"
)
_PARTIAL_TEXT = re.compile(r"P(?:artial)?(?:\((?P<op>[^()]*)\))?")


def parse_placement(text: str) -> Placement:
    """Return the placement that ``str`` or ``repr`` prints as ``text``; also ``"P"`` for a sum.

    Raises:
        PlacementError: ``text`` is not a placement, or names a user's :class:`Monoid`, which text cannot define.

    >>> parse_placement("S(0:3+2)"), parse_placement("P(max)"), parse_placement("Shard(dim=1)"), parse_placement("R")
    (Shard(dim=0, sizes=(3, 2)), Partial(max), Shard(dim=1), Replicate())
    """
    compact = re.sub(r"\s*([(),=:+@])\s*", r"\1", text.strip())
    if compact in ("R", "Replicate()"):
        return Replicate()
    if match := _SHARD_TEXT.fullmatch(compact):
        sizes, level = match["sizes"], match["level"]
        return Shard(
            int(match["dim"]),
            None if sizes is None else tuple(map(int, re.findall(r"\d+", sizes))),
            None if level is None else int(level),
        )
    if match := _PARTIAL_TEXT.fullmatch(compact):
        return Partial(_reduction_of_name((match["op"] or "sum").strip("'\"")))
    raise PlacementError(
        f"{text!r} is not a placement; write S(0) to shard tensor dim 0, R to replicate, P(sum) for a partial value"
    )


def _reduction_of_name(name: str) -> str | Monoid:
    """Return the reduction or library monoid of this name; raise PlacementError if there is none."""
    reduction: str | Monoid | None = name if name in REDUCE_OPS else resolve_late("library_monoid")(name)
    if reduction is None:
        raise PlacementError(
            f"P({name}) is not a reduction of the library: text can name {', '.join(REDUCE_OPS)}. For a Monoid of the program "
            "pass the object: Partial(monoid), in a list or in a mapping of mesh dim names"
        )
    return reduction


# --- placements by tensor dim --------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True, weakref_slot=True, repr=False)
class Partition:
    """Mesh dims by tensor dim, as in JAX's ``PartitionSpec``: an immutable value without a mesh. Make one with :func:`partition`.

    Attributes:
        dims: for each tensor dim the names of the mesh dims that shard it, outermost first.
        unreduced: names of the mesh dims along which the value is ``Partial("sum")``.

    It communicates nothing; errors are those of :func:`partition`.

    >>> partition("dp", None).dims
    (('dp',), ())
    """

    dims: tuple[tuple[str, ...], ...]
    unreduced: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raise PlacementError for entries that are no names, and for repeated names."""
        names = [*(name for dim in self.dims for name in dim), *self.unreduced]
        if not all(isinstance(name, str) for name in names):
            raise PlacementError(
                f"partition takes for each tensor dim the name of a mesh dim, None, or a tuple of names, got {names}; "
                'write partition("dp", None), for example'
            )
        if repeated := [name for name in names if names.count(name) > 1]:
            raise PlacementError(f"{self!r} has mesh dim {repeated[0]!r} twice: a mesh dim shards at most one tensor dim")

    def __deepcopy__(self, memo: dict[int, Any]) -> Partition:
        return self

    def __repr__(self) -> str:
        entries = [repr(names[0] if len(names) == 1 else names or None) for names in self.dims]
        return f"partition({', '.join(entries + [f'unreduced={self.unreduced}'] * bool(self.unreduced))})"


def partition(*dims: str | Sequence[str] | None, unreduced: Iterable[str] = ()) -> Partition:
    """Return placements by tensor dim, as JAX's ``PartitionSpec``. Pass it wherever placements are accepted.

    Args:
        dims: for each tensor dim the name of the mesh dim that shards it, None, or a tuple of names, outermost first. Tensor
            dims after the last entry are not sharded. Mesh dims without an entry are replicated.
        unreduced: names of mesh dims along which the value is ``Partial("sum")``.

    Raises:
        PlacementError: a name appears twice, or, once the mesh and the tensor are known: the mesh does not have it, or there
            are more entries than tensor dims.

    It communicates nothing.

    >>> import dtensor as dt
    >>> mesh = dt.init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "cp", "tp"))
    >>> dt.zeros(8, 3, 8, device_mesh=mesh, placements=dt.partition("dp", None, ("tp", "cp"))).layout
    float32[8, 3, 8] on (dp=S(0), cp=S(2@1), tp=S(2@0))
    """
    return Partition(tuple(map(_names_of, dims)), tuple(sorted(_names_of(unreduced), key=str)))


def _names_of(entry: str | Iterable[str] | None) -> tuple[str, ...]:
    """Return the mesh dim names of one partition entry (a name, several, or None) as a tuple."""
    if isinstance(entry, str) or not isinstance(entry, Iterable):
        return () if entry is None else (entry,)
    return tuple(entry)


NamedPlacements: TypeAlias = Mapping[str, Placement] | str | Partition
"""Placements that can use mesh dim names; read by :mod:`.layout.placement_forms`, which knows the mesh."""

Placements: TypeAlias = Placement | Sequence[Placement] | NamedPlacements
"""Every form of placements: one for each mesh dim in order, by mesh dim name, as printed text, or by tensor dim."""


def _check_int(value: Any, what: str, example: str) -> int:
    """Return ``value`` as an int; raise PlacementError with ``example`` if it is none."""
    index = as_index(value)
    if index is None:
        raise PlacementError(f"{what} takes an int, got {value!r}; write {example}")
    return index


def normalize_placements(placements: Any, mesh_ndim: int, ndim: int) -> tuple[Placement, ...]:
    """Return ``placements``, given in the order of the mesh dims, as a tuple with one per mesh dim and non-negative dims.

    Raises:
        PlacementError: wrong count, not a placement, or a tensor dim out of range.
    """
    if placements is None:
        return (Replicate(),) * mesh_ndim
    if isinstance(placements, Placement):
        placements = (placements,)
    if isinstance(placements, (str, Mapping, Set)) or not isinstance(placements, Iterable):
        raise PlacementError(
            f"{placements!r} is not a placement, nor a list with one for each mesh dim; write [Shard(0)], for example"
        )
    placements = tuple(placements)
    if len(placements) != mesh_ndim:
        raise PlacementError(
            f"placements and mesh dims must have the same length: {len(placements)} placements for a mesh of {mesh_ndim} dims: "
            f"{placements}; give one per mesh dim, for example [Shard(0)" + ", Replicate()" * (mesh_ndim - 1) + "]"
        )
    return tuple(check_placement(placement, ndim) for placement in placements)


def check_placement(placement: Placement, ndim: int) -> Placement:
    """Return ``placement`` with a non-negative tensor dim, after a check that it fits a tensor of ``ndim`` dims.

    Raises:
        PlacementError: not a placement, or a tensor dim out of range.
    """
    placement = unwrap_graph_constant(placement)
    if isinstance(placement, Shard):
        dim = placement.dim
        if not -ndim <= dim < ndim:
            raise PlacementError(
                f"{placement!r} is out of range for a tensor of {ndim} dims; "
                + (f"use a dim in [{-ndim}, {ndim - 1}]" if ndim else "a 0-d tensor can only be Replicate() or Partial()")
            )
        return placement if dim >= 0 else Shard(dim + ndim, placement.sizes, placement.level)
    if isinstance(placement, (Replicate, Partial)):
        return placement
    kind = type(placement)
    origin = f" of dtensor but one of {kind.__module__}" if kind.__name__ in ("Shard", "Replicate", "Partial") else ""
    raise PlacementError(f"{placement!r} is not a placement{origin}; use Shard(dim), Replicate() or Partial(op)")
