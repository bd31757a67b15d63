"""Indexing rules: declarations of operators that read or write elements by index.

- ``index_read("take", FLAT)`` is ``result[i] = self[index[i]]``.
- ``index_write("index_add", ROWS, adds)`` is ``self[.., index[i], ..] += source[.., i, ..]``.

The dims of the indices replace the indexed dims, in the result of a read and in the source of a write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from ...placement import REDUCE_OPS, Monoid, Partial
from ..call import Call
from ..partial_rules import one_of
from ..registry import register
from ..rule import (
    Along,
    Declaration,
    Dims,
    Factors,
    Kernel,
    R,
    Rule,
    Strategy,
    StrategyChoice,
    factors_of_first_operand,
    make_factor_per_dim,
    make_unsharded_factors,
)
from .sharded_index_exchange import read_by_exchange, write_by_exchange
from .sharded_index_local import Address, index_dims_position, read_local_masked, run_local, write_local_masked

CombineOp = Callable[[Call], str | None]

CONSTANT_REDUCTIONS = ("avg", "max", "min")  # reductions of a constant that are the constant
# (reduction of partial destinations, of partial sources)
REPLACE_PARTIALS = (*((op, op) for op in REDUCE_OPS), *(pair for op in CONSTANT_REDUCTIONS for pair in ((op, "R"), ("R", op))))
ADD_PARTIALS = (("sum", "sum"), ("avg", "avg"), ("avg", "R"), ("R", "avg"))


def index_read(names: str, address: Address, op: Any = None, **options: Any) -> Rule:
    """Declare operators that read the elements of operand 0 at given indices.

    ``op`` reads from a block, if the operator itself does not take an index for each dim.
    """
    exchange = Kernel(partial(read_by_exchange, address, op), collectives=1, nbytes=_result_share_bytes)
    kernel = Kernel(partial(read_local_masked, address, op), lacking=Partial("sum"), joint=True)
    local = Kernel(partial(run_local, address, op, None))
    factors = IndexingFactors(address, kernel, exchange_kernel=exchange, local_kernel=local)
    return register(
        names, Rule(factors, one_of(address.operand), when=IndexingCondition(factors, allows_zero_fill), kind="read", **options)
    )


def index_write(
    names: str, address: Address, combined: CombineOp, op: Any = None, *, unsharded: str = "", masks: Any = None, **options: Any
) -> Rule:
    """Declare operators that write to the elements of operand 0 at given indices.

    Args:
        combined: a function of the call that returns the reduction of written and existing values, so that ranks may divide the
            indices. None: values are replaced. ``""``: only one rank may combine.
        op: writes to a block, if the operator itself does not take an index for each dim.
        unsharded: further factors that must be unsharded.
        masks: a function that returns the factors if a mask selects the elements.
    """
    kernel = Kernel(partial(write_local_masked, address, op), joint=True)
    exchange = Kernel(partial(write_by_exchange, address, op), collectives=1, nbytes=_source_share_bytes)
    local = Kernel(partial(run_local, address, op, 0))
    factors = IndexingFactors(address, kernel, combined, frozenset(unsharded.split()), masks, exchange, local)
    options.setdefault("partials", WritePartials(combined))
    options["when"] = IndexingCondition(factors, options.get("when"))
    return register(names, Rule(factors, kind="write", **options))


# --- reductions of written and existing values ------------------------------------------------------------------------
def combine_by_sum(call: Call) -> str:
    """Return "sum": the operator adds written values to the existing ones, so ranks may divide the indices."""
    return "sum"


def replace_written(call: Call) -> None:
    """Return None: written values replace the existing ones."""


def combine_on_owner(call: Call) -> str:
    """Return "": one rank must combine all values that are written to an element."""
    return ""


def combine_if_accumulate(call: Call) -> str | None:
    """Return "sum" if argument ``accumulate`` is true, else None: written values replace."""
    return "sum" if call["accumulate"] else None


def combine_by_reduce(call: Call) -> str | None:
    """Return how arguments ``reduce`` and ``include_self`` combine written values.

    It is a reduction over ranks, None to replace, or "" if only one rank may combine.
    """
    reduce_op = call.get("reduce")
    partial_ops = {"add": "sum", "sum": "sum", "amax": "max", "amin": "min"} if call.get("include_self", True) else {}
    return None if reduce_op is None else partial_ops.get(reduce_op, "")


# --- strategies for partial operands ----------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class WritePartials(Declaration):
    """Strategies for partial destinations and sources. A source that is a number is no operand."""

    combined: CombineOp

    def __call__(self, call: Call) -> tuple[str, ...]:
        """Return the strategies in which the destination, the source or both are partial."""
        combine_op, indices = self.combined(call), len(_index_operands(call))
        sources = len(call.operands) - 1 - indices
        pairs = ADD_PARTIALS if combine_op == "sum" else REPLACE_PARTIALS if combine_op is None else ()
        return tuple(
            [
                f"{','.join([target, *['R'] * indices, *[source] * sources])} -> {source if target == 'R' else target}"
                for target, source in pairs
                if sources or source == "R"
            ]
        )


def allows_zero_fill(choice: StrategyChoice) -> bool:
    """Return True if the chosen kernels, which fill with zeros, meet no partial value of a user's monoid: zeros may change it."""
    return all(strategy.kernel is None for strategy in choice.strategies) or not any(
        isinstance(spec, Partial) and isinstance(spec.reduce_op, Monoid)
        for strategy in choice.strategies
        for spec in strategy.operands
    )


