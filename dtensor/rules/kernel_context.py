"""What a kernel sees while it runs: its locals' place in the whole, and collectives over the mesh dims that split a factor.

A kernel is the straight-line program of one rank: what it computes before a collective, the collective, what it computes after.
Its locals are tensors, in one process a ``PerRank`` of them, on which functions run rank by rank, which costs something each:
``on_each_rank`` makes one of several, and of what asks for shapes; ``at.map`` also tells a rank's place.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import product
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from ..base.recorder_hooks import ACTIVE, site
from ..base.symbolic_sizes import sizes
from ..base.torch_internals import assert_async, nn_functions
from ..comm import communicator_of
from ..comm.backend_base import Reduction
from ..layout.layout import Layout
from ..layout.splits import Split, offsets_of
from ..placement import Monoid
from ..ranks.per_rank import ALONE, count_ranks, over_ranks, shards_of
from .call import Call
from .rule import Dims

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class At:
    """One member's place: its index in the group, and its block of the sharded factor."""

    member: int
    index: int
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Measured:
    """A result of a kernel whose size the data decide.

    Attributes:
        split: how its first dim is cut.
        stride: of the whole.
        names: of columns of positions, how each dim is cut that they are positions of, if those of a rank are in its block.
    """

    local: Any
    split: Split
    stride: tuple[int, ...]
    names: tuple[Split | None, ...] = ()


