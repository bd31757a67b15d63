"""Variants: the programs of one cache key, by the conditions that its plan depends on in addition to the key.

A plan may depend on the kinds of Python numbers (0, 1, negative, ...), on facts of the operands (:mod:`.facts`), and on the
default dtype. Most plans depend on none of these. If a plan does, its cache entry is a table of programs by these conditions, and
a call under other conditions is planned once more and added.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ...base.caches import BoundedDict
from ...layout.layout import Layout
from ...propagation.op_schema import OperatorSchema
from ...propagation.propagate import CallPlan
from ...rules.call import classify_number
from .facts import depends_on_facts, facts_key, make_quick_facts_key
from .frame import Args, Keywords, Runner
from .program import runner_of

_LIMIT = 64  # long lists of numbers have many kinds
NUMBERS, FACTS, DEFAULT_DTYPE = "numbers", "facts", "default dtype"
Replan = Callable[[Args, Keywords], tuple[CallPlan, Layout | Runner]]


def conditions_of(plan: CallPlan, operator: OperatorSchema) -> frozenset[str]:
    """Return the names of the conditions that ``plan`` depends on in addition to its cache key."""
    depends = {NUMBERS: plan.by_numbers, FACTS: depends_on_facts(plan, operator), DEFAULT_DTYPE: _depends_on_default_dtype(plan)}
    return frozenset(name for name, holds in depends.items() if holds)


def with_variants(
    plan: CallPlan, program: Layout | Runner, operator: OperatorSchema, args: Args, kwargs: Keywords, replan: Replan
) -> Layout | Runner:
    """Return the program of all calls with the cache key: ``program`` if it depends on nothing else, else a table of variants.

    Args:
        replan: plans a call under conditions that the table does not have yet.
    """
    conditions = conditions_of(plan, operator)
    if not conditions:
        return program
    table: tuple[Any, ...]  # replaced as one object, since other threads read it

    def reset_table() -> None:
        """Start an empty table of programs, keyed by all conditions that plans have depended on so far."""
        nonlocal table
        quick, full = (_make_key_function(operator, conditions, complete) for complete in (False, True))
        table = BoundedDict(_LIMIT), quick, full

    def add_program(program: Layout | Runner, args: Args, kwargs: Keywords) -> Any:
        programs, _, full = table
        return programs.keep(full(args, kwargs), runner_of(program, operator))

    def run_variant(args: Args, kwargs: Keywords, local_args: list[Any], local_kwargs: Keywords) -> Any:
        """Run the program for the numbers, facts and default dtype of this call; plan the call if there is none."""
        nonlocal conditions
        programs, quick, full = table
        variant = programs.get(quick(args, kwargs))
        if variant is None:
            variant = programs.get(full(args, kwargs))
        if variant is None:
            plan, program = replan(args, kwargs)
            if not conditions >= (depends := conditions_of(plan, operator)):
                conditions |= depends  # this plan depends on more than the ones before
                reset_table()
            variant = add_program(program, args, kwargs)
        return variant(args, kwargs, local_args, local_kwargs)

    reset_table()
    add_program(program, args, kwargs)
    return run_variant


def _make_key_function(operator: OperatorSchema, conditions: frozenset[str], complete: bool) -> Callable[[Args, Keywords], Any]:
    """Make the function that returns, for a call, the values of the conditions as the key of its program in the table.

    Args:
        complete: also find facts that take long to find.
    """
    parts: list[Callable[[Args, Keywords], Any]] = []
    if FACTS in conditions:
        parts.append((lambda args, kwargs: facts_key(operator, args, kwargs)) if complete else make_quick_facts_key(operator))
    if NUMBERS in conditions:
        parts.append(_number_kinds)
    if DEFAULT_DTYPE in conditions:
        parts.append(lambda args, kwargs: torch.get_default_dtype())
    if len(parts) == 1:
        return parts[0]
    if len(parts) == 2:  # facts and numbers: a partial value and a scalar
        first, second = parts
        return lambda args, kwargs: (first(args, kwargs), second(args, kwargs))
    return lambda args, kwargs: tuple([part(args, kwargs) for part in parts])


def _number_kinds(args: Args, kwargs: Keywords) -> tuple[Any, ...]:
    return tuple([_number_kind(value) for value in (*args, *kwargs.values())])


def _number_kind(value: Any) -> Any:
    """Return the kind of a number that decides between plans (see ``classify_number``); a tuple of kinds for a list."""
    if isinstance(value, (list, tuple)):
        return tuple([_number_kind(item) for item in value])
    return classify_number(value) if isinstance(value, (int, float, complex)) else None


def _depends_on_default_dtype(plan: CallPlan) -> bool:
    """Return True if results have a floating dtype that no distributed operand has: it is the default dtype."""
    for i, layout in enumerate(plan.call.operands):
        if _is_floating(layout) and i not in plan.call.plain:
            return False
    return any(_is_floating(layout) for result in plan.results for layout in (result if isinstance(result, list) else [result]))


def _is_floating(layout: Any) -> bool:
    return isinstance(layout, Layout) and (layout.dtype.is_floating_point or layout.is_complex)