# --- factors ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class IndexingFactors(Declaration):
    """The factors of an operator that reads (``combined`` is None) or writes elements of operand 0; see :func:`index_write`."""

    address: Address
    kernel: Kernel
    combined: CombineOp | None = None
    unsharded: frozenset[str] = frozenset()
    masks: Callable[[Call], Factors | None] | None = None
    exchange_kernel: Kernel | None = None
    local_kernel: Kernel | None = None

    def __call__(self, call: Call) -> Factors | None:
        """Return the factors of a call, by the form of its address; those of ``masks`` (or None) if a mask selects."""
        dims = self.address.dims(call)
        if dims is None:
            return None if self.masks is None else self.masks(call)
        if not call.shape(0) and self.address.form in ("rows", "elements"):
            return make_unsharded_factors(call)
        return (
            self._index_each_element(call, *dims) if self.address.form == "elements" else self._replace_indexed_dims(call, dims)
        )

    def __str__(self) -> str:
        return f"by {self.address.form}"

    def _replace_indexed_dims(self, call: Call, indexed_dims: Sequence[int]) -> Factors | None:
        """Return the factors if index dims replace the indexed dims (``x[:, i]``); None if the source does not fit."""
        dims, sizes = factors_of_first_operand(call)
        shapes = [call.shape(i) for i in _index_operands(call)]
        index_dims, index_sizes = make_factor_per_dim("i", torch.broadcast_shapes(*shapes) if shapes[1:] else shapes[0])
        sizes |= index_sizes
        indices = [_broadcast_dims(index_dims, shape, sizes) or () for shape in shapes]
        if self.address.form == "rows":
            if len(index_dims) > 1:
                raise IndexError(f"{call.func._schema.name}(): Index is supposed to be a vector")
            index_dims = index_dims or ((),)
        others, lead = [dim for d, dim in enumerate(dims) if d not in indexed_dims], index_dims_position(indexed_dims)
        elements = (*others[:lead], *index_dims, *others[lead:])
        sources = [call.shape(i) for i in range(1 + len(shapes), len(call.operands))]
        source_dims = [_broadcast_dims(elements, shape, sizes) for shape in sources]
        is_flat = self.address.form == "flat"
        if None in source_dims and not is_flat:
            if self.address.form == "rows" and index_dims[0]:  # torch's inference does not check
                raise RuntimeError(
                    f"{call.func._schema.name}(): source {sources[0]} is not self {call.shape(0)} with {call.shape(1)} rows"
                )
            return None
        # the source may have the same number of elements in another shape
        misfits = set(index_sizes) if is_flat and any(shape != shapes[0] for shape in sources) else set()
        operands = (dims, *indices, *(term or ((),) * len(shape) for term, shape in zip(source_dims, sources, strict=True)))
        return self._make_factors(call, operands, elements, sizes, tuple(index_sizes), indexed_dims, misfits)

    def _index_each_element(self, call: Call, indexed_dim: int) -> Factors:
        """Return the factors if the index has an entry for each element (``gather``): all other dims correspond."""
        dims, sizes = factors_of_first_operand(call)
        shapes = [call.shape(i) for i in range(1, len(call.operands))]
        if any(len(shape) != len(dims) for shape in shapes):
            return make_unsharded_factors(call)
        sizes["i"] = max(shape[indexed_dim] for shape in shapes)
        elements = (*dims[:indexed_dim], ("i",), *dims[indexed_dim + 1 :])
        tensor_shapes = {("operand", i): shape for i, shape in enumerate(shapes, 1)}
        if self.combined is None:
            tensor_shapes["result", 0] = shapes[0]
        each = [(at, name, size) for at, shape in tensor_shapes.items() for (name,), size in zip(elements, shape, strict=True)]
        windows = {(*at, name): range(size) for at, name, size in each if size < sizes[name]}
        misfits = {name for _, name, size in each if size > sizes[name]}
        return self._make_factors(
            call, (dims, *(elements,) * len(shapes)), elements, sizes, ("i",), (indexed_dim,), misfits, windows
        )

    def _make_factors(
        self,
        call: Call,
        operands: tuple[Dims, ...],
        elements: Dims,
        sizes: Mapping[str, int],
        index_factors: tuple[str, ...],
        indexed_dims: Sequence[int],
        misfits: set[str],
        windows: Mapping[tuple[str, int, str], range] = MappingProxyType({}),
    ) -> Factors:
        """Return factors with the kernels of the indexed dims and the exchange strategies, for a read or a write."""
        kernels = dict.fromkeys([f"d{d}" for d in indexed_dims], self.kernel)
        fits = not windows and not (misfits and self.address.form == "elements")
        strategies = self._exchange_strategies(call, operands, sizes, index_factors, indexed_dims) if fits else ()
        if self.combined is None:
            return Factors(
                operands, (elements,), sizes, frozenset(misfits), kernels=kernels, windows=windows, listed_strategies=strategies
            )
        combine_op = self.combined(call)
        unsharded_factors = self.unsharded.union(misfits, () if combine_op else index_factors)
        reduced, additive = (
            dict.fromkeys(index_factors, combine_op) if combine_op else {},
            frozenset({0} if combine_op == "sum" else ()),
        )
        return Factors(operands, (operands[0],), sizes, unsharded_factors, reduced, additive, kernels, strategies, windows)

    def _exchange_strategies(
        self,
        call: Call,
        operands: tuple[Dims, ...],
        sizes: Mapping[str, int],
        index_factors: tuple[str, ...],
        indexed_dims: Sequence[int],
    ) -> tuple[Strategy, ...]:
        """Return strategies with an indexed dim and the first index dim both sharded, by an exchange.

        Indices that are marked as local need no exchange.
        """
        count = len(_index_operands(call))
        if self.exchange_kernel is None or self.address.form not in ("rows", "places", "elements") or not index_factors:
            return ()
        index_dims, source = tuple((name,) for name in index_factors), operands[1 + count :]
        if self.combined is not None and not (source and _contains_run(source[0], index_dims)):
            return ()
        elements, dims_of_indices, strategies = Along(index_factors[0]), operands[1 : 1 + count], []
        source_specs = (elements,) * len(source)
        for k, along in enumerate(Along(f"d{d}") for d in indexed_dims):
            result = (elements,) if self.combined is None else (along,)
            if (
                call.operand_facts
                and dims_of_indices[k] == index_dims
                and len(index_factors) == 1
                and call.local_index_split(1 + k) is not None
            ):
                index_specs = tuple([elements if (index_factors[0],) in dims else R for dims in dims_of_indices])
                strategies.append(Strategy((along, *index_specs, *source_specs), result, along.factor, self.local_kernel))
            if _is_worth_exchanging(call, dims_of_indices, index_factors[0], sizes[index_factors[0]]):
                strategies.append(Strategy((along, *(R,) * count, *source_specs), result, along.factor, self.exchange_kernel))
        return tuple(strategies)

    def are_indices_local(self, choice: StrategyChoice) -> bool:
        """Return True if the splits of a choice are those for which indices were marked as local to each rank's block."""
        call, operands = choice.call, choice.factors.operands
        for strategy in choice.strategies:
            if strategy.kernel is self.local_kernel and strategy.factor is not None:
                indexed_dims = self.address.dims(call) or ()
                index_operand = 1 + indexed_dims.index(int(strategy.factor[1:]))
                ((index_factor,),) = operands[index_operand]
                if choice.splits.get(strategy.factor) != call.local_index_split(index_operand):
                    return False
                if choice.splits.get(index_factor) != call.operands[index_operand].splits[0]:
                    return False
        return True


