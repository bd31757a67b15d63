"""Whether the order of a folded dim matters to an operator: see ``folded``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ...base.caches import Bounded, nested_key
from ...dispatch.mixed_meshes import meshes_of
from ...dispatch.operands import laid_out
from ...placement import Partial
from ...propagation.calls import make_call
from ...propagation.meta import NotInferable, results_of
from ...propagation.schema import Operator
from ...rules import lookup
from ...rules.call import Meta
from ...rules.rule import Factors, alone, candidates
from ..dtensor import DTensor


@dataclass(frozen=True, slots=True)
class Mark:
    """The place of a tensor among those of a call."""

    place: int


def replaced(args: Any, kwargs: Any, by: Callable[[Any], Any], kind: type = torch.Tensor) -> tuple[Any, dict[str, Any]]:
    """Arguments with something else in the place of each tensor, in their order."""

    def of(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [by(item) if isinstance(item, kind) else item for item in value]
        return by(value) if isinstance(value, kind) else value

    return tuple([of(value) for value in args]), {name: of(value) for name, value in kwargs.items()}


Places = tuple[tuple[int | None, ...], tuple[int | None, ...]]  # the folded dim of each operand, and of each result
_PLACES: Bounded[Any, Places | None] = Bounded(4096, "folded.places")


def where_folded(
    operator: Operator, marked: tuple[Any, Any], tensors: Sequence[Any], dims: tuple[int | None, ...]
) -> Places | None:
    """Where the folded dim of operands (``dims``) is in all of them and in the results; None where its order matters."""
    layouts = [(x._layout,) if isinstance(x, DTensor) else (tuple(x.shape), x.stride(), x.dtype) for x in tensors]
    key = (operator.func, nested_key(marked), *layouts, dims)
    if key not in _PLACES:
        _PLACES.keep(key, _places(operator, marked, tensors, dims))
    return _PLACES.get(key)


def _places(operator: Operator, marked: tuple[Any, Any], tensors: Sequence[Any], dims: tuple[int | None, ...]) -> Places | None:
    """Where the folded dim of operands is in all of them and in the results; None where its order matters."""
    bound, rule = operator.bind(*replaced(*marked, lambda mark: tensors[mark.place], Mark)), lookup(operator.func)
    meshes = tuple(meshes_of(bound.values()))
    if len(meshes) > 1 or rule is None or operator.facts.per_element or rule.measured:
        return None
    if rule.answer or rule.decompose or rule.run or rule.local_args:  # which may ask where a block begins
        return None
    call, slots = make_call(operator, meshes[0], laid_out(operator, bound, meshes[0]))
    if rule.writes is not None and rule.writes(call):  # to what others have, not to blocks made for this call
        return None
    try:
        metas = rule.metas(call) if rule.metas is not None else results_of(operator, rule, call)
    except NotInferable:
        return None
    call.results = metas
    factors = None if any(not isinstance(meta, Meta | None) for meta in metas) else rule.factors(call)
    if factors is None:
        return None
    own = operator.bind(*marked)
    places = {own[name] if k is None else own[name][k]: i for i, (name, k) in enumerate(slots) if name in operator.tensors}
    operands = [factors.operands[places[Mark(place)]] for place in range(len(tensors))]
    names = {operand[dim] for operand, dim in zip(operands, dims, strict=True) if dim is not None}
    lengths = {x.shape[dim] for x, dim in zip(tensors, dims, strict=True) if dim is not None}
    if len(names) != 1 or len(lengths) != 1 or not _orderless(factors, name := names.pop()):
        return None
    for tensor in (*operands, *factors.results):
        if [each for each in tensor if name[0] in each] not in ([], [name]):  # a part of a dim, or of several
            return None
    return tuple(alone(operand, name) for operand in operands), tuple(alone(result, name) for result in factors.results)


def _orderless(factors: Factors, name: tuple[str, ...]) -> bool:
    """Whether blocks along a factor may be any slices: one factor, no kernel that asks which, nothing but a reduction over it."""
    rows = [] if factors.rows else [row for row in candidates(factors, ()) if name == (row.factor,)]
    monoids = [spec for row in rows for spec in row.results if isinstance(spec, Partial) and not isinstance(spec.reduce_op, str)]
    windowed = any(key[2] == name[0] for key in factors.windows)
    return bool(rows) and not monoids and not windowed and (rows[0].kernel is None or rows[0].kernel.orderless)
