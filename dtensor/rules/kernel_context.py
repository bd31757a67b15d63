"""Kernel context: the positions of local tensors in the global ones, and collectives over the mesh dims that shard a factor.

A kernel is the straight-line program of one rank: computation, a collective, computation. Its local tensors are tensors, or in
one process a ``PerRank``, on which each torch function runs rank by rank, at some cost. ``on_each_rank`` turns several functions
into one, also those that read shapes. ``at.map`` also passes the position of the rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import product
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..base.recorder_hooks import ACTIVE_RECORDERS, recorded_op
from ..base.symbolic_sizes import hashable_sizes
from ..base.torch_internals import assert_async, nn_functions
from ..comm.communicator import BoundReduction
from ..comm.map_ranks import communicator_of
from ..layout.layout import Layout
from ..layout.splits import Split, offsets_of
from ..placement import Monoid
from ..ranks.per_rank import TYPES_WITHOUT_RANKS, count_ranks, over_ranks, shards_of
from .call import Call
from .rule import Dims

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class At:
    """The position of one rank: its index in the group, and its block of the sharded factor."""

    member: int
    index: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class DataDependentResult:
    """A kernel result with a size that data decide.

    Attributes:
        split: the split of its first dim.
        stride: the global strides.
        names: for each column of positions the split of the dim that it indexes, if each rank's positions are in its own block.
    """

    local: Any
    split: Split
    stride: tuple[int, ...]
    names: tuple[Split | None, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelContext:
    """Collectives over ``mesh_dims`` (those that shard the kernel's factor, outermost first) and positions of blocks.

    Attributes:
        call: the global call.
        operands, results: layouts of the kernel's local operands and results.
        mesh_dims: the mesh dims that shard the factor (all factors of a joint kernel); () if it is not sharded.
        sizes: the factor's block sizes along the group.
        splits: the split of each sharded factor of the kernel.
    """

    call: Call
    operands: tuple[Layout, ...]
    results: tuple[Layout | None, ...]
    mesh_dims: tuple[int, ...]
    sizes: tuple[int, ...]
    splits: Mapping[str, Split] = field(default_factory=dict)
    places: dict[int, At] = field(default_factory=dict, compare=False)  # by rank, filled at first use
    cache: dict[Any, Any] = field(default_factory=dict, compare=False)  # what a kernel computes once

    @property
    def comm(self) -> Any:
        return communicator_of(self.call.mesh)

    @property
    def total(self) -> int:
        """Global size of the factor."""
        return sum(self.sizes)

    def all_reduce(self, x: Any, op: str | Monoid, factors: tuple[str, ...] | None = None, *, spent: bool = False) -> Any:
        """All-reduce ``x`` over the ranks that shard the kernel's factor. In a joint kernel: those that shard ``factors``.

        ``spent``: ``x`` is row-major memory of the kernel that it needs no more, and that the result may reuse.
        """
        key = factors, op, x.dtype
        bound_reduction: BoundReduction | None = self.cache.get(key)
        if bound_reduction is None or ACTIVE_RECORDERS:
            mesh_dims = self.mesh_dims
            if factors is not None:
                mesh_dims = tuple([mesh_dim for name in factors for mesh_dim in self.splits[name].mesh_dims])
                if not mesh_dims:
                    return x
            if ACTIVE_RECORDERS:  # a recorder records the method
                return self.comm.all_reduce(x, mesh_dims, op).wait()
            bound_reduction = self.cache[key] = self.comm.bind_all_reduce(mesh_dims, op, x.dtype)
        return ((bound_reduction.run_donated if spent else None) or bound_reduction.run)(x).wait()

    def all_gather(self, x: Any, shape_of: Callable[[int], tuple[int, ...]] | None = None) -> list[Any]:
        """All-gather ``x`` over the ranks that shard the kernel's factor; return one tensor for each group position.

        ``shape_of(member)``: their shapes, if they differ in a group.
        """
        if shape_of is None:
            shapes = dict(zip(self.comm.held, [hashable_sizes(own.shape) for own in shards_of(x)], strict=False))
            alike = next(iter(shapes.values()))  # a process that has one rank only asks for ranks of its group
            shape_of = lambda member: shapes.get(member, alike)  # noqa: E731
        return list(self.comm.all_gather(x, self.mesh_dims, shape_of).wait())

    def compute_once(self, find: Callable[[Call], T]) -> T:
        """Return ``find(call)``. It is computed in the first run of a dispatch plan and cached for its later runs."""
        if find not in self.cache:
            self.cache[find] = find(self.call)
        value: T = self.cache[find]
        return value

    def block_counts(self, total: int) -> list[int]:
        """Return how many of a result's ``total`` global elements the block of each group position has."""
        key = "counts", total
        if key not in self.cache:
            block_sizes = [math.prod(sizes) for sizes in product(*(split.sizes for split in self.splits.values()))]
            self.cache[key] = [total * share // max(1, sum(block_sizes)) for share in block_sizes]
        return cast("list[int]", self.cache[key])

    def block_range(self, name: str, dim: int, member: int) -> range:
        """Return the range of global positions that a rank's block of argument ``name`` has along a dim."""
        positions: range | None = self.cache.get(key := (name, dim, member))
        if positions is None:
            layout, coordinate = self.operands[self.call.names.index(name)], self.call.mesh.coordinates[member]
            start = layout.local_offset(coordinate)[dim]
            positions = self.cache[key] = range(start, start + layout.local_shape(coordinate)[dim])
        return positions

    def arguments_by_name(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return a dict of the kernel's arguments by schema name, because overloads differ in their order."""
        return dict(zip(self.compute_once(schema_argument_names), args, strict=False)) | kwargs

    def dtype(self, result: int) -> torch.dtype:
        """Return the dtype of the result at position ``result``, which is a tensor."""
        layout = self.results[result]
        assert layout is not None
        return layout.dtype

    def map(self, fn: Callable[..., Any], *args: Any) -> Any:
        """Call ``fn(at, *args)`` for each rank of this process, with its position and its local tensors; join the results."""
        if (own_position := self.cache.get("alone")) is not None:  # the only rank of this process
            return fn(own_position, *args)
        if not self.comm.holds_all and self.comm.held:
            self.cache["alone"] = self.position_of(*self.comm.held)
        return self.comm.map(lambda member, *locals_: fn(self.position_of(member), *locals_), *args)

    def position_of(self, member: int) -> At:
        """Return one rank's index in the group and its block of the sharded factor (cached).

        A joint kernel shards several factors and cannot use it.
        """
        position = self.places.get(member)
        if position is None:
            mesh = self.call.mesh
            index = mesh.index_over(self.mesh_dims, mesh.coordinates[member]) if self.sizes else 0
            offset, size = (offsets_of(self.sizes)[index], self.sizes[index]) if self.sizes else (0, 0)
            position = self.places[member] = At(member, index, offset, size)
        return position


def schema_argument_names(call: Call) -> tuple[str, ...]:
    """Return the names of the operator's arguments in the order of the schema."""
    return tuple([argument.name for argument in call.func._schema.arguments])


# --- functions for kernels of several families --------------------------------------------------------------------------
def on_each_rank(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a function that reads shapes, for use as ``local`` of a rule: it is called once per rank, with plain tensors."""

    @wraps(function)
    def run_on_each_rank(*args: Any, **kwargs: Any) -> Any:
        """Call the function for each rank of this process if an argument is a ``PerRank``, else once."""
        if TYPES_WITHOUT_RANKS.issuperset(map(type, args)) and not (
            kwargs and not TYPES_WITHOUT_RANKS.issuperset(map(type, kwargs.values()))
        ):
            return function(*args, **kwargs)
        return over_ranks(function, args, kwargs) if count_ranks((args, kwargs)) else function(*args, **kwargs)

    setattr(run_on_each_rank, "of_one_rank", function)  # noqa: B010  functions have no such attribute in their type
    return run_on_each_rank


def drop_unrequested_results(call: Call, results: Sequence[Dims]) -> tuple[Dims, ...]:
    """Return the dims of the results that ``output_mask`` requests, and set ``call.results`` of the others to None.

    Not all meta kernels of torch do so.
    """
    requested = call["output_mask"]
    call.results = tuple(meta if is_requested else None for meta, is_requested in zip(call.results, requested, strict=True))
    return tuple(dims for dims, is_requested in zip(results, requested, strict=True) if is_requested)


def to_sum_dtype(x: Any) -> Any:
    """Convert ``x`` to the dtype in which sums are computed: half precision to float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def make_index_tensor(device: torch.device, numbers: Sequence[int]) -> Tensor:
    """Make an int64 tensor of known numbers on a device: on the CPU first, because fake devices cannot convert a list."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device)


def statistics_bytes(call: Call, count: int) -> int:
    """Return the bytes of ``count`` statistics of the first operand, which are kept in float32 or wider."""
    return count * torch.promote_types(call.operands[0].dtype, torch.float32).itemsize


@recorded_op  # values decide, so each replay checks its own
def check_range(index: Tensor, legal: range, ignored: int | None, make_error: Callable[[int], Exception]) -> None:
    """Raise ``make_error(element)`` for an index that is neither in ``legal`` nor ``ignored``. On a device, assert it."""
    has_values = index.device.type == "cpu" and type(index) is Tensor  # a FakeTensor has no values
    if index.dtype is not torch.int64:  # a bound outside of the dtype does not apply
        legal = range(legal.start, min(legal.stop, torch.iinfo(index.dtype).max + 1))
    if index.is_meta or (has_values and torch.equal(index, index.clamp(legal.start, legal.stop - 1))):
        return
    is_legal = (index >= legal.start).logical_and_(index <= legal.stop - 1)
    if ignored is not None:
        is_legal = is_legal.logical_or_(index == ignored)
    if not has_values:
        assert_async(is_legal.all())
    elif not is_legal.all():
        raise make_error(int(index[~is_legal][0]))


def on_contiguous(op: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap an operator that wrongly assumes contiguous operands: it is called with contiguous copies of its tensors."""

    def run_contiguous(*args: Any, **kwargs: Any) -> Any:
        return op(*[arg.contiguous() if isinstance(arg, Tensor) else arg for arg in args], **kwargs)

    return run_contiguous


def run_operator(at: KernelContext, *args: Any, **kwargs: Any) -> Any:
    """Run the operator on local tensors as a kernel, so that results without the factor are replicated instead of partial."""
    return at.compute_once(functional_overload)(*args, **kwargs)


def functional_operator(name: str) -> Any:
    """Return the out-of-place function for any variant's name: torch's own, which is faster to call, else the aten operator."""
    name = name.removeprefix("aten::").removesuffix("_")
    return getattr(torch, name, None) or getattr(nn_functions, name, None) or getattr(torch.ops.aten, name)


def functional_overload(call: Call) -> Any:
    """Return the function for a kernel to call on blocks: the overload of the call, or its packet for an ``out=`` overload."""
    func = call.func
    return func.overloadpacket if any(argument.is_out for argument in func._schema.arguments) else func