@dataclass(frozen=True, slots=True)
class IndexingCondition(Declaration):
    """The ``when`` of a rule, together with the check that local indices are local."""

    factors: IndexingFactors
    rule: Callable[[StrategyChoice], bool] | None = None

    def __call__(self, choice: StrategyChoice) -> bool:
        """Return True if indices that are marked as local are local in the choice, and the rule's own condition holds."""
        return self.factors.are_indices_local(choice) and (self.rule is None or self.rule(choice))


def _is_worth_exchanging(call: Call, index_dims: Sequence[Dims], first: str, size: Any) -> bool:
    """Return True if an exchange strategy is worth listing: indices are sharded, or each rank gets at least one of them."""
    if not isinstance(size, int) or size >= call.mesh.size():
        return True
    splits = [
        layout.splits[dims.index((first,))]
        for dims, layout in zip(index_dims, call.operands[1:], strict=False)
        if (first,) in dims
    ]
    return any(split is not None for split in splits)


def _contains_run(dims: Dims, listed: Dims) -> bool:
    return any(dims[k : k + len(listed)] == listed for k in range(len(dims)))


def _result_share_bytes(call: Call) -> int:
    """Return the bytes of a read's exchange: a rank's share of the result."""
    return call.result_bytes()[0] // call.mesh.size()


def _source_share_bytes(call: Call) -> int:
    """Return the bytes of a write's exchange: a rank's share of the source."""
    return call.operands[-1].nbytes // call.mesh.size()


def _index_operands(call: Call) -> list[int]:
    return [i for i, name in enumerate(call.names) if name in ("index", "indices")]


def _broadcast_dims(dims: Dims, shape: Sequence[int], sizes: Mapping[str, int]) -> Dims | None:
    """Return the last ``dims`` for a tensor of ``shape``, () where it broadcasts. None if they do not fit."""
    aligned = dims[max(0, len(dims) - len(shape)) :]
    if len(aligned) < len(shape):
        return None
    fits = [not dim or sizes[dim[0]] == size for dim, size in zip(aligned, shape, strict=True)]
    if any(size != 1 and not fit for size, fit in zip(shape, fits, strict=True)):
        return None
    return tuple([dim if fit else () for dim, fit in zip(aligned, fits, strict=True)])
