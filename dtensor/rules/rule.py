"""What a rule is: data that says which placements an operation keeps, on ONE mesh dim.

``Factors`` is a rule applied to one call: every tensor dim written as a product of factors. Sharding a factor shards every
tensor dim it leads; a factor missing from a result leaves it ``Partial``. ``candidates`` turns that and the rule's partial rows
into :class:`Row` s, the ways in which the local op gives the right blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from ..base.caches import remembered
from ..comm.local_reduce import identity
from ..errors import RuleError
from ..layout.layout import Layout
from ..layout.splits import Split
from ..placement import REDUCE_OPS, Monoid, Partial, Replicate
from .call import Call, Meta
from .disjoint_partial import Parted

Dims = tuple[tuple[str, ...], ...]  # per tensor dim its factors, major first; () cannot be sharded
Shapes = tuple[tuple[int, ...], ...]


class Word:
    """What the language makes of a declaration: called like the function that it stands for."""

    __slots__ = ()

    def own(self) -> tuple[Any, ...]:
        """Kernels and functions that were handed to it."""
        return ()


@dataclass(frozen=True, slots=True)
class Along:
    """On this mesh dim the tensor is sharded along a factor."""

    factor: str


Spec = Along | Replicate | Partial
R = Replicate()


@dataclass(frozen=True, slots=True)
class Kernel:
    """How to compute when a factor that the plain local op needs whole is sharded.

    Args:
        run: ``run(at, *args, **kwargs)`` gets the op's arguments with tensors replaced by locals, and a ``KernelContext``; it
            returns locals.
        lacking: the spec of the results that do not have the factor, one for all or one for each result.
        collectives: how many ``run`` issues, the usual number where the data decide; ``nbytes``: that a rank gives to all of them
            (it receives as many where two share the factor). Prices, which ``tests/rules/test_kernel_costs.py`` compares.
        joint: ``run`` also computes with several of its factors sharded, by different mesh dims.
        orderless: a block may be any slices along the factor.
    """

    run: Callable[..., Any]
    lacking: Spec | tuple[Spec, ...] = R
    collectives: int = 0
    nbytes: Callable[[Call], int] = lambda call: 0
    joint: bool = False
    orderless: bool = False


Reduced = str | Monoid | tuple[str | Monoid, ...]


@dataclass(frozen=True, slots=True)
class Factors:
    """A rule applied to one call.

    Attributes:
        operands, results: the factors of each tensor dim.
        sizes: global size of each factor.
        whole: factors that every rank needs whole.
        reduced: factor -> reduce op of the results that lack it ("R": they are whole, and the same), or one for each result.
        additive: operands that are added once, so they are Partial wherever a factor is summed.
        kernels: factor -> kernel to run instead of the op when this factor is sharded.
        rows: the rows of the factors, where they do not follow from their positions (a user's table of placements).
        windows: ("operand" or "result", position, factor) -> the positions of the factor that this tensor holds, where not all.
        groups: factor -> the factor that counts its groups, and the argument that says which group each position belongs to.
        orderless: factors whose blocks may be any slices, also for what computes instead of the op.

    Names that begin with "@" are readings of their tensor dim, each the whole of it ("@0" with what is inside it, "@0/2").
    """

    operands: tuple[Dims, ...]
    results: tuple[Dims, ...]
    sizes: Mapping[str, int]
    whole: frozenset[str] = frozenset()
    reduced: Mapping[str, Reduced] = field(default_factory=dict)
    additive: frozenset[int] = frozenset()
    kernels: Mapping[str, Kernel] = field(default_factory=dict)
    rows: tuple[Row, ...] = ()
    windows: Mapping[tuple[str, int, str], range] = field(default_factory=dict)
    groups: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    orderless: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Row:
    """One way to place operands and results on one mesh dim so that the local op is right (``parted``: for such operands)."""

    operands: tuple[Spec, ...]
    results: tuple[Spec, ...]
    factor: str | None = None
    kernel: Kernel | None = None
    needs: tuple[tuple[int, str], ...] = ()  # operands that must be "finite", or "nonzero"
    parted: Parted | None = None


Partials = tuple[str | Row, ...]


@dataclass(frozen=True, slots=True)
class Choice:
    """A full choice for all mesh dims: how each factor is cut (in units of the factor)."""

    call: Call
    factors: Factors
    rows: tuple[Row, ...]
    splits: Mapping[str, Split]

    def sizes(self, factor: str) -> tuple[int, ...]:
        """Block sizes of a factor (one block if it is not sharded)."""
        split = self.splits.get(factor)
        return (self.factors.sizes[factor],) if split is None else split.sizes


class LocalView:
    """The blocks of one member, for ``local_args``: shapes and offsets of operands and results, per tensor dim."""

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
        factors: the factors of a call, or None where the rule does not apply (the op then decomposes or gathers).
        partials: how partial operands pass through (see :func:`parse_partial`; a :class:`Row` says what a text cannot), or a
            function of the call giving the rows.
        when: a predicate on a full choice, true only where the local ops give the right blocks.
        nonempty: letters, groups and picked dims of the notation whose blocks must all have elements, ``"*"`` of all of them,
            ``"reduced"`` of what shards are combined of, unless by sums and norms: the operator refuses to have none.
        local_args: arguments to replace for one member, ``local_args(call, view) -> {name: value}``; ``local`` may have others.
        local: a function to call instead of the op, same arguments.
        run: the same with a ``KernelContext`` first, whatever row is chosen (random ops: every block of one global draw).
        answer: the value itself, from layouts alone, for operations that return no tensor (``NotImplemented``: the data decide).
        absent: the Python value on ranks outside of the mesh, for operations that return no tensor.
        metas: what the results look like, for operators whose own meta kernel is missing or refuses what they take.
        shapes: the shapes of the results where they follow from those of the operands, none of whose sizes is 0 or 1 (None: the
            operator is asked, as it is where this is not given). Where operands are dense in memory, so are the results.
        decompose: the operation in terms of others, with its arguments; it is called with DTensors and comes before ``factors``,
            for the calls that ``decomposes`` picks (default all).
        measured: result shapes depend on data; ``factors`` has none, and what the local op or kernel gives is whole on all ranks,
            but what a kernel gives as :class:`~dtensor.rules.kernel_context.Measured`.
        writes: arguments that a call writes to though its schema does not say so (running statistics).
        plain: arguments that may be plain tensors, the same on all ranks, beside DTensors (tables of indices, class weights).
        floats_matter: the plan depends on the value of Python floats (an output size, say): they enter the cache key.
        as_laid_out: the operator chooses, refuses or reads memory by its operands' strides: blocks get the order of the global.
        flops: of the products of a whole call, where the factors do not show them (see ``flops.py``).
        kind: the verb that made it, for the docs.
        samples: arguments to verify it with, as whoever declared it gave them.
    """

    factors: Callable[[Call], Factors | None]
    partials: Partials | Callable[[Call], Partials] = ()
    when: Callable[[Choice], bool] | None = None
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

    def allows(self, choice: Choice) -> bool:
        """Whether the local ops give the right blocks: a mean of means is the mean where all blocks have one size."""
        reduced = choice.factors.reduced
        for name, split in choice.splits.items():
            if self.nonempty and 0 in split.sizes and self._needs_elements(name, reduced):
                return False
            if reduced.get(name) == "avg" and not split.even:
                return False
        return self.when is None or self.when(choice)

    def _needs_elements(self, factor: str, reduced: Mapping[str, Any]) -> bool:
        match self.nonempty:
            case "*":
                return True
            case "reduced":
                return factor in reduced and not starts_at_zero(reduced[factor])
            case _:
                return factor.partition(".")[0] in labels(self.nonempty)


def starts_at_zero(op: Any) -> bool:
    """Whether 0 is the reduction of nothing, which is what operators give that refuse other ones."""
    return not isinstance(op, tuple) and not identity(op, torch.empty((), device="cpu")).item()


def labels(words: str) -> frozenset[str]:
    """The letters, groups and picked dims that ``words`` name.

    >>> sorted(labels("m s* @dim"))
    ['dim', 'm', 's']
    """
    return frozenset(word.strip("@!*.") for word in words.split() if word != "*")


def named(prefix: str, shape: Sequence[int]) -> tuple[Dims, dict[str, int]]:
    """A factor for each dim, and their sizes."""
    sizes = {f"{prefix}{d}": size for d, size in enumerate(shape)}
    return tuple([(name,) for name in sizes]), sizes


def own_factors(call: Call) -> tuple[Dims, dict[str, int]]:
    """One factor for each dim of operand 0, and their sizes."""
    return named("d", call.shape(0))


def uncut(call: Call) -> Factors:
    """Every rank needs all of it."""
    results = tuple([((),) * len(meta.shape) for meta in call.results if meta is not None])
    return Factors(tuple([((),) * len(layout.shape) for layout in call.operands]), results, {})


def stands(dims: Dims, factor: str) -> int | None:
    """The tensor dim that ``factor`` is part of; None if it stands nowhere."""
    return next((d for d, names in enumerate(dims) if factor in names), None)


def alone(dims: Dims, names: tuple[str, ...]) -> int | None:
    """The tensor dim that is these factors and no others."""
    return dims.index(names) if names in dims else None


def candidates(factors: Factors, partials: Partials) -> list[Row]:
    """All rows, the ones that shard first (declaration order breaks ties)."""
    rows = [*factors.rows]
    names = dict.fromkeys(name for dims in (*factors.operands, *factors.results) for dim in dims for name in dim)
    for name in names:
        if name[0] != "@" and name not in factors.whole and (row := _row_of(factors, name)) is not None:
            rows.append(row)
    for text in partials:
        row = text if isinstance(text, Row) else parse_partial(text, len(factors.operands), len(factors.results))
        if row is not None:
            rows.append(row)
    rows.append(Row((R,) * len(factors.operands), (R,) * len(factors.results)))
    return rows


def _row_of(factors: Factors, name: str) -> Row | None:
    operand_dims = [stands(dims, name) for dims in factors.operands]
    result_dims = [stands(dims, name) for dims in factors.results]
    if sum(name in dim for dims in factors.operands for dim in dims) != sum(d is not None for d in operand_dims):
        return None  # twice in one operand, as on a diagonal
    kernel = factors.kernels.get(name)
    op = factors.reduced.get(name)
    lacking: Spec | tuple[Spec, ...] = kernel.lacking if kernel is not None else _left(op)
    if kernel is None and op is None and any(d is None for d in result_dims):
        return None
    summed = all(d is None for d in result_dims)  # elsewhere each block of the result needs the operand whole
    added: Spec = lacking if summed and isinstance(lacking, Partial) else R
    each = lacking if isinstance(lacking, tuple) else (lacking,) * len(result_dims)
    operands = tuple((added if i in factors.additive else R) if d is None else Along(name) for i, d in enumerate(operand_dims))
    if not any(isinstance(spec, Along) for spec in operands):
        return None
    results = tuple(spec if d is None else Along(name) for d, spec in zip(result_dims, each, strict=True))
    return Row(operands, results, name, kernel)


def _left(op: Reduced | None) -> Spec | tuple[Spec, ...]:
    """What shards of a factor leave of results that lack it."""
    if isinstance(op, tuple):
        return tuple(R if each == "R" else Partial(each) for each in op)
    return R if op is None or op == "R" else Partial(op)


@remembered(4096)
def parse_partial(text: str, operand_count: int, result_count: int) -> Row | None:
    """The row that ``"sum,R -> sum"`` denotes; ``"sum... -> sum"`` repeats for all operands; None if the counts do not fit.

    ``finite`` and ``nonzero`` are ``R`` for operands that are known to be so, whatever their values: integers and bools are
    finite, numbers are looked at. ``0 * inf`` is NaN and so is ``inf - inf``: terms do not pass a factor that may be infinite,
    nor a divisor that may be zero.

    >>> parse_partial("sum... -> sum", 3, 1).operands
    (Partial(sum), Partial(sum), Partial(sum))
    """
    left, arrow, right = text.partition("->")
    if not arrow:
        raise RuleError(f'partial strategy {text!r} has no "->"; write for example "sum,R -> sum"')
    operands = _specs(left, operand_count)
    results = _specs(right, result_count)
    if operands is None or results is None:
        return None
    needs = [(i, word) for i, word in enumerate(map(str.strip, left.split(","))) if word in KNOWN]
    return Row(operands, results, needs=tuple(needs))


def _specs(text: str, count: int) -> tuple[Spec, ...] | None:
    words = [word.strip() for word in text.split(",")] if text.strip() else []
    if len(words) == 1 and words[0].endswith("..."):
        words = [words[0].removesuffix("...")] * count
    return None if len(words) != count else tuple(R if word == "R" or word in KNOWN else Partial(word) for word in words)


KNOWN = ("finite", "nonzero")
ANY_PARTIAL = tuple(f"{op}... -> {op}..." for op in REDUCE_OPS)
LINEAR_PARTIAL = ("sum... -> sum...", "avg... -> avg...")
