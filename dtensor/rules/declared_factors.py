"""Declared factors: the factors of a call by a notation, with reductions of absent factors and kernels of factors in brackets.

``notation`` parses the text, ``bind_pattern`` matches it with the tensors of a call, and this module adds what the rule declares.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from ..base.caches import memoize
from ..base.tensor_tree import tensor_leaves
from ..comm.local_reduce import reduction_identity
from ..layout.splits import Split
from ..placement import Monoid, Partial
from .bind_pattern import BoundPattern, Sizes, bind_pattern, notation_label
from .call import Call
from .kernel_context import At, KernelContext, run_operator
from .notation import Pattern, Term, is_group
from .rule import Declaration, Factors, Kernel, Reduced, has_zero_identity


@dataclass(frozen=True, slots=True)
class by(Declaration):  # noqa: N801  used like a function
    """The entry of a table for the value of an argument: ``by("reduction", {1: "avg", 2: "sum"})``. None if it has no entry."""

    argument: str
    table: Mapping[Any, Any]

    def __call__(self, call: Call) -> Any:
        return self.table.get(call.get(self.argument))


@dataclass(frozen=True, slots=True)
class fitting(Declaration):  # noqa: N801
    """The first of several patterns with as many dims as the tensors of a call."""

    patterns: tuple[Pattern, ...]

    def __call__(self, call: Call) -> Pattern | None:
        return next((pattern for pattern in self.patterns if bind_pattern(pattern, call, {}) is not None), None)

    @property
    def table(self) -> Mapping[Any, Pattern]:
        return dict(enumerate(self.patterns))


ReduceChoice = Reduced | Callable[[Call], Reduced | None] | None  # "R": results are replicated


@dataclass(frozen=True, slots=True)
class DeclaredFactors(Declaration):
    """Factors by a notation, and what a rule declares of single factors.

    Attributes:
        pattern: a pattern, or a function that chooses one for a call.
        reductions: the reduction of results that lack a letter (a group, a selected dim; "*": any). Letters without an entry must
            be unsharded. Means of uneven blocks are weighted.
        refuses_nothing: the operator refuses to reduce empty blocks by a reduction with an identity other than 0. The identity
            replaces their results.
        kernel: the kernel of the factors in brackets, or a function that returns one or None for a call.
        kernels: kernels of other letters.
        sizes: sizes of letters that are no dim of an operand: an argument name, or a function of the call.
    """

    pattern: Pattern | by | fitting
    reductions: Mapping[str, ReduceChoice] = field(default_factory=dict)
    refuses_nothing: bool = False
    kernel: Kernel | Callable[[Call], Kernel | None] | None = None
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    sizes: Sizes = field(default_factory=dict)

    def __call__(self, call: Call) -> Factors | None:
        """Return the factors of a call by its pattern, or by the first of several that matches. None if none matches."""
        if isinstance(self.pattern, fitting):
            return next(
                (found for pattern in self.pattern.patterns if (found := self._match_factors(pattern, call)) is not None), None
            )
        pattern = self.pattern if isinstance(self.pattern, Pattern) else self.pattern(call)
        return None if pattern is None else self._match_factors(pattern, call)

    def _match_factors(self, pattern: Pattern, call: Call) -> Factors | None:
        """Match one pattern with a call, and return the factors with reductions and kernels. None if it does not match."""
        empty_results = _unrequested_results(pattern, call)
        factors = bind_pattern(pattern, call, self.sizes, empty_results)
        if factors is None:
            return None
        reduced, kernels = self._reductions_and_kernels(call, factors) if self.reductions else ({}, {})
        unsharded = factors.match.unsharded
        kernel = self.kernel(call) if callable(self.kernel) else self.kernel
        if kernel is not None:
            kernels.update(dict.fromkeys(sorted(unsharded), kernel))
            unsharded = frozenset()
        if self.kernels:
            kernels.update({name: kernel for name, kernel in self.kernels.items() if name in factors.sizes})
        if empty_results:  # empty results lack every factor, and are equal on all ranks
            kernels = {name: Kernel(run_operator) for name in factors.sizes if name not in unsharded} | kernels
        results = factors.results if not empty_results else _insert_empty_results(factors, empty_results, call)
        return Factors(factors.operands, results, factors.sizes, unsharded, reduced, factors.match.additive, kernels)

    def _reductions_and_kernels(self, call: Call, factors: BoundPattern) -> tuple[dict[str, Reduced], dict[str, Kernel]]:
        """Return the reduction of each factor that a result lacks, and kernels in its place if blocks are empty or uneven."""
        reduced: dict[str, Reduced] = {}
        for name in factors.summed:
            choice = self.reductions.get(notation_label(name), self.reductions.get("*"))
            op = choice(call) if callable(choice) and not isinstance(choice, Monoid) else choice
            if op is not None:
                reduced[name] = op
        kernels: dict[str, Kernel] = {}
        if self.refuses_nothing and any(factors.sizes[name] == 0 for name in reduced):
            return {}, kernels  # the operator itself refuses the empty operand
        empty = self.refuses_nothing and _has_block(call, lambda split: 0 in split.sizes)
        uneven = "avg" in reduced.values() and _has_block(call, lambda split: not split.is_even)
        for name, op in tuple(reduced.items()):
            if (empty and not has_zero_identity(op)) or (uneven and op == "avg"):
                kernels[name] = WEIGHTED_MEANS if op == "avg" else make_identity_kernel(op)
                del reduced[name]
        return reduced, kernels

    def __str__(self) -> str:
        return (
            self.pattern.text if isinstance(self.pattern, Pattern) else " or ".join(p.text for p in self.pattern.table.values())
        )


# --- results that were not requested: empty tensors of shape (0,) ------------------------------------------------------
def _unrequested_results(pattern: Pattern, call: Call) -> frozenset[int]:
    """Return the positions of results of shape (0,) that the pattern does not describe: the call does not request them."""
    empty = [i for i, meta in enumerate(call.results) if meta is not None and meta.shape == (0,)]
    return (
        frozenset([i for i in empty if i < len(pattern.results) and _must_be_unrequested(pattern.results[i])])
        if empty
        else NO_EMPTY_RESULTS
    )


NO_EMPTY_RESULTS: frozenset[int] = frozenset()


def _must_be_unrequested(term: Term) -> bool:
    """Return True if a requested result of this term cannot have the shape (0,): it has no dim, or several."""
    own = sum(not is_group(dim) for dim in term.dims)
    return own > 1 or (own == 0 and not term.dims)


def _insert_empty_results(factors: BoundPattern, empty: frozenset[int], call: Call) -> Any:
    """Return the dims of all results: those of the pattern, and one dim without factors for each result in ``empty``."""
    following = iter(factors.results)
    positions = [i for i, meta in enumerate(call.results) if meta is not None or i in empty]
    return tuple([((),) if i in empty else next(following) for i in positions])


# --- blocks that the operator does not reduce by itself ----------------------------------------------------------------
def _has_block(call: Call, holds: Callable[[Split], bool]) -> bool:
    return any(split is not None and holds(split) for layout in call.operands for split in layout.splits)


@dataclass(frozen=True, slots=True)
class WeightedMeans(Declaration):
    """A kernel: the mean of each block times the block's fraction of the global tensor. Their sum is the mean. An empty block has
    weight 0."""

    def __call__(self, at: KernelContext, *args: Any, **kwargs: Any) -> Any:
        """Return the mean of each rank's block, weighted by the block's share of all elements."""
        op = at.call.func.overloadpacket
        result = at.results[0]
        assert result is not None

        def weighted_mean(here: At, args: Any, kwargs: Any) -> torch.Tensor:
            """Compute the mean of one rank's block times the block's share of all elements; zeros for an empty block."""
            fraction = math.prod(block_fractions(at, here.member))
            if not fraction:
                return torch.zeros(result.shape_of(here.member), dtype=result.dtype, device=device_of(args))
            value: torch.Tensor = op(*args, **kwargs)
            return (value.to(torch.promote_types(value.dtype, torch.float32)) * fraction).to(value.dtype)

        return at.map(weighted_mean, args, kwargs)


def block_fractions(at: KernelContext, member: int) -> list[float]:
    """Return, for each sharded factor of a kernel, the fraction of its positions in a rank's block.

    It is 1 if the factor has size 0, so that a mean is still NaN.
    """
    mesh, fractions = at.call.mesh, []
    for split in at.splits.values():
        own, total = split.sizes[mesh.index_over(split.mesh_dims, mesh.coordinates[member])], sum(split.sizes)
        fractions.append(own / total if total else 1.0)
    return fractions


def device_of(args: Any) -> torch.device:
    """Return the device of the first tensor among the arguments."""
    device: torch.device = tensor_leaves(args)[0].device
    return device


@dataclass(frozen=True, slots=True)
class OperatorOrIdentity(Declaration):
    """A kernel: the operator on blocks with elements, and the identities of the reductions in place of its results on empty
    blocks."""

    ops: tuple[Any, ...]

    def __call__(self, at: KernelContext, *args: Any, **kwargs: Any) -> Any:
        """Reduce each rank's block, and return identities of the reductions on ranks with an empty block."""
        op = at.call.func.overloadpacket
        layouts = [layout for layout in at.results if layout is not None]

        def reduce_block(here: At, args: Any, kwargs: Any) -> Any:
            """Run the operator on one rank's block. For an empty block return the identities of the reductions."""
            blocks = tensor_leaves(args)
            if all(block.numel() for block in blocks):
                return op(*args, **kwargs)
            shapes = [layout.shape_of(here.member) for layout in layouts]
            empty = [blocks[0].new_empty(shape, dtype=layout.dtype) for shape, layout in zip(shapes, layouts, strict=True)]
            values = tuple(reduction_identity(op, like) for op, like in zip(self.ops, empty, strict=True))
            return values if len(values) > 1 else values[0]

        return at.map(reduce_block, args, kwargs)


WEIGHTED_MEANS = Kernel(WeightedMeans(), Partial("sum"), joint=True, order_invariant=True)


@memoize(256)
def make_identity_kernel(op: Reduced) -> Kernel:
    """Return a kernel that runs the operator on blocks with elements, and returns the identity of ``op`` for empty ones."""
    ops = op if isinstance(op, tuple) else (op,)
    lacking = tuple(Partial(each) for each in ops)
    return Kernel(OperatorOrIdentity(ops), lacking if len(lacking) > 1 else lacking[0], joint=True, order_invariant=True)
