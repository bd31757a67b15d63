"""Rules: data that states which placements an operator keeps, on ONE mesh dim.

``Factors`` is a rule applied to one call: every tensor dim is a product of factors. Sharding a factor shards every tensor dim
that it leads. A factor that a result lacks leaves the result ``Partial``. ``strategies_of_factors`` makes the strategies from
the factors and the rule's partial strategies: the ways in which the local operator computes the right blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..base.caches import memoize
from ..comm.local_reduce import reduction_identity
from ..errors import RuleError
from ..layout.layout import Layout
from ..layout.splits import Split
from ..placement import REDUCE_OPS, Monoid, Partial, Replicate
from .call import Call, Meta
from .disjoint_partial import DisjointSplit

Dims = tuple[tuple[str, ...], ...]  # for each tensor dim its factors, major first; () cannot be sharded
Shapes = tuple[tuple[int, ...], ...]


class Declaration:
    """A callable object that a declaration function makes: data instead of a closure, so that its parts can be inspected."""

    __slots__ = ()


@dataclass(frozen=True, slots=True)
class Along:
    """A tensor that is sharded along a factor on this mesh dim."""

    factor: str


Spec = Along | Replicate | Partial
R = Replicate()


@dataclass(frozen=True, slots=True)
class Kernel:
    """A function with collectives that computes while a factor is sharded that the operator needs unsharded.

    Args:
        run: ``run(at, *args, **kwargs)`` gets a ``KernelContext`` and the operator's arguments with local tensors. It returns
            local tensors.
        lacking: the spec of the results that lack the factor, one for all or one for each result.
        collectives: how many collectives ``run`` issues. If data decide, the usual number.
        nbytes: bytes that a rank sends in all of them (it receives as many if two ranks share the factor). Both are costs, which
            ``tests/rules/test_kernel_costs.py`` compares.
        joint: ``run`` also computes with several of its factors sharded by different mesh dims.
        order_invariant: a block may consist of any slices along the factor.
    """

    run: Callable[..., Any]
    lacking: Spec | tuple[Spec, ...] = R
    collectives: int = 0
    nbytes: Callable[[Call], int] = lambda call: 0
    joint: bool = False
    order_invariant: bool = False


Reduced = str | Monoid | tuple[str | Monoid, ...]


@dataclass(frozen=True, slots=True)
class Factors:
    """A rule applied to one call.

    Attributes:
        operands, results: the factors of each tensor dim.
        sizes: global size of each factor.
        unsharded: factors that must be unsharded.
        reduced: factor -> reduce op of the results that lack it, or one for each result. "R": these results are replicated.
        additive: operands that are added once, so they are Partial wherever a factor is summed.
        kernels: factor -> kernel that runs instead of the operator if the factor is sharded.
        listed_strategies: strategies that do not follow from the positions of factors (a user's table of placements).
        windows: ("operand" or "result", position, factor) -> the positions of the factor that this tensor has, if not all.
        groups: factor -> the factor that counts its groups, and the argument that states the group of each position.
        order_invariant: factors with blocks that may be any slices, also for what computes instead of the operator.

    Names that begin with "@" are readings of a tensor dim. Each reading is the complete dim ("@0" with its inner part "@0/2").
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    unsharded: frozenset[str] = frozenset()
    reduced: Mapping[str, Reduced] = field(default_factory=dict)
    additive: frozenset[int] = frozenset()
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    listed_strategies: tuple[Strategy, ...] = ()
    windows: Mapping[tuple[str, int, str], range] = field(default_factory=dict)
    groups: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    order_invariant: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Strategy:
    """A strategy: placements of operands and results on one mesh dim with which the local operator is right.

    ``disjoint_split``: the disjoint rows of the operands that it is for.
    """

    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    factor: str | None = None
    kernel: Kernel | None = None
    needs: tuple[tuple[int, str], ...] = ()  # operands that must be "finite" or "nonzero"
    disjoint_split: DisjointSplit | None = None


Partials = tuple[str | Strategy, ...]


@dataclass(frozen=True, slots=True)
class StrategyChoice:
    """A strategy for each mesh dim, with the resulting splits of factors."""

    call: Call
    factors: Factors
    strategies: tuple[Strategy, ...]
    splits: Mapping[str, Split]

    def sizes(self, factor: str) -> tuple[int, ...]:
        """Return the block sizes of a factor (one block if it is not sharded)."""
        split = self.splits.get(factor)
        return (self.factors.sizes[factor],) if split is None else split.sizes


class LocalView:
    """The blocks of one rank, for ``local_args``: shapes and offsets of operands and results, for each tensor dim."""

    def __init__(self, operands: Sequence[Layout], results: Sequence[Layout], coordinate: tuple[int, ...]) -> None:
        self._layouts = operands, results
        self._coordinate = coordinate

    @cached_property
    def operands(self) -> tuple[tuple[int, ...], ...]:
        return tuple([layout.local_shape(self._coordinate) for layout in self._layouts[0]])

    @cached_property
    def results(self) -> tuple[tuple[int, ...], ...]:
        return tuple([layout.local_shape(self._coordinate) for layout in self._layouts[1]])

    @cached_property
    def operand_offsets(self) -> tuple[tuple[int, ...], ...]:
        return tuple([layout.local_offset(self._coordinate) for layout in self._layouts[0]])

    @cached_property
    def result_offsets(self) -> tuple[tuple[int, ...], ...]:
        return tuple([layout.local_offset(self._coordinate) for layout in self._layouts[1]])


@dataclass(frozen=True, slots=True)
class Rule:
    """A sharding rule.

    Attributes:
        factors: a function from a call to its factors, or to None if the rule does not apply. The operator then decomposes or is
            gathered.
        partials: strategies for partial operands (see :func:`parse_partial_strategy`), or a function of the call that returns
            them. A strategy object states what a text cannot.
        when: a predicate on a complete choice. It is true only if the local operators compute the right blocks.
        nonempty: letters, groups and selected dims of the notation with blocks that must have elements, because the operator
            refuses to have none. ``"*"``: all of them. ``"reduced"``: those that are reduced, unless by sums and norms.
        local_args: ``local_args(call, view) -> {name: value}``: arguments to replace for one rank. ``local`` may have other
            arguments.
        local: a function to call instead of the operator, with the same arguments.
        run: the same with a ``KernelContext`` first, for all strategies (random operators: a block of one global random tensor).
        answer: a function from the call to the value of an operator that returns no tensor. ``NotImplemented``: data decide.
        absent: the Python value on ranks outside of the mesh, for operators that return no tensor.
        metas: metadata of the results, for operators with a missing or too strict meta kernel.
        shapes: shapes of the results, if they follow from operand shapes without sizes 0 and 1. None: the operator is run on meta
            tensors. If operands are dense in memory, so are the results.
        decompose: the operator in terms of others, called with DTensors. It comes before ``factors``, for the calls that
            ``decomposes`` selects (default all).
        measured: result shapes depend on data. Factors have no results. Results are replicated, except
            :class:`~dtensor.rules.kernel_context.DataDependentResult` ones of a kernel.
        writes: arguments that a call writes to though its schema does not state it (running statistics).
        plain: arguments that may be plain tensors, equal on all ranks, beside DTensors (tables of indices, class weights).
        floats_matter: the plan depends on the values of Python floats (an output size), so they are part of the cache key.
        as_laid_out: the operator depends on the strides of its operands, so blocks get the memory order of the global tensor.
        flops: FLOPs of the products of a whole call, if the factors do not show them (see ``flops.py``).
        kind: the declaration function that made the rule, for the docs.
        samples: arguments that verify the rule, given by its author.
    """

    factors: Callable[[Call], Factors | None]
    partials: Partials | Callable[[Call], Partials] = ()
    when: Callable[[StrategyChoice], bool] | None = None
    nonempty: str = ""
    local_args: Callable[[Call, LocalView], dict[str, Any]] | None = None
    local: Callable[..., Any] | None = None
    run: Callable[..., Any] | None = None
    answer: Callable[[Call], Any] | None = None
    absent: Any = None
    decompose: Callable[..., Any] | None = None
    metas: Callable[[Call], tuple[Meta, ...]] | None = None
    shapes: Callable[[Call], Shapes | None] | None = None
    decomposes: Callable[[Call], bool] | None = None
    measured: bool = False
    writes: Callable[[Call], tuple[str, ...]] | None = None
    plain: tuple[str, ...] = ()
    floats_matter: bool = False
    as_laid_out: bool = False
    flops: Callable[[Call], float] | None = None
    kind: str = "rule"
    samples: tuple[Any, ...] = ()

    def allows(self, choice: StrategyChoice) -> bool:
        """Return True if the chosen blocks give right results: none is refused as empty, no mean is uneven, ``when`` is true.

        A mean of means is the mean only if all blocks have one size.
        """
        reduced = choice.factors.reduced
        for name, split in choice.splits.items():
            if self.nonempty and 0 in split.sizes and self._needs_elements(name, reduced):
                return False
            if reduced.get(name) == "avg" and not split.is_even:
                return False
        return self.when is None or self.when(choice)

    def _needs_elements(self, factor: str, reduced: Mapping[str, Any]) -> bool:
        """Return True if the operator refuses empty blocks along this factor, as the attribute ``nonempty`` states."""
        match self.nonempty:
            case "*":
                return True
            case "reduced":
                return factor in reduced and not has_zero_identity(reduced[factor])
            case _:
                return factor.partition(".")[0] in parse_labels(self.nonempty)


def has_zero_identity(op: Any) -> bool:
    """Return True if ``op`` is one reduction with identity 0, such as a sum or a norm.

    Operators that refuse other reductions of no elements return 0 for these.
    """
    return not isinstance(op, tuple) and not reduction_identity(op, torch.empty((), device="cpu")).item()


def parse_labels(words: str) -> frozenset[str]:
    """Return the labels in a text of factors, groups and selected dims, without their marks.

    >>> sorted(parse_labels("m s* @dim"))
    ['dim', 'm', 's']
    """
    return frozenset(word.strip("@!*.") for word in words.split() if word != "*")


def make_factor_per_dim(prefix: str, shape: Sequence[int]) -> tuple[Dims, dict[str, int]]:
    """Return one new factor for each dim of a shape, named prefix and dim number (``d0``), and the size of each factor."""
    sizes = {f"{prefix}{d}": size for d, size in enumerate(shape)}
    return tuple([(name,) for name in sizes]), sizes


def factors_of_first_operand(call: Call) -> tuple[Dims, dict[str, int]]:
    """Return one factor for each dim of operand 0 (``d0``, ``d1`` ...), and the size of each factor."""
    return make_factor_per_dim("d", call.shape(0))


def make_unsharded_factors(call: Call) -> Factors:
    """Return factors that shard nothing: every rank computes the operator on unsharded operands."""
    results = tuple([((),) * len(meta.shape) for meta in call.results if meta is not None])
    return Factors(tuple([((),) * len(layout.shape) for layout in call.operands]), results, {})


def find_dim(dims: Dims, factor: str) -> int | None:
    """Return the tensor dim that has ``factor``, or None."""
    return next((d for d, names in enumerate(dims) if factor in names), None)


def find_exact_dim(dims: Dims, names: tuple[str, ...]) -> int | None:
    """Return the tensor dim that consists of exactly these factors, or None."""
    return dims.index(names) if names in dims else None


def strategies_of_factors(factors: Factors, partials: Partials) -> list[Strategy]:
    """Return all strategies on one mesh dim: listed, one for each factor, for partial operands, and replication.

    The order of declaration breaks ties.
    """
    strategies = [*factors.listed_strategies]
    names = dict.fromkeys(name for dims in (*factors.operands, *factors.results) for dim in dims for name in dim)
    for name in names:
        if name[0] != "@" and name not in factors.unsharded and (strategy := _strategy_of_factor(factors, name)) is not None:
            strategies.append(strategy)
    for text in partials:
        strategy = (
            text if isinstance(text, Strategy) else parse_partial_strategy(text, len(factors.operands), len(factors.results))
        )
        if strategy is not None:
            strategies.append(strategy)
    strategies.append(Strategy((R,) * len(factors.operands), (R,) * len(factors.results)))
    return strategies


def is_order_invariant(rule: Rule, factors: Factors, factor: str) -> bool:
    """Return True if blocks along a factor may be any slices of the dim, because no computation depends on where they begin.

    This holds for a single factor without a kernel that needs the position, with at most a reduction over it.
    ``Factors.order_invariant`` states it where ``rule.run`` computes the blocks.
    """
    if rule.run is not None or factor in factors.order_invariant:
        return factor in factors.order_invariant
    if factors.listed_strategies or any(key[2] == factor for key in factors.windows):
        return False
    strategy = next((each for each in strategies_of_factors(factors, ()) if each.factor == factor), None)
    if strategy is None or (strategy.kernel is not None and not strategy.kernel.order_invariant):
        return False
    return not any(isinstance(spec, Partial) and isinstance(spec.reduce_op, Monoid) for spec in strategy.results)


def _strategy_of_factor(factors: Factors, name: str) -> Strategy | None:
    """Return the strategy that shards every tensor with a factor along it, or None if the local operator would be wrong."""
    operand_dims = [find_dim(dims, name) for dims in factors.operands]
    result_dims = [find_dim(dims, name) for dims in factors.results]
    if sum(name in dim for dims in factors.operands for dim in dims) != sum(d is not None for d in operand_dims):
        return None  # twice in one operand, as on a diagonal
    kernel = factors.kernels.get(name)
    op = factors.reduced.get(name)
    missing: Spec | tuple[Spec, ...] = kernel.lacking if kernel is not None else _missing_factor_spec(op)
    if kernel is None and op is None and any(d is None for d in result_dims):
        return None
    is_reduced = all(d is None for d in result_dims)  # otherwise each block of the result needs the unsharded operand
    additive_spec: Spec = missing if is_reduced and isinstance(missing, Partial) else R
    each = missing if isinstance(missing, tuple) else (missing,) * len(result_dims)
    operands = tuple(
        (additive_spec if i in factors.additive else R) if d is None else Along(name) for i, d in enumerate(operand_dims)
    )
    if not any(isinstance(spec, Along) for spec in operands):
        return None
    results = tuple(spec if d is None else Along(name) for d, spec in zip(result_dims, each, strict=True))
    return Strategy(operands, results, name, kernel)


def _missing_factor_spec(op: Reduced | None) -> Spec | tuple[Spec, ...]:
    """Return the placement of results that lack a sharded factor: partial by ``op``, or replicated if that is None or "R"."""
    if isinstance(op, tuple):
        return tuple(R if each == "R" else Partial(each) for each in op)
    return R if op is None or op == "R" else Partial(op)


@memoize(4096)
def parse_partial_strategy(text: str, operand_count: int, result_count: int) -> Strategy | None:
    """Parse a partial strategy such as ``"sum,R -> sum"``; None if it does not fit the counts of operands and results.

    ``"sum... -> sum"`` repeats for all operands. ``finite`` and ``nonzero`` are ``R`` for operands that are known to be so.
    Integers and bools are finite, numbers are checked. ``0 * inf`` is NaN and so is ``inf - inf``: a partial value does not pass
    a factor that may be infinite, nor a divisor that may be zero.

    >>> parse_partial_strategy("sum... -> sum", 3, 1).operands
    (Partial(sum), Partial(sum), Partial(sum))
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f'partial strategy {text!r} has no "->"; write for example "sum,R -> sum"')
    operands = _parse_specs(left, operand_count)
    results = _parse_specs(right, result_count)
    if operands is None or results is None:
        return None
    needs = [(i, word) for i, word in enumerate(map(str.strip, left.split(","))) if word in KNOWN_VALUES]
    return Strategy(operands, results, needs=tuple(needs))


def _parse_specs(text: str, count: int) -> tuple[Spec, ...] | None:
    """Parse one side of a partial strategy (``"sum, R"``) into placements; None if their number is not ``count``."""
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if len(words) == 1 and words[0].endswith("..."):
        words = [words[0].removesuffix("...")] * count
    return None if len(words) != count else tuple(R if word == "R" or word in KNOWN_VALUES else Partial(word) for word in words)


KNOWN_VALUES = ("finite", "nonzero")
ANY_PARTIAL = tuple(f"{op}... -> {op}..." for op in REDUCE_OPS)
LINEAR_PARTIAL = ("sum... -> sum...", "avg... -> avg...")
