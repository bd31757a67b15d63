"""The words for operators that read or write elements by index: ``reads("take", FLAT)`` is ``result[i] = self[index[i]]``,
``writes("index_add", ROWS, adds)`` is ``self[.., index[i], ..] += source[.., i, ..]``.

The dims of the indices stand in place of those that are indexed: in what is read, and in what is written.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import torch

from ..placement import REDUCE_OPS, Monoid, Partial
from .call import Call
from .partial_rules import one_of
from .registry import register
from .rule import Along, Choice, Dims, Factors, Kernel, R, Row, Rule, Word, named, own_factors, uncut
from .sharded_index_exchange import read_fetched, write_sent
from .sharded_index_local import Address, lead_of, of_own, read_owned, write_owned

Combined = Callable[[Call], str | None]

CONSTANT = ("avg", "max", "min")  # of a constant they are that constant
# terms of what is written to and of what is written
REPLACED = (*((op, op) for op in REDUCE_OPS), *(pair for op in CONSTANT for pair in ((op, "R"), ("R", op))))
ADDED = (("sum", "sum"), ("avg", "avg"), ("avg", "R"), ("R", "avg"))


def reads(names: str, address: Address, op: Any = None, **options: Any) -> Rule:
    """A rule for operations that read the elements of operand 0 which an index names. ``op`` reads from a block, where the
    operator itself does not take an index for each dim."""
    fetched = Kernel(partial(read_fetched, address, op), collectives=1, nbytes=_of_result)
    kernel = Kernel(partial(read_owned, address, op), lacking=Partial("sum"), joint=True)
    own = Kernel(partial(of_own, address, op, None))
    factors = Indexed(address, kernel, travelling=fetched, staying=own)
    return register(
        names, Rule(factors, one_of(address.operand), when=Allowed(factors, no_foreign_zeros), kind="read", **options)
    )


def writes(
    names: str, address: Address, combined: Combined, op: Any = None, *, whole: str = "", masks: Any = None, **options: Any
) -> Rule:
    """A rule for operations that write to the elements of operand 0 which an index names.

    Args:
        combined: the reduction that joins what is written with what is there, so that ranks may share it out, of a call (None:
            it replaces that; ``""``: they may not).
        op: writes to a block, where the operator itself does not take an index for each dim.
        whole: factors that are, beside those.
        masks: the factors where a mask names the elements.
    """
    kernel = Kernel(partial(write_owned, address, op), joint=True)
    sent = Kernel(partial(write_sent, address, op), collectives=1, nbytes=_of_source)
    own = Kernel(partial(of_own, address, op, 0))
    factors = Indexed(address, kernel, combined, frozenset(whole.split()), masks, sent, own)
    options.setdefault("partials", Written(combined))
    options["when"] = Allowed(factors, options.get("when"))
    return register(names, Rule(factors, kind="write", **options))


# --- how what is written joins with what is there ---------------------------------------------------------------------
def adds(call: Call) -> str:
    """It is added."""
    return "sum"


def replaces(call: Call) -> None:
    """It takes its place."""


def alone(call: Call) -> str:
    """In a way of which no rank can do a part."""
    return ""


def may_accumulate(call: Call) -> str | None:
    """As argument ``accumulate`` says."""
    return "sum" if call["accumulate"] else None


def reduces(call: Call) -> str | None:
    """As arguments ``reduce`` and ``include_self`` say."""
    how = call.get("reduce")
    passing = {"add": "sum", "sum": "sum", "amax": "max", "amin": "min"} if call.get("include_self", True) else {}
    return None if how is None else passing.get(how, "")


# --- terms ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Written(Word):
    """Rows for terms of what is written to and of what is written; a number that is written is no operand."""

    combined: Combined

    def __call__(self, call: Call) -> tuple[str, ...]:
        how, indices = self.combined(call), len(_indices(call))
        sources = len(call.operands) - 1 - indices
        pairs = ADDED if how == "sum" else REPLACED if how is None else ()
        return tuple(
            [
                f"{','.join([to, *['R'] * indices, *[source] * sources])} -> {source if to == 'R' else to}"
                for to, source in pairs
                if sources or source == "R"
            ]
        )


def no_foreign_zeros(choice: Choice) -> bool:
    """Kernels that fill with zeros do not meet terms of a reduction that zeros may change."""
    return all(row.kernel is None for row in choice.rows) or not any(
        isinstance(spec, Partial) and isinstance(spec.reduce_op, Monoid) for row in choice.rows for spec in row.operands
    )


# --- factors ----------------------------------------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class Indexed(Word):
    """The factors of an operation that reads (``combined`` is None), or writes, elements of operand 0; see :func:`writes`."""

    address: Address
    kernel: Kernel
    combined: Combined | None = None
    whole: frozenset[str] = frozenset()
    masks: Callable[[Call], Factors | None] | None = None
    travelling: Kernel | None = None
    staying: Kernel | None = None

    def __call__(self, call: Call) -> Factors | None:
        places = self.address.dims(call)
        if places is None:
            return None if self.masks is None else self.masks(call)
        if not call.shape(0) and self.address.form in ("rows", "elements"):
            return uncut(call)
        return self._by_element(call, *places) if self.address.form == "elements" else self._by_index(call, places)

    def __str__(self) -> str:
        return f"by {self.address.form}"

    def own(self) -> tuple[Any, ...]:
        return () if self.masks is None else (self.masks,)

    def _by_index(self, call: Call, places: Sequence[int]) -> Factors | None:
        """The dims of indices stand in place of those that are indexed, in front if these are not adjacent."""
        dims, sizes = own_factors(call)
        shapes = [call.shape(i) for i in _indices(call)]
        made, more = named("i", torch.broadcast_shapes(*shapes) if shapes[1:] else shapes[0])
        sizes |= more
        indices = [_fitted(made, shape, sizes) or () for shape in shapes]
        if self.address.form == "rows":
            if len(made) > 1:
                raise IndexError(f"{call.func._schema.name}(): Index is supposed to be a vector")
            made = made or ((),)
        others, lead = [dim for d, dim in enumerate(dims) if d not in places], lead_of(places)
        elements = (*others[:lead], *made, *others[lead:])
        sources = [call.shape(i) for i in range(1 + len(shapes), len(call.operands))]
        terms = [_fitted(elements, shape, sizes) for shape in sources]
        flat = self.address.form == "flat"
        if None in terms and not flat:
            if self.address.form == "rows" and made[0]:  # torch's inference does not look
                raise RuntimeError(
                    f"{call.func._schema.name}(): source {sources[0]} is not self {call.shape(0)} with {call.shape(1)} rows"
                )
            return None
        # the same number of elements in another shape
        misfit = set(more) if flat and any(shape != shapes[0] for shape in sources) else set()
        operands = (dims, *indices, *(term or ((),) * len(shape) for term, shape in zip(terms, sources, strict=True)))
        return self._joined(call, operands, elements, sizes, tuple(more), places, misfit)

    def _by_element(self, call: Call, place: int) -> Factors:
        """Dims that are not indexed go together; what is shorter there holds a window of them."""
        dims, sizes = own_factors(call)
        shapes = [call.shape(i) for i in range(1, len(call.operands))]
        if any(len(shape) != len(dims) for shape in shapes):
            return uncut(call)
        sizes["i"] = max(shape[place] for shape in shapes)
        elements = (*dims[:place], ("i",), *dims[place + 1 :])
        shown = {("operand", i): shape for i, shape in enumerate(shapes, 1)}
        if self.combined is None:
            shown["result", 0] = shapes[0]
        each = [(at, name, size) for at, shape in shown.items() for (name,), size in zip(elements, shape, strict=True)]
        windows = {(*at, name): range(size) for at, name, size in each if size < sizes[name]}
        longer = {name for _, name, size in each if size > sizes[name]}
        return self._joined(call, (dims, *(elements,) * len(shapes)), elements, sizes, ("i",), (place,), longer, windows)

    def _joined(
        self,
        call: Call,
        operands: tuple[Dims, ...],
        elements: Dims,
        sizes: Mapping[str, int],
        made: tuple[str, ...],
        places: Sequence[int],
        whole: set[str],
        windows: Mapping[tuple[str, int, str], range] = MappingProxyType({}),
    ) -> Factors:
        """``made``: the factors of the indices."""
        kernels = dict.fromkeys([f"d{d}" for d in places], self.kernel)
        fits = not windows and not (whole and self.address.form == "elements")
        rows = self._travelling(call, operands, sizes, made, places) if fits else ()
        if self.combined is None:
            return Factors(operands, (elements,), sizes, frozenset(whole), kernels=kernels, windows=windows, rows=rows)
        how = self.combined(call)
        kept = self.whole.union(whole, () if how else made)
        reduced, additive = dict.fromkeys(made, how) if how else {}, frozenset({0} if how == "sum" else ())
        return Factors(operands, (operands[0],), sizes, kept, reduced, additive, kernels, rows, windows)

    def _travelling(
        self, call: Call, operands: tuple[Dims, ...], sizes: Mapping[str, int], made: tuple[str, ...], places: Sequence[int]
    ) -> tuple[Row, ...]:
        """Those of what is cut along a dim, where the elements that are named are cut too, by the first of their dims."""
        count = len(_indices(call))
        if self.travelling is None or self.address.form not in ("rows", "places", "elements") or not made:
            return ()
        listed, source = tuple((name,) for name in made), operands[1 + count :]
        if self.combined is not None and not (source and _contains(source[0], listed)):
            return ()
        elements, names, rows = Along(made[0]), operands[1 : 1 + count], []
        written = (elements,) * len(source)
        for k, along in enumerate(Along(f"d{d}") for d in places):
            result = (elements,) if self.combined is None else (along,)
            if call.known and names[k] == listed and len(made) == 1 and call.named_by(1 + k) is not None:
                alike = tuple([elements if (made[0],) in dims else R for dims in names])
                rows.append(Row((along, *alike, *written), result, along.factor, self.staying))
            if _dealt_out(call, names, made[0], sizes[made[0]]):
                rows.append(Row((along, *(R,) * count, *written), result, along.factor, self.travelling))
        return tuple(rows)

    def names_own(self, choice: Choice) -> bool:
        """Whether the names that are said to be of a rank's own block are: they, and the block, lie as when that was found."""
        call, operands = choice.call, choice.factors.operands
        for row in choice.rows:
            if row.kernel is self.staying and row.factor is not None:
                places = self.address.dims(call) or ()
                naming = 1 + places.index(int(row.factor[1:]))
                ((named,),) = operands[naming]
                if choice.splits.get(row.factor) != call.named_by(naming):
                    return False
                if choice.splits.get(named) != call.operands[naming].splits[0]:
                    return False
        return True


