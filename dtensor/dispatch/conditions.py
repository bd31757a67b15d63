"""Plans that hold while something does: for numbers of some kinds, under a default dtype. Else another is made."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..base.caches import Bounded
from ..layout.layout import Layout
from ..propagation.propagate import Plan
from ..rules.call import kind_of
from .steps import Args, Keywords, Runner


def floats_by_default(plan: Plan) -> bool:
    """Whether results have a floating dtype that no distributed operand has: the default one when the plan is made."""
    for i, layout in enumerate(plan.call.operands):
        if _floats(layout) and i not in plan.call.plain:
            return False
    return any(_floats(layout) for made in plan.results for layout in (made if isinstance(made, list) else [made]))


def _floats(layout: Any) -> bool:
    return isinstance(layout, Layout) and (layout.dtype.is_floating_point or layout.is_complex)


def under_default_dtype(runner: Runner, again: Runner) -> Runner:
    """``runner`` while the default dtype is what it is now, else ``again``, which plans anew."""
    planned = torch.get_default_dtype()

    def run(args: Args, kwargs: Keywords, local_args: list[Any], local_kwargs: Keywords) -> Any:
        return (runner if torch.get_default_dtype() is planned else again)(args, kwargs, local_args, local_kwargs)

    return run


def by_kinds(runner: Runner, args: Args, kwargs: Keywords, plan: Callable[[Args, Keywords], Runner]) -> Runner:
    """``runner`` for numbers of the kinds that these arguments have, for others what ``plan`` makes of them, once."""
    runners: Bounded[Any, Runner] = Bounded(64)  # long lists of numbers have many
    runners.keep(_kinds(args, kwargs), runner)

    def run(args: Args, kwargs: Keywords, local_args: list[Any], local_kwargs: Keywords) -> Any:
        kinds = _kinds(args, kwargs)
        found = runners.get(kinds)
        if found is None:
            found = runners.keep(kinds, plan(args, kwargs))
        return found(args, kwargs, local_args, local_kwargs)

    return run


def _kinds(args: Args, kwargs: Keywords) -> tuple[Any, ...]:
    return tuple([_kind(value) for value in (*args, *kwargs.values())])


def _kind(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple([_kind(item) for item in value])
    return kind_of(value) if isinstance(value, (int, float, complex)) else None
