"""Factors by declaration: a notation, what shards of a reduced factor leave, and kernels for factors that must be whole."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..base.caches import remembered
from ..base.tensor_tree import tensors
from ..comm.local_reduce import identity
from ..layout.splits import Split
from ..placement import Monoid, Partial
from .bind_notation import Bound, Sizes, bound
from .call import Call
from .kernel_context import At, KernelContext, plain_op
from .notation import Pattern, Term, is_group
from .pattern_match import label_of
from .rule import Factors, Kernel, Reduced, Word, starts_at_zero


@dataclass(frozen=True, slots=True)
class by(Word):  # noqa: N801  a word, used like a function
    """What a table has for the value of an argument of the call: ``by("reduction", {1: "avg", 2: "sum"})``; None if nothing."""

    argument: str
    table: Mapping[Any, Any]

    def __call__(self, call: Call) -> Any:
        return self.table.get(call.get(self.argument))


@dataclass(frozen=True, slots=True)
class fitting(Word):  # noqa: N801
    """The first of several patterns that have as many dims as the tensors of a call."""

    patterns: tuple[Pattern, ...]

    def __call__(self, call: Call) -> Pattern | None:
        return next((pattern for pattern in self.patterns if bound(pattern, call, {}) is not None), None)

    @property
    def table(self) -> Mapping[Any, Pattern]:
        return dict(enumerate(self.patterns))


Left = Reduced | Callable[[Call], Reduced | None] | None  # "R": nothing is left, results are whole and the same


@dataclass(frozen=True, slots=True)
class Notation(Word):
    """Factors by notation.

    Attributes:
        pattern: one, or what chooses one for a call.
        left: what shards of a letter (a group, a picked dim; "*": of any) leave of results that lack it; where nothing is said it
            must be whole. Means of uneven blocks weigh by their shares of the whole.
        refuses_nothing: the operator does not reduce blocks without elements by what has another identity than 0: they stand for
            it.
        kernel: what computes with blocks of the factors that the notation has in brackets (None for a call: nothing does).
        kernels: kernels of other letters.
        sizes: sizes of letters that are no dim of an operand: the argument that says it, or a function of the call.
    """

    pattern: Pattern | by | fitting
    left: Mapping[str, Left] = field(default_factory=dict)
    refuses_nothing: bool = False
    kernel: Kernel | Callable[[Call], Kernel | None] | None = None
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=dict)

    def __call__(self, call: Call) -> Factors | None:
        if isinstance(self.pattern, fitting):
            return next((found for pattern in self.pattern.patterns if (found := self._under(pattern, call)) is not None), None)
        pattern = self.pattern if isinstance(self.pattern, Pattern) else self.pattern(call)
        return None if pattern is None else self._under(pattern, call)

    def _under(self, pattern: Pattern, call: Call) -> Factors | None:
        markers = _markers(pattern, call)
        factors = bound(pattern, call, self.sizes, markers)
        if factors is None:
            return None
        reduced, kernels = self._reduced(call, factors) if self.left else ({}, {})
        whole = factors.recipe.whole
        kernel = self.kernel(call) if callable(self.kernel) else self.kernel
        if kernel is not None:
            kernels.update(dict.fromkeys(sorted(whole), kernel))
            whole = frozenset()
        if self.kernels:
            kernels.update({name: kernel for name, kernel in self.kernels.items() if name in factors.sizes})
        if markers:  # they lack every factor, and are the same on all ranks
            kernels = {name: Kernel(plain_op) for name in factors.sizes if name not in whole} | kernels
        results = factors.results if not markers else _with_markers(factors, markers, call)
        return Factors(factors.operands, results, factors.sizes, whole, reduced, factors.recipe.additive, kernels)

    def _reduced(self, call: Call, factors: Bound) -> tuple[dict[str, Reduced], dict[str, Kernel]]:
        """What shards leave, and kernels for blocks that the operator does not combine."""
        reduced: dict[str, Reduced] = {}
        for name in factors.summed:
            left = self.left.get(label_of(name), self.left.get("*"))
            op = left(call) if callable(left) and not isinstance(left, Monoid) else left
            if op is not None:
                reduced[name] = op
        kernels: dict[str, Kernel] = {}
        if self.refuses_nothing and any(factors.sizes[name] == 0 for name in reduced):
            return {}, kernels  # the operator itself says that there is nothing
        empty = self.refuses_nothing and _some_block(call, lambda split: 0 in split.sizes)
        uneven = "avg" in reduced.values() and _some_block(call, lambda split: not split.even)
        for name, op in tuple(reduced.items()):
            if (empty and not starts_at_zero(op)) or (uneven and op == "avg"):
                kernels[name] = SHARES if op == "avg" else identity_of_nothing(op)
                del reduced[name]
        return reduced, kernels

    def own(self) -> tuple[Any, ...]:
        given = (*self.left.values(), self.kernel, *self.kernels.values(), *self.sizes.values())
        return tuple(item for item in given if (callable(item) and not isinstance(item, Monoid)) or isinstance(item, Kernel))

    def __str__(self) -> str:
        return (
            self.pattern.text if isinstance(self.pattern, Pattern) else " or ".join(p.text for p in self.pattern.table.values())
        )


# --- results that were not asked for: empty markers of shape (0,) ------------------------------------------------------
def _markers(pattern: Pattern, call: Call) -> frozenset[int]:
    empty = [i for i, meta in enumerate(call.results) if meta is not None and meta.shape == (0,)]
    return frozenset([i for i in empty if i < len(pattern.results) and _is_left_out(pattern.results[i])]) if empty else NONE


NONE: frozenset[int] = frozenset()


def _is_left_out(term: Term) -> bool:
    own = sum(not is_group(dim) for dim in term.dims)
    return own > 1 or (own == 0 and not term.dims)


def _with_markers(factors: Bound, markers: frozenset[int], call: Call) -> Any:
    following = iter(factors.results)
    places = [i for i, meta in enumerate(call.results) if meta is not None or i in markers]
    return tuple([((),) if i in markers else next(following) for i in places])


# --- blocks that the operator does not combine by itself ---------------------------------------------------------------
def _some_block(call: Call, are: Callable[[Split], bool]) -> bool:
    return any(split is not None and are(split) for layout in call.operands for split in layout.splits)


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
                return torch.zeros(result.shape_of(here.member), dtype=result.dtype, device=device_of(args))
            value: torch.Tensor = op(*args, **kwargs)
            return (value.to(torch.promote_types(value.dtype, torch.float32)) * share).to(value.dtype)

        return at.map(one, args, kwargs)


def share_of(at: KernelContext, member: int) -> list[float]:
    """Which part of each factor of the kernel a member's block is: of nothing each is all, so that its mean is still NaN."""
    mesh, shares = at.call.mesh, []
    for split in at.splits.values():
        own, total = split.sizes[mesh.index_over(split.mesh_dims, mesh.coordinates[member])], sum(split.sizes)
        shares.append(own / total if total else 1.0)
    return shares


