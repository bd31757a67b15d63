"""Samples made from a rule's notation: every factor has a size of its own, and arguments that pick dims pick what it says."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch

from ...base.tensor_tree import mapped, tensors
from ...rules.notation import EACH, Pattern, Term, argument_of, is_group, is_picked
from ...rules.notation_rules import by, fitting
from ...rules.rule import Rule
from .of_schema import DTYPES, refusal, sample_of, tensor
from .sample import Sample

_SIZES = (5, 7, 6, 3, 4, 8, 2)


def samples_by_notation(overloads: list[Any], rule: Rule) -> Iterator[Sample]:
    """Calls that the rule's notation speaks of, in every dtype that plain torch takes."""
    for pattern in _patterns(getattr(rule.factors, "pattern", None)):
        for op in overloads:
            for dtype in DTYPES:
                given = None if any(a.is_out for a in op._schema.arguments) else _given(op._schema, pattern, dtype)
                if given is not None and refusal(op, sample := sample_of(op._schema, given, dtype)) is None:
                    yield replace(sample, gradients=_differentiable(op, sample))


def _differentiable(op: Any, sample: Sample) -> bool:
    """Whether plain torch finds gradients."""
    args, kwargs = mapped(lambda x: x.clone().requires_grad_(x.is_floating_point() or x.is_complex()), sample.given)
    try:
        results = [x for x in tensors(op(*args, **kwargs)) if x.requires_grad]
        torch.autograd.backward(results, [torch.ones_like(x) for x in results])
    except Exception:  # an operator without a formula says so in words of its own
        return False
    return bool(results)


def _patterns(found: Pattern | by | fitting | None) -> tuple[Pattern, ...]:
    match found:
        case Pattern():
            return (found,)
        case fitting():
            return found.patterns
        case by():
            return tuple(found.table.values())
        case _:
            return ()


def _given(schema: Any, pattern: Pattern, dtype: torch.dtype) -> dict[str, Any] | None:
    """The arguments of a call by name, but for numbers; None if the schema and the notation do not fit."""
    sizes: dict[str, int] = {}
    terms = {term.name: term for term in pattern.operands}
    following = iter(pattern.operands)
    given: dict[str, Any] = {}
    picked = {
        argument_of(dim).rstrip("!"): k
        for term in reversed(pattern.operands)
        for k, dim in enumerate(term.dims)
        if is_picked(dim)
    }
    for seed, argument in enumerate(schema.arguments):
        name, kind = argument.name, str(argument.type)
        if "Tensor" in kind:
            term = terms[EACH] if EACH in terms else terms.get(name) if pattern.named else next(following, None)
            if term is None and not argument.has_default_value():
                return None
            if term is not None:
                made = [tensor(_shape(term, sizes), dtype, seed + k) for k in range(1 + ("List" in kind))]
                given[name] = made if "List" in kind else made[0]
        elif name in picked:
            given[name] = [picked[name]] if "List" in kind else picked[name]
    return given


def _shape(term: Term, sizes: dict[str, int]) -> tuple[int, ...]:
    """The sizes of a term's dims; those of a group are two, or one beside dims that are picked."""
    shape = []
    for dim in term.dims:
        names = dim if not is_group(dim) or any(map(is_picked, term.dims)) else (dim[0], f"{dim[0]} again")
        own = [sizes.setdefault(name, _SIZES[len(sizes) % len(_SIZES)]) for name in names]
        shape += own if is_group(dim) else [int(torch.Size(own).numel())]
    return tuple(shape)
