"""Factors by declaration: a notation, what shards of a reduced factor leave, and kernels for factors that must be whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from ..base.nested import tensors
from ..comm.fold import identity
from ..placement import Monoid, Partial
from .binding import Reduction, Sizes, bind, label_of
from .call import Call
from .kernels import At, KernelContext, plain_op
from .notation import Pattern, Term, is_group
from .rule import Factors, Kernel, Word


@dataclass(frozen=True, slots=True)
class by(Word):  # noqa: N801  a word, used like a function
    """What a table has for the value of an argument of the call: ``by("reduction", {1: "avg", 2: "sum"})``; None if nothing."""

    argument: str
    table: Mapping[Any, Any]

    def __call__(self, call: Call) -> Any:
        return self.table.get(call.get(self.argument))


Reduce = Reduction | Callable[[Call], Reduction | None] | None


@dataclass(frozen=True, slots=True)
class Notation(Word):
    """Factors by notation.

    Attributes:
        pattern: one, or what chooses one for a call.
        reduce: what shards of a factor leave of results that lack it; None: they must be whole. Means of uneven blocks weigh by
            their shares of the whole.
        sums: the letters, groups and picked dims that this holds for; None: all.
        refuses_nothing: the operator does not reduce blocks without elements: they stand for the identity of ``reduce``.
        kernel: what computes with blocks of the factors that the notation has in brackets (None for a call: nothing does).
        kernels: kernels of other letters.
        sizes: sizes of letters that are no dim of an operand: the argument that says it, or a function of the call.
    """

    pattern: Pattern | by
    reduce: Reduce = None
    sums: frozenset[str] | None = None
    refuses_nothing: bool = False
    kernel: Kernel | Callable[[Call], Kernel | None] | None = None
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=dict)

    def __call__(self, call: Call) -> Factors | None:
        pattern = self.pattern if isinstance(self.pattern, Pattern) else self.pattern(call)
        op = self.reduce(call) if callable(self.reduce) and not isinstance(self.reduce, Monoid) else self.reduce
        markers = _markers(pattern, call)
        if markers:
            call = replace(call, results=tuple(None if i in markers else meta for i, meta in enumerate(call.results)))
        factors = None if pattern is None else bind(pattern, call, op, self.sizes)
        if factors is None:
            return None
        reduced, whole, kernels = dict(factors.reduced), factors.whole, dict[str, Kernel]()
        if self.sums is not None:
            reduced = {name: op for name, op in reduced.items() if label_of(name) in self.sums}
        reduced, whole, kernels = self._reduced(call, factors, reduced, op)
        kernel = self.kernel(call) if callable(self.kernel) else self.kernel
        if kernel is not None:
            kernels.update(dict.fromkeys(sorted(factors.whole), kernel))
            whole = whole - factors.whole
        kernels.update({name: kernel for name, kernel in self.kernels.items() if name in factors.sizes})
        if markers:  # they lack every factor, and are the same on all ranks
            kernels = {name: Kernel(plain_op) for name in factors.sizes if name not in whole} | kernels
        results = factors.results if not markers else _with_markers(factors, markers, call)
        return Factors(factors.operands, results, factors.sizes, whole, reduced, factors.additive, kernels)

    def _reduced(
        self, call: Call, factors: Factors, reduced: dict[str, Reduction], op: Reduction | None
    ) -> tuple[dict[str, Reduction], frozenset[str], dict[str, Kernel]]:
        """What is reduced as it stands, what must be whole, and kernels for blocks that the operator does not combine."""
        if not reduced or op is None or self.kernel is not None:
            return reduced, factors.whole, {}
        if self.refuses_nothing and op in ("max", "min"):
            if any(factors.sizes[name] == 0 for name in reduced):
                return {}, factors.whole.union(reduced), {}  # the operator itself says that there is none
            if any(split is not None and 0 in split.sizes for layout in call.operands for split in layout.splits):
                stand_in = Kernel(IDENTITIES[op], Partial(op), joint=True)
                return {}, factors.whole, dict.fromkeys(reduced, stand_in)
        if op == "avg" and _uneven(call, factors, reduced):
            return {}, factors.whole, dict.fromkeys(reduced, SHARES)
        return reduced, factors.whole, {}

    def own(self) -> tuple[Any, ...]:
        given = (self.reduce, self.kernel, *self.kernels.values(), *(size for size in self.sizes.values() if callable(size)))
        return tuple(item for item in given if item is not None and not isinstance(item, (str, Monoid)))

    def __str__(self) -> str:
        return (
            self.pattern.text if isinstance(self.pattern, Pattern) else " or ".join(p.text for p in self.pattern.table.values())
        )


# --- results that were not asked for: empty markers of shape (0,) ------------------------------------------------------
def _markers(pattern: Any, call: Call) -> frozenset[int]:
    terms = pattern.results if pattern is not None else ()
    pairs = enumerate(zip(terms, call.results, strict=False))
    return frozenset(i for i, (term, meta) in pairs if meta is not None and meta.shape == (0,) and _is_left_out(term))


def _is_left_out(term: Term) -> bool:
    own = sum(not is_group(dim) for dim in term.dims)
    return own > 1 or (own == 0 and not term.dims)


def _with_markers(factors: Factors, markers: frozenset[int], call: Call) -> Any:
    following = iter(factors.results)
    places = [i for i, meta in enumerate(call.results) if meta is not None or i in markers]
    return tuple([((),) if i in markers else next(following) for i in places])


# --- blocks that the operator does not combine by itself ---------------------------------------------------------------
def _uneven(call: Call, factors: Factors, names: Mapping[str, Any]) -> bool:
    for dims, layout in zip(factors.operands, call.operands, strict=True):
        for dim, split in zip(dims, layout.splits, strict=True):
            if split is not None and not split.even and not names.keys().isdisjoint(dim):
                return True
    return False


@dataclass(frozen=True, slots=True)
class Shares(Word):
    """The mean of each block times its share of the whole: terms of the mean. Nothing has no share."""

    def __call__(self, at: KernelContext, *args: Any, **kwargs: Any) -> Any:
        op = at.call.func.overloadpacket
        result = at.results[0]
        assert result is not None

        def one(here: At, args: Any, kwargs: Any) -> torch.Tensor:
            share = math.prod(share_of(at, here.member))
            if not share:
                return torch.zeros(
                    result.local_shape(at.call.mesh.coordinates[here.member]), dtype=result.dtype, device=device_of(args)
                )
            value: torch.Tensor = op(*args, **kwargs)
            return (value.to(torch.promote_types(value.dtype, torch.float32)) * share).to(value.dtype)

        return at.map(one, args, kwargs)


def share_of(at: KernelContext, member: int) -> list[float]:
    """Which part of each factor of the kernel a member's block is."""
    coordinate, shape = at.call.mesh.coordinates[member], at.call.mesh.shape
    shares = []
    for split in at.splits.values():
        index = 0
        for mesh_dim in split.mesh_dims:
            index = index * shape[mesh_dim] + coordinate[mesh_dim]
        shares.append(split.sizes[index] / max(1, sum(split.sizes)))
    return shares


def device_of(args: Any) -> torch.device:
    """The device of the first tensor among arguments."""
    found: torch.device = tensors(args)[0].device
    return found


@dataclass(frozen=True, slots=True)
class OrIdentity(Word):
    """The operator on blocks that have elements; the identity of a reduction in the place of others."""

    op: str

    def __call__(self, at: KernelContext, *args: Any, **kwargs: Any) -> Any:
        op = at.call.func.overloadpacket
        result = at.results[0]
        assert result is not None

        def one(here: At, args: Any, kwargs: Any) -> torch.Tensor:
            block = tensors(args)[0]
            if block.numel():
                value: torch.Tensor = op(*args, **kwargs)
                return value
            return identity(
                self.op, block.new_empty(result.local_shape(at.call.mesh.coordinates[here.member]), dtype=result.dtype)
            )

        return at.map(one, args, kwargs)


SHARES = Kernel(Shares(), Partial("sum"), joint=True)
IDENTITIES = {"max": OrIdentity("max"), "min": OrIdentity("min")}