def device_of(args: Any) -> torch.device:
    """The device of the first tensor among arguments."""
    found: torch.device = tensors(args)[0].device
    return found


@dataclass(frozen=True, slots=True)
class OrIdentity(Word):
    """The operator on blocks that have elements; the identities of reductions in the place of its results of others."""

    ops: tuple[Any, ...]

    def __call__(self, at: KernelContext, *args: Any, **kwargs: Any) -> Any:
        op = at.call.func.overloadpacket
        layouts = [layout for layout in at.results if layout is not None]

        def one(here: At, args: Any, kwargs: Any) -> Any:
            blocks = tensors(args)
            if all(block.numel() for block in blocks):
                return op(*args, **kwargs)
            shapes = [layout.shape_of(here.member) for layout in layouts]
            made = [blocks[0].new_empty(shape, dtype=layout.dtype) for shape, layout in zip(shapes, layouts, strict=True)]
            values = tuple(identity(op, like) for op, like in zip(self.ops, made, strict=True))
            return values if len(values) > 1 else values[0]

        return at.map(one, args, kwargs)


SHARES = Kernel(Shares(), Partial("sum"), joint=True, orderless=True)


@remembered(256)
def identity_of_nothing(op: Reduced) -> Kernel:
    """The kernel of a reduction whose operator refuses blocks without elements."""
    ops = op if isinstance(op, tuple) else (op,)
    lacking = tuple(Partial(each) for each in ops)
    return Kernel(OrIdentity(ops), lacking if len(lacking) > 1 else lacking[0], joint=True, orderless=True)