@dataclass(frozen=True, slots=True)
class KernelContext:
    """Collectives over ``mesh_dims`` (those that split the kernel's factor, outermost first) and block positions.

    Attributes:
        call: the global call.
        operands, results: layouts of the locals that the kernel gets and gives.
        mesh_dims: the mesh dims that split the factor (all factors, where a joint kernel has several); () when it is not split.
        sizes: the factor's block sizes along the group.
        splits: how each factor of the kernel that is sharded is cut.
    """

    call: Call
    operands: tuple[Layout, ...]
    results: tuple[Layout | None, ...]
    mesh_dims: tuple[int, ...]
    sizes: tuple[int, ...]
    splits: Mapping[str, Split] = field(default_factory=dict)
    places: dict[int, At] = field(default_factory=dict, compare=False)  # of members, once asked for
    known: dict[Any, Any] = field(default_factory=dict, compare=False)  # what a kernel works out once

    @property
    def comm(self) -> Any:
        return communicator_of(self.call.mesh)

    @property
    def total(self) -> int:
        """Global size of the factor."""
        return sum(self.sizes)

    def all_reduce(self, x: Any, op: str | Monoid, factors: tuple[str, ...] | None = None, *, spent: bool = False) -> Any:
        """The reduction of ``x`` over the group, on every rank; of a joint kernel over the ranks that split ``factors``.

        ``spent``: ``x`` is row-major memory of the kernel's own, which it needs no more, and which may be that of the result.
        """
        key = factors, op, x.dtype
        bound: Reduction | None = self.known.get(key)
        if bound is None or ACTIVE:
            mesh_dims = self.mesh_dims if factors is None else self._dims_of(factors)
            if factors is not None and not mesh_dims:
                return x
            if ACTIVE:  # a recorder knows the method
                return self.comm.all_reduce(x, mesh_dims, op).wait()
            bound = self.known[key] = self.comm.bind_all_reduce(mesh_dims, op, x.dtype)
        return (bound.taking if spent and bound.taking is not None else bound.run)(x).wait()

    def _dims_of(self, factors: Iterable[str]) -> tuple[int, ...]:
        """The mesh dims that split these factors."""
        return tuple([mesh_dim for name in factors for mesh_dim in self.splits[name].mesh_dims])

    def all_gather(self, x: Any, shape_of: Callable[[int], tuple[int, ...]] | None = None) -> list[Any]:
        """Every group position's ``x``; ``shape_of(member)`` tells their shapes, ``None`` if those of one group are alike."""
        if shape_of is None:
            shapes = dict(zip(self.comm.held, [sizes(own.shape) for own in shards_of(x)], strict=False))
            alike = next(iter(shapes.values()))  # where only one rank's is here, the others asked about are of its group
            shape_of = lambda member: shapes.get(member, alike)  # noqa: E731
        return list(self.comm.all_gather(x, self.mesh_dims, shape_of).wait())

    def once(self, find: Callable[[Call], T]) -> T:
        """``find(call)``, of a function that tells something of a call: worked out once for all runs of the plan."""
        if find not in self.known:
            self.known[find] = find(self.call)
        found: T = self.known[find]
        return found

    def counts(self, total: int) -> list[int]:
        """How many of ``total`` elements, the product of all its factors' sizes and others', each group position has."""
        key = "counts", total
        if key not in self.known:
            self.known[key] = self._counts(total)
        return cast("list[int]", self.known[key])

    def _counts(self, total: int) -> list[int]:
        shares = [math.prod(sizes) for sizes in product(*(split.sizes for split in self.splits.values()))]
        return [total * share // max(1, sum(shares)) for share in shares]

    def held(self, name: str, dim: int, member: int) -> range:
        """The positions along a dim of argument ``name`` that a member's block holds."""
        found: range | None = self.known.get(key := (name, dim, member))
        if found is None:
            layout, coordinate = self.operands[self.call.names.index(name)], self.call.mesh.coordinates[member]
            start = layout.local_offset(coordinate)[dim]
            found = self.known[key] = range(start, start + layout.local_shape(coordinate)[dim])
        return found

    def named(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The kernel's arguments by name, where overloads have them in different places."""
        return dict(zip(self.once(argument_names), args, strict=False)) | kwargs

    def dtype(self, result: int) -> torch.dtype:
        """The dtype of a result that is a tensor."""
        layout = self.results[result]
        assert layout is not None
        return layout.dtype

    def map(self, fn: Callable[..., Any], *args: Any) -> Any:
        """``fn(at, *args)`` once per rank held in this process, with that rank's locals."""
        if (alone := self.known.get("alone")) is not None:  # a process's own rank
            return fn(alone, *args)
        if not self.comm.holds_all and self.comm.held:
            self.known["alone"] = self.at(*self.comm.held)
        return self.comm.map(lambda member, *locals_: fn(self.at(member), *locals_), *args)

    def at(self, member: int) -> At:
        """One member's place in the group (of no use to a joint kernel, whose group splits several factors)."""
        found = self.places.get(member)
        if found is None:
            found = self.places[member] = self._place(member)
        return found

    def _place(self, member: int) -> At:
        if not self.sizes:
            return At(member, 0, 0, 0)
        index = self.call.mesh.index_over(self.mesh_dims, self.call.mesh.coordinates[member])
        return At(member, index, offsets_of(self.sizes)[index], self.sizes[index])


def argument_names(call: Call) -> tuple[str, ...]:
    """The names of all arguments, in order."""
    return tuple([argument.name for argument in call.func._schema.arguments])


# --- what kernels of several families say -------------------------------------------------------------------------------
def on_each_rank(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` as the ``local`` of a rule, though it reads shapes: it gets one rank's plain tensors at a time."""

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if ALONE.issuperset(map(type, args)) and not (kwargs and not ALONE.issuperset(map(type, kwargs.values()))):
            return function(*args, **kwargs)
        return over_ranks(function, args, kwargs) if count_ranks((args, kwargs)) else function(*args, **kwargs)

    setattr(run, "of_one_rank", function)  # noqa: B010  no attribute of functions that types know
    return run


def asked_for(call: Call, results: Sequence[Dims]) -> tuple[Dims, ...]:
    """Those of ``results`` that ``output_mask`` asks for; the others are None, which not all of torch's meta kernels tell."""
    wanted = call["output_mask"]
    call.results = tuple(meta if asked else None for meta, asked in zip(call.results, wanted, strict=True))
    return tuple(dims for dims, asked in zip(results, wanted, strict=True) if asked)


def wide(x: Any) -> Any:
    """``x`` in the dtype that sums are computed in: at least float32."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def integers_on(device: torch.device, numbers: Sequence[int]) -> Tensor:
    """Known numbers on a device. Made on the CPU and sent: a device that only pretends to compute makes none of a list."""
    return torch.tensor(numbers, dtype=torch.int64, device="cpu").to(device)


def statistics_bytes(call: Call, count: int) -> int:
    """Bytes of that many numbers about the first operand, which are not kept in half precision."""
    return count * torch.promote_types(call.operands[0].dtype, torch.float32).itemsize


@site  # values decide, so each replay looks at those that it has
def check_range(index: Tensor, legal: range, but: int | None, refused: Callable[[int], Exception]) -> None:
    """Raises ``refused(element)`` if an element of ``index`` is neither in ``legal`` nor ``but``; on a device it is asserted."""
    seen = index.device.type == "cpu" and type(index) is Tensor  # nobody can look into a FakeTensor
    if index.dtype is not torch.int64:  # a bound that is no number of the dtype is none
        legal = range(legal.start, min(legal.stop, torch.iinfo(index.dtype).max + 1))
    if index.is_meta or (seen and torch.equal(index, index.clamp(legal.start, legal.stop - 1))):
        return
    fits = (index >= legal.start).logical_and_(index <= legal.stop - 1)
    if but is not None:
        fits = fits.logical_or_(index == but)
    if not seen:
        assert_async(fits.all())
    elif not fits.all():
        raise refused(int(index[~fits][0]))


def densely(op: Callable[..., Any]) -> Callable[..., Any]:
    """``op``, which takes its operands for contiguous without a look, on contiguous blocks."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return op(*[arg.contiguous() if isinstance(arg, Tensor) else arg for arg in args], **kwargs)

    return run


def plain_op(at: KernelContext, *args: Any, **kwargs: Any) -> Any:
    """The operator itself: a kernel only in that its results without the factor are whole instead of terms."""
    return at.once(without_out)(*args, **kwargs)


def functional_of(name: str) -> Any:
    """The operator that gives a new tensor, whatever variant is named; torch's own function takes half the time to call."""
    name = name.removeprefix("aten::").removesuffix("_")
    return getattr(torch, name, None) or getattr(nn_functions, name, None) or getattr(torch.ops.aten, name)


def without_out(call: Call) -> Any:
    """The operator as kernels call it, which get no ``out=``."""
    func = call.func
    return func.overloadpacket if any(argument.is_out for argument in func._schema.arguments) else func