@dataclass(frozen=True, slots=True)
class Allowed(Word):
    """What a rule says of a choice, and that names are found where they were."""

    factors: Indexed
    rule: Callable[[Choice], bool] | None = None

    def __call__(self, choice: Choice) -> bool:
        return self.factors.names_own(choice) and (self.rule is None or self.rule(choice))

    def own(self) -> tuple[Any, ...]:
        return () if self.rule is None else (self.rule,)


def _dealt_out(call: Call, names: Sequence[Dims], first: str, size: Any) -> bool:
    """Whether names are cut, or so many (or an open number) that no rank would go without."""
    if not isinstance(size, int) or size >= call.mesh.size():
        return True
    cut = [
        layout.splits[dims.index((first,))] for dims, layout in zip(names, call.operands[1:], strict=False) if (first,) in dims
    ]
    return any(split is not None for split in cut)


def _contains(dims: Dims, listed: Dims) -> bool:
    return any(dims[k : k + len(listed)] == listed for k in range(len(dims)))


def _of_result(call: Call) -> int:
    """A rank's part of the result, which others may have."""
    return call.result_bytes()[0] // call.mesh.size()


def _of_source(call: Call) -> int:
    """A rank's part of what is written, which others may own."""
    return call.operands[-1].nbytes // call.mesh.size()


def _indices(call: Call) -> list[int]:
    return [i for i, name in enumerate(call.names) if name in ("index", "indices")]


def _fitted(dims: Dims, shape: Sequence[int], sizes: Mapping[str, int]) -> Dims | None:
    """The last of ``dims``, as many as ``shape`` has, none where one element is broadcast; None if they do not fit."""
    own = dims[max(0, len(dims) - len(shape)) :]
    if len(own) < len(shape):
        return None
    fits = [not dim or sizes[dim[0]] == size for dim, size in zip(own, shape, strict=True)]
    if any(size != 1 and not fit for size, fit in zip(shape, fits, strict=True)):
        return None
    return tuple([dim if fit else () for dim, fit in zip(own, fits, strict=True)])
