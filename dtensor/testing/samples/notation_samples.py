"""Notation samples: calls made from a rule's notation.

Every factor has its own size, and arguments select the dims that the notation selects.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ...base.tensor_tree import map_tensors, tensor_leaves
from ...rules.declared_factors import by, fitting
from ...rules.notation import EACH, Pattern, Term, is_group, is_selected, selector_argument
from ...rules.rule import Rule
from .sample import Sample
from .schema_samples import DTYPES, error_in_plain_torch, make_sample, make_tensor

_SIZES = (5, 7, 6, 3, 4, 8, 2)


def samples_by_notation(overloads: list[Any], rule: Rule) -> Iterator[Sample]:
    """Yield a sample for each notation of the rule, in every dtype that plain torch accepts."""
    for pattern in _patterns_of(getattr(rule.factors, "pattern", None)):
        for op in overloads:
            for dtype in DTYPES:
                given = None if any(a.is_out for a in op._schema.arguments) else _make_arguments(op._schema, pattern, dtype)
                if given is not None and error_in_plain_torch(op, sample := make_sample(op._schema, given, dtype)) is None:
                    yield replace(sample, gradients=_has_gradients(op, sample))


def _has_gradients(op: Any, sample: Sample) -> bool:
    """Return True if plain torch computes gradients of the operator for this sample."""
    args, kwargs = map_tensors(lambda x: x.clone().requires_grad_(x.is_floating_point() or x.is_complex()), sample.arguments)
    try:
        results = [x for x in tensor_leaves(op(*args, **kwargs)) if x.requires_grad]
        torch.autograd.backward(results, [torch.ones_like(x) for x in results])
    except Exception:  # operators without a gradient formula raise different errors
        return False
    return bool(results)


def _patterns_of(factors: Pattern | by | fitting | None) -> tuple[Pattern, ...]:
    """Return the patterns of a declaration of factors; none if it is a function."""
    match factors:
        case Pattern():
            return (factors,)
        case fitting():
            return factors.patterns
        case by():
            return tuple(factors.table.values())
        case _:
            return ()


def _make_arguments(schema: Any, pattern: Pattern, dtype: torch.dtype) -> dict[str, Any] | None:
    """Return the arguments of a call by name, without numbers; None if the schema and the notation do not fit."""
    sizes: dict[str, int] = {}
    terms = {term.name: term for term in pattern.operands}
    following = iter(pattern.operands)
    given: dict[str, Any] = {}
    picked = {
        selector_argument(dim).rstrip("!"): k
        for term in reversed(pattern.operands)
        for k, dim in enumerate(term.dims)
        if is_selected(dim)
    }
    for seed, argument in enumerate(schema.arguments):
        name, kind = argument.name, str(argument.type)
        if "Tensor" in kind:
            term = terms[EACH] if EACH in terms else terms.get(name) if pattern.named else next(following, None)
            if term is None and not argument.has_default_value():
                return None
            if term is not None:
                made = [make_tensor(_term_shape(term, sizes), dtype, seed + k) for k in range(1 + ("List" in kind))]
                given[name] = made if "List" in kind else made[0]
        elif name in picked:
            given[name] = [picked[name]] if "List" in kind else picked[name]
    return given


def _term_shape(term: Term, sizes: dict[str, int]) -> tuple[int, ...]:
    """Return the sizes of a term's dims. A group has two dims, or one if the term has selected dims."""
    shape = []
    for dim in term.dims:
        names = dim if not is_group(dim) or any(map(is_selected, term.dims)) else (dim[0], f"{dim[0]} again")
        own = [sizes.setdefault(name, _SIZES[len(sizes) % len(_SIZES)]) for name in names]
        shape += own if is_group(dim) else [int(torch.Size(own).numel())]
    return tuple(shape)
